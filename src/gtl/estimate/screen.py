"""Which of many source rows are worth a model's look: counts of tokens say it in a second.

    s(x) = sum over l of log q(x_l) / p(x_l),        q(v) = (c_v + k p(v)) / (c + k)

p counts all source rows, c the few target rows, and k, what a token's share in the source weighs against them, is the
one that makes held-out target rows likeliest. Models look at the rows of the largest s alone, S. Each fold has an S of
its own, by the target rows that it does not hold out: but for k, those that judge a choice have no part in it. For r
inside S what is outside still counts: a source row stands for one of all source rows, a target row for one of all
target rows.

What a model says of a row and what the counts say differ in their errors (a model's is the noise of a few corruptions,
that of counts is blindness for order): logistic regression of the domain on both makes one log-ratio of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

__all__ = ["Screen", "counts_of", "log_odds", "screen"]

PRIORS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Values of k among which held-out rows choose, in units of c."""
CHUNK = 2**22
"""Tokens that are looked up at a time."""


def counts_of(x: Tensor, num_ids: int) -> Tensor:
    """How often each token comes in x (N, L), which may be memory-mapped: (K,), float64."""
    counts = torch.zeros(num_ids, dtype=torch.float64)
    for part in x.split(max(1, CHUNK // x.shape[1])):
        counts += torch.bincount(part.reshape(-1).long().cpu(), minlength=num_ids)
    return counts


def log_odds(own: Tensor, p: Tensor, prior: float) -> Tensor:
    """log q(v) / p(v) from target counts (K,) and the source's law (K,), for k = prior * c: (K,)."""
    k = prior * own.sum()
    return ((own + k * p) / (own.sum() + k)).log() - p.log()


def total(table: Tensor, x: Tensor) -> Tensor:
    """The sum of table[x_l] over each row of x (N, L), for tables (..., K): (..., N)."""
    parts = x.split(max(1, CHUNK // x.shape[1]))
    return torch.cat([table[..., part.long().cpu()].sum(-1) for part in parts], -1)


@dataclass
class Screen:
    """The source rows that models look at, and what counts say of them and of the target's."""

    rows: Tensor
    """What any fold takes, or all of them together: (M, L)."""
    taken: Tensor
    """Which of these are S, for each fold by the rows that it does not hold out, and last by the mean of their s:
    (F + 1, M)."""
    source: Tensor
    """s of these rows by the counts of each fold: (F, M)."""
    target: Tensor
    """s of the target rows, each by the fold that held it out, in the order of the folds: (N,)."""
    inside: Tensor
    """Which of them are in the S of that fold: (N,)."""
    seen: int
    """Source rows that were looked through."""
    prior: float = 1.0
    """k, in units of c."""

    @property
    def shares(self) -> tuple[float, float]:
        """Of all target rows and of all source rows, those in S."""
        return float(self.inside.double().mean()), int(self.taken[-1].sum()) / self.seen

    def combine(self, target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """One score of models' log-ratios (N,), (F, M) and of counts, by what tells the domains apart inside S: those
        of the target rows in S, and (F, M)."""
        mine = torch.stack([target, self.target.to(target)], -1)[self.inside]
        theirs = torch.stack([source, self.source.to(source)], -1)
        if not len(mine):
            return mine.sum(-1), theirs.sum(-1)
        others = theirs.mean(0)[self.taken[-1]]
        both = torch.cat([mine, others])
        scale = both.std(0).clamp(min=1e-12)
        labels = np.repeat([1, 0], [len(mine), len(others)])
        fitted = LogisticRegression(class_weight="balanced").fit((both / scale).numpy(), labels)
        weights = torch.from_numpy(fitted.coef_[0]).to(scale) / scale
        return mine @ weights, theirs @ weights


def screen(source: Tensor, parts: Sequence[tuple[Tensor, Tensor]], num_ids: int, most: int) -> Screen:
    """The `most` source rows of the largest s, for each fold and for all of them together.

    Args:
        source: (M, L), all rows; may be memory-mapped.
        parts: rows and held-out rows of each fold of the target.
        num_ids: K.
        most: how many source rows to take each time; there are more.
    """
    counts = counts_of(source, num_ids) + 1
    p = counts / counts.sum()
    folds = [(counts_of(rows, num_ids), held) for rows, held in parts]
    prior = max(PRIORS, key=lambda k: sum(float(total(log_odds(own, p, k), held).sum()) for own, held in folds))
    tables = torch.stack([log_odds(own, p, prior) for own, _ in folds])
    best, cuts = [], []
    for table in (*tables, tables.mean(0)):
        found = total(table, source).topk(most)
        best.append(found.indices)
        cuts.append(found.values.min())
    every = torch.cat(best).unique()
    own = [total(table, held) for table, (_, held) in zip(tables, parts, strict=True)]
    return Screen(
        rows=source[every],
        taken=torch.stack([torch.isin(every, mine) for mine in best]),
        source=total(tables, source[every]),
        target=torch.cat(own),
        inside=torch.cat([s >= cut for s, cut in zip(own, cuts[:-1], strict=True)]),
        seen=len(source),
        prior=prior,
    )
