"""The paper's heat-map figure, and the page that shows a Markov run."""

import base64
from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gtl.report.table import heading, pivot
from gtl.run import Row
from gtl.train.checkpoint import atomic

__all__ = ["TITLES", "heat_maps", "page"]

TITLES = {
    "source": "source model, unguided",
    "vanilla": "vanilla (target only)",
    "finetuned": "fine-tuned",
    "finetuned-twice": "fine-tuned, twice the budget",
    "finetuned-long": "fine-tuned, twice the budget",
    "finetuned-slow": "fine-tuned, lower rates",
    "finetuned-fast": "fine-tuned, longer fits",
    "lora": "LoRA",
    "lora-slow": "LoRA, lower rates",
    "lora-wide": "LoRA, as many weights as sparse changes",
    "sparse": "sparse changes",
    "gtl-local": "GTL, local ratio",
    "gtl-local-iw": "GTL, local ratio, importance-weighted",
    "gtl-knn": "GTL, nearest neighbours",
    "gtl-local-knn": "GTL, local ratio and neighbours",
    "gtl-sparse": "GTL, sparse changes",
    "gtl-sparse-long": "GTL, sparse changes, twice the budget",
    "gtl-sparse-slow": "GTL, sparse changes, lower rates",
    "gtl-sparse-fast": "GTL, sparse changes, longer fits",
    "gtl-stack": "GTL, stack",
    "gtl-blend": "GTL, blend with fine-tuning",
    "gtl-blend-slow": "GTL, blend with fine-tuning, lower rates",
    "gtl-blend-fast": "GTL, blend with fine-tuning, longer fits",
    "gtl-late": "GTL, late injection",
    "finetuned-iw": "fine-tuned, importance-weighted",
    "finetuned-iw-slow": "fine-tuned, importance-weighted, lower rates",
    "sparse-iw": "sparse changes, importance-weighted",
    "sparse-iw-slow": "sparse changes, importance-weighted, lower rates",
    "gtl-sequence": "GTL, sequence ratio by likelihood",
    "gtl-both": "GTL, sequence ratio by both losses",
    "gtl-direct": "GTL, direct ratio",
    "gtl-paper": "GTL, paper's ratio",
    "gtl-paper-protocol": "GTL, paper's ratio and protocol",
    "counting": "counting the n sequences (add one)",
    "exact": "exact models, same sampler",
    "published-vanilla": "published: vanilla",
    "published-finetuned": "published: fine-tuned",
    "published-gtl": "published: GTL",
}
"""Methods as a reader calls them."""

Matrix = Sequence[Sequence[float]]


def heat_maps(path: Path, source: Matrix, target: Matrix, estimates: dict[int, dict[str, Matrix]]) -> None:
    """Draws the true source and target beside the estimates of every method, one row for each n.

    Args:
        path: the .png file to write.
        source: (V, V), true transition matrix.
        target: (V, V)
        estimates: n -> method -> (V, V).
    """
    numbers = sorted(estimates, reverse=True)
    methods = list(dict.fromkeys(method for n in numbers for method in estimates[n]))
    rows, columns = max(2, len(numbers)), 1 + len(methods)
    figure = Figure(figsize=(1.2 + 2.0 * columns, 0.6 + 2.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    top = max(float(np.max(source)), float(np.max(target)))
    size = len(target)

    def draw(row: int, column: int, matrix: Matrix, title: str) -> None:
        ax = axes[row][column]
        ax.imshow(matrix, vmin=0, vmax=top, cmap="viridis")
        ax.set_title(title, fontsize=9)
        ax.set_xticks([])
        ax.set_yticks([])
        if size <= 6:
            for i in range(size):
                for j in range(size):
                    value = matrix[i][j]
                    colour = "white" if value < 0.6 * top else "black"
                    text = f"{value:.2f}".lstrip("0") if value < 1 else "1"
                    ax.text(j, i, text, ha="center", va="center", fontsize=6.5, color=colour)

    for ax in axes.flat:
        ax.set_axis_off()
    for row, matrix, title in ((0, source, "true source"), (1, target, "true target")):
        axes[row][0].set_axis_on()
        draw(row, 0, matrix, title)
    for row, n in enumerate(numbers):
        for column, method in enumerate(methods, 1):
            if method in estimates[n]:
                axes[row][column].set_axis_on()
                name = TITLES.get(method, method)
                draw(row, column, estimates[n][method], f"{name}\nn = {n}" if row == 0 else f"n = {n}")
    figure.colorbar(axes[0][0].images[0], ax=axes, shrink=0.5, aspect=30, label="P(next = column | current = row)")
    with atomic(path) as handle:
        figure.savefig(handle, format="png", dpi=150)


def page(path: Path, title: str, rows: list[Row], figure: Path, facts: dict[str, str]) -> None:
    """Writes one self-contained HTML file: the table of KLs, the figure, and how they were made."""
    environment = jinja2.Environment(loader=jinja2.PackageLoader("gtl", "report"), autoescape=True)
    columns, lines = pivot(rows, "kl")
    text = environment.get_template("markov.html").render(
        title=title,
        columns=[heading(n) for n in columns],
        lines=[(TITLES.get(method, method), method, cells) for method, cells in lines],
        figure=base64.b64encode(figure.read_bytes()).decode(),
        facts=facts,
    )
    with atomic(path) as handle:
        handle.write(text.encode())
