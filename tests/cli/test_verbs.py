"""The verbs end to end."""

import json
import math
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from gtl.estimate import Adapted, Problem
from gtl.progress import Bar
from gtl.run import Run
from typed import COMMANDS, DOMAINS, KEYS, SMALL, gtl, rows


@pytest.mark.parametrize("name", COMMANDS)
def test_a_training_run(shared: Path, name: str):
    """The folder that training leaves: checkpoint, metrics, rows, and what was run."""
    folder = shared / name
    files = {"config.json", "weights.safetensors", "config.yaml", "run.json", "metrics.jsonl", "results.json"}
    assert {p.name for p in folder.iterdir()} == files | {"FINISHED"}
    marker = (folder / "FINISHED").stat().st_mtime_ns
    assert all(p.stat().st_mtime_ns <= marker for p in folder.iterdir())
    (row,) = rows(folder)
    assert list(row) == KEYS
    assert (row["metric"], row["seed"]) == ("held_out_loss", 0)
    assert row["command"] == shlex.join(["gtl", *shlex.split(COMMANDS[name]), "--out", name])
    weights = load_file(folder / "weights.safetensors")
    assert row["trainable_weights"] == sum(w.numel() for w in weights.values())
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [3, 6]
    assert row["value"] == min(line["held_out"] for line in metrics)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["fit"]["steps"] == 6
    assert config["network"]["width"] == 8


def test_a_ratio_takes_over_the_process_of_a_denoiser(shared: Path):
    process = [json.loads((shared / name / "config.json").read_text())["process"] for name in ("denoiser", "ratio")]
    assert process[0] == process[1]


@pytest.mark.parametrize("objective", ["denoiser --data src.npy", f"ratio {DOMAINS}"])
def test_the_seed_is_written_down(tmp_path: Path, objective: str):
    gtl(f"train {objective} {SMALL} --fit.steps 1 --fit.seed 7", "--out", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "run.json").read_text())["seed"] == 7
    assert rows(tmp_path / "out")[0]["seed"] == 7


def test_the_same_seed_trains_the_same_weights(shared: Path, tmp_path: Path):
    gtl(COMMANDS["denoiser"], "--out", tmp_path / "again")
    gtl(COMMANDS["denoiser"], "--fit.seed", 1, "--out", tmp_path / "other")
    weights = [(folder / "weights.safetensors").read_bytes() for folder in (shared / "denoiser", tmp_path / "again")]
    assert weights[0] == weights[1]
    assert (tmp_path / "other" / "weights.safetensors").read_bytes() != weights[0]


def test_fine_tuning_starts_from_a_checkpoint(shared: Path, tmp_path: Path):
    """A tiny learning rate: close to the start, and not the start."""
    command = "train denoiser --data tgt.npy --start denoiser --fit.steps 2 --fit.learning_rate 1e-6"
    gtl(command, "--out", tmp_path / "out")
    before, after = (load_file(f / "weights.safetensors") for f in (shared / "denoiser", tmp_path / "out"))
    assert (shared / "denoiser" / "config.json").read_text() == (tmp_path / "out" / "config.json").read_text()
    assert all(torch.allclose(before[k], after[k], atol=1e-4) for k in before)
    assert not all(torch.equal(before[k], after[k]) for k in before)


