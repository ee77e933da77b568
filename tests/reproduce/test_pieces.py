"""Pieces of an experiment: their order, side by side, when one fails, at the time limit, and at Ctrl-C.

Processes of most tests come from a server that has imported the library already (see tests/cli/test_kill.py).
"""

import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.context import ForkServerContext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from gtl.progress import Bar
from gtl.reproduce import pieces
from gtl.reproduce.pieces import Piece, Report, is_done, run_pieces, with_history, words
from gtl.run import Run
from typed import SMALL, contents

SHORT = f"train denoiser --data data.npy {SMALL}"
LOOKS = "--fit.evaluate_every 50 --fit.evaluation_rows 32 --fit.save_every 50"
LONG = f"{SHORT} {LOOKS} --fit.steps 300"
ENDLESS = f"{SHORT} {LOOKS} --fit.steps 1000000"
LASTING = ("weights.safetensors", "config.json", "metrics.jsonl")
PRELOADED = ["gtl.cli", "pytest", "torch._dynamo", "torch.distributed.tensor", "sklearn.isotonic"]


def piece(name: str, command: str = SHORT, *needs: str) -> Piece:
    return Piece("train", Path(name), tuple(shlex.split(command)), tuple(map(Path, needs)))


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Commands run where the data is, on one thread."""
    np.save(tmp_path / "data.npy", np.random.default_rng(0).integers(0, 3, (20, 6)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Where processes come from in no time; the first one waits until it is ready."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    first = context.Process(target=len, args=("",))
    first.start()
    first.join()
    return context


@pytest.fixture
def served(server: ForkServerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "get_context", {"spawn": server}.__getitem__)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of the pieces that ran in this process."""
    found: list[str] = []
    perform = pieces.perform

    def counted(piece: Piece, deadline: float | None, log: Path | None) -> str | None:
        found.append(str(piece.folder))
        return perform(piece, deadline, log)

    monkeypatch.setattr(pieces, "perform", counted)
    return found


def lasting(folder: str) -> list[bytes]:
    """What a training leaves, but for times."""
    return [Path(folder, name).read_bytes() for name in LASTING]


def wait_for(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Whether a condition holds before so many seconds are over."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return bool(condition())


def when(condition: Callable[[], object], act: Callable[[], None]) -> threading.Thread:
    """Does something as soon as a condition holds."""

    def watch() -> None:
        wait_for(condition)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


# words


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, ""),
        ({"fit": {"steps": 9, "rate": 0.5}, "seed": 0}, "--fit.steps 9 --fit.rate 0.5 --seed 0"),
        ({"training": {"ratio": {"width": 8}, "folds": 2}}, "--training.ratio.width 8 --training.folds 2"),
        ({"domain": ["a=b:c,d", "e=f:g"], "n": [1, 2]}, "--domain a=b:c,d e=f:g --n 1 2"),
        ({"exclusive": True, "skip_bad": False, "noisy": [True]}, "--exclusive true --skip_bad false --noisy true"),
        ({"train": None, "fit": {"stop": None, "steps": 1}, "network": {}}, "--fit.steps 1"),
        ({"out": Path("my runs") / "x", "learning_rate": 1e-05}, "--out 'my runs/x' --learning_rate 1e-05"),
    ],
)
def test_words(flags: dict[str, object], wanted: str):
    assert words(flags) == shlex.split(wanted)
    assert words(flags, "a.") == [word.replace("--", "--a.") for word in shlex.split(wanted)]


def test_a_piece_is_a_command(tmp_path: Path):
    one = piece("my runs/x", "mix --source 'a b' --share 0.5")
    assert one.words == ["mix", "--source", "a b", "--share", "0.5", "--out", "my runs/x"]
    assert str(one) == "gtl mix --source 'a b' --share 0.5 --out 'my runs/x'"


def test_blanks_in_names(started: list[str]):
    """What a piece did is recognised by its command, blanks or not."""
    Path("my data.npy").write_bytes(Path("data.npy").read_bytes())
    one = piece("my runs/a piece", f"train denoiser --data 'my data.npy' {SMALL}")
    assert run_pieces([one]) == Report(done=1)
    assert is_done(one)
    assert run_pieces([one]) == Report(done=1)
    assert started == ["my runs/a piece"]


# order


def test_order_and_needs(started: list[str], capsys: pytest.CaptureFixture[str]):
    """As they stand there, each after what it needs; what is done is passed over; a line each."""
    found = [piece("a"), piece("b", f"{SHORT} --start a", "a"), piece("c", f"{SHORT} --fit.seed 1")]
    assert run_pieces(found) == Report(done=3)
    assert started == ["a", "b", "c"]
    lines = [line for line in capsys.readouterr().err.splitlines() if " s done" in line]
    assert [line.split()[:2] for line in lines] == [["1/3", "a"], ["2/3", "b"], ["3/3", "c"]]
    before = contents(Path())
    started.clear()
    assert run_pieces(found) == Report(done=3)
    assert started == []
    assert contents(Path()) == before
    (Path("b") / "FINISHED").unlink()
    assert run_pieces(found) == Report(done=3)
    assert started == ["b"]


