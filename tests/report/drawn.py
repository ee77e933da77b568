"""A row to draw, and what a figure shows of it."""

import numpy as np
from matplotlib.container import ErrorbarContainer

from gtl.run import Row


def row(
    method: str, value: float, n: int | None = 100, seed: int = 0, metric: str = "mauve", name: str = "arxiv"
) -> Row:
    return Row(name, method, n, seed, metric, value, None, None, "cpu, 2 threads", "gtl reproduce arxiv")


def lines(ax) -> dict[str, ErrorbarContainer]:
    """The lines of an axis by their label."""
    return {box.get_label(): box for box in ax.containers}


def points(box: ErrorbarContainer) -> np.ndarray:
    """x and y of a line: (2, points)."""
    return box.lines[0].get_xydata().T


def bars(box: ErrorbarContainer) -> np.ndarray:
    """Half the length of each bar, nan where there is none."""
    found = box.lines[2][0].get_segments()
    return np.array([(ends[1][1] - ends[0][1]) / 2 if len(ends) else np.nan for ends in found])
