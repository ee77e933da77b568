"""Tables from rows: one line a method, one column an n, mean and standard error over seeds.

`python -m gtl.report.table results/*.json` writes each table as Markdown beside its rows. Prose that belongs to a table
stands in NAME.notes.md and is put at its end.
"""

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from gtl.run import Row, read_rows

__all__ = ["cell", "markdown", "paired", "pivot"]

HEADLINE = "gtl-local"
"""The method that others are compared with, seed by seed."""


def cell(values: list[float]) -> str:
    """Mean and, for several values, the standard error of the mean."""
    mean = statistics.fmean(values)
    digits = 4 if abs(mean) < 1 else 3 if abs(mean) < 10 else 1 if abs(mean) < 100 else 0
    text = f"{mean:.{digits}f}"
    if len(values) < 2:
        return text
    return f"{text} ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}"


def pivot(rows: Iterable[Row], metric: str) -> tuple[list[int | None], list[tuple[str, list[str]]]]:
    """The columns (n, largest first) and, for every method in order of appearance, its cells."""
    rows = [row for row in rows if row.metric == metric]
    columns = sorted({row.n for row in rows}, key=lambda n: -(n if n is not None else -1))
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        groups = [[row.value for row in rows if (row.method, row.n) == (method, n)] for n in columns]
        lines.append((method, [cell(group) if group else "" for group in groups]))
    return columns, lines


def paired(rows: Iterable[Row], metric: str, reference: str) -> tuple[list[int], list[tuple[str, list[str]]]]:
    """The columns and, for every other method, its values minus those of `reference` under the same seed and n.

    The last cell is of the seeds' means over n.
    """
    values = {(r.method, r.n, r.seed): r.value for r in rows if r.metric == metric and None not in (r.n, r.seed)}
    ours = {(n, seed): v for (method, n, seed), v in values.items() if method == reference}
    columns = sorted({n for n, _ in ours if n is not None}, reverse=True)
    lines = []
    for method in dict.fromkeys(method for method, _, _ in values if method != reference):
        gaps = {key: values[method, *key] - v for key, v in ours.items() if (method, *key) in values}
        seeds = [s for s in dict.fromkeys(s for _, s in ours) if all((n, s) in gaps for n in columns)]
        groups = [[gap for (m, _), gap in gaps.items() if m == n] for n in columns]
        groups.append([statistics.fmean(gaps[n, s] for n in columns) for s in seeds])
        lines.append((method, [cell(group) if group else "" for group in groups]))
    return columns, lines


def heading(n: int | None) -> str:
    """A column's title."""
    return "any n" if n is None else f"n = {n}"


def markdown(rows: list[Row]) -> str:
    """All tables of a list of rows, each metric in its own, with the commands and devices that made them."""
    parts = []
    for experiment in dict.fromkeys(row.experiment for row in rows):
        mine = [row for row in rows if row.experiment == experiment]
        parts.append(f"# {experiment}\n")
        for metric in dict.fromkeys(row.metric for row in mine):
            columns, lines = pivot(mine, metric)
            seeds = {len({r.seed for r in mine if (r.metric, r.method) == (metric, m)}) for m, _ in lines}
            parts.append(f"## {metric}\n")
            parts.append(f"Mean ± standard error over up to {max(seeds)} seeds.\n" if max(seeds) > 1 else "")
            parts.append("| method | " + " | ".join(heading(n) for n in columns) + " |")
            parts.append("|---|" + "---|" * len(columns))
            parts += [f"| {method} | " + " | ".join(cells) + " |" for method, cells in lines]
            parts.append("")
            if metric == "kl" and HEADLINE in {method for method, _ in lines}:
                numbers, gaps = paired(mine, metric, HEADLINE)
                parts.append(f"Minus {HEADLINE}, paired by seed (above zero: {HEADLINE} is better).\n")
                parts.append("| method | " + " | ".join(heading(n) for n in numbers) + " | mean over n |")
                parts.append("|---|" + "---|" * (len(numbers) + 1))
                parts += [f"| {method} | " + " | ".join(cells) + " |" for method, cells in gaps]
                parts.append("")
        weights: dict[str, set[int]] = {}
        for r in mine:
            if r.trainable_weights:
                weights.setdefault(r.method, set()).add(r.trainable_weights)
        if weights:
            counts = ", ".join(f"{m} {' or '.join(f'{w:,}' for w in sorted(w))}" for m, w in weights.items())
            parts.append(f"Trainable weights: {counts}.\n")
        seconds: dict[str, list[float]] = {}
        for r in mine:
            if r.seconds is not None:
                seconds.setdefault(r.method, []).append(r.seconds)
        if seconds:
            times = ", ".join(f"{m} {statistics.fmean(s):.0f}" for m, s in seconds.items())
            parts.append(f"Mean seconds of training and sampling: {times}.\n")
        for command, device in dict.fromkeys((r.command, r.device) for r in mine):
            parts.append(f"- `{command}` on {device}" if device != command else f"- {command}")
        parts.append("")
    return "\n".join(part for part in parts if part is not None).replace("\n\n\n", "\n\n")


def main(paths: list[str]) -> None:
    """Writes the Markdown beside each JSON file of rows."""
    for name in paths:
        path = Path(name)
        text = markdown(read_rows(path))
        notes = path.with_suffix(".notes.md")
        if notes.exists():
            text = text.rstrip("\n") + "\n\n" + notes.read_text()
        path.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
