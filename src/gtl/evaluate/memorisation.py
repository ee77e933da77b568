"""Memorisation: how much of what was generated stands in the training data word for word.

    copied_n = share of the samples' n-grams that occur in the training data,      n = 4, 8, 12
    longest_copy = tokens of the longest run of a sample that occurs there, averaged over samples; and its maximum

Real text repeats phrases too, so the same numbers of held-out data, as many sequences, belong beside these: only what
exceeds them is memorised. n-grams that span two rows of the training data are not seen.

One sweep over n finds, for every place of the samples, the longest run from there that the training data holds: a run
of n + 1 tokens can only start where one of n tokens did, on both sides, so little is left to look at after a few n.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gtl.evaluate.ngrams import Windows, member

__all__ = ["copied_runs", "memorisation"]

CHUNK = 2**21
"""Tokens of training data that are looked at together; a bound on memory."""


def copied_runs(
    samples: Windows, train: NDArray[np.int64], on_progress: Callable[[float], None] | None = None
) -> NDArray[np.int64]:
    """For every place of the samples (N, L) the tokens of the longest run from there that occurs in `train` (M, T):
    (N, L)."""
    runs = np.zeros(samples.x.size, np.int64)
    rows = max(1, CHUNK // max(1, train.shape[1]))
    for at in range(0, len(train), rows):
        part = Windows(train[at : at + rows].astype(np.int64))
        mine, theirs = samples.starts(1), part.starts(1)
        room, space = samples.room.ravel(), part.room.ravel()
        n = 1
        while len(mine) and len(theirs):
            here = samples.hashes(n, mine)
            there = part.hashes(n, theirs)
            common = member(there, here)
            theirs = theirs[common]
            mine = mine[member(here, there[common])]
            runs[mine] = np.maximum(runs[mine], n)
            n += 1
            mine, theirs = mine[room[mine] >= n], theirs[space[theirs] >= n]
        if on_progress is not None:
            on_progress(min(1.0, (at + rows) / len(train)))
    return runs.reshape(samples.x.shape)


def memorisation(
    x: NDArray[np.int64],
    train: NDArray[np.int64],
    sizes: Sequence[int] = (4, 8, 12),
    on_progress: Callable[[float], None] | None = None,
) -> dict[str, float]:
    """`copied_n` for the n in `sizes` that x (N, L) has n-grams of, `longest_copy` and `longest_copy_max`."""
    windows = Windows(x)
    runs = copied_runs(windows, train, on_progress)
    found = {f"copied_{n}": float((runs[windows.room >= n] >= n).mean()) for n in sizes if (windows.room >= n).any()}
    longest = runs.max(1, initial=0)
    return found | {"longest_copy_max": float(longest.max(initial=0)), "longest_copy": float(longest.mean())}
