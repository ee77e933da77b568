"""What a source that has seen a share r of the target is worth, and what importance-weighted fitting makes of it.

One panel a metric, r from left to right: a line for each method, in one colour with its importance-weighted kind
(`METHOD-iw`, whole line and filled marks). Points are means over seeds and bars one standard error of the mean; the
legend says what each costs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from gtl.estimate.borrow import ENDING
from gtl.report.cost import labels
from gtl.report.lines import MEDIUM, NAMES, better, check, curve, dodged, grid, legend, looks_of, save
from gtl.run import Row

__all__ = ["by_share", "share_figure"]


def by_share(path: Path, rows: Mapping[float, Sequence[Row]], panels: Sequence[str], titles: dict[str, str]) -> None:
    """Writes `share_figure` as a .png file."""
    save(path, share_figure(rows, panels, titles))


def share_figure(rows: Mapping[float, Sequence[Row]], panels: Sequence[str], titles: dict[str, str]) -> Figure:
    """The figure.

    Args:
        rows: for each r, those of one number of target sequences, and of what has none (the source, unguided).
        panels: the metrics.
        titles: methods as a reader calls them.
    """
    check(panels, {row.metric for mine in rows.values() for row in mine})
    shares = sorted(rows)
    known = {share: max((row.n for row in rows[share] if row.n), default=0) for share in shares}
    methods = [m for m in dict.fromkeys(row.method for share in shares for row in rows[share]) if m != "real"]
    methods.sort(key=lambda method: (method != "source", method.removesuffix(ENDING), method))
    looks = looks_of([*dict.fromkeys(method.removesuffix(ENDING) for method in reversed(methods))])
    names = labels([row for mine in rows.values() for row in mine], methods, titles)
    figure, axes = grid(1, len(panels), 3.4, 2.6, shared=False)
    for ax, metric in zip(axes.flat, panels, strict=True):
        for index, method in enumerate(methods):
            look = looks[method.removesuffix(ENDING)]
            found = [[r.value for r in rows[share] if (r.method, r.metric) == (method, metric)] for share in shares]
            weighted = method.endswith(ENDING)
            look = look._replace(dashes="-") if weighted else look._replace(dashes=(0, (2, 1.5)))
            drawn = curve(ax, dodged(range(len(shares)), index, len(methods)), found, look, names[method])
            if drawn is not None and not weighted:
                drawn.lines[0].set_markerfacecolor("white")
        ticks = [f"r = {share:g}\nn = {known[share]:,}" for share in shares]
        ax.set_xticks(range(len(shares)), ticks)
        ax.set_title(f"{NAMES.get(metric, metric)} ({better(metric, False)})", fontsize=MEDIUM)
    legend(figure, axes.flat)
    return figure
