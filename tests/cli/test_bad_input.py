"""Bad input gets one line on stderr and a non-zero exit, and leaves nothing behind."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gtl.cli import main, normalise
from typed import COMMANDS, DOMAINS, PAPER, SMALL, TO, TOY, gtl

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
    "sample uniform --length 4 --order left-to-right": "reveals masks",
    "sample denoiser --length 4 --sampler ancestral --order confidence": "are for --sampler planner",
    "sample denoiser --length 4 --order planner": "--planner FOLDER",
    "sample denoiser --length 4 --order random --planner ratio": "go together",
    "sample denoiser --length 4 --planner ratio": "holds no planner",
    "sample denoiser --length 4 --planner nowhere": "nowhere",
    "sample denoiser --length 4 --per_step 0": "per_step=0",
    "sample denoiser --length 4 --order random --order_temperature 1": "order_temperature",
    "sample denoiser --length 4 --tokenizer nowhere": "nowhere",
    f"train planner --data src.npy {SMALL}": "needs --denoiser",
    f"train planner --denoiser denoiser {SMALL}": "needs --data",
    f"train planner --data src.npy --denoiser uniform {SMALL}": "noise has none",
    f"train planner --data src.npy --denoiser ratio {SMALL}": "holds a ratio",
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
    "adapt bans tgt.npy": "tgt.npy: holds the id 1, which the model never gives",
    "adapt bans zeros.npy --source src.npy --method finetuned-iw": "src.npy: holds the id 1",
    "diagnose bans tgt.npy": "tgt.npy: holds the id 1",
    "diagnose bans zeros.npy --source src.npy": "src.npy: holds the id 1",
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
    "sample denoiser --length 4 --ratio five.npy": "five.npy: not a checkpoint",
    "sample denoiser --length 4 --ratio '0.5 * ratio + 0.5 * nowhere'": "nowhere: not a checkpoint",
    "sample denoiser --length 4 --ratio '0.5 * ratio + '": "not a sum such as",
    "sample denoiser --length 4 --ratio 'half * ratio'": "half * ratio: not a checkpoint",
    "sample denoiser --length 4 --ratio 'ratio + wide'": "different processes",
    "sample denoiser --length 4 --ratio denoiser --scoring taylor": "needs a sequence ratio",
    "sample denoiser --length 4 --ratio ratio --scoring exact": "scoring",
    "sample denoiser --length 4 --ratio uniform": "the ratio knows 3 ids",
    "diagnose denoiser one.npy": "one.npy: 1 sequence",
    "diagnose denoiser masked.npy": "masked.npy: holds the mask id 3",
    "diagnose denoiser tgt.npy --source short.npy": "short.npy: sequences of 5 tokens",
    "diagnose denoiser tgt.npy --steps 0": "steps=0",
    "diagnose denoiser tgt.npy --seed -1": "seed=-1",
    "diagnose ratio tgt.npy": "holds a ratio, not a denoiser",
    "adapt denoiser tgt.npy --method gtl-local-iw": "give --source",
    "reproduce markov --n 8 --mixture 1": "mixture=1",
    "sample denoiser --length 4 --ratio wide": "the ratio knows 6 ids",
    "sample denoiser --length 4 --ratio wide --sampler ancestral": "the ratio knows 6 ids",
    "evaluate missing tgt.npy": "missing: 1 tensors are missing",
    "evaluate ratio tgt.npy": "holds a ratio, not a denoiser",
    "evaluate denoiser tgt.npy --ratio wide": "the ratio knows 6 ids",
    f"train denoiser --data src.npy --start ratio {SMALL}": "holds a ratio, not a denoiser",
    f"train denoiser --data src.npy --start cut {SMALL}": "not a safetensors file",
    f"train ratio {DOMAINS} --start denoiser {SMALL}": "holds a denoiser; a sequence ratio or classifier is needed",
    f"train ratio {DOMAINS} --like nowhere {SMALL}": "nowhere: not a checkpoint",
    f"train ratio {DOMAINS} --like damaged {SMALL}": "config.json",
    f"{PAPER} {SMALL}": "--classifier and --noisy_classifier",
    f"{PAPER} --classifier denoiser --noisy_classifier noisy {SMALL}": "holds a denoiser; a sequence ratio",
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


@pytest.mark.parametrize("verb", ["", "demo", "reproduce", "train", "adapt", "sample", "evaluate"])
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
