"""A large experiment in pieces: commands of gtl, each into a folder of its own.

A piece whose folder says FINISHED is passed over, one that was stopped goes on where its command can, and one that
fails leaves the others alone. Pieces run one after the other, or several at a time in processes that stay. At the time
limit, what runs is stopped as Ctrl-C would stop it.
"""

import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

__all__ = ["Piece", "Report", "is_done", "run_pieces", "words"]

STOPPED = "stopped"


@dataclass(frozen=True)
class Piece:
    """One command."""

    stage: str
    folder: Path
    command: tuple[str, ...]
    """The words after `gtl`, --out left out."""
    needs: tuple[Path, ...] = ()
    """Folders of pieces that come before."""
    about: dict[str, Any] = field(default_factory=dict)
    """What its rows will be called."""

    @property
    def words(self) -> list[str]:
        """The words after `gtl`."""
        return [*self.command, "--out", str(self.folder)]

    def __str__(self) -> str:
        return shlex.join(["gtl", *self.words])


@dataclass
class Report:
    """How it went."""

    done: int = 0
    left: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Folder -> what its command said last."""


def words(flags: dict[str, Any], prefix: str = "") -> list[str]:
    """Settings as a command's words: {"fit": {"steps": 9}, "domain": ["a", "b"]} -> --fit.steps 9 --domain a b."""
    found: list[str] = []
    for key, value in flags.items():
        if isinstance(value, dict):
            found += words(value, f"{prefix}{key}.")
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            found += [f"--{prefix}{key}", *(str(v).lower() if isinstance(v, bool) else str(v) for v in values)]
    return found


def is_done(piece: Piece) -> bool:
    """Whether its result is there; that of another command in its place is refused."""
    if not (piece.folder / "FINISHED").is_file():
        return False
    known = json.loads((piece.folder / "run.json").read_text())["command"]
    if known != str(piece):
        raise FileExistsError(
            f"{piece.folder} holds the result of another command ({known}); remove it, or choose another --out"
        )
    return True


def run_pieces(
    pieces: Sequence[Piece], jobs: int = 1, seconds: float | None = None, console: Console | None = None
) -> Report:
    """Runs what is not done yet, each piece after those that it needs.

    Args:
        pieces: in an order in which they can run.
        jobs: how many at a time; what several say goes to log.txt beside their folders.
        seconds: the time limit.
        console: where a line a piece is printed.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    console = console or Console(stderr=True)
    deadline = None if seconds is None else time.time() + seconds
    waiting = [piece for piece in pieces if not is_done(piece)]
    made = {piece.folder for piece in waiting}
    for piece in waiting:
        missing = [folder for folder in piece.needs if folder not in made and not (folder / "FINISHED").is_file()]
        if missing:
            raise FileNotFoundError(f"{piece.folder} needs {missing[0]}, which is not there yet: run its stage first")
    report = Report(done=len(pieces) - len(waiting))
    total = len(pieces)

    def ended(piece: Piece, error: str | None, took: float) -> None:
        if error is None:
            report.done += 1
        elif error != STOPPED:
            report.failed[str(piece.folder)] = error
        state = "done" if error is None else error if error == STOPPED else "FAILED: " + error
        console.print(f"{report.done}/{total} {piece.folder} {took:.0f} s {state}", highlight=False, soft_wrap=True)

    def in_time() -> bool:
        return deadline is None or time.time() < deadline

    if jobs == 1:
        for piece in waiting:
            if in_time() and ready(piece):
                started = time.time()
                ended(piece, perform(piece, deadline, None), time.time() - started)
    else:
        side_by_side(waiting, jobs, deadline, in_time, ended)
    report.left = total - report.done - len(report.failed)
    return report


def ready(piece: Piece) -> bool:
    """Whether everything that it needs is there."""
    return all((folder / "FINISHED").is_file() for folder in piece.needs)


def side_by_side(
    waiting: list[Piece],
    jobs: int,
    deadline: float | None,
    in_time: Callable[[], bool],
    ended: Callable[[Piece, str | None, float], None],
) -> None:
    """Runs pieces in processes that stay, so that libraries are loaded once."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    os.environ |= {name: value or str(threads) for name, value in before.items()}
    running: dict[Future[str | None], tuple[Piece, float]] = {}
    try:
        with ProcessPoolExecutor(min(jobs, max(1, len(waiting))), get_context("spawn")) as pool:
            while True:
                for piece in [p for p in waiting if ready(p)]:
                    if len(running) == jobs or not in_time():
                        break
                    waiting.remove(piece)
                    log = piece.folder.with_name(f"{piece.folder.name}.log")
                    running[pool.submit(perform, piece, deadline, log)] = piece, time.time()
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    piece, started = running.pop(future)
                    ended(piece, future.result(), time.time() - started)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def perform(piece: Piece, deadline: float | None, log: Path | None) -> str | None:
    """Runs one command as if it had been typed; None, or what went wrong."""
    from gtl.cli import main

    typed, sys.argv = sys.argv, ["gtl", *piece.words]
    try:
        with limited(deadline), logged(log):
            try:
                main(piece.words)
            except Exception:
                traceback.print_exc()
                raise
        return None
    except SystemExit as error:
        if error.code in (None, 0):
            return None
        return STOPPED if error.code == 130 else last_line(log)
    except KeyboardInterrupt:
        if deadline is None or time.time() < deadline:
            raise
        return STOPPED
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        sys.argv = typed


@contextmanager
def limited(deadline: float | None) -> Iterator[None]:
    """A KeyboardInterrupt at the deadline."""
    if deadline is None:
        yield
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, deadline - time.time()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def logged(log: Path | None) -> Iterator[None]:
    """Everything that is printed goes to a file, if there is one."""
    if log is None:
        yield
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
        yield


def last_line(log: Path | None) -> str:
    """What a command said at the end."""
    if log is None:
        return "see above"
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return lines[-1] if lines else "nothing was said"
