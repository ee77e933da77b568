"""kill -9 at every moment: the same command goes on, and ends as if nothing had happened.

Processes come from a server that has imported the library already, so that each takes a fraction of a second. Some die
by their own hand at an exact moment: with the k-th file half written (or just before a file is removed), or with the
k-th line of metrics half written. Others are killed from outside, after random times.
"""

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

from gtl import run as runs
from typed import SMALL, contents, gtl

TRAIN = f"train denoiser --data src.npy {SMALL} --fit.steps 14 --fit.save_every 4"
TINY = "--training.budget 12 --training.folds 2 --training.evaluate_every 2 --training.ratio.width 8"
STACK = f"adapt denoiser tgt.npy --method gtl-stack {TINY} --training.ratio.heads 2"
TUNE = f"adapt denoiser tgt.npy --method finetuned {TINY}"
NEVER = 1000
LINE = '{"step": 3, "loss": 0.5}\n'
PRELOADED = ["gtl.cli", "pytest", "torch._dynamo", "torch.distributed.tensor", "sklearn.isotonic"]
LOG = runs.Run.log


class Death:
    """Comes once so many calls went through."""

    def __init__(self, allowed: int) -> None:
        self.left = allowed

    def due(self) -> bool:
        self.left -= 1
        return self.left < 0

    def come(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fsync(self, handle: int) -> None:
        """With half of a file on disk, which does not have its name yet."""
        if self.due():
            os.ftruncate(handle, os.fstat(handle).st_size // 2)
            self.come()

    def before(self, call: Callable[..., None]) -> Callable[..., None]:
        """Before a call."""

        def or_die(*args: Any, **kwargs: Any) -> None:
            if self.due():
                self.come()
            call(*args, **kwargs)

        return or_die

    def log(self, run: runs.Run, metrics: dict[str, Any]) -> None:
        """With half of a line on disk."""
        if self.due():
            with (run.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics)[:20])
            self.come()
        LOG(run, metrics)


def run_until(command: str, out: Path, files: int, lines: int) -> None:
    """One command, in a process of its own, until its time has come."""
    runs.STARTED = time.time()  # a fork is younger than its modules
    by_file, by_line = Death(files), Death(lines)
    os.fsync, os.unlink = by_file.fsync, by_file.before(os.unlink)  # type: ignore[assignment]
    runs.Run.log = lambda run, metrics: by_line.log(run, metrics)  # type: ignore[method-assign]
    gtl(command, "--out", out)


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Where processes come from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.fixture
def start(server: ForkServerContext, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts a command."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def begin(command: str, out: Path, files: int = NEVER, lines: int = NEVER) -> Any:
        process = server.Process(target=run_until, args=(command, out, files, lines))
        process.start()
        return process

    return begin


def ended(process: Any) -> bool:
    """Whether a process came to its own end, and not to the one that was prepared for it."""
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def told(folder: Path) -> dict[str, Any]:
    """All that a run leaves, but for times and for what names the folder."""
    found: dict[str, Any] = dict(contents(folder) or {})
    rows = json.loads(found.pop("results.json"))
    found["rows"] = [{k: v for k, v in row.items() if k not in ("seconds", "command")} for row in rows]
    for name in ("FINISHED", "run.json", "config.yaml"):
        assert found.pop(name)
    return found


@pytest.mark.parametrize(
    ("command", "files", "steps"),
    [(TRAIN, range(11), [3, 6, 9, 12, 14]), (STACK, (0, 4, 8, 11, 14, 16, 19, 22), [2, 4, 2, 4, 2, 4, 2, 4, 0])],
    ids=["train", "adapt"],
)
def test_killed_while_a_file_is_written(tmp_path: Path, start: Callable[..., Any], command: str, files, steps):
    """At each file in turn, the marker being the last, and then once more a little later."""
    whole = start(command, tmp_path / "whole", max(files) + 1)
    folders = {count: tmp_path / str(count) for count in files}
    assert not any([ended(each) for each in [start(command, folder, count) for count, folder in folders.items()]])
    assert ended(whole)
    leftovers = {path.name.rsplit(".", 1)[0] for folder in folders.values() for path in folder.rglob(".*")}
    assert {".config.yaml", ".FINISHED"} < leftovers
    again = [start(command, folder, count + 1) for count, folder in folders.items()]
    killed = [folder for folder, process in zip(folders.values(), again, strict=True) if not ended(process)]
    assert killed
    assert all([ended(process) for process in [start(command, folder) for folder in killed]])
    wanted = told(tmp_path / "whole")
    assert [json.loads(line).get("step", 0) for line in wanted["metrics.jsonl"].splitlines()] == steps
    for folder in folders.values():
        assert told(folder) == wanted, folder.name


@pytest.mark.parametrize("command", [TRAIN, TUNE], ids=["train", "adapt"])
def test_killed_while_metrics_are_written(tmp_path: Path, start: Callable[..., Any], command: str):
    """Always at a later line, as long as it takes."""
    whole, out, lines = tmp_path / "whole", tmp_path / "out", 0
    began = start(command, whole)
    while not ended(start(command, out, lines=lines)):
        assert not (out / "metrics.jsonl").read_text().endswith("\n")
        lines += 1
    assert lines > 2
    assert ended(began)
    assert told(out) == told(whole)


def test_a_line_cut_short_is_dropped_even_if_nothing_more_is_logged(tmp_path: Path):
    for _ in range(2):
        run = runs.Run(tmp_path / "run", "train", {}, torch.device("cpu"))
        assert not (run.folder / "metrics.jsonl").exists() or (run.folder / "metrics.jsonl").read_text() == LINE
        (run.folder / "metrics.jsonl").write_text(LINE + LINE[:9])


@pytest.mark.parametrize("seed", range(2))
def test_killed_from_outside(tmp_path: Path, start: Callable[..., Any], seed: int):
    """After random times, and as soon as a state is being written."""
    whole, out, kills = tmp_path / "whole", tmp_path / "out", 0
    started = time.perf_counter()
    assert ended(start(TRAIN, whole))
    span = time.perf_counter() - started
    draw = random.Random(seed)
    process = start(TRAIN, out)
    while kills < 5:
        until = time.perf_counter() + draw.uniform(0.3, 1) * span
        while time.perf_counter() < until and not (kills % 2 and any(out.glob(".state.*"))):
            time.sleep(0)
        process.kill()
        if ended(process) or (out / "FINISHED").exists():  # the marker, and then it was killed
            break
        kills += 1
        process = start(TRAIN, out)
    assert (out / "FINISHED").exists() or ended(process)
    assert told(out) == told(whole)
