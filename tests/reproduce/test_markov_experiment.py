"""`gtl reproduce markov` end to end at toy size: files, rows, resume, and what a method may depend on."""

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from gtl.estimate import NetworkSize
from gtl.report.table import markdown
from gtl.reproduce.markov import PRESETS
from gtl.run import Run, read_rows
from typed import gtl

KEYS = ["experiment", "method", "n", "seed", "metric", "value", "seconds", "trainable_weights", "device", "command"]
TOY = "--m 64 --length 6 --samples 32 --source_steps 5 --budget 9 --folds 2 --batch_size 16"
FILES = {
    "config.yaml", "run.json", "metrics.jsonl", "results.json", "transitions.json", "figure.png", "report.html",
    "FINISHED",
}  # fmt: skip
Measurement = tuple[Any, ...]


@pytest.fixture(autouse=True, scope="module")
def toy():
    """The small preset with tiny networks, few validation samples, and one thread, on which they are fastest."""
    size = NetworkSize(16, 1, 2, 0.0)
    small = PRESETS["small"]
    tiny = replace(small, validation_samples=8, training=replace(small.training, denoiser=size, ratio=size))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "small", tiny)
        yield
    torch.set_num_threads(threads)


def measured(folder: Path) -> dict[Measurement, float]:
    """The values of a run; a measurement that stands there twice is an error."""
    rows = read_rows(folder / "results.json")
    values = {(row.method, row.n, row.seed, row.metric): row.value for row in rows}
    assert len(values) == len(rows), "a measurement was recorded twice"
    return values


def kl(folder: Path) -> dict[Measurement, float]:
    return {key[:2]: value for key, value in measured(folder).items() if key[3] == "kl"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The preset's methods, n = 8 and 4, seed 0."""
    folder = tmp_path_factory.mktemp("markov") / "run"
    gtl(f"reproduce markov {TOY} --n 8 4", "--out", folder)
    return folder


def test_the_folder(run: Path):
    assert {p.name for p in run.iterdir()} == FILES | {"source-0"}
    assert {p.name for p in (run / "source-0").iterdir()} == {"config.json", "weights.safetensors"}
    marker = (run / "FINISHED").stat().st_mtime_ns
    assert all(p.stat().st_mtime_ns <= marker for p in run.rglob("*") if p.is_file())
    assert (run / "figure.png").read_bytes().startswith(b"\x89PNG")
    about = json.loads((run / "run.json").read_text())
    assert about.keys() == {"seed", "git_commit", "versions", "device", "command"}
    assert about["command"] == f"gtl reproduce markov {TOY} --n 8 4 --out {run}"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["n"], config["seeds"], config["training"]["budget"]) == ([8, 4], [0], 9)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all({"network", "step", "loss", "held_out"} <= line.keys() for line in metrics)


def test_the_rows(run: Path):
    stored = json.loads((run / "results.json").read_text())
    assert all(list(row) == KEYS for row in stored)
    assert all(row["command"].startswith("gtl reproduce markov") and row["experiment"] == "markov" for row in stored)
    wanted = {("source", None)} | {
        (method, n) for n in (8, 4) for method in ("counting", "vanilla", "finetuned", "gtl-local")
    }
    assert kl(run).keys() == wanted
    assert all(value >= 0 for value in kl(run).values())
    trained = [row for row in stored if row["metric"] == "kl" and row["method"] in ("vanilla", "gtl-local")]
    assert all(row["seconds"] > 0 and row["trainable_weights"] > 0 for row in trained)
    assert all(value <= 9 for key, value in measured(run).items() if key[3] == "steps")
    assert not any(key[0].startswith("published") for key in measured(run))  # another length than the paper's


def test_the_estimated_matrices(run: Path):
    """They are row-stochastic, and the KL of each can be had from them (where no transition was missed)."""
    known = json.loads((run / "transitions.json").read_text())
    assert known.keys() == {f"{method}/{n}/0" for method, n in kl(run)}
    for matrix in known.values():
        assert np.allclose(np.sum(matrix, axis=1), 1)
    true = np.where(np.eye(5, dtype=bool), 0.8, 0.05)
    for n in (8, 4):
        estimate = np.array(known[f"counting/{n}/0"])
        by_hand = (true * np.log(true / estimate)).sum(1).mean()
        assert kl(run)["counting", n] == pytest.approx(by_hand)


