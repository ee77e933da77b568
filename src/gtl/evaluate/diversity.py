"""Diversity of sequences: what a sampler that repeats itself loses.

    distinct_n    different n-grams / n-grams, over all sequences together
    seq_rep_n     1 - different n-grams / n-grams within a sequence, averaged over sequences (Welleck et al., 2020)
    repeated_n    share of the tokens that lie in an n-gram which their sequence holds at least twice
    token_entropy -sum_v f_v log f_v of the token frequencies f within a sequence, in nats, averaged over sequences
    corpus_entropy  the same of all sequences together

distinct_n falls and corpus_entropy rises with the number of sequences: compare equal numbers of equal length.
"""

import numpy as np
from numpy.typing import NDArray

from gtl.evaluate.ngrams import Windows

__all__ = ["distinct", "diversity", "entropy", "repetition", "token_entropy"]


def distinct(windows: Windows, n: int) -> float:
    """distinct_n; 0 where there is no n-gram."""
    hashes = windows.hashes(n)
    return len(np.unique(hashes)) / max(1, len(hashes))


def repetition(windows: Windows, n: int) -> tuple[float, float]:
    """seq_rep_n, over the sequences that hold an n-gram, and repeated_n."""
    starts = windows.starts(n)
    row = starts // windows.x.shape[1]
    _, kind, count = np.unique(
        np.stack([row.astype(np.uint64), windows.hashes(n, starts)]), axis=1, return_inverse=True, return_counts=True
    )
    total = np.bincount(row, minlength=len(windows.x))
    first = np.unique(kind, return_index=True)[1]
    different = np.bincount(row[first], minlength=len(windows.x))
    rates = 1 - different[total > 0] / total[total > 0]
    inside = np.zeros(windows.x.size, np.bool_)
    for offset in range(n):
        inside[starts[count[kind.ravel()] > 1] + offset] = True
    return float(rates.mean()) if len(rates) else 0.0, float(inside.sum() / max(1, (windows.x >= 0).sum()))


def entropy(counts: NDArray[np.int64]) -> float:
    """Of frequencies given as counts, in nats."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def token_entropy(x: NDArray[np.int64]) -> float:
    """`token_entropy` of x (N, L), over the sequences that hold a token; negative numbers are no tokens."""
    values = [entropy(np.unique(row[row >= 0], return_counts=True)[1]) for row in x if (row >= 0).any()]
    return float(np.mean(values)) if values else 0.0


def diversity(x: NDArray[np.int64], most: int = 4) -> dict[str, float]:
    """All of them for tokens x (N, L), n = 1 .. `most` (n = `most` for the repetitions)."""
    windows = Windows(x)
    found = {f"distinct_{n}": distinct(windows, n) for n in range(1, most + 1)}
    found[f"seq_rep_{most}"], found[f"repeated_{most}"] = repetition(windows, most)
    found["corpus_entropy"] = entropy(np.unique(x[x >= 0], return_counts=True)[1])
    found["token_entropy"] = token_entropy(x)
    return found
