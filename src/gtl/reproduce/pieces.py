"""A large experiment in pieces: commands of gtl, each into a folder of its own.

A piece whose folder says FINISHED is passed over, one that was stopped goes on where its command can, one that fails
leaves the others alone, and one that needs what is not there is left out. Pieces run one after the other, or several at
a time in processes that stay. At the time limit, what runs is stopped as Ctrl-C would stop it.
"""

import gc
import io
import json
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from hashlib import sha256
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console

from gtl.train.checkpoint import atomic

__all__ = ["Piece", "Report", "is_done", "run_pieces", "with_history", "words"]

STOPPED = "stopped"
MADE_FROM = "made-from.txt"
"""Holds the history of a piece that is done."""


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
    history: str = ""
    """A hash of its command and of all commands before it, see `with_history`."""

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
    missing: dict[str, str] = field(default_factory=dict)
    """Folder -> what it needs, is not there, and none of the pieces makes."""


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


def with_history(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces, each after those that it needs, that know what they come from."""
    known: dict[Path, str] = {}
    for piece in pieces:
        lines = [str(piece), str(piece.about.get("count")), *(known.get(folder, "") for folder in piece.needs)]
        known[piece.folder] = sha256("\n".join(lines).encode()).hexdigest()
    return [replace(piece, history=known[piece.folder]) for piece in pieces]


def is_done(piece: Piece) -> bool:
    """Whether its result is there; that of another command in its place is refused."""
    marker = piece.folder / "FINISHED"
    if not marker.is_file():
        return False
    known = json.loads((piece.folder / "run.json").read_text())["command"]
    if known != str(piece):
        raise FileExistsError(
            f"{piece.folder} holds the result of another command ({known}); remove it, or choose another --out"
        )
    noted = piece.folder / MADE_FROM
    if piece.history and noted.is_file() and noted.read_text() != piece.history:
        raise FileExistsError(f"{piece.folder} was made from results of another recipe; remove it")
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
    left = [piece for piece in pieces if not is_done(piece)]
    total, report = len(pieces), Report(done=len(pieces) - len(left))
    made, waiting = set(), []
    for piece in left:
        missing = [folder for folder in piece.needs if folder not in made and not (folder / "FINISHED").is_file()]
        if missing:
            report.missing[str(piece.folder)] = str(missing[0])
        else:
            made.add(piece.folder)
            waiting.append(piece)
    if report.missing and len(report.missing) == total:
        folder, need = next(iter(report.missing.items()))
        raise FileNotFoundError(f"{folder} needs {need}, which is not there yet: run its stage first")

    def ended(piece: Piece, error: str | None, took: float) -> None:
        if error is None:
            report.done += 1
        elif error != STOPPED:
            report.failed[str(piece.folder)] = error
        state = "done" if error is None else error if error == STOPPED else "FAILED: " + error
        line = f"{report.done}/{total} {piece.folder} {took:.0f} s {state}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)

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
    """Runs pieces in processes that stay, so that libraries are loaded once; one that dies takes its piece along."""
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // jobs))
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    os.environ |= {name: value or str(threads) for name, value in before.items()}
    others = {*active_children()}
    free = [process(threads) for _ in range(min(jobs, len(waiting)))]
    running: dict[Future[str | None], tuple[Piece, float, ProcessPoolExecutor]] = {}
    try:
        while True:
            for piece in [p for p in waiting if ready(p)]:
                if not free or not in_time():
                    break
                waiting.remove(piece)
                log, worker = piece.folder.with_name(f"{piece.folder.name}.log"), free.pop()
                try:
                    future = worker.submit(perform, piece, deadline, log)
                except BrokenProcessPool:  # it was killed while it had nothing to do
                    worker = process(threads)
                    future = worker.submit(perform, piece, deadline, log)
                running[future] = piece, time.time(), worker
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                piece, started, worker = running.pop(future)
                try:
                    error = future.result()
                    free.append(worker)
                except BrokenProcessPool:
                    whole = (piece.folder / "FINISHED").is_file()
                    error = None if whole else "its process was killed; is there memory for so many --jobs?"
                    free.append(process(threads))
                ended(piece, error, time.time() - started)
    except KeyboardInterrupt:
        wait(running, timeout=1)  # in a terminal all have heard it
        for child in active_children():
            if child not in others and child.pid is not None:
                os.kill(child.pid, signal.SIGINT)
        raise
    finally:
        for worker in [*free, *(worker for _, _, worker in running.values())]:
            worker.shutdown(cancel_futures=True)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def process(threads: int) -> ProcessPoolExecutor:
    """One process that stays."""
    return ProcessPoolExecutor(1, get_context("spawn"), begin, (threads,))


def begin(threads: int) -> None:
    """Makes a process deaf to Ctrl-C while it has nothing to do, and ends it when its parent is gone."""
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def perform(piece: Piece, deadline: float | None, log: Path | None) -> str | None:
    """Runs one command as if it had been typed; None, or what went wrong. Ctrl-C in this process, without a log, is
    raised."""
    from gtl.cli import main

    typed, sys.argv = sys.argv, ["gtl", *piece.words]
    said = Last(sys.stderr)
    try:
        with limited(deadline), logged(log, said):
            try:
                main(piece.words)
            except Exception:
                traceback.print_exc()
                raise
        with atomic(piece.folder / MADE_FROM) as handle:
            handle.write(piece.history.encode())
        return None
    except SystemExit as error:
        if error.code in (None, 0):
            return None
        if error.code != 130:
            return said.line or "nothing was said"
    except KeyboardInterrupt:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        sys.argv = typed
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # other processes need it
    if log is None and (deadline is None or time.time() < deadline):
        raise KeyboardInterrupt
    return STOPPED


class Last(io.TextIOBase):
    """A stream that passes on what is written and remembers the last line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.line = stream, ""

    def write(self, text: str) -> int:
        """Passes text on."""
        self.line = next((line for line in reversed(text.splitlines()) if line.strip()), self.line)
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()


@contextmanager
def limited(deadline: float | None) -> Iterator[None]:
    """A KeyboardInterrupt at the deadline, and at Ctrl-C."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    heard = signal.signal(signal.SIGINT, stop)
    before = signal.signal(signal.SIGALRM, stop)
    if deadline is not None:
        signal.setitimer(signal.ITIMER_REAL, max(0.01, deadline - time.time()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, heard)


@contextmanager
def logged(log: Path | None, said: Last) -> Iterator[None]:
    """Everything that is printed goes to a file, if there is one."""
    if log is None:
        with redirect_stderr(said):
            yield
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        said.stream = file
        with redirect_stdout(file), redirect_stderr(said):
            yield
