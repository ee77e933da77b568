"""The command line: bad input gets one line and leaves nothing behind; the verbs work end to end."""

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from gtl.cli import main, normalise
from gtl.progress import Bar

KEYS = {
    "experiment",
    "method",
    "n",
    "seed",
    "metric",
    "value",
    "seconds",
    "trainable_weights",
    "device",
    "command",
}
NETWORK = "--network.width 8 --network.depth 1 --network.heads 2"
SMALL = f"{NETWORK} --fit.steps 6 --fit.batch_size 8 --fit.evaluate_every 3"
DOMAINS = "--source src.npy --target tgt.npy"
TOY = "--m 32 --length 4 --samples 8 --source_steps 2 --budget 9 --folds 2 --batch_size 8"
PAPER = f"train ratio {DOMAINS} --like denoiser --estimator paper"
TO = "--like denoiser --target"
COMMANDS = {
    "denoiser": f"train denoiser --data src.npy {SMALL}",
    "clean": f"train classifier {DOMAINS} --like denoiser --noisy false --label_smoothing 0.1 {SMALL}",
    "noisy": f"train classifier {DOMAINS} --like denoiser {SMALL}",
    "ratio": f"{PAPER} --classifier clean --noisy_classifier noisy {SMALL}",
    "uniform": f"train denoiser --data src.npy --process uniform {SMALL}",
    "wide": f"train ratio --source five.npy --target five.npy {SMALL}",
}
"""Checkpoints that the tests share, each trained by its command."""


