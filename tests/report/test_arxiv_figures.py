"""Figures of the arXiv experiments: what is drawn is what the rows say."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drawn import bars, lines, points, row

from gtl.report.arxiv import by_fraction, fraction_figure, sweep, sweep_figure
from gtl.run import Row

NUMBERS = (100, 1000, 20_000)
SIZES = ["n_ratio = 64", "n_ratio = 256", "n_ratio = 1024", "n_ratio = all"]
TITLES = {"gtl-local": "GTL", "real": "held-out target text", "nll": "NLL"}


def some_rows() -> list[Row]:
    """1, 2 and 6 times 0.1, plus 0.1 for each later n: standard error 0.15275 (see test_table.py)."""
    seeds = list(enumerate((0.1, 0.2, 0.6)))
    rows = [
        row(method, value + 0.1 * place, n, seed, metric)
        for method, metric in itertools.product(("vanilla", "gtl-local", "new"), ("mauve", "nll"))
        for place, n in enumerate(NUMBERS)
        for seed, value in seeds
    ]
    return rows + [row("source", 0.05 + 0.01 * seed, None, seed) for seed in range(3)] + [row("real", 0.9, None)]


def sweep_rows(share: str = "0", metrics: tuple[str, ...] = ("domain", "mauve")) -> list[Row]:
    """Value gamma + N / 10,000, give or take 0.1."""
    rows = [
        row(f"gamma={gamma:g},n_ratio={size}", gamma + (0 if size == "all" else size) / 1e4 + give, 50, seed, metric)
        for gamma in (4, 0.5, 1)
        for size in ("all", 64, 256, 1024)
        for seed, give in enumerate((-0.1, 0.1))
        for metric in metrics
    ]
    rows += [row(f"n_ratio={size}", 1 / size, None, metric="outside") for size in (64, 4, 1024)]
    names = {True: f"arxiv-outside-r{share}", False: f"arxiv-sweep-gtl-paper-r{share}"}
    return [Row(**{**vars(r), "experiment": names[r.metric == "outside"]}) for r in rows]


def own_rows(share: str = "0") -> list[Row]:
    """What candidates leave out of the source's own text: half of the target's, and at one number more."""
    name = f"arxiv-outside-own-r{share}"
    return [row(f"n_ratio={size}", 0.5 / size, None, name=name, metric="outside") for size in (4, 4096, 1024, 64)]


def test_means_and_errors_over_seeds():
    figure = fraction_figure(some_rows(), ["mauve", "nll"], TITLES, 20_000)
    left, right = figure.axes
    for ax in (left, right):
        assert set(lines(ax)) == {"vanilla", "GTL", "new"}
        for box in lines(ax).values():
            np.testing.assert_allclose(points(box)[1], [0.3, 0.4, 0.5])
            np.testing.assert_allclose(bars(box), [math.sqrt(7 / 3) / 10] * 3)
    flat = {line.get_label(): line for line in left.get_lines() if line.get_label() in ("source", TITLES["real"])}
    assert {name: pytest.approx(line.get_ydata()) for name, line in flat.items()} == {
        "source": [0.06, 0.06],
        TITLES["real"]: [0.9, 0.9],
    }
    assert {line.get_linestyle() for line in flat.values()} == {"--"}
    assert "source" not in [line.get_label() for line in right.get_lines()]


def with_costs(rows: list[Row]) -> list[Row]:
    """The same, and steps and weights of each."""
    fits = {(r.experiment, r.method, r.n): replace(r, metric="steps", value=3000 + r.n) for r in rows if r.n}
    return [replace(r, trainable_weights=1_400_000 if r.n else None) for r in [*rows, *fits.values()]]


def test_lines_say_what_they_cost():
    """In the legend, below the name; lines and what is named above them are as without."""
    rows = [*some_rows(), *(row("source", 0.35, None, metric="nll") for _ in range(2)), row("bad", 9.0, metric="nll")]
    plain, costly = (fraction_figure(r, ["mauve", "nll"], TITLES, 20_000) for r in (rows, with_costs(rows)))
    words = [text.get_text() for text in costly.legends[0].get_texts()]
    cost = "\n1.4 M weights, 3,100 to 23,000 steps"
    assert words[:4] == ["vanilla" + cost, "GTL" + cost, "new" + cost, "bad\n1.4 M weights, 3,100 steps"]
    assert words[4:] == ["source", "held-out target text"]
    for one, other in zip(plain.axes, costly.axes, strict=True):
        assert [text.get_text() for text in one.texts] == [text.get_text() for text in other.texts]
        for first, second in zip(one.containers, other.containers, strict=True):
            np.testing.assert_array_equal(points(first), points(second))
    assert any("bad: 9.00" in text.get_text() for ax in costly.axes for text in ax.texts)


def test_what_is_written():
    figure = fraction_figure(some_rows(), ["mauve", "nll"], TITLES, 20_000)
    left, right = figure.axes
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["100\n0.5 %", "1,000\n5 %", "20,000\n100 %"]
    assert left.get_xscale() == "log"
    assert left.get_title() == "MAUVE (higher is better)"
    assert right.get_title() == "NLL (lower is better)"
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["vanilla", "GTL", "new", "source", "held-out target text"]


def test_a_bad_likelihood_hides_nothing():
    """What is far worse than the source is named, and the axis is for the others; not so with other metrics."""
    values = {"vanilla": (6.5, 5.2), "finetuned": (4.4, 4.0), "gtl-paper": (4.6, 4.5)}
    rows = [row(name, v, n, metric=m) for name, pair in values.items() for n, v in zip((100, 1000), pair, strict=True)
            for m in ("nll", "domain")]  # fmt: skip
    for source, shown in ((4.5, ["vanilla: 5.20 to 6.50"]), (6.4, [])):
        flat = [row("source", source, None, metric=m) for m in ("nll", "domain")]
        left, right = fraction_figure(rows + flat, ["nll", "domain"], {}, 1000).axes
        assert [text.get_text() for text in left.texts] == shown
        assert not right.texts
        low, high = left.get_ylim()
        assert low < 4.0
        assert (4.6 < high < 5.0) if shown else high > 6.5
        assert right.get_ylim()[1] > 6.5


def test_labels_that_would_touch():
    rows = [row(f"n_ratio={size}", 1 / size, None, metric="outside") for size in (8, 32, 128, 256, 512, 2048)]
    rows = [Row(**{**vars(r), "experiment": "arxiv-outside-r0"}) for r in rows]
    (ax,) = sweep_figure(rows, ["outside"]).axes
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["8", "32", "128", "", "512", "2048"]
    assert [*ax.get_xticks()] == [8, 32, 128, 256, 512, 2048]


def test_lines_stand_side_by_side():
    """In the order of the legend, nearer to their own n than to the next."""
    (ax,) = fraction_figure(some_rows(), ["mauve"], TITLES, 20_000).axes
    x = np.log([points(box)[0] for box in lines(ax).values()])
    assert bool((np.diff(x, axis=0) > 0).all())
    np.testing.assert_allclose(x.mean(0), np.log(NUMBERS))
    assert np.abs(x - np.log(NUMBERS)).max() < np.diff(np.log(NUMBERS)).min() / 4


def test_methods_look_the_same_in_every_figure():
    """Known ones whatever is beside them; no two of one figure share a colour or a marker."""
    many = [row(name, 0.1) for name in ("new", "lora", "finetuned-iw", "gtl-stack", "other", "third")]
    all_looks = []
    for rows in (some_rows() + many, [row("gtl-local", 0.1), row("lora", 0.2)]):
        (ax,) = fraction_figure(rows, ["mauve"], {}, 100).axes
        looks = {name: (box.lines[0].get_color(), box.lines[0].get_marker()) for name, box in lines(ax).items()}
        for part in zip(*looks.values(), strict=True):
            assert len(set(part)) == len(looks)
        all_looks.append(looks)
    assert all(all_looks[0][name] == all_looks[1][name] for name in ("gtl-local", "lora"))


def test_one_seed_has_no_bar_and_missing_cells_are_left_out():
    rows = [row("a", 0.5), row("a", 0.7, 1000, 0), row("a", 0.9, 1000, 1), row("b", 0.1, 20_000)]
    rows += [row("c", 1.0, 1000, metric="nll")]
    left, right = fraction_figure(rows, ["mauve", "nll"], {}, 20_000).axes
    assert set(lines(left)) == {"a", "b"}
    assert set(lines(right)) == {"c"}
    np.testing.assert_allclose(points(lines(left)["a"])[1], [0.5, 0.8])
    np.testing.assert_allclose(bars(lines(left)["a"]), [np.nan, 0.1])
    np.testing.assert_allclose(bars(lines(left)["b"]), [np.nan])


@pytest.mark.parametrize("draw", [lambda rows, panels: fraction_figure(rows, panels, {}, 100), sweep_figure])
def test_unknown_metrics(draw):
    rows = some_rows() + sweep_rows()
    with pytest.raises(ValueError, match="metric 'beauty' is not known; choose among mauve, domain"):
        draw(rows, ["mauve", "beauty"])
    with pytest.raises(ValueError, match="metric 'masked_nll' has no rows"):
        draw(rows, ["mauve", "masked_nll"])


def test_three_panels_leave_room_for_the_legend():
    rows = [*some_rows(), *(replace(row, metric="domain") for row in some_rows() if row.metric == "mauve")]
    figure = fraction_figure(rows, ["mauve", "nll", "domain"], TITLES, 20_000)
    two = fraction_figure(rows, ["mauve", "nll"], TITLES, 20_000)
    *panels, room = figure.axes
    assert len(panels) == 3
    assert not figure.legends
    assert not room.axison
    words = [text.get_text() for text in room.get_legend().get_texts()]
    assert words == [text.get_text() for text in two.legends[0].get_texts()]
    figure.canvas.draw()
    box, place = room.get_legend().get_window_extent(), room.get_window_extent()
    assert place.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert figure.get_figwidth() == two.get_figwidth()
    assert panels[2].get_title() == "domain score (nearer to real text is better)"
    alone = fraction_figure([row for row in rows if row.method != "real"], ["domain"], TITLES, 20_000)
    assert alone.axes[0].get_title() == "domain score (lower is better)"


def test_legends_and_letters_fit():
    """At column width nothing lies outside, and no letters are smaller than 7 points."""
    rows = [
        row(f"a method with a name of its own {i}", i / 10, n, s) for i in range(7) for n in NUMBERS for s in (0, 1)
    ]
    for figure in (
        fraction_figure(rows, ["mauve"], {}, 20_000),
        fraction_figure(with_costs(rows), ["mauve"], {}, 20_000),
        sweep_figure(sweep_rows(), ["mauve", "outside"]),
    ):
        figure.canvas.draw()
        width, height = figure.get_size_inches() * figure.dpi
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= width
        assert box.y1 < min(ax.get_tightbbox().y0 for ax in figure.axes)
        assert min(ax.get_window_extent().height for ax in figure.axes) > 1.2 * figure.dpi
        assert height < 6 * figure.dpi
        texts = [t for ax in figure.axes for t in (ax.title, ax.xaxis.label, *ax.get_xticklabels())]
        assert min(text.get_fontsize() for text in [*texts, *figure.legends[0].get_texts()]) >= 7


def test_the_sweep():
    rows = sweep_rows("0.25") + sweep_rows("0") + sweep_rows("0.05") + own_rows()
    figure = sweep_figure(rows, ["domain", "mauve", "outside"])
    axes = np.array(figure.axes).reshape(3, 3)
    assert [ax.get_title() for ax in axes[0]] == ["r = 0, n = 50", "r = 0.05, n = 50", "r = 0.25, n = 50"]
    assert [ax.get_ylabel().split("\n")[1] for ax in axes[:, 0]] == [
        "(lower is better)", "(higher is better)", "(lower is better)",
    ]  # fmt: skip
    for ax in axes[:2].flat:
        assert list(lines(ax)) == SIZES
        for name, box in lines(ax).items():
            size = 0 if name == "n_ratio = all" else int(name.removeprefix("n_ratio = "))
            np.testing.assert_allclose(points(box)[1], np.array([0.5, 1, 4]) + size / 1e4)
            np.testing.assert_allclose(points(box)[0], [0.5, 1, 4], atol=0.12)
            np.testing.assert_allclose(bars(box), [0.1] * 3)
    for column, ax in enumerate(axes[2]):
        sizes = [4, 64, 1024] + [4096] * (column == 0)
        drawn = lines(ax)
        assert list(drawn) == ["of the target"] + ["of the source"] * (column == 0)
        assert [text.get_text() for text in ax.get_legend().get_texts()] == list(drawn)
        assert ax.get_xscale() == "log"
        for box, factor, known in zip(drawn.values(), (1, 0.5), ([4, 64, 1024], sizes), strict=False):
            np.testing.assert_allclose(points(box)[0], known)
            np.testing.assert_allclose(points(box)[1], factor / np.array(known))
        assert [tick.get_text() for tick in ax.get_xticklabels()] == [str(size) for size in sizes]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == SIZES


def test_candidates_left_out_change_no_colours():
    colours = []
    for panels in (["mauve"], ["mauve", "outside"]):
        ax = sweep_figure(sweep_rows() + own_rows(), panels).axes[0]
        colours.append([box.lines[0].get_color() for box in lines(ax).values()])
    assert colours[0] == colours[1]
    assert len({*colours[0]}) == 4


def test_real_text_in_the_sweep():
    """A line straight across, and a domain score is better the nearer it is."""
    real = [row("real", value, None, metric=metric) for metric, value in (("domain", 0.2), ("mauve", 0.9))]
    figure = sweep_figure(sweep_rows("0") + real, ["domain", "mauve", "outside"])
    for ax, wanted in zip(figure.axes, ([0.2], [0.9], []), strict=True):
        flat = [line.get_ydata()[0] for line in ax.get_lines() if line.get_label() == "real text"]
        assert flat == wanted
    assert figure.axes[0].get_ylabel() == "domain score\n(nearer to real text is better)"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*SIZES, "real text"]


def main_rows(share: str, n: int = 50, method: str = "gtl-paper") -> list[Row]:
    """Of the swept method: gammas 1 and 2, and values 3 and 5 of each metric."""
    name = "arxiv" if share == "0" else f"arxiv-r{share}"
    rows = [row(method, gamma, n, gamma, "gamma", name) for gamma in (1, 2)]
    return rows + [row(method, v, n, int(v), metric, name) for v in (3.0, 5.0) for metric in ("domain", "mauve")]


def test_a_sweep_says_how_far_apart_sets_are():
    """Mean and standard deviation of the same method's main rows at that r and n, at their mean gamma."""
    rows = sweep_rows("0") + sweep_rows("0.05") + main_rows("0.05")
    others = main_rows("0", n=51) + main_rows("0", method="gtl-sparse")
    figure = sweep_figure(with_costs(rows) + others, ["domain", "mauve", "outside"])
    axes = np.array(figure.axes).reshape(3, 2)
    assert [ax.get_title() for ax in axes[0]] == ["r = 0, n = 50", "r = 0.05, n = 50\n1.4 M weights, 3,050 steps"]
    for ax in axes[:2, 1]:
        *swept, found = ax.containers
        assert [box.get_label() for box in swept] == SIZES
        np.testing.assert_allclose(points(found), [[1.5], [4.0]])
        np.testing.assert_allclose(bars(found), [math.sqrt(2)])
    assert all([*lines(ax)] == SIZES for ax in axes[:2, 0])
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == [*SIZES, "main rows: mean and standard deviation"]