def test_settings_from_a_file(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("denoiser: denoiser\nlength: 5\ncount: 3\nseed: 2\n")
    gtl(f"sample --config {tmp_path / 'config.yaml'} --count 2", "--out", tmp_path / "out")
    assert np.load(tmp_path / "out" / "samples.npy").shape == (2, 5)  # a flag beats the file


def test_an_interrupted_training_goes_on(shared: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """Control-C says what to do; the same command then ends where the whole run ended."""
    advance = Bar.advance

    def stop(bar: Bar, fraction: float) -> None:
        if fraction > 0.6:
            raise KeyboardInterrupt
        advance(bar, fraction)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Bar, "advance", stop)
        with pytest.raises(SystemExit) as caught:
            gtl(COMMANDS["denoiser"], "--out", out)
    assert caught.value.code == 130
    assert "same command" in capsys.readouterr().err
    assert (out / "state.safetensors").exists()
    assert not (out / "FINISHED").exists()
    assert not (out / "weights.safetensors").exists()
    gtl(COMMANDS["denoiser"], "--out", out)
    assert {p.name for p in out.iterdir()} == {p.name for p in (shared / "denoiser").iterdir()}
    assert (out / "weights.safetensors").read_bytes() == (shared / "denoiser" / "weights.safetensors").read_bytes()
    assert (out / "metrics.jsonl").read_text() == (shared / "denoiser" / "metrics.jsonl").read_text()


def test_an_unfinished_run_of_other_settings(refused: Callable[..., str], tmp_path: Path):
    out = tmp_path / "out"
    gtl(COMMANDS["denoiser"], "--out", out)
    (out / "FINISHED").unlink()
    assert "another config" in refused(COMMANDS["denoiser"] + " --fit.seed 3", out)


@pytest.mark.parametrize("sampler", ["one-position", "ancestral"])
@pytest.mark.parametrize("guided", ["", "--ratio ratio --gamma 2 --n_ratio 2"])
def test_samples_respect_the_prompt(tmp_path: Path, sampler: str, guided: str):
    command = f"sample denoiser {guided} --prompt prompt.npy --count 5 --sampler {sampler} --steps 4 --batch_size 4"
    gtl(command, "--out", tmp_path / "out")
    samples = np.load(tmp_path / "out" / "samples.npy", allow_pickle=False)
    prompt = np.load("prompt.npy").repeat(5, axis=0)
    assert samples.shape == (15, 6)
    assert samples.max() < 3  # no mask is left
    assert (samples == prompt)[prompt != 3].all()
    assert len({tuple(row) for row in samples[5:10].tolist()}) > 1  # the rest is drawn
    about = json.loads((tmp_path / "out" / "run.json").read_text())
    assert about["command"].startswith("gtl sample denoiser")
    assert (tmp_path / "out" / "FINISHED").exists()


def test_samples_are_seeded(tmp_path: Path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        gtl(f"sample denoiser --ratio ratio --length 7 --count 9 --seed {seed}", "--out", tmp_path / name)
    a, b, c = (np.load(tmp_path / name / "samples.npy") for name in "abc")
    assert a.shape == (9, 7)
    assert (a == b).all()
    assert (a != c).any()


def test_samples_without_guidance_strength_are_the_source(tmp_path: Path):
    gtl("sample denoiser --length 7 --count 9", "--out", tmp_path / "a")
    gtl("sample denoiser --ratio ratio --gamma 0 --length 7 --count 9", "--out", tmp_path / "b")
    assert (np.load(tmp_path / "a" / "samples.npy") == np.load(tmp_path / "b" / "samples.npy")).all()


def test_adapt_then_sample(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Needed arguments by name or by place; the chosen gamma is stored and is what `auto` means."""
    tiny = "--training.budget 9 --training.folds 2 --training.ratio.width 8 --training.ratio.heads 2"
    gtl(f"adapt --denoiser {shared / 'denoiser'} --target={shared / 'tgt.npy'} {tiny}", "--out", tmp_path / "ratio")
    assert "held-out nll" in capsys.readouterr().out
    config = json.loads((tmp_path / "ratio" / "config.json").read_text())
    assert config["kind"] == "local"
    assert config["gamma"] >= 0
    draws = []
    for gamma in ("auto", config["gamma"]):
        out = tmp_path / f"samples-{gamma}"
        gtl(f"sample {shared / 'denoiser'} --ratio {tmp_path / 'ratio'} --length 4 --gamma {gamma}", "--out", out)
        draws.append((out / "samples.npy").read_bytes())
    assert draws[0] == draws[1]
    gtl(
        f"evaluate {shared / 'denoiser'} --ratio {tmp_path / 'ratio'} --data {shared / 'tgt.npy'}",
        "--out",
        tmp_path / "e",
    )
    metrics = {row["metric"] for row in json.loads((tmp_path / "e" / "results.json").read_text())}
    assert metrics == {"nll", "perplexity_bound", "masked_nll", "nll_gain"}  # a local ratio obeys the martingale


@pytest.mark.parametrize(("judged", "says"), [(None, "over 2 held-out parts"), (1, "over 1 held-out part ")])
def test_adapt_says_how_many_parts_judged(
    shared: Path, tmp_path: Path, judged: int | None, says: str, capsys, monkeypatch: pytest.MonkeyPatch
):
    adapted = Problem.adapted
    monkeypatch.setattr(Problem, "adapted", lambda self, name: replace(adapted(self, name), judged=judged))
    tiny = "--method finetuned --training.budget 9 --training.folds 2"
    gtl(f"adapt --denoiser {shared / 'denoiser'} --target={shared / 'tgt.npy'} {tiny}", "--out", tmp_path / "tuned")
    assert says in capsys.readouterr().out


@pytest.mark.parametrize("model", ["denoiser", "uniform"])
@pytest.mark.parametrize("sampler", [None, "ancestral", "euler", "tau-leaping", "exact-jump"])
def test_every_sampler(shared: Path, tmp_path: Path, model: str, sampler: str | None):
    """Clean tokens from masked and from uniform noise; without a name the process has a default."""
    name = "" if sampler is None else f"--sampler {sampler}"
    gtl(f"sample {shared / model} --length 5 --count 7 --steps 4 {name}", "--out", tmp_path / "out")
    x = np.load(tmp_path / "out" / "samples.npy")
    assert x.shape == (7, 5)
    assert x.max() < 3


KEPT = ["gtl-knn", "gtl-local-knn", "gtl-sparse", "gtl-stack", "gtl-blend", "gtl-local-iw", "gtl-late"]


@pytest.mark.parametrize("method", [*KEPT, "finetuned", "lora", "sparse"])
def test_whatever_adapt_makes_can_guide(shared: Path, tmp_path: Path, method: str):
    """A ratio, a stack of them, or a tuned denoiser: each is a folder that sample and evaluate take as it is."""
    tiny = "--training.budget 24 --training.folds 2 --training.ratio.width 8 --training.ratio.heads 2"
    data = f"{shared / 'tgt.npy'} --source {shared / 'src.npy'}"
    gtl(f"adapt {shared / 'denoiser'} {data} --method {method} {tiny}", "--out", tmp_path / "made")
    gtl(f"sample {shared / 'denoiser'} --ratio {tmp_path / 'made'} --length 4", "--out", tmp_path / "s")
    assert np.load(tmp_path / "s" / "samples.npy").max() < 3
    fast = f"--ratio {tmp_path / 'made'} --length 4 --precision bf16"
    gtl(f"sample {shared / 'denoiser'} {fast}", "--out", tmp_path / "f")
    assert np.load(tmp_path / "f" / "samples.npy").max() < 3
    gtl(f"evaluate {shared / 'denoiser'} {shared / 'tgt.npy'} --ratio {tmp_path / 'made'}", "--out", tmp_path / "e")
    found = {(row["method"], row["metric"]): row["value"] for row in rows(tmp_path / "e")}
    assert math.isfinite(found["guided", "nll"])  # type: ignore[arg-type]


def test_several_methods_share_what_they_train(shared: Path, tmp_path: Path):
    """Each in a folder of its own, the same as alone, and a stack trains nothing that was trained already."""
    tiny = "--training.budget 24 --training.folds 2 --training.ratio.width 8 --training.ratio.heads 2"
    command = f"adapt {shared / 'denoiser'} {shared / 'tgt.npy'} {tiny} --seed 3"
    gtl(f"{command} --method gtl-stack finetuned gtl-local", "--out", tmp_path / "all")
    for method in ("finetuned", "gtl-local"):
        gtl(f"{command} --method {method}", "--out", tmp_path / method)
        weights = [folder / "weights.safetensors" for folder in (tmp_path / "all" / method, tmp_path / method)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        assert (tmp_path / "all" / method / "config.json").read_text() == (
            tmp_path / method / "config.json"
        ).read_text()
    logged = [json.loads(line) for line in (tmp_path / "all" / "metrics.jsonl").read_text().splitlines()]
    fits = [line["network"] for line in logged if line.get("step") == max(x["step"] for x in logged if "step" in x)]
    assert len(fits) == len(set(fits))
    found = {(row["method"], row["metric"]): row["value"] for row in rows(tmp_path / "all")}
    assert found["gtl-stack", "steps"] == found["finetuned", "steps"] + found["gtl-local", "steps"]  # type: ignore[operator]


def test_several_methods_stopped_in_the_middle(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is done is kept, the rest is trained, and nothing stands there twice."""
    tiny = "--training.budget 12 --training.folds 2 --training.ratio.width 8 --training.ratio.heads 2"
    command = f"adapt {shared / 'denoiser'} {shared / 'tgt.npy'} {tiny} --rows 8 --method finetuned gtl-local gtl-stack"
    gtl(command, "--out", tmp_path / "whole")
    adapted, add, trained = Problem.adapted, Run.add, []

    def counted(problem: Problem, method: str) -> Adapted:
        trained.append(method)
        return adapted(problem, method)

    def stop(run: Run, experiment: str, method: str, metric: str, *more: Any, **about: Any) -> None:
        add(run, experiment, method, metric, *more, **about)
        if (method, metric) == ("gtl-local", "gamma"):
            raise KeyboardInterrupt

    monkeypatch.setattr(Problem, "adapted", counted)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "add", stop)
        with pytest.raises(SystemExit):
            gtl(command, "--out", tmp_path / "out")
    gtl(command, "--out", tmp_path / "out")
    assert trained == ["finetuned", "gtl-local", "gtl-local", "gtl-stack"]
    told = [[(r["method"], r["metric"], r["value"]) for r in rows(tmp_path / name)] for name in ("whole", "out")]
    assert told[0] == told[1]
    assert len(told[0]) == len(set(told[0])) == 1 + 3 * 3
    for name in (
        "finetuned/weights.safetensors",
        "gtl-local/weights.safetensors",
        "gtl-stack/config.json",
        "target.npy",
    ):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_some_of_the_rows(shared: Path, tmp_path: Path):
    """Drawn by the seed; a larger number holds a smaller one's."""
    tiny = "--training.budget 6 --training.folds 0 --training.ratio.width 8 --training.ratio.heads 2"
    command = f"adapt {shared / 'denoiser'} {shared / 'tgt.npy'} {tiny} --rows"
    gtl(f"{command} 5", "--out", tmp_path / "five")
    assert {row["n"] for row in rows(tmp_path / "five")} == {5}
    with pytest.raises(SystemExit):
        gtl(f"{command} 100000", "--out", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_sum_of_folders(shared: Path, tmp_path: Path):
    """A sum of one ratio's parts is that ratio; a term without a weight counts once; its own gamma counts in `auto`."""

    def drawn(name: str, ratio: str, *more: object) -> bytes:
        command = ["--ratio", ratio, "--length", 4, "--out", tmp_path / name, *more]
        gtl(f"sample {shared / 'denoiser'}", *command)
        return (tmp_path / name / "samples.npy").read_bytes()

    one = tmp_path / "ratio"
    shutil.copytree(shared / "ratio", one)
    config = json.loads((one / "config.json").read_text())
    (one / "config.json").write_text(json.dumps(config | {"gamma": 6.0}))
    alone = drawn("alone", str(one), "--gamma", 1)
    assert drawn("halves", f"0.5 * {one} + 0.5*{one}", "--gamma", 1) == alone
    assert drawn("plain", f"{one} + 0 * {one}", "--gamma", 1) == alone
    own = drawn("own", str(one))
    assert own == drawn("six", str(one), "--gamma", 6)
    assert drawn("auto", f"0.25 * {one} + 0.75 * {one}") == own
    with pytest.raises(SystemExit):
        drawn("auto", str(one))  # a finished run is left alone
    assert drawn("tuned", f"1e-9 * {one} + {shared / 'denoiser'}", "--gamma", 1) == drawn(
        "source", str(one), "--gamma", 0
    )


def test_taylor_scoring(shared: Path, tmp_path: Path):
    gtl(f"sample {shared / 'denoiser'} --ratio {shared / 'ratio'} --length 4 --scoring taylor", "--out", tmp_path / "s")
    assert np.load(tmp_path / "s" / "samples.npy").shape == (64, 4)


@pytest.mark.parametrize("model", ["denoiser", "uniform"])
@pytest.mark.parametrize("given", [True, False])
def test_diagnose(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, given: bool):
    source = f"--source {shared / 'src.npy'}" if given else ""
    gtl(f"diagnose {shared / model} {shared / 'tgt.npy'} {source} --steps 4", "--out", tmp_path / "d")
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "d" / "diagnosis.json").read_text())
    assert found["use"] in ("gtl", "fine-tuning", "both", "neither")
    assert found["advice"].split(":")[0] in " ".join(said.split())
    assert found["source_sampled"] is not given
    assert 0 <= found["auc"] <= 1
    assert 0 < found["token_overlap"] <= 1
    assert (found["martingale_rms"] is None) == (model == "uniform")
    names = {gain["name"] for gain in found["gains"]}
    assert names == {"local", "knn", "finetuned"} | ({"sequence"} if model == "denoiser" else set())
    assert (tmp_path / "d" / "diagnosis.png").stat().st_size > 10_000
    assert {row["metric"] for row in rows(tmp_path / "d")} == {"nll_gain"}


@pytest.mark.parametrize("changed", ["denoiser", "target", "source"])
def test_an_unfinished_run_is_not_gone_on_with_other_inputs(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changed: str
):
    """Another model or other sequences at the same path: one line says which, and what was kept stays."""
    for name in ("src.npy", "tgt.npy"):
        shutil.copy(shared / name, tmp_path / name)
    shutil.copytree(shared / "denoiser", tmp_path / "denoiser")
    monkeypatch.chdir(tmp_path)
    tiny = "--training.budget 9 --training.folds 2 --training.evaluate_every 2"
    command = f"adapt denoiser tgt.npy --source src.npy --method finetuned {tiny} --out run"
    with monkeypatch.context() as patch:
        patch.setattr("gtl.commands.adapt.keep", interrupted)
        with pytest.raises(SystemExit):
            gtl(command)
    fits = sorted(Path("run/fits").iterdir())
    assert fits
    if changed == "denoiser":
        weights = load_file("denoiser/weights.safetensors")
        save_file({name: weight + 1 for name, weight in weights.items()}, "denoiser/weights.safetensors")
    else:
        path = "tgt.npy" if changed == "target" else "src.npy"
        np.save(path, np.load(path)[::-1])
    with pytest.raises(SystemExit):
        gtl(command)
    assert f"gtl: run was begun with another {changed}; choose another --out" in capsys.readouterr().err
    assert sorted(Path("run/fits").iterdir()) == fits


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt
