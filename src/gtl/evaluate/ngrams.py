"""n-grams as 64-bit numbers: every window of every row at once, by numpy.

    h(i, n) = sum_{j < n} c(x_{i+j}) B^j  mod 2^64  =  (S_{i+n} - S_i) B^{-i},        S_i = sum_{j < i} c(x_j) B^j

c sends a token to a random-looking number and B is odd, hence invertible. After the cumulative sums S, windows of any
length cost one subtraction and one product each. Two of a million n-grams agree by chance with probability about 1e-7.
A negative token is no token: no window may hold one.
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["Windows", "member"]

BASE = np.uint64(0x9E3779B97F4A7C15)
INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))
TABLE = 22
"""log2 of the entries of the table that sorts out most of what cannot match."""


def scramble(tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
    """c: a bijection of 64-bit numbers without visible structure (the finaliser of splitmix64)."""
    x = tokens.astype(np.uint64) + BASE
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def powers(base: np.uint64, count: int) -> NDArray[np.uint64]:
    """base^0 .. base^(count-1) mod 2^64: (count,)."""
    values = np.full(count, base, np.uint64)
    values[:1] = 1
    return np.multiply.accumulate(values)


class Windows:
    """The windows of tokens x (N, L)."""

    def __init__(self, x: NDArray[np.int64]) -> None:
        self.x = x

    @cached_property
    def room(self) -> NDArray[np.int64]:
        """How many tokens there are from each place to the end of its row or the next negative one: (N, L)."""
        room = np.zeros((len(self.x), self.x.shape[1] + 1), np.int64)
        for at in range(self.x.shape[1] - 1, -1, -1):
            room[:, at] = np.where(self.x[:, at] >= 0, room[:, at + 1] + 1, 0)
        return room[:, :-1]

    @cached_property
    def _sums(self) -> NDArray[np.uint64]:
        """S as (N, L + 1)."""
        length = self.x.shape[1]
        sums = np.zeros((len(self.x), length + 1), np.uint64)
        np.cumsum(scramble(self.x) * powers(BASE, length), axis=1, out=sums[:, 1:])
        return sums

    @cached_property
    def _inverse(self) -> NDArray[np.uint64]:
        return powers(INVERSE, self.x.shape[1])

    def starts(self, n: int) -> NDArray[np.int64]:
        """Where the windows of n tokens start, as flat places row * L + i: (M,)."""
        return np.flatnonzero(self.room >= n)

    def hashes(self, n: int, starts: NDArray[np.int64] | None = None) -> NDArray[np.uint64]:
        """h of the windows of n tokens at flat places (M,), at all of them by default: (M,)."""
        starts = self.starts(n) if starts is None else starts
        row, at = np.divmod(starts, self.x.shape[1])
        return (self._sums[row, at + n] - self._sums[row, at]) * self._inverse[at]


def member(values: NDArray[np.uint64], among: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether each of `values` (M,) is one of `among`: (M,). Fast where most are not."""
    among = np.unique(among)
    found = np.zeros(len(values), np.bool_)
    if not len(among):
        return found
    shift = np.uint64(64 - TABLE)
    table = np.zeros(2**TABLE, np.bool_)
    table[(among >> shift).astype(np.int64)] = True
    likely = np.flatnonzero(table[(values >> shift).astype(np.int64)])
    place = np.searchsorted(among, values[likely]).clip(max=len(among) - 1)
    found[likely] = among[place] == values[likely]
    return found