def test_one_set_is_not_apart_from_anything():
    alone = [r for r in main_rows("0") if r.metric == "gamma" or r.value == 3]
    for rows in (alone, [r for r in main_rows("0") if r.metric != "gamma"]):
        assert [*lines(sweep_figure(sweep_rows() + rows, ["mauve"]).axes[0])] == SIZES


def test_the_unguided_source_in_the_sweep():
    """Straight across, each r with its own; a metric without it has no line."""
    rows = sweep_rows("0") + sweep_rows("0.05")
    for name, values in (("arxiv", (0.2, 0.4)), ("arxiv-r0.05", (0.6,)), ("arxiv-r0.25", (9.0,))):
        rows += [row("source", value, None, seed, "mauve", name) for seed, value in enumerate(values)]
    figure = sweep_figure(rows, ["domain", "mauve", "outside"])
    flat = [
        [line.get_ydata()[0] for line in ax.get_lines() if line.get_label() == "source model, unguided"]
        for ax in figure.axes
    ]
    assert flat == [[], [], [pytest.approx(0.3)], [0.6], [], []]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*SIZES, "source model, unguided"]


def test_rows_that_are_no_part_of_the_sweep():
    good = sweep_rows("0.05")
    bad = [Row(**{**vars(r), "experiment": "arxiv"}) for r in good]
    for method in (
        "source",
        "gamma=1",
        "gamma=x,n_ratio=4",
        "gamma=1,n_ratio=some",
        "n_ratio=64",
        "gamma=1,n_ratio=4,",
    ):
        bad += [row(method, 9.0, name="arxiv-sweep-gtl-paper-r0.05", metric=metric) for metric in ("mauve", "domain")]
    bad += [row(m, 9.0, name="arxiv-outside-r0.05", metric="outside") for m in ("n_ratio=all", "gamma=1,n_ratio=4")]
    bad += [row("n_ratio=4", 9.0, name="arxiv-sweep-gtl-paper-r0.05", metric="outside")]
    bad += [row("gamma=1,n_ratio=4", 9.0, name=f"arxiv-outside{own}-r0.05") for own in ("", "-own")]
    panels = ["mauve", "domain", "outside"]
    for with_bad, ax in zip(sweep_figure(bad + good, panels).axes, sweep_figure(good, panels).axes, strict=True):
        assert list(lines(with_bad)) == list(lines(ax))
        for one, other in zip(with_bad.containers, ax.containers, strict=True):
            np.testing.assert_array_equal(points(one), points(other))
    with pytest.raises(ValueError, match="metric 'mauve' has no rows"):
        sweep_figure(bad, panels)


