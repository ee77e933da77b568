"""Figures of lines: one line a method, points that are means over seeds, bars one standard error of the mean.

A single seed has no bar. Methods look the same in every figure, and differ without colour.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike, NDArray

from gtl.train.checkpoint import atomic

__all__ = [
    "FLAT",
    "LOOKS",
    "MEDIUM",
    "NAMES",
    "SMALL",
    "Look",
    "better",
    "check",
    "curve",
    "dodged",
    "grid",
    "legend",
    "log_ticks",
    "looks_of",
    "save",
]

BETTER = {
    "mauve": "higher",
    "domain": "lower",
    "nll": "lower",
    "masked_nll": "lower",
    "perplexity_bound": "lower",
    "generative_perplexity": "lower",
    "outside": "lower",
}
"""Metrics that can be drawn, and which way is better."""
NAMES = {"mauve": "MAUVE", "domain": "domain score", "nll": "NLL, nats a token", "outside": "mass left out"}
SMALL, MEDIUM = 7.0, 8.0
"""Sizes of letters, in points."""
Dashes = tuple[float, tuple[float, ...]]


class Look(NamedTuple):
    """Of a line; marker and dashes tell lines apart where there is no colour."""

    colour: str
    marker: str
    dashes: str | Dashes


LOOKS = (
    Look("#777777", "v", (0, (1, 1))),
    Look("#d55e00", "s", (0, (5, 1.5))),
    Look("#cc79a7", "D", (0, (3, 1, 1, 1))),
    Look("#0072b2", "o", "-"),
    Look("#009e73", "^", (0, (5, 1, 1, 1, 1, 1))),
    Look("#56b4e9", "P", (0, (2, 1))),
    Look("#000000", "*", "-"),
    Look("#e69f00", "X", (0, (8, 1.5))),
    Look("#8c564b", "<", (0, (1, 2))),
    Look("#332288", "h", (0, (6, 1, 2, 1))),
)
METHODS = ("vanilla", "finetuned", "lora", "gtl-local", "gtl-paper", "gtl-sparse", "gtl-blend")
"""Methods that look the same in every figure, in the order of LOOKS; others take what is left."""
FLAT: tuple[Dashes, ...] = ((0, (8, 3)), (0, (2, 2)), (0, (8, 2, 2, 2)))
"""Dashes of what has no n."""


def check(panels: Sequence[str], there: set[str]) -> None:
    """Refuses a metric that is not known, and one that has no rows."""
    for metric in panels:
        if metric not in BETTER:
            raise ValueError(f"metric {metric!r} is not known; choose among {', '.join(BETTER)}")
        if metric not in there:
            raise ValueError(f"metric {metric!r} has no rows; {', '.join(sorted(there)) or 'no other'} has")


def better(metric: str, real: bool) -> str:
    """Which way is better: a domain score below that of real text, where it is known, says nothing good."""
    return f"{'nearer to real text' if metric == 'domain' and real else BETTER[metric]} is better"


def looks_of(methods: Sequence[str]) -> dict[str, Look]:
    """Known methods look as they always do; others take what is not in use."""
    known = dict(zip(METHODS, LOOKS, strict=False))
    used = [known[method] for method in methods if method in known]
    spare = [look for look in reversed(LOOKS) if look not in used] or list(LOOKS)
    others = [method for method in methods if method not in known]
    return known | {method: spare[index % len(spare)] for index, method in enumerate(others)}


def grid(rows: int, columns: int, width: float, height: float, shared: bool) -> tuple[Figure, NDArray[Any]]:
    """A figure and its axes (rows, columns), each of so many inches; with `shared`, those of a row have one y-axis."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharey="row" if shared else False)
    for ax in axes.flat:
        ax.tick_params(labelsize=SMALL)
        ax.grid(axis="y", color="#dddddd", linewidth=0.5)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def dodged(x: ArrayLike, index: int, count: int) -> NDArray[np.float64]:
    """Rising x moved a little to the side, so that the bars of `count` lines do not hide each other."""
    places = np.asarray(x, np.float64)
    gap = min(np.diff(places).min(), 0.15 * np.ptp(places)) if len(places) > 1 else 1.0
    return places + 0.45 * gap * ((index + 0.5) / count - 0.5)


def curve(
    ax: Axes, x: Iterable[float], cells: Sequence[list[float]], look: Look, label: str
) -> ErrorbarContainer | None:
    """Mean and standard error of each cell at its x; an empty cell is left out."""
    points = [(at, statistics.fmean(cell), error(cell)) for at, cell in zip(x, cells, strict=True) if cell]
    if not points:
        return None
    at, mean, bars = zip(*points, strict=True)
    return ax.errorbar(
        at, mean, bars, label=label, color=look.colour, marker=look.marker, linestyle=look.dashes, linewidth=1.1,
        markersize=4.2 if look.marker in "*PX" else 3.2, elinewidth=0.8, capsize=1.5, capthick=0.8,
    )  # fmt: skip


def error(cell: list[float]) -> float:
    """The standard error of the mean, nan for one value."""
    return statistics.stdev(cell) / len(cell) ** 0.5 if len(cell) > 1 else math.nan


def log_ticks(ax: Axes, x: Sequence[float], labels: Sequence[str]) -> None:
    """A logarithmic axis with ticks at x alone; of labels that would stand too close the later one is left out."""
    ax.set_xscale("log")
    shown, last = [], -math.inf
    for at, label in zip(x, labels, strict=True):
        apart = math.log(at) - last >= math.log(max(x) / min(x)) / 7
        shown.append(label if apart else "")
        last = math.log(at) if apart else last
    ax.set_xticks(x, shown)
    ax.set_xticks([], minor=True)


def legend(figure: Figure, axes: Iterable[Axes], room: Axes | None = None) -> None:
    """One legend below all axes, in as many columns as fit, and room for it; or in the place of an axis that is not
    needed. Lines straight across come last. Labels may have several lines."""
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if not found:
        return
    found = dict(sorted(found.items(), key=lambda pair: isinstance(pair[1], Line2D)))
    if room is not None:
        room.axis("off")
        room.legend(found.values(), found.keys(), loc="center", fontsize=MEDIUM, frameon=False, handlelength=3.2)
        return
    wide = max(len(line) for label in found for line in label.split("\n"))
    high = 1 + max(label.count("\n") for label in found)
    fitting = max(1, int(figure.get_figwidth() / (0.5 + 0.05 * wide)))
    lines = math.ceil(len(found) / fitting)
    figure.set_figheight(figure.get_figheight() + 0.16 * lines * high + 0.1)
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=math.ceil(len(found) / lines),
        fontsize=SMALL, frameon=False, handlelength=3.2, columnspacing=1.0,
    )  # fmt: skip


def save(path: Path, figure: Figure) -> None:
    """Writes a .png file that is fine enough for print."""
    with atomic(path) as handle:
        figure.savefig(handle, format="png", dpi=200)
