"""When the device runs out of memory: the same work in smaller parts.

    rows 0 .. n-1 = [a chunk][a chunk][does not fit] -> [a chunk][a chunk][half][half] ...

What is finished is kept, and the chunk that fits is what the rest goes on with. Only a lack of memory on the device is
caught; everything else is the caller's.

**Randomness.** Where the function draws nothing, the results are the same whatever the chunk. Where it draws from the
`generator`, the generator is put back to where it was before a chunk is tried again, so that draws are never lost: the
results are those of a run that had used the smaller chunks from there on. Draws from the global generator are not put
back; they are as good as any others, but not the same.
"""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["DoesNotFit", "by_chunks"]

T = TypeVar("T")


class DoesNotFit(ValueError):
    """Memory ran out for a single row. Around a call that was chunked itself, it is a reason for smaller chunks too."""


def by_chunks(
    call: Callable[[slice], T], rows: int, chunk: int, generator: torch.Generator | None = None, what: str = "this"
) -> tuple[list[T], int]:
    """Calls a function on consecutive chunks of rows, smaller ones where memory runs out.

    Args:
        call: gets the slice of a chunk. What it leaves behind when it runs out of memory must do no harm.
        rows: how many there are.
        chunk: rows in a call, at first.
        generator: what `call` draws from, if it does.
        what: does not fit, if a single row does not; for the error.

    Returns:
        What the calls gave, in the order of the rows, and the rows in a call that fitted at the end.
    """
    results: list[T] = []
    at, chunk = 0, max(1, chunk)
    while at < rows:
        size = min(chunk, rows - at)
        state = None if generator is None else generator.get_state()
        try:
            results.append(call(slice(at, at + size)))
        except (torch.OutOfMemoryError, DoesNotFit):
            pass  # the error holds on to what the call had allocated; only after this block is it gone
        else:
            at += size
            continue
        if torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.empty_cache()
        if size == 1:
            raise DoesNotFit(
                f"{what} does not fit in memory even for one sequence: use a smaller n_ratio, length or batch_size"
            )
        chunk = size // 2
        if generator is not None and state is not None:
            generator.set_state(state)
    return results, chunk
