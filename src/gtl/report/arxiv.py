"""Figures and samples of the arXiv experiments, from rows.

    by_fraction   what each method makes of n target sequences, one panel a metric
    sweep         the behaviour of gamma and n_ratio, one column a share r of the target in the source and an n
    summary       all that was measured of each method at one n, side by side
    samples_page  the first texts of each run

Points are means over seeds and bars one standard error of the mean; a single seed has no bar.
"""

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike, NDArray

from gtl.report.table import cell
from gtl.run import Row
from gtl.train.checkpoint import atomic

__all__ = ["by_fraction", "fraction_figure", "samples_page", "summary", "sweep", "sweep_figure"]

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
SIDES = {
    "mauve": "MAUVE",
    "nll": "NLL",
    "domain": "domain score",
    "distinct_2": "distinct pairs",
    "token_entropy": "token entropy",
    "copied_8": "copied runs of 8",
}
"""Columns of the summary."""
UNBOUNDED = ("nll", "masked_nll", "perplexity_bound")
"""Of those, in which a bad model can be so bad that nothing else is seen."""
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
OUTSIDE = {
    "outside": ("of the target", Look("#222222", "o", "-")),
    "outside-own": ("of the source", Look("#777777", "D", (0, (4, 1.5)))),
}
"""Experiments of what candidates leave out -> of whose text, and its line."""
EXPERIMENT = re.compile(r"arxiv-(sweep-.+|outside|outside-own)-r(\d+(?:\.\d+)?)")
SETTING = re.compile(r"(?:gamma=(\d+(?:\.\d+)?),)?n_ratio=(\d+|all)")


def by_fraction(path: Path, rows: Sequence[Row], panels: Sequence[str], titles: dict[str, str], whole: int) -> None:
    """Writes `fraction_figure` as a .png file."""
    save(path, fraction_figure(rows, panels, titles, whole))


def sweep(path: Path, rows: Sequence[Row], panels: Sequence[str]) -> None:
    """Writes `sweep_figure` as a .png file."""
    save(path, sweep_figure(rows, panels))


def summary(rows: Sequence[Row], titles: dict[str, str]) -> str:
    """A Markdown table for each experiment and n: one line a method, one column a metric; what has no n in each. What
    is known of real text in one experiment holds for the others; methods that were only fitted are left out. Standard
    errors stand below their means, so that a table fits a column of text, and so do weights where subsets differ."""
    parts = []
    for experiment, n in dict.fromkeys((row.experiment, row.n) for row in rows if row.n and row.metric in SIDES):
        mine = [row for row in rows if row.experiment == experiment and row.n in (n, None)]
        known = {row.metric for row in mine if row.method == "real"}
        mine += [row for row in rows if row.method == "real" and row.metric not in known]
        borrowed = {"borrowed": "borrowed rows"} if any(row.metric == "borrowed" for row in mine) else {}
        sides = SIDES | borrowed
        parts += [f"## {experiment}, n = {n:,}\n", "| | weights | steps | " + " | ".join(sides.values()) + " |"]
        parts.append("|---" * (3 + len(sides)) + "|")
        for method in dict.fromkeys(row.method for row in mine if row.metric in SIDES):
            own = [row for row in mine if row.method == method]
            weights = sorted({row.trainable_weights for row in own if row.trainable_weights is not None})
            steps = [row.value for row in own if row.metric == "steps"]
            found = [[row.value for row in own if row.metric == metric] for metric in sides]
            taken = f"{statistics.fmean(steps):,.0f}" if steps else ""
            cells = ["<br>".join(dict.fromkeys(map(count, weights))), taken]
            cells += [cell(values).replace(" ± ", "<br>±&nbsp;") if values else "" for values in found]
            parts.append(f"| {titles.get(method, method)} | " + " | ".join(cells) + " |")
        parts.append("")
    return "\n".join(parts)


def count(weights: int) -> str:
    """How many weights: in millions, or one by one where there are few."""
    return f"{weights / 1e6:,.1f} M" if weights >= 1e5 else f"{weights:,}"


def samples_page(texts: dict[str, list[str]], count: int = 10) -> str:
    """A Markdown page with the first texts of each method, as they are."""
    parts = ["# Samples\n", f"Uncurated: the first {count} of each run.\n"]
    for method, found in texts.items():
        lines = [f"{number}. {escaped(text)}" for number, text in enumerate(found[:count], 1)]
        parts += [f"## {escaped(method)}\n", *lines, ""]
    return "\n".join(parts)