def gtl(command: str, *more: object) -> None:
    """Runs one command as if it had been typed."""
    arguments = [*shlex.split(command), *map(str, more)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GTL_TRACEBACK", raising=False)
        patch.setattr(sys, "argv", ["gtl", *arguments])
        main(arguments)


def contents(folder: Path) -> dict[str, bytes] | None:
    """All files below a folder, or None where there is no folder."""
    if not folder.exists():
        return None
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def rows(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, good and bad, and with small checkpoints."""
    folder = tmp_path_factory.mktemp("shared")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    arrays = {
        "src": random.integers(0, 3, (20, 6)),
        "tgt": random.integers(0, 3, (10, 6)),
        "five": random.integers(0, 5, (20, 6)),
        "prompt": np.array([[0, 3, 3, 2, 3, 1], [3, 3, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1]]),
        "empty": np.zeros((0, 6), dtype=int),
        "one": np.zeros((1, 6), dtype=int),
        "short": np.zeros((4, 5), dtype=int),
        "masked": np.array([[0, 1, 2, 0, 1, 3], [0, 1, 2, 0, 1, 2]]),
        "large": np.full((4, 6), 9),
        "negative": np.array([[0, 1, 2, 0, 1, -1], [0, 1, 2, 0, 1, 2]]),
        "floats": np.zeros((4, 6)),
        "flat": np.zeros(6, dtype=int),
        "third": np.full((3, 3), 1 / 3),
        "sums": np.full((5, 5), 0.5),
        "oblong": np.full((2, 3), 1 / 3),
        "objects": np.array([[0.5, 0.5], [0.5, 0.5]], dtype=object),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=True)
    (folder / "nothing.npy").write_bytes(b"")
    (folder / "nothing.txt").write_text("")
    (folder / "uneven.txt").write_text("0 1 2 0 1 2\n0 1 2\n")
    (folder / "words.txt").write_text("to be or not to be\n")
    (folder / "unknown.yaml").write_text("length: 4\nbogus: 3\n")
    (folder / "nested.yaml").write_text("data: src.npy\nfit:\n  stepz: 3\n")
    (folder / "broken.yaml").write_text("length: [4\n")
    (folder / "few.yaml").write_text("experiment: markov\nn: [1]\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, command in COMMANDS.items():
            gtl(command, "--out", name)
    for name in ("missing", "extra", "shape", "cut", "unconfigured", "damaged"):
        (folder / name).mkdir()
        for file in ("config.json", "weights.safetensors"):
            shutil.copy(folder / "denoiser" / file, folder / name / file)
    weights = load_file(folder / "denoiser" / "weights.safetensors")
    first = min(weights)
    save_file({k: v for k, v in weights.items() if k != first}, folder / "missing" / "weights.safetensors")
    save_file({**weights, "more": torch.zeros(1)}, folder / "extra" / "weights.safetensors")
    save_file({**weights, first: torch.zeros(3)}, folder / "shape" / "weights.safetensors")
    (folder / "cut" / "weights.safetensors").write_bytes(b"cut short")
    (folder / "unconfigured" / "config.json").unlink()
    (folder / "damaged" / "config.json").write_text("{")
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(autouse=True)
def there(shared: Path, monkeypatch: pytest.MonkeyPatch):
    """Commands name files in the shared folder; tiny networks are fastest on one thread."""
    monkeypatch.chdir(shared)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end in one line on stderr, a non-zero exit, and --out left as it was."""

    def check(command: str, out: Path = tmp_path / "out") -> str:
        before = contents(out)
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            gtl(command, "--out", out)
        lines = capsys.readouterr().err.splitlines()
        assert caught.value.code not in (0, None)
        assert len(lines) == 1, lines
        assert lines[0].startswith("gtl: ")
        assert contents(out) == before
        return lines[0]

    return check


BAD = {
    # too little data
    "reproduce markov --n 1": "n=1",
    "reproduce markov --n 0": "n=0",
    "reproduce markov --n 20 1": "n=1",
    "reproduce markov --n": "n",
    f"train ratio --source src.npy {TO} empty.npy {SMALL}": "empty.npy: 0 sequences",
    f"train ratio --source src.npy {TO} one.npy {SMALL}": "one.npy: 1 sequence",
    f"train ratio --source one.npy {TO} tgt.npy {SMALL}": "one.npy: 1 sequence",
    f"train ratio --source src.npy {TO} nothing.npy {SMALL}": "nothing.npy",
    f"train ratio --source src.npy {TO} nothing.txt {SMALL}": "nothing.txt",
    f"train denoiser --data empty.npy {SMALL}": "empty.npy: 0 sequences",
    f"train denoiser --data one.npy {SMALL}": "one.npy: 1 sequence",
    "evaluate denoiser empty.npy": "empty.npy: 0 sequences",
    "adapt denoiser empty.npy": "empty.npy: 0 sequences",
    "sample uniform --length 4 --sampler one-position": "reveals masks",
    "sample uniform --length 4 --sampler remasking": "needs masked noise",
    "sample uniform --prompt prompt.npy": "has none",
    "train denoiser --data src.npy --process d3pm --matrix nonsense": "choose uniform, absorbing",
    "train denoiser --data src.npy --process uniform --mask_id 1": "no mask of its own",
    "reproduce markov --n 8 --process uniform --sampler one-position": "has none: use ancestral",
    "adapt --denoiser denoiser --target masked.npy": "masked.npy: holds the mask id 3",
    "adapt denoiser tgt.npy --method nonsense": "unknown method 'nonsense'; choose among",
    "adapt denoiser tgt.npy --method gtl-direct": "give --source, or use gtl-local",
    "adapt denoiser tgt.npy --training.folds 1": "folds=1",
    "adapt denoiser tgt.npy --training.budget 5": "budget=5",
    "adapt denoiser tgt.npy --held_out 1": "held_out=1",
    "adapt denoiser tgt.npy --seed -1": "seed=-1",
    "adapt denoiser tgt.npy --source five.npy": "five.npy",
    "adapt ratio tgt.npy": "holds a ratio, not a denoiser",
    "adapt denoiser": "target",
    "evaluate denoiser nothing.txt": "nothing.txt",
    "sample denoiser --prompt empty.npy": "empty.npy: 0 sequences",
    # token ids
    f"train denoiser --data five.npy --vocabulary 3 {SMALL}": "five.npy: token id 4 is outside",
    f"train denoiser --data src.npy --vocabulary 2 {SMALL}": "src.npy: holds the mask id 2",
    f"train denoiser --data src.npy --mask_id 1 {SMALL}": "src.npy: holds the mask id 1",
    f"train denoiser --data src.npy --mask_id 9 {SMALL}": "mask_id=9",
    f"train denoiser --data src.npy --vocabulary 0 {SMALL}": "vocabulary|num_ids",
    f"train denoiser --data negative.npy {SMALL}": "negative.npy: token id -1",
    f"train ratio --source src.npy {TO} masked.npy {SMALL}": "masked.npy: holds the mask id 3",
    f"train ratio --source src.npy {TO} large.npy {SMALL}": "large.npy: token id 9",
    f"train ratio --source negative.npy {TO} tgt.npy {SMALL}": "negative.npy: token id -1",
    "evaluate denoiser masked.npy": "masked.npy: holds the mask id 3",
    "evaluate denoiser large.npy": "large.npy: token id 9",
    "sample denoiser --prompt large.npy": "large.npy: token id 9",
    "sample denoiser --prompt negative.npy": "negative.npy: token id -1",
    # shapes
    f"train denoiser --data uneven.txt {SMALL}": "uneven.txt, line 2: 3 tokens",
    f"train denoiser --data words.txt {SMALL}": "words.txt, line 1",
    f"train denoiser --data floats.npy {SMALL}": "floats.npy: expected integers",
    f"train denoiser --data flat.npy {SMALL}": "flat.npy: expected integers of shape",
    f"train denoiser --data objects.npy {SMALL}": "objects.npy",
    f"train denoiser --data nowhere.npy {SMALL}": "nowhere.npy: no such file",
    f"train ratio --source src.npy {TO} short.npy {SMALL}": "short.npy: sequences of 5 tokens",
    f"train ratio --source short.npy {TO} tgt.npy {SMALL}": "tokens; expected 5",
    # gamma and n_ratio
    "sample denoiser --length 4 --gamma -1": "gamma=-1",
    "sample denoiser --length 4 --gamma nan": "gamma",
    "sample denoiser --length 4 --gamma .nan": "gamma=nan",
    "sample denoiser --length 4 --gamma inf": "gamma",
    "sample denoiser --length 4 --gamma .inf": "gamma=inf",
    "sample denoiser --length 4 --gamma 1e999": "gamma=inf",
    "evaluate denoiser tgt.npy --ratio ratio --gamma=-0.5": "gamma=-0.5",
    "evaluate denoiser tgt.npy --ratio ratio --gamma .nan": "gamma=nan",
    "evaluate denoiser tgt.npy --ratio ratio --gamma .inf": "gamma=inf",
    "sample denoiser --length 4 --n_ratio 0": "n_ratio=0",
    "sample denoiser --length 4 --n_ratio 4": "n_ratio=4 exceeds the vocabulary (3)",
    "sample denoiser --length 4 --ratio ratio --n-ratio -2": "n_ratio=-2",
    "evaluate denoiser tgt.npy --ratio ratio --n_ratio 0": "n_ratio=0",
    "evaluate denoiser tgt.npy --ratio ratio --n_ratio 4": "n_ratio=4 exceeds the vocabulary (3)",
    "evaluate denoiser tgt.npy --n_ratio 0": "n_ratio=0",
    "evaluate denoiser tgt.npy --n_ratio 4": "n_ratio=4 exceeds the vocabulary (3)",
    f"reproduce markov --n 8 --n_ratio 0 {TOY}": "n_ratio=0",
    f"reproduce markov --n 8 --n_ratio 6 {TOY}": "n_ratio=6 exceeds the vocabulary (5)",
    # checkpoints
    "sample missing --length 4": "missing: 1 tensors are missing",
    "sample extra --length 4": "extra: 1 unknown tensors, 'more'",
    "sample shape --length 4": "has shape (3,)",
    "sample cut --length 4": "weights.safetensors: not a safetensors file",
    "sample unconfigured --length 4": "config.json is missing",
    "sample damaged --length 4": "config.json",
    "sample nowhere --length 4": "nowhere: not a checkpoint",
    "sample ratio --length 4": "holds a ratio, not a denoiser",
    "sample denoiser --length 4 --ratio denoiser": "holds a denoiser, not a ratio",
    "sample denoiser --length 4 --ratio wide": "the ratio knows 6 ids",
    "sample denoiser --length 4 --ratio wide --sampler ancestral": "the ratio knows 6 ids",
    "evaluate missing tgt.npy": "missing: 1 tensors are missing",
    "evaluate ratio tgt.npy": "holds a ratio, not a denoiser",
    "evaluate denoiser tgt.npy --ratio wide": "the ratio knows 6 ids",
    f"train denoiser --data src.npy --start ratio {SMALL}": "holds a ratio, not a denoiser",
    f"train denoiser --data src.npy --start cut {SMALL}": "not a safetensors file",
    f"train ratio {DOMAINS} --start denoiser {SMALL}": "holds a denoiser, not a ratio",
    f"train ratio {DOMAINS} --like nowhere {SMALL}": "nowhere: not a checkpoint",
    f"train ratio {DOMAINS} --like damaged {SMALL}": "config.json",
    f"{PAPER} {SMALL}": "--classifier and --noisy_classifier",
    f"{PAPER} --classifier denoiser --noisy_classifier noisy {SMALL}": "not a ratio",
    f"{PAPER} --classifier wide --noisy_classifier noisy {SMALL}": "ids",
    f"{PAPER} --classifier clean --noisy_classifier wide {SMALL}": "ids",
    # verbs and keys
    "bogus": "'bogus'",
    "sample denoiser --length 4 --bogus 3": "--bogus",
    "train denoiser --data src.npy --fit.stepz 3": "stepz",
    "train bogus --data src.npy": "bogus",
    "reproduce bogus": "bogus",
    "sample denoiser --config unknown.yaml": "bogus",
    "train denoiser --config nested.yaml": "stepz",
    "sample denoiser --config broken.yaml": "pars",
    "sample denoiser --config nowhere.yaml": "nowhere.yaml",
    "reproduce --config few.yaml": "n=1",
    "sample denoiser --length four": "length",
    "sample denoiser": "--length",
    "sample denoiser --length 0": "length",
    "sample denoiser --length 4 --count 0": "count=0",
    "sample denoiser --length 4 --batch_size 0": "batch_size=0",
    "sample denoiser --length 4 --sampler ancestral --steps 0": "steps=0",
    "evaluate denoiser tgt.npy --draws 0": "draws=0",
    "evaluate denoiser tgt.npy --draws=-1": "draws=-1",
    # training
    f"train denoiser {SMALL}": "needs --data",
    f"train ratio --source src.npy {SMALL}": "needs --target",
    f"train classifier --target tgt.npy {SMALL}": "needs --source",
    f"train classifier {DOMAINS} --label_smoothing 1 {SMALL}": "label_smoothing=1",
    f"train classifier {DOMAINS} --label_smoothing=-0.1 {SMALL}": "label_smoothing=-0.1",
    f"train classifier {DOMAINS} --label_smoothing .nan {SMALL}": "label_smoothing=nan",
    f"train ratio {DOMAINS} --label_smoothing 1.5 {SMALL}": "label_smoothing=1.5",
    f"train denoiser --data src.npy {SMALL} --fit.learning_rate=-1": "learning_rate=-1",
    f"train denoiser --data src.npy {SMALL} --fit.learning_rate 0": "learning_rate=0",
    f"train denoiser --data src.npy {SMALL} --fit.learning_rate .nan": "learning_rate=nan",
    f"train denoiser --data src.npy {SMALL} --fit.weight_decay=-1": "weight_decay=-1",
    f"train denoiser --data src.npy {SMALL} --fit.seed=-1": "seed=-1",
    f"train denoiser --data src.npy {SMALL} --fit.steps 0": "steps=0",
    f"train denoiser --data src.npy {SMALL} --held_out 1": "held_out=1",
    f"train denoiser --data src.npy {SMALL} --network.width 7": "width=7",
    f"train denoiser --data src.npy {SMALL} --network.heads 0": "heads=0",
    f"train denoiser --data src.npy {SMALL} --network.dropout 2": "dropout=2",
    # the experiment
    "reproduce markov --n 8 --methods bogus": "unknown method 'bogus'",
    "reproduce markov --n 8 --methods vanilla,bogus": "unknown method 'bogus'",
    f"reproduce markov --n 8 --methods source-best-gamma {TOY}": "source-best-gamma",
    f"reproduce markov --n 8 --methods counting-best-gamma {TOY}": "counting-best-gamma",
    "reproduce markov --n eight": "eight",
    "reproduce markov --n 8 --source-matrix sums.npy": "sums.npy: rows must sum to 1",
    "reproduce markov --n 8 --target-matrix oblong.npy": "oblong.npy: shape (2, 3) is not square",
    "reproduce markov --n 8 --source-matrix objects.npy": "objects.npy: not an array of numbers",
    "reproduce markov --n 8 --source-matrix nowhere.npy": "nowhere.npy: no such file",
    "reproduce markov --n 8 --source-matrix nothing.npy": "nothing.npy",
    "reproduce markov --n 8 --source-matrix third.npy": "sizes differ",
    "reproduce markov --n 8 --source-matrix diagonal:1.5": "diagonal:1.5",
    "reproduce markov --n 8 --source-matrix bogus:1": "unknown family",
    "reproduce markov --n 8 --vocabulary 1": "V=1",
    "reproduce markov --n 8 --length 1": "length=1",
    "reproduce markov --n 8 --m 1": "m=1",
    "reproduce markov --n 8 --samples 0": "samples=0",
    "reproduce markov --n 8 --seeds 0": "seeds=0",
    "reproduce markov --n 8 --budget 2": "budget=2",
    f"reproduce markov --n 8 --first_seed=-1 {TOY}": "seed",
    f"reproduce markov --n 8 --learning_rate=-1 {TOY}": "learning_rate=-1",
    f"reproduce markov --n 8 --learning_rate .nan {TOY}": "learning_rate=nan",
    f"reproduce markov --n 8 --label_smoothing 2 {TOY}": "label_smoothing=2",
    f"reproduce markov --n 8 --methods gtl-paper --label_smoothing=-1 {TOY}": "label_smoothing=-1",
    f"reproduce markov --n 8 {TOY} --batch_size 0": "batch_size=0",
    f"reproduce markov --n 8 {TOY} --source_steps 0": "steps=0",
    f"reproduce markov --n 8 {TOY} --sampler ancestral --sampling_steps 0": "steps=0",
    f"reproduce markov --n 8 {TOY} --methods": "methods",
}


@pytest.mark.parametrize("command", BAD, ids=lambda command: command.replace(SMALL, "...").replace(TOY, "..."))
def test_bad_input(refused: Callable[..., str], command: str):
    """One line that names what is wrong."""
    line = refused(command)
    assert any(part in line for part in BAD[command].split("|")), line


@pytest.mark.parametrize(
    "command",
    [
        COMMANDS["denoiser"],
        COMMANDS["ratio"],
        "sample denoiser --length 4",
        "evaluate denoiser tgt.npy",
        f"reproduce markov --n 8 {TOY}",
        "demo",
    ],
    ids=["train denoiser", "train ratio", "sample", "evaluate", "reproduce", "demo"],
)
def test_a_finished_run_is_never_touched(refused: Callable[..., str], tmp_path: Path, command: str):
    shutil.copytree("denoiser", tmp_path / "done")
    assert "already holds a finished run" in refused(command, tmp_path / "done")


@pytest.mark.parametrize("command", ["sample denoiser --length 4", f"train denoiser --data src.npy {SMALL}"])
def test_other_folders_that_are_refused(refused: Callable[..., str], tmp_path: Path, command: str):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    assert "not empty" in refused(command, tmp_path / "full")
    assert "is a file" in refused(command, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x"


def test_a_broken_state_in_an_unfinished_run(refused: Callable[..., str], tmp_path: Path):
    """A state that cannot be read is not passed over in silence."""
    out = tmp_path / "out"
    gtl(COMMANDS["denoiser"], "--out", out)
    for name in ("FINISHED", "results.json", "weights.safetensors", "config.json"):
        (out / name).unlink()
    (out / "state.safetensors").write_bytes(b"no state")
    with pytest.raises(SystemExit):
        gtl(COMMANDS["denoiser"], "--out", out)
    assert not (out / "FINISHED").exists()


def test_the_program_itself(tmp_path: Path):
    """The installed command: one line and a non-zero exit, no traceback."""
    call = [
        sys.executable,
        "-m",
        "gtl.cli",
        "sample",
        "nowhere",
        "--length",
        "4",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["gtl: nowhere: not a checkpoint, config.json is missing"]
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()


def test_the_traceback_can_be_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GTL_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError):
        main(["sample", "nowhere", "--length", "4"])


@pytest.mark.parametrize("verb", ["", "demo", "reproduce", "train", "sample", "evaluate"])
def test_help(verb: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        gtl(f"{verb} --help")
    assert caught.value.code == 0
    assert "usage: gtl" in capsys.readouterr().out


def test_lists_may_be_written_in_several_ways():
    wanted = ["reproduce", "markov", "--n=[100,20]", "--seeds", "2"]
    for written in ("--n 100 20", "--n 100,20", "--n=100,20", "--n [100,20]", "--n=[100,20]"):
        assert normalise(["reproduce", "markov", *written.split(), "--seeds", "2"]) == wanted
    assert normalise(["--methods", "gtl-direct", "vanilla"]) == ["--methods=[gtl-direct,vanilla]"]
    assert normalise(["--source-matrix", "a-b.npy", "--first-seed=-3"]) == [
        "--source_matrix", "a-b.npy", "--first_seed=-3",
    ]  # fmt: skip


# The verbs at work


@pytest.mark.parametrize("name", COMMANDS)
def test_a_training_run(shared: Path, name: str):
    """The folder that training leaves: checkpoint, metrics, rows, and what was run."""
    folder = shared / name
    files = {"config.json", "weights.safetensors", "config.yaml", "run.json", "metrics.jsonl", "results.json"}
    assert {p.name for p in folder.iterdir()} == files | {"FINISHED"}
    marker = (folder / "FINISHED").stat().st_mtime_ns
    assert all(p.stat().st_mtime_ns <= marker for p in folder.iterdir())
    (row,) = rows(folder)
    assert row.keys() == KEYS
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


def test_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    gtl("evaluate denoiser tgt.npy --ratio ratio --draws 2", "--out", tmp_path / "out")
    found = rows(tmp_path / "out")
    assert all(row.keys() == KEYS and row["n"] == 10 for row in found)
    values = {(row["method"], row["metric"]): float(str(row["value"])) for row in found}
    assert len(values) == len(found) == 7
    for name in ("source", "guided"):
        assert values[name, "nll"] > 0
        assert values[name, "masked_nll"] > 0
    assert values["guided", "nll_gain"] == pytest.approx(values["source", "nll"] - values["guided", "nll"])
    assert values["guided", "martingale_rms"] >= abs(values["guided", "martingale_mean"]) > 0
    assert "martingale_rms" in capsys.readouterr().out


def test_evaluate_without_a_ratio(tmp_path: Path):
    gtl("evaluate denoiser one.npy --draws 2", "--out", tmp_path / "out")
    assert [(row["method"], row["metric"]) for row in rows(tmp_path / "out")] == [
        ("source", "nll"),
        ("source", "masked_nll"),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_evaluate_where_nothing_may_be_masked(tmp_path: Path, seed: int):
    """One sequence of one token is masked in every other draw; whatever is drawn, no traceback and no NaN."""
    np.save(tmp_path / "tiny.npy", np.zeros((1, 1), dtype=int))
    command = f"evaluate denoiser {tmp_path / 'tiny.npy'} --ratio ratio --draws 1 --seed {seed}"
    with contextlib.suppress(SystemExit):
        gtl(command, "--out", tmp_path / "out")
    if (tmp_path / "out" / "FINISHED").exists():
        assert all(np.isfinite(float(str(row["value"]))) for row in rows(tmp_path / "out"))


@pytest.mark.parametrize("kept", [1, 3, 7])
def test_an_interrupted_evaluation_measures_nothing_twice(tmp_path: Path, kept: int):
    command, out = "evaluate denoiser tgt.npy --ratio ratio --draws 1", tmp_path / "out"
    gtl(command, "--out", out)
    whole = rows(out)
    (out / "FINISHED").unlink()
    (out / "results.json").write_text(json.dumps(whole[:kept]))
    gtl(command, "--out", out)
    assert [(r["method"], r["metric"], r["value"]) for r in rows(out)] == [
        (r["method"], r["metric"], r["value"]) for r in whole
    ]
    assert (out / "FINISHED").exists()


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
    assert metrics == {"nll", "masked_nll", "nll_gain"}  # a local ratio has no martingale to violate


@pytest.mark.parametrize("model", ["denoiser", "uniform"])
@pytest.mark.parametrize("sampler", [None, "ancestral", "euler", "tau-leaping", "exact-jump"])
def test_every_sampler(shared: Path, tmp_path: Path, model: str, sampler: str | None):
    """Clean tokens from masked and from uniform noise; without a name the process has a default."""
    name = "" if sampler is None else f"--sampler {sampler}"
    gtl(f"sample {shared / model} --length 5 --count 7 --steps 4 {name}", "--out", tmp_path / "out")
    x = np.load(tmp_path / "out" / "samples.npy")
    assert x.shape == (7, 5)
    assert x.max() < 3
