"""What was measured, and what was written, as Markdown.

summary       all that was measured of each method at one n, side by side
samples_page  the first texts of each run
"""

import re
import statistics
from collections.abc import Sequence

from gtl.report.cost import million
from gtl.report.table import cell
from gtl.run import Row

__all__ = ["escaped", "samples_page", "summary"]

SIDES = {
    "mauve": "MAUVE",
    "nll": "NLL",
    "domain": "domain score",
    "distinct_2": "distinct pairs",
    "token_entropy": "token entropy",
    "copied_8": "copied runs of 8",
}
"""Columns of the summary."""


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
            cells = ["<br>".join(dict.fromkeys(map(million, weights))), taken]
            cells += [cell(values).replace(" ± ", "<br>±&nbsp;") if values else "" for values in found]
            parts.append(f"| {titles.get(method, method)} | " + " | ".join(cells) + " |")
        parts.append("")
    return "\n".join(parts)


def samples_page(texts: dict[str, list[str]], count: int = 10) -> str:
    """A Markdown page with the first texts of each method, as they are."""
    parts = ["# Samples\n", f"Uncurated: the first {count} of each run.\n"]
    for method, found in texts.items():
        lines = [f"{number}. {escaped(text)}" for number, text in enumerate(found[:count], 1)]
        parts += [f"## {escaped(method)}\n", *lines, ""]
    return "\n".join(parts)


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    lines = []
    for line in text.splitlines():
        line = re.sub(r"([\\`*_\[\]<>&#~|$])", r"\\\1", line)
        line = re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", line)  # what would begin a list
        lines.append(re.sub(r"^\s|\s(?=\s)|\s$", "&nbsp;", line))
    return "<br>".join(lines)
