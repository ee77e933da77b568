"""From a file of abstracts to numbers: prepare, train, plan, adapt, sample, evaluate, at toy size."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gtl.data.tokens import read_tokens
from texts import documents, lines_of, write, write_vocabulary
from typed import NETWORK, gtl, rows

FIT = "--fit.steps 30 --fit.batch_size 16 --fit.evaluate_every 15 --fit.learning_rate 5e-3"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both domains, a source model, its planner and a local ratio."""
    folder = tmp_path_factory.mktemp("text")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_vocabulary(folder / "vocab.txt")
        write(folder / "arxiv-metadata-oai-snapshot.json", lines_of(documents(400)))
        gtl(
            "prepare arxiv-metadata-oai-snapshot.json --tokenizer vocab.txt --length 16 --out data "
            "--domain cs=categories:cs physics=categories:hep,astro"
        )
        gtl(f"train denoiser --data data/cs --out source {NETWORK} {FIT}")
        gtl(f"train planner --data data/cs --denoiser source --out planner {NETWORK} {FIT}")
        training = "--training.budget 36 --training.ratio.width 8 --training.ratio.heads 2"
        gtl(f"adapt --denoiser source --target data/physics --out ratio {training}")
    return folder


@pytest.fixture(autouse=True)
def there(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


def test_a_planner_is_judged(made: Path):
    found = {row["metric"]: row["value"] for row in rows(made / "planner")}
    assert {"held_out_loss", "accuracy", "right", "calibration_error", "accuracy@0.0-0.1"} <= found.keys()
    assert 0.5 < found["accuracy"] <= 1
    assert (made / "planner" / "planner.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "flags",
    ["--planner planner --n_ratio 20", "--planner planner --order_temperature 1 --per_step 3", "--order confidence",
     "--order left-to-right --precision bf16", "--sampler planner"],
)  # fmt: skip
def test_samples_and_what_they_say(made: Path, tmp_path: Path, flags: str):
    command = f"sample --denoiser source --ratio ratio --length 16 --count 6 --tokenizer data {flags}"
    gtl(command, "--out", tmp_path / "a")
    gtl(command, "--out", tmp_path / "b")
    samples = read_tokens(tmp_path / "a" / "samples.npy")
    assert samples.shape == (6, 16)
    mask = json.loads((made / "data" / "cs" / "meta.json").read_text())["mask_id"]
    assert not bool((samples == mask).any())
    lines = (tmp_path / "a" / "samples.txt").read_text().splitlines()
    assert len(lines) == 6
    assert not any("[MASK]" in line for line in lines)
    for name in ("samples.npy", "samples.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_prompt_is_filled_in_and_kept(made: Path, tmp_path: Path):
    mask = json.loads((made / "data" / "cs" / "meta.json").read_text())["mask_id"]
    prompt = read_tokens("data/physics").long()[:3].numpy()
    prompt[:, 4:9] = mask
    np.save(tmp_path / "prompt.npy", prompt)
    gtl(
        "sample --denoiser source --ratio ratio --planner planner --per_step 2 --count 2",
        "--prompt", tmp_path / "prompt.npy", "--out", tmp_path / "out",
    )  # fmt: skip
    samples = read_tokens(tmp_path / "out" / "samples.npy").numpy()
    assert samples.shape == (6, 16)
    kept = np.repeat(prompt, 2, 0)
    assert (samples[kept != mask] == kept[kept != mask]).all()
    assert (samples != mask).all()


def test_models_and_samples_are_evaluated(made: Path, tmp_path: Path):
    gtl("evaluate --denoiser source --ratio ratio --data data/physics --draws 1", "--out", tmp_path / "model")
    found = {(row["method"], row["metric"]) for row in rows(tmp_path / "model")}
    assert {("source", "nll"), ("guided", "nll"), ("guided", "perplexity_bound"), ("guided", "nll_gain")} <= found
    gtl("sample --denoiser source --ratio ratio --length 16 --count 120 --seed 1", "--out", tmp_path / "samples")
    gtl(
        "evaluate --data data/physics --train data/physics --metrics diversity memorisation",
        "--samples", tmp_path / "samples" / "samples.npy", "--out", tmp_path / "scores",
    )  # fmt: skip
    metrics = {row["metric"] for row in rows(tmp_path / "scores")}
    assert any(metric.startswith("distinct") for metric in metrics)
    assert any("memor" in metric or "copied" in metric for metric in metrics), metrics
