"""Figures of the arXiv experiments, from rows.

by_fraction   what each method makes of n target sequences, one panel a metric
sweep         the behaviour of gamma and n_ratio, one column a share r of the target in the source and an n

Both say what their fits cost: trainable weights and gradient steps.
"""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from gtl.report.cost import cost, labels
from gtl.report.lines import (
    FLAT,
    LOOKS,
    MEDIUM,
    NAMES,
    SMALL,
    Look,
    better,
    check,
    curve,
    dodged,
    grid,
    legend,
    log_ticks,
    looks_of,
    save,
)
from gtl.run import Row

__all__ = ["by_fraction", "experiment", "fraction_figure", "sweep", "sweep_figure"]

UNBOUNDED = ("nll", "masked_nll", "perplexity_bound")
"""Metrics in which a bad model can be so bad that nothing else is seen."""
OUTSIDE = {
    "outside": ("of the target", Look("#222222", "o", "-")),
    "outside-own": ("of the source", Look("#777777", "D", (0, (4, 1.5)))),
}
"""Experiments of what candidates leave out -> of whose text, and its line."""
EXPERIMENT = re.compile(r"arxiv-(sweep-(?P<method>.+)|outside|outside-own)-r(?P<share>\d+(?:\.\d+)?)")
SPREAD = "main rows: mean and standard deviation"
SETTING = re.compile(r"(?:gamma=(\d+(?:\.\d+)?),)?n_ratio=(\d+|all)")


def experiment(share: float) -> str:
    """What the main rows of a world are called."""
    return f"arxiv-r{share:g}" if share else "arxiv"


def by_fraction(path: Path, rows: Sequence[Row], panels: Sequence[str], titles: dict[str, str], whole: int) -> None:
    """Writes `fraction_figure` as a .png file."""
    save(path, fraction_figure(rows, panels, titles, whole))


def sweep(path: Path, rows: Sequence[Row], panels: Sequence[str]) -> None:
    """Writes `sweep_figure` as a .png file."""
    save(path, sweep_figure(rows, panels))


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
    lines = labels(rows, methods, names)
    columns = min(2, len(panels))
    figure, axes = grid(-(-len(panels) // columns), columns, 3.4, 2.6, shared=False)
    for ax, metric in zip(axes.flat, panels, strict=False):
        for index, method in enumerate(methods):
            x = np.exp(dodged(np.log(numbers), index, len(methods)))
            found = [cells.get((metric, method, n), []) for n in numbers]
            curve(ax, x, found, looks[method], lines[method])
        for index, method in enumerate(flat):
            across(ax, cells.get((metric, method, None), []), names.get(method, method), index)
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
    `outside` of arxiv-outside-rSHARE, or of the source's own text arxiv-outside-own-rSHARE, and n_ratio=N; straight
    across, main rows of the method `source`, and in all columns those of the method `real`. Main rows of METHOD say
    what its fits cost and how far apart sets of samples are: a point at their mean gamma, with one standard deviation
    for a bar.
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
    fits = {column: main_rows(rows, *column) for column in columns}
    figure, axes = grid(len(panels), len(columns), 2.4, 1.9, shared=True)
    for (at, column), ax in np.ndenumerate(axes):
        metric, (share, n) = panels[at], columns[column]
        for index, line in enumerate(lines):
            points = dict(sorted(cells.get((metric, share, n, line), {}).items()))
            curve(ax, dodged([*points], index, len(lines)), [*points.values()], looks[index], f"n_ratio = {line}")
        spread(ax, fits[share, n], metric)
        if metric == "outside":
            for line, (label, look) in OUTSIDE.items():
                points = dict(sorted(cells.get((metric, share, None, line), {}).items()))
                curve(ax, [*points], [*points.values()], look, label)
            counts = sorted({x for line in OUTSIDE for x in cells.get((metric, share, None, line), {})})
            log_ticks(ax, counts, [f"{count:.0f}" for count in counts])
            if ax.containers:
                ax.legend(frameon=False, fontsize=SMALL)
        source = [r.value for r in rows if (r.experiment, r.method, r.metric) == (experiment(share), "source", metric)]
        across(ax, source, "source model, unguided", 0)
        across(ax, real[metric], "real text", 1)
        ax.set_xlabel("n_ratio" if metric == "outside" else "guidance strength gamma", fontsize=MEDIUM)
        title = f"r = {share:g}" + (f", n = {n:,}" if n else "") + f"\n{cost(fits[share, n])}".rstrip()
        ax.set_title(title if at == 0 else "", fontsize=MEDIUM)
        if column == 0:
            ax.set_ylabel(f"{NAMES.get(metric, metric)}\n({better(metric, bool(real[metric]))})", fontsize=MEDIUM)
    strong = [*axes[[metric != "outside" for metric in panels]].flat]
    if {label for ax in strong for label in ax.get_legend_handles_labels()[1]} != {"n_ratio = all"}:
        legend(figure, strong)
    return figure


def place_of(row: Row) -> tuple[float, str, float] | None:
    """Where a row of a sweep belongs: the share r, the line (its n_ratio, or what of OUTSIDE), and x."""
    found, method = EXPERIMENT.fullmatch(row.experiment), SETTING.fullmatch(row.method)
    if found is None or method is None or (found[1] in OUTSIDE) != (row.metric == "outside"):
        return None
    share, (gamma, n_ratio) = float(found["share"]), method.groups()
    if row.metric == "outside":
        return None if gamma is not None or n_ratio == "all" else (share, found[1], float(n_ratio))
    return None if gamma is None or row.n is None else (share, n_ratio, float(gamma))


def across(ax: Axes, values: Sequence[float], label: str, index: int) -> None:
    """The mean of what has no x, where there is one, as a line straight across."""
    if values:
        dashes = FLAT[index % len(FLAT)]
        ax.axhline(statistics.fmean(values), color="#222222", linewidth=0.8, linestyle=dashes, label=label)


def main_rows(rows: Sequence[Row], share: float, n: int) -> list[Row]:
    """What the main experiment of a world has of the swept method, at that n."""
    swept = {found["method"] for row in rows if (found := EXPERIMENT.fullmatch(row.experiment))}
    return [row for row in rows if row.experiment == experiment(share) and row.method in swept and row.n == n]


def spread(ax: Axes, rows: Sequence[Row], metric: str) -> None:
    """Mean and standard deviation of main rows, where there are several, at their mean gamma."""
    gammas = [row.value for row in rows if row.metric == "gamma"]
    values = [row.value for row in rows if row.metric == metric]
    if gammas and len(values) > 1:
        ax.errorbar(
            statistics.fmean(gammas), statistics.fmean(values), statistics.stdev(values), label=SPREAD,
            color="#d55e00", marker="_", linestyle="none", markersize=6, elinewidth=1.2, capsize=2.5, capthick=1.2,
        )  # fmt: skip


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