def test_what_a_piece_needs_and_nobody_makes(started: list[str]):
    """It is left out, and what needs it; where nothing else is there to be done, it is an error."""
    alone = [piece("b", SHORT, "a"), piece("d", SHORT, "b")]
    with pytest.raises(FileNotFoundError, match="b needs a, which is not there yet: run its stage first"):
        run_pieces(alone)
    for _ in range(2):
        assert run_pieces([piece("c"), *alone]) == Report(done=1, left=2, missing={"b": "a", "d": "b"})
        assert started == ["c"]
    assert run_pieces([piece("a"), piece("c"), *alone]) == Report(done=4)


def test_the_result_of_another_command(started: list[str]):
    run_pieces([piece("a")])
    with pytest.raises(FileExistsError, match=r"a holds the result of another command \(gtl train .* remove it, or"):
        run_pieces([piece("b"), piece("a", f"{SHORT} --fit.seed 1")])
    assert started == ["a"]


def test_what_was_made_from_another_result():
    """The same command, after another one before it: refused."""
    run_pieces(with_history([piece("a"), piece("b", f"{SHORT} --start a", "a")]))
    shutil.rmtree("a")
    other = with_history([piece("a", f"{SHORT} --fit.seed 1"), piece("b", f"{SHORT} --start a", "a")])
    with pytest.raises(FileExistsError, match="b was made from results of another recipe; remove it"):
        run_pieces(other)
    assert not Path("a").exists()
    shutil.rmtree("b")
    assert run_pieces(other) == Report(done=2)
    assert run_pieces(other) == Report(done=2)


def test_bad_jobs():
    with pytest.raises(ValueError, match="jobs=0 must be at least 1"):
        run_pieces([piece("a")], jobs=0)
    assert not Path("a").exists()


def test_nothing_to_do():
    assert run_pieces([]) == Report()
    assert run_pieces([], jobs=2) == Report()


# failure


def test_what_fails_leaves_the_others_alone(started: list[str], capsys: pytest.CaptureFixture[str]):
    """Pieces that need it are left undone, and nothing of them is there."""
    bad = piece("bad", f"{SHORT} --fit.steps 0")
    found = [bad, piece("after", SHORT, "bad"), piece("later", SHORT, "after"), piece("good")]
    report = run_pieces(found)
    assert (report.done, report.left, list(report.failed)) == (1, 2, ["bad"])
    assert started == ["bad", "good"]
    assert not Path("after").exists()
    assert not Path("bad").exists()
    said = capsys.readouterr().err
    assert "steps=0 must be at least 1" in said
    assert re.search(r"0/4 bad \d+ s FAILED: ", said)


def test_an_error_that_nobody_foresaw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A traceback for those who must find it, and its last line in the report."""

    def broken(run: Run) -> None:
        raise RuntimeError("out of\n  memory")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", broken)
        report = run_pieces([piece("a")])
    assert report == Report(failed={"a": "RuntimeError: out of memory"})
    assert "Traceback" in capsys.readouterr().err
    assert run_pieces([piece("a")]) == Report(done=1)


def test_brackets_in_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def broken(run: Run) -> None:
        raise RuntimeError("expected [/a] and [b]")

    monkeypatch.setattr(Run, "finish", broken)
    report = run_pieces([piece("a")])
    assert list(report.failed) == ["a"]
    assert "FAILED: RuntimeError: expected [/a] and [b]" in capsys.readouterr().err


# side by side


def spans(names: list[str]) -> list[tuple[float, float]]:
    """From the first file to the marker."""
    return [(Path(n, "config.yaml").stat().st_mtime, Path(n, "FINISHED").stat().st_mtime) for n in names]


def test_side_by_side(served: None, capsys: pytest.CaptureFixture[str]):
    """They overlap, the results are those of one process, and a failure is one piece's."""
    names = ["a", "b", "c"]
    found = [piece(name, f"{LONG} --fit.seed {seed}") for seed, name in enumerate(names)]
    found += [
        piece("bad", f"{SHORT} --fit.steps 0"),
        piece("after", SHORT, "bad"),
        piece("e", f"{SHORT} --start a", "a"),
    ]
    Path("bad.log").write_text("what was said before\n")
    environment, typed = dict(os.environ), list(sys.argv)
    report = run_pieces(found, jobs=2)
    assert report == Report(done=4, left=1, failed={"bad": "gtl: steps=0 must be at least 1"})
    assert (dict(os.environ), sys.argv) == (environment, typed)
    times = sorted(spans(names))
    assert any(late < end for (_, end), (late, _) in pairwise(times))
    assert not multiprocessing.active_children()
    said = capsys.readouterr().err
    assert said.count(" s done") == 4
    assert "training the denoiser" not in said
    for name in [*names, "e"]:
        log = Path(f"{name}.log").read_text()
        assert "training the denoiser" in log
        assert f"{name}: held-out loss" in log
    assert "gtl: steps=0 must be at least 1" in Path("bad.log").read_text()
    assert not Path("after.log").exists()
    run_pieces([piece("alone", f"{LONG} --fit.seed 1")])
    assert lasting("b") == lasting("alone")


