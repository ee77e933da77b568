"""The rule of choice: where what was seen of held-out rows is best."""

from collections.abc import Callable
from statistics import fmean, stdev

__all__ = ["choose", "descend"]


def choose(curves: list[dict[int, list[float]]], favourite: int | None = None) -> tuple[int, int, float]:
    """The step, the index of gamma and their score, where the mean of the curves is lowest.

    Only steps that every fold has seen count: a fold that stopped early says nothing of what comes after. A `favourite`
    index (gamma = 1, where mathematics puts the target) gives way only to one that is ahead by more than a standard
    error over the folds: few held-out rows like a gamma below 1 for what it hedges, and samples pay for it.
    """
    shared = set.intersection(*(set(curve) for curve in curves))
    mean = {
        step: [sum(values) / len(values) for values in zip(*(c[step] for c in curves), strict=True)] for step in shared
    }
    ranked = sorted(
        ((step, i, v) for step, values in mean.items() for i, v in enumerate(values)), key=lambda x: (x[2], x[0])
    )
    best = ranked[0]
    if favourite is None or len(curves) < 2:
        return best
    liked = next(one for one in ranked if one[1] == favourite)
    gains = [curve[liked[0]][favourite] - curve[best[0]][best[1]] for curve in curves]
    return best if fmean(gains) > stdev(gains) / len(gains) ** 0.5 else liked


def descend(value: Callable[[int], float], count: int) -> tuple[int, float]:
    """A minimum of a function on 0 .. count-1 whose neighbours are not smaller, found downhill from the middle."""
    seen: dict[int, float] = {}

    def at(index: int) -> float:
        if index not in seen:
            seen[index] = value(index) if 0 <= index < count else float("inf")
        return seen[index]

    here = count // 2
    while (there := min((here - 1, here + 1), key=at)) in range(count) and at(there) < at(here):
        here = there
    return here, at(here)