def test_the_page_is_self_contained(run: Path):
    text = (run / "report.html").read_text()
    assert not re.search(r"https?://|//cdn|<script|<link|@import|url\(", text)
    (image,) = re.findall(r'<img[^>]* src="([^"]+)"', text)
    head, _, data = image.partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == (run / "figure.png").read_bytes()
    for part in ("GTL, local ratio", "fine-tuned", "n = 8", "n = 4", "gtl reproduce markov", "diagonal:0.8"):
        assert part in text, part


def test_the_table_is_made_from_the_rows(run: Path):
    rows = read_rows(run / "results.json")
    text = markdown(rows)
    assert all(f"| {row.method} |" in text for row in rows)
    assert f"`gtl reproduce markov {TOY} --n 8 4 --out {run}`" in text


def test_a_finished_run_is_not_repeated(run: Path, capsys: pytest.CaptureFixture[str]):
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(SystemExit):
        gtl(f"reproduce markov {TOY} --n 8 4", "--out", run)
    assert "already holds a finished run" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("call", [1, 2, 9])
def test_an_interrupted_run_goes_on(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: int
):
    """Stopped before its CALLth measurement is written and taken up again: the same rows, none of them twice."""
    add, calls = Run.add, 0

    def stop(self: Run, *args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        add(self, *args, **kwargs)

    out = tmp_path / "out"
    command = f"reproduce markov {TOY} --n 8 4 --methods source,counting,vanilla,gtl-local"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "add", stop)
        with pytest.raises(SystemExit) as caught:
            gtl(command, "--out", out)
    assert caught.value.code == 130
    assert not (out / "FINISHED").exists()
    source = (out / "source-0" / "weights.safetensors").stat().st_mtime_ns
    first = read_rows(out / "results.json") if (out / "results.json").exists() else []
    assert len(first) == call - 1

    capsys.readouterr()
    with pytest.raises(SystemExit):
        gtl(f"{command} --first_seed 1", "--out", out)
    assert "another config" in capsys.readouterr().err

    gtl(command, "--out", out)
    assert (out / "FINISHED").exists()
    assert (out / "source-0" / "weights.safetensors").stat().st_mtime_ns == source  # not trained again
    assert read_rows(out / "results.json")[: len(first)] == first
    trained = [json.loads(line)["network"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert sum("vanilla" in network for network in trained) == 4  # two folds for each n, whenever that was
    assert sum("source model" in network for network in trained) == 1
    whole = {key: value for key, value in measured(run).items() if key[0] != "finetuned"}
    assert measured(out) == whole  # and "finetuned" made no difference to the others


def test_matrices_from_files(tmp_path: Path):
    """Three states, one transition of the target impossible."""
    np.save(tmp_path / "p.npy", np.array([[0.2, 0.3, 0.5], [0.6, 0.2, 0.2], [0.1, 0.1, 0.8]]))
    np.save(tmp_path / "q.npy", np.array([[0.5, 0.5, 0.0], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]))
    command = f"reproduce markov {TOY} --n 6 --methods source gtl-direct exact counting"
    gtl(command, "--source-matrix", tmp_path / "p.npy", "--target-matrix", tmp_path / "q.npy", "--out", tmp_path / "o")
    values = kl(tmp_path / "o")
    assert values.keys() == {("source", None), ("exact", None), ("gtl-direct", 6), ("counting", 6)}
    assert all(np.isfinite(value) for value in values.values())
    known = json.loads((tmp_path / "o" / "transitions.json").read_text())
    assert all(np.shape(matrix) == (3, 3) for matrix in known.values())
    assert known["exact/None/0"][0][2] == 0  # what the target forbids is never drawn
    assert (tmp_path / "o" / "report.html").exists()


def test_named_families_and_the_paper_estimator(tmp_path: Path):
    """Anti-diagonal to Dirichlet, all of the paper's kinds of rows, the paper's sampler, two seeds."""
    methods = "vanilla-epochs,finetuned-epochs,gtl-paper,gtl-paper-best-gamma,gtl-direct-mean"
    command = (
        f"reproduce markov {TOY} --n 4 --methods {methods} --vocabulary 3 --source-matrix anti-diagonal:0.6 "
        "--target-matrix dirichlet:2 --sampler ancestral --sampling_steps 4 --n_ratio 2 --pooling auto "
        "--label_smoothing 0.1 --seeds 2 --first_seed 3"
    )
    gtl(command, "--out", tmp_path / "out")
    values = measured(tmp_path / "out")
    for method in methods.split(","):
        for seed in (3, 4):
            assert values[method, 4, seed, "kl"] >= 0
    assert values["gtl-paper-best-gamma", 4, 3, "kl"] <= values["gtl-paper", 4, 3, "kl"]
    assert {p.name for p in (tmp_path / "out").iterdir()} == FILES | {"source-3", "source-4"}
    assert all(value <= 9 for key, value in values.items() if key[0] == "gtl-paper" and key[3] == "steps")
    assert values["vanilla-epochs", 4, 3, "steps"] == 60
    assert "±" in markdown(read_rows(tmp_path / "out" / "results.json"))
    assert "±" in (tmp_path / "out" / "report.html").read_text()
    assert json.loads((tmp_path / "out" / "run.json").read_text())["seed"] in (3, [3, 4])


def test_the_exact_models_and_the_published_figures(tmp_path: Path):
    """The paper's chain and length: exact models leave only sampling noise, and the paper's rows stand beside."""
    command = (
        "reproduce markov --m 32 --n 20 1000 --methods exact counting --samples 1024 --source_steps 1 --batch_size 8"
    )
    gtl(command, "--out", tmp_path / "out")
    values = measured(tmp_path / "out")
    assert values["exact", None, 0, "kl"] < 0.01
    assert values["counting", 1000, 0, "kl"] < 0.005
    assert 0.005 < values["counting", 20, 0, "kl"] < 0.1
    assert values["published-vanilla", 20, None, "kl"] == 0.5842
    assert values["published-finetuned", 1000, None, "kl"] == 0.0393
    assert values["published-gtl", 20, None, "kl"] == 0.3621
    rows = read_rows(tmp_path / "out" / "results.json")
    assert all(r.command == "as published" for r in rows if r.method.startswith("published"))


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The demo preset: its table on the terminal, its page in the folder."""
    demo = PRESETS["demo"]
    training = replace(PRESETS["small"].training, source_steps=2, budget=9, folds=2, batch_size=16)
    monkeypatch.setitem(PRESETS, "demo", replace(demo, m=32, n=[4], length=5, samples=16, training=training))
    gtl("demo --seed 2", "--out", tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} >= FILES
    assert {key[2] for key in measured(tmp_path / "out")} == {2}
    shown = capsys.readouterr().out
    assert "GTL, local ratio" in shown
    assert "report.html" in shown


@pytest.mark.parametrize("process", ["uniform", "d3pm", "ctmc"])
def test_other_noise(tmp_path: Path, process: str):
    """Source, baselines and the local ratio under noise without masks, with the stated steps and names."""
    methods = ["source", "counting", "vanilla", "finetuned", "gtl-local", "gtl-direct"]
    gtl(f"reproduce markov --process {process} {TOY} --n 6 --methods {','.join(methods)}", "--out", tmp_path / "out")
    assert kl(tmp_path / "out").keys() == {("source", None), *((method, 6) for method in methods[1:])}
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    sampler = "tau-leaping" if process == "ctmc" else "ancestral"
    assert (config["sampler"], config["sampling_steps"], config["experiment"]) == (sampler, 64, f"markov-{process}")
    assert all(np.isfinite(value) for value in measured(tmp_path / "out").values())
    kind = json.loads((tmp_path / "out" / "source-0" / "config.json").read_text())["kind"]
    assert kind == ("score" if process == "ctmc" else "denoiser")


def test_another_seed_is_another_run(run: Path, tmp_path: Path):
    gtl(f"reproduce markov {TOY} --n 8 --methods counting,source --first_seed 1", "--out", tmp_path / "out")
    values = kl(tmp_path / "out")
    assert values["counting", 8] != kl(run)["counting", 8]
    assert values["source", None] != kl(run)["source", None]
