"""Processes that tokenise: one encoder each, blocks in and tokens out through pipes, results in the blocks' order.

A worker is a fresh interpreter that imports neither torch nor the program that started it (multiprocessing would have
it import both), so it starts fast and stays small. It ends when its pipe does, even if its parent was killed.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from queue import SimpleQueue
from typing import IO, cast

from gtl.data.documents import Block
from gtl.data.encode import Encoded, Encoder, Task, one_thread

__all__ = ["encode_all"]

FEW = 4
"""Blocks below which it is not worth starting processes."""
START = "from gtl.data.workers import serve; serve()"


def encode_all(task: Task, blocks: Iterable[Block], workers: int) -> Iterator[Encoded]:
    """What an encoder makes of the blocks, in their order, by so many processes."""
    rest = iter(blocks)
    first = list(islice(rest, FEW))
    if len(first) < FEW:
        encoder = Encoder(task)
        yield from map(encoder, chain(first, rest))
        return
    pool = [Worker(task) for _ in range(workers)]
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in pool:
        free.put(worker)

    def encode(block: Block) -> Encoded:
        worker = free.get()
        try:
            return worker(block)
        finally:
            free.put(worker)

    threads = ThreadPoolExecutor(workers)
    waiting: deque[Future[Encoded]] = deque()
    try:
        for block in chain(first, rest):
            waiting.append(threads.submit(encode, block))
            if len(waiting) > 2 * workers:  # two each, so that memory does not depend on the input
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for worker in pool:
            worker.stop()
        threads.shutdown()


class Worker:
    """One process with its two pipes."""

    def __init__(self, task: Task) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
        )
        self._send(task)

    def _send(self, value: Task | Block) -> None:
        """Writes one value to the process."""
        pipe = cast(IO[bytes], self.process.stdin)
        pickle.dump(value, pipe, protocol=5)
        pipe.flush()

    def __call__(self, block: Block) -> Encoded:
        """What the process makes of a block; an error there is raised here."""
        try:
            self._send(block)
            answer = pickle.load(cast(IO[bytes], self.process.stdout))
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            raise ChildProcessError(
                "a tokenising process ended unexpectedly (out of memory?); try fewer --workers"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return cast(Encoded, answer)

    def stop(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):  # what was not sent yet
                cast(IO[bytes], pipe).close()


def serve() -> None:
    """The work of a process: a task first, then blocks until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends us
    one_thread()
    into, out = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing but answers may go down the pipe
    encoder = Encoder(pickle.load(into))
    while True:
        try:
            block = pickle.load(into)
        except EOFError:
            return
        answer: Encoded | Exception
        try:
            answer = encoder(block)
        except Exception as error:
            answer = error if isinstance(error, ValueError) else RuntimeError(f"{type(error).__name__}: {error}")
        pickle.dump(answer, out, protocol=5)
        out.flush()