def fraction_figure(rows: Sequence[Row], panels: Sequence[str], titles: dict[str, str], whole: int) -> Figure:
    """One panel a metric, two side by side: a line over n for each method, and one straight across for each that has no
    n.

    Args:
        rows: of one experiment.
        panels: the metrics.
        titles: methods and metrics as a reader calls them.
        whole: the target sequences that there are, of which n is a part.
    """
    check(panels, {row.metric for row in rows})
    cells: dict[tuple[str, str, int | None], list[float]] = {}
    for row in rows:
        if row.metric in panels:
            cells.setdefault((row.metric, row.method, row.n), []).append(row.value)
    numbers = sorted({n for _, _, n in cells if n is not None})
    methods = list(dict.fromkeys(method for _, method, n in cells if n is not None))
    flat = list(dict.fromkeys(method for _, method, n in cells if n is None))
    looks, names = looks_of(methods), NAMES | titles
    columns = min(2, len(panels))
    figure, axes = grid(-(-len(panels) // columns), columns, 3.4, 2.6, shared=False)
    for ax, metric in zip(axes.flat, panels, strict=False):
        for index, method in enumerate(methods):
            x = np.exp(dodged(np.log(numbers), index, len(methods)))
            found = [cells.get((metric, method, n), []) for n in numbers]
            curve(ax, x, found, looks[method], names.get(method, method))
        for index, method in enumerate(flat):
            if value := cells.get((metric, method, None)):
                look: dict[str, Any] = {"color": "#222222", "linewidth": 0.8, "linestyle": FLAT[index % len(FLAT)]}
                ax.axhline(statistics.fmean(value), label=names.get(method, method), **look)
        ax.margins(y=0.06)
        means = {key: statistics.fmean(cell) for key, cell in cells.items() if key[0] == metric}
        if metric in UNBOUNDED and (metric, "source", None) in means:
            cut(ax, {(names.get(m, m), n): v for (_, m, n), v in means.items()}, means[metric, "source", None])
        log_ticks(ax, numbers, [f"{n:,}\n{percent(n / whole)}" for n in numbers])
        ax.set_xlabel("target sequences n, and their share of all", fontsize=MEDIUM)
        known = better(metric, (metric, "real", None) in cells)
        ax.set_title(f"{names.get(metric, metric)} ({known})", fontsize=MEDIUM)
    legend(figure, axes.flat[: len(panels)], room=axes.flat[-1] if len(panels) < axes.size else None)
    return figure


def sweep_figure(rows: Sequence[Row], panels: Sequence[str]) -> Figure:
    """One column a share r and an n, one row a panel: a line over gamma for each n_ratio; `outside` has its
    own, over n_ratio, for all n.

    Drawn are rows of an experiment arxiv-sweep-METHOD-rSHARE and a method gamma=GAMMA,n_ratio=N, of one METHOD, and for
    `outside` of arxiv-outside-rSHARE, or of the source's own text arxiv-outside-own-rSHARE, and n_ratio=N; and across
    all columns, rows of the method `real`.
    """
    real = {metric: [row.value for row in rows if (row.method, row.metric) == ("real", metric)] for metric in panels}
    cells: dict[tuple[str, float, int | None, str], dict[float, list[float]]] = {}
    for row in rows:
        if row.metric in panels and (place := place_of(row)) is not None:
            share, line, x = place
            cells.setdefault((row.metric, share, row.n, line), {}).setdefault(x, []).append(row.value)
    check(panels, {metric for metric, *_ in cells})
    found = {(share, n) for _, share, n, _ in cells}
    known = {share for share, n in found if n is not None}
    columns = sorted((share, n or 0) for share, n in found if n is not None or share not in known)
    swept = {line for metric, *_, line in cells if metric != "outside"}
    lines = sorted(swept, key=lambda line: (line == "all", len(line), line))
    shades = colormaps["viridis"](np.linspace(0.8, 0.0, len(lines)))
    looks = [Look(to_hex(shade), LOOKS[index % len(LOOKS)].marker, "-") for index, shade in enumerate(shades)]
    figure, axes = grid(len(panels), len(columns), 2.4, 1.9, shared=True)
    for (at, column), ax in np.ndenumerate(axes):
        metric, (share, n) = panels[at], columns[column]
        for index, line in enumerate(lines):
            points = dict(sorted(cells.get((metric, share, n, line), {}).items()))
            curve(ax, dodged([*points], index, len(lines)), [*points.values()], looks[index], line)
        if metric == "outside":
            for line, (label, look) in OUTSIDE.items():
                points = dict(sorted(cells.get((metric, share, None, line), {}).items()))
                curve(ax, [*points], [*points.values()], look, label)
            counts = sorted({x for line in OUTSIDE for x in cells.get((metric, share, None, line), {})})
            log_ticks(ax, counts, [f"{count:.0f}" for count in counts])
            if ax.containers:
                ax.legend(frameon=False, fontsize=SMALL)
        if real[metric]:
            ax.axhline(
                statistics.fmean(real[metric]), color="#222222", linewidth=0.8, linestyle=FLAT[1], label="real text"
            )
        ax.set_xlabel("n_ratio" if metric == "outside" else "guidance strength gamma", fontsize=MEDIUM)
        title = f"r = {share:g}" + (f", n = {n:,}" if n else "")
        ax.set_title(title if at == 0 else "", fontsize=MEDIUM)
        if column == 0:
            ax.set_ylabel(f"{NAMES.get(metric, metric)}\n({better(metric, bool(real[metric]))})", fontsize=MEDIUM)
    if lines != ["all"] or any(real.values()):
        legend(figure, axes[[metric != "outside" for metric in panels]].flat, "n_ratio")
    return figure


def place_of(row: Row) -> tuple[float, str, float] | None:
    """Where a row of a sweep belongs: the share r, the line (its n_ratio, or what of OUTSIDE), and x."""
    experiment, method = EXPERIMENT.fullmatch(row.experiment), SETTING.fullmatch(row.method)
    if experiment is None or method is None or (experiment[1] in OUTSIDE) != (row.metric == "outside"):
        return None
    share, (gamma, n_ratio) = float(experiment[2]), method.groups()
    if row.metric == "outside":
        return None if gamma is not None or n_ratio == "all" else (share, experiment[1], float(n_ratio))
    return None if gamma is None or row.n is None else (share, n_ratio, float(gamma))


def better(metric: str, real: bool) -> str:
    """Which way is better: a domain score below that of real text, where it is known, says nothing good."""
    return f"{'nearer to real text' if metric == 'domain' and real else BETTER[metric]} is better"


def check(panels: Sequence[str], there: set[str]) -> None:
    """Refuses a metric that is not known, and one that has no rows."""
    for metric in panels:
        if metric not in BETTER:
            raise ValueError(f"metric {metric!r} is not known; choose among {', '.join(BETTER)}")
        if metric not in there:
            raise ValueError(f"metric {metric!r} has no rows; {', '.join(sorted(there)) or 'no other'} has")


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


def cut(ax: Axes, means: dict[tuple[str, int | None], float], source: float) -> None:
    """Ends a y-axis, on which lower is better, a little above the source; what is far above it is named there."""
    least = min(means.values())
    top = source + 0.4 * (source - least)
    above = {name: [v for (other, _), v in means.items() if other == name] for (name, _), v in means.items() if v > top}
    if not above or source == least:
        return
    ax.set_ylim(least - 0.06 * (top - least), top)
    lines = [f"{name}: {min(found):.2f} to {max(found):.2f}" for name, found in above.items()]
    ax.text(0.02, 0.98, "\n".join(lines), fontsize=SMALL, transform=ax.transAxes, va="top")


def percent(share: float) -> str:
    """A share in per cent, with two figures where it is small."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def legend(figure: Figure, axes: Iterable[Axes], title: str = "", room: Axes | None = None) -> None:
    """One legend below all axes, in as many columns as fit, and room for it; or in the place of an axis that is not
    needed. Lines straight across come last."""
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
    fitting = max(1, int(figure.get_figwidth() / (0.5 + 0.05 * max(map(len, found)))))
    lines = math.ceil(len(found) / fitting)
    figure.set_figheight(figure.get_figheight() + 0.16 * (lines + bool(title)) + 0.1)
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=math.ceil(len(found) / lines), title=title,
        fontsize=SMALL, title_fontsize=SMALL, frameon=False, handlelength=3.2, columnspacing=1.0,
    )  # fmt: skip


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    lines = []
    for line in text.splitlines():
        line = re.sub(r"([\\`*_\[\]<>&#~|$])", r"\\\1", line)
        line = re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", line)  # what would begin a list
        lines.append(re.sub(r"^\s|\s(?=\s)|\s$", "&nbsp;", line))
    return "<br>".join(lines)


def save(path: Path, figure: Figure) -> None:
    """Writes a .png file that is fine enough for print."""
    with atomic(path) as handle:
        figure.savefig(handle, format="png", dpi=200)
