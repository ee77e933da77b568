"""Processes that tokenise: one encoder each, blocks in and tokens out through a pipe, results in the blocks' order.

A worker is a fresh interpreter that imports neither torch nor the program that started it (multiprocessing would have
it import both), so it starts fast and stays small. It ends when its pipe does, even if its parent was killed.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import cast

from gtl.data.documents import Block
from gtl.data.encode import Encoded, Encoder, Task, one_thread

__all__ = ["encode_all"]

FEW = 4
"""Blocks below which it is not worth starting processes."""
START = "from gtl.data.workers import serve; serve({})"


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
    """One process, at the other end of a pipe."""

    def __init__(self, task: Task) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.pipe, its = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", START.format(its.fileno())],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": paths},
            pass_fds=[its.fileno()],
        )
        its.close()
        self.pipe.send(task)

    def __call__(self, block: Block) -> Encoded:
        """What the process makes of a block; an error there is raised here."""
        try:
            self.pipe.send(block)
            answer = self.pipe.recv()
        except (EOFError, OSError):
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
        self.pipe.close()


def serve(number: int) -> None:
    """The work of a process at the end of a pipe: a task first, then blocks until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends us
    one_thread()
    pipe = Connection(number)
    encoder = Encoder(pipe.recv())
    while True:
        try:
            block = pipe.recv()
        except EOFError:
            return
        answer: Encoded | Exception
        try:
            answer = encoder(block)
        except Exception as error:
            answer = error if isinstance(error, ValueError) else RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(answer)