def test_a_sweep_with_holes():
    """A share without a metric, and an n_ratio that another share has not."""
    rows = sweep_rows("0", ("mauve",)) + [r for r in sweep_rows("0.05", ("domain",)) if "1024" not in r.method]
    axes = np.array(sweep_figure(rows, ["domain", "mauve", "outside"]).axes).reshape(3, 2)
    assert [[len(ax.containers) for ax in line] for line in axes] == [[0, 3], [4, 0], [1, 1]]
    looks = [{n: b.lines[0].get_color() for n, b in lines(ax).items()} for ax in (axes[1, 0], axes[0, 1])]
    assert looks[1].items() < looks[0].items()
    alone = sweep_figure(rows, ["outside"])
    assert not alone.legends
    assert [len(ax.containers) for ax in alone.axes] == [1, 1]


def test_a_sweep_at_several_numbers_of_sequences():
    """A column each, rising; one line needs no legend."""
    rows = [
        row(f"gamma={gamma},n_ratio=all", gamma * n, n, name="arxiv-sweep-a-r0") for n in (50, 9) for gamma in (1, 2)
    ]
    figure = sweep_figure(rows, ["mauve"])
    assert [ax.get_title() for ax in figure.axes] == ["r = 0, n = 9", "r = 0, n = 50"]
    for ax, n in zip(figure.axes, (9, 50), strict=True):
        np.testing.assert_allclose(points(lines(ax)["n_ratio = all"])[1], [n, 2 * n])
    assert not figure.legends


def test_files(tmp_path: Path):
    by_fraction(tmp_path / "a" / "fraction.png", some_rows(), ["mauve", "nll"], TITLES, 20_000)
    sweep(tmp_path / "a" / "sweep.png", sweep_rows(), ["domain", "outside"])
    files = sorted((tmp_path / "a").iterdir())
    assert [file.name for file in files] == ["fraction.png", "sweep.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