# the time limit


def test_the_time_limit(started: list[str], capsys: pytest.CaptureFixture[str]):
    """What runs is stopped and goes on from its state; the end is bit for bit that of a run that was not stopped."""

    def other(*_: object) -> None: ...

    before = signal.signal(signal.SIGALRM, other)
    typed = list(sys.argv)
    try:
        run_pieces([piece("first")])
        begun = time.perf_counter()
        run_pieces([piece("whole", LONG)])
        seconds = 0.4 * (time.perf_counter() - begun)
        found, reached = [piece("a", LONG), piece("b")], [0]
        for _ in range(12):
            report = run_pieces(found, seconds=seconds)
            assert not report.failed
            if not report.left:
                break
            if Path("a", "FINISHED").exists():
                continue
            assert not Path("b").exists()
            with safe_open(Path("a", "state.safetensors"), "pt") as file:
                reached.append(json.loads(file.metadata()["numbers"])["step"])
        assert signal.getsignal(signal.SIGALRM) is other
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        assert sys.argv == typed
    finally:
        signal.signal(signal.SIGALRM, before)
    assert report == Report(done=2)
    assert len(reached) > 1
    assert reached == sorted({*reached})
    assert lasting("a") == lasting("whole")
    assert not Path("a", "state.safetensors").exists()
    assert " s stopped" in capsys.readouterr().err


def test_no_time_at_all(started: list[str]):
    assert run_pieces([piece("a"), piece("b")], seconds=0) == Report(left=2)
    assert run_pieces([piece("a"), piece("b")], jobs=2, seconds=0) == Report(left=2)
    assert started == []
    assert contents(Path()).keys() == {"data.npy"}


def test_the_time_limit_of_several(served: None):
    """All that run are stopped, and no process is left."""
    found = [piece(name, f"{ENDLESS} --fit.seed {seed}") for seed, name in enumerate("abc")]
    begun = time.perf_counter()
    report = run_pieces(found, jobs=2, seconds=2)
    assert time.perf_counter() - begun < 20
    assert report == Report(left=3)
    assert not multiprocessing.active_children()
    assert not Path("c").exists()
    for name in "ab":
        assert "gtl: stopped; the same command" in Path(f"{name}.log").read_text()
        assert not Path(name, "FINISHED").exists()
        with safe_open(Path(name, "state.safetensors"), "pt") as file:
            assert json.loads(file.metadata()["numbers"])["step"] > 0


# Ctrl-C and worse


@pytest.mark.parametrize("seconds", [None, 600])
def test_control_c_stops_everything(started: list[str], monkeypatch: pytest.MonkeyPatch, seconds: float | None):
    def stop(bar: Bar, fraction: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    typed, handler = list(sys.argv), signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(Bar, "advance", stop)
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        run_pieces([piece("a"), piece("b")], seconds=seconds)
    assert caught.type is KeyboardInterrupt or caught.value.code == 130
    assert started == ["a"]
    assert not Path("a", "FINISHED").exists()
    assert (sys.argv, signal.getsignal(signal.SIGALRM)) == (typed, handler)


def test_control_c_stops_all_processes(served: None):
    """Although only this process hears it."""
    found = [piece(name, f"{ENDLESS} --fit.seed {seed}") for seed, name in enumerate("ab")]
    heard: list[float] = []

    def interrupt() -> None:
        heard.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    when(lambda: all(Path(name, "metrics.jsonl").exists() for name in "ab"), interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_pieces(found, jobs=2, seconds=30)  # so that the test ends
    assert time.monotonic() - heard[0] < 10
    assert not multiprocessing.active_children()


def test_a_process_that_is_killed(served: None):
    """By the kernel, for its memory: one piece failed, and the other is done."""

    def kill() -> None:
        min(multiprocessing.active_children(), key=lambda process: process.pid or 0).kill()

    found = [piece(name, f"{LONG} --fit.seed {seed}") for seed, name in enumerate("ab")]
    when(lambda: all(Path(name, "config.yaml").exists() for name in "ab"), kill)
    report = run_pieces(found, jobs=2)
    assert (report.done, report.left, len(report.failed)) == (1, 0, 1)


def two_endless() -> None:
    """What a process of its own does, in forks of its own."""
    pieces.get_context = lambda _: multiprocessing.get_context("fork")  # type: ignore[assignment]
    run_pieces([piece(name, f"{ENDLESS} --fit.seed {seed}") for seed, name in enumerate("ab")], jobs=2, seconds=20)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_its_parent(server: ForkServerContext, how: signal.Signals):
    """Which would work on in folders that the same command takes up again."""
    parent = server.Process(target=two_endless)
    parent.start()
    wait_for(lambda: all(Path(name, "metrics.jsonl").exists() for name in "ab"))
    children = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    assert len(children) == 2
    os.kill(parent.pid or 0, how)
    parent.join()
    try:
        assert wait_for(lambda: not any(alive(child) for child in children), 5)
    finally:
        for child in filter(alive, children):
            os.kill(child, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
