"""The figure over r: what is drawn is what the rows say."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drawn import bars, lines, points, row
from matplotlib.colors import to_hex
from matplotlib.image import imread

from gtl.report.shares import by_share, share_figure
from gtl.run import Row

TITLES = {"finetuned": "fine-tuned"}


def some_rows() -> dict[float, list[Row]]:
    """Values 1 and 3 times r + .1 for each method, the source half of that; no importance weights at r = 0."""
    found = {}
    for share, n in ((0.25, 60), (0.0, 80), (0.05, 70)):
        methods = ["finetuned", "sparse"] + (["finetuned-iw", "sparse-iw"] if share else [])
        found[share] = [
            row(method, factor * (share + 0.1), n, seed, metric)
            for method in methods
            for seed, factor in enumerate((1, 3))
            for metric in ("mauve", "nll")
        ]
        found[share] += [row("source", 0.5 * (share + 0.1), None, 0, metric) for metric in ("mauve", "nll")]
        found[share] += [row("real", 9.0, None)]
    return found


def test_each_method_at_each_share() -> None:
    figure = share_figure(some_rows(), ["mauve", "nll"], TITLES)
    for ax in figure.axes:
        drawn = lines(ax)
        assert set(drawn) == {"fine-tuned", "finetuned-iw", "sparse", "sparse-iw", "source"}
        for name, box in drawn.items():
            shares = [0.05, 0.25] if name.endswith("-iw") else [0, 0.05, 0.25]
            where = {0: 0, 0.05: 1, 0.25: 2}
            factor, bar = (0.5, math.nan) if name == "source" else (2, 1)
            x, y = points(box)
            np.testing.assert_allclose(y, [factor * (share + 0.1) for share in shares])
            np.testing.assert_allclose(bars(box), [bar * (share + 0.1) for share in shares])
            assert np.abs(x - [where[share] for share in shares]).max() < 0.3
        at_most = {round(float(x), 6) for box in drawn.values() for x in points(box)[0][-1:]}
        assert len(at_most) == len(drawn)  # no line hides another one's bars
        labels = [tick.get_text() for tick in ax.get_xticklabels()]
        assert labels == ["r = 0\nn = 80", "r = 0.05\nn = 70", "r = 0.25\nn = 60"]


def test_what_is_written() -> None:
    """One legend for all panels, the source first and each method beside its importance-weighted kind."""
    figure = share_figure(some_rows(), ["mauve", "nll"], TITLES)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "source", "fine-tuned", "finetuned-iw", "sparse", "sparse-iw",
    ]  # fmt: skip
    assert [ax.get_title() for ax in figure.axes] == ["MAUVE (higher is better)", "NLL, nats a token (lower is better)"]


def test_the_legend_says_what_each_costs() -> None:
    """Over all r, the least and the most."""
    rows = some_rows()
    rows[0.0].append(replace(row("sparse", 3450, 80, metric="steps"), trainable_weights=1_402_167))
    rows[0.25].append(replace(row("sparse", 3600, 60, metric="steps"), trainable_weights=1_402_167))
    (legend,) = share_figure(rows, ["mauve", "nll"], TITLES).legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words[2:] == ["finetuned-iw", "sparse\n1.4 M weights, 3,450 to 3,600 steps", "sparse-iw"]


def test_importance_weights_look_like_their_method() -> None:
    """The same colour, a whole line and full marks; another method has another colour."""
    drawn = lines(share_figure(some_rows(), ["mauve"], {}).axes[0])
    plain, weighted, other = (drawn[name].lines[0] for name in ("finetuned", "finetuned-iw", "sparse"))
    assert plain.get_color() == weighted.get_color() != other.get_color()
    assert (plain.get_linestyle(), weighted.get_linestyle()) == ("--", "-")
    assert to_hex(plain.get_markerfacecolor()) == "#ffffff" != to_hex(weighted.get_markerfacecolor())


def test_a_metric_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'domain' has no rows"):
        share_figure(some_rows(), ["domain"], TITLES)
    by_share(tmp_path / "shares.png", some_rows(), ["nll"], TITLES)
    assert imread(tmp_path / "shares.png").std() > 0.01
