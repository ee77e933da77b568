"""What pieces measured becomes the rows of one table."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gtl.reproduce import collect
from gtl.reproduce.collect import rows_by_share, rows_of, shown
from gtl.reproduce.pieces import Piece
from gtl.reproduce.recipe import Recipe, World
from gtl.run import Row
from gtl.train.checkpoint import write_json


def piece(folder: Path, stage: str, who: str, metric: str, weights: int | None, **about: Any) -> Piece:
    """One that is done and measured 0.5."""
    folder.mkdir()
    own = Row("evaluate", who, 7, about["subset"], metric, 0.5, 1.0, weights, "cpu", "gtl ...")
    write_json(folder / "results.json", [asdict(own)])
    (folder / "FINISHED").touch()
    called = {"share": 0, "n": 7, "method": "gtl-sparse", "called": {"gtl-sparse": "gtl-sparse"}}
    return Piece(stage, folder, ("evaluate", "--ratio", "there"), about=called | about)


def test_a_row_has_the_weights_that_its_own_subset_was_fitted_with(tmp_path: Path):
    done = []
    for subset, weights in ((0, 120), (1, 100)):
        at = tmp_path / f"s{subset}"
        at.mkdir()
        done += [
            piece(at / "likelihood", "likelihood", "guided", "nll", None, subset=subset),
            piece(at / "adapt", "adapt", "gtl-sparse", "steps", weights, subset=subset),
            piece(at / "judge", "judge", "samples", "mauve", None, subset=subset, draw=1),
        ]
    source = {"method": "source", "n": None, "subset": 0}
    done.append(piece(tmp_path / "source", "judge", "samples", "mauve", None, draw=1, **source))
    found = {(row.method, row.metric, row.seed): row.trainable_weights for row in rows_of(done, "gtl reproduce")}
    assert found == {
        ("gtl-sparse", "nll", 0): 120,
        ("gtl-sparse", "nll", 1): 100,
        ("gtl-sparse", "steps", 0): 120,
        ("gtl-sparse", "steps", 1): 100,
        ("gtl-sparse", "mauve", 1): 120,
        ("gtl-sparse", "mauve", 11): 100,
        ("source", "mauve", 1): None,
    }


def recipe(**changes: Any) -> Recipe:
    worlds = [
        World(0.0, [1, 0.5, 0.1], ["vanilla", "finetuned"]),
        World(0.2, [0.5, 0.1, 1], [["finetuned", "finetuned-iw"]]),
        World(0.4, [0.1], ["sparse"]),
    ]
    settings: dict[str, Any] = {"draws": [3, 4], "subsets": [5, 6]} | changes
    prepare = {"domain": ["source=a", "target=b"]}
    return Recipe(prepare, {}, worlds=worlds, adapt={}, sample={"count": 1}, **settings)


@pytest.fixture
def target_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 target rows, less the share that went to the source."""
    monkeypatch.setattr(collect, "target_rows", lambda _, share: round(100 * (1 - share)))


def a_row(experiment: str, method: str, n: int | None) -> Row:
    return Row(experiment, method, n, 0, "mauve", 0.5, None, None, "cpu", "gtl ...")


@pytest.mark.usefixtures("target_rows")
def test_shares_are_compared_at_the_first_fraction_of_the_first_mixed_world(tmp_path: Path):
    """By its methods and the source's; of a world that has none of those at that fraction, nothing."""
    rows = [
        a_row(name, method, n)
        for name, count in (("arxiv", 100), ("arxiv-r0.2", 80), ("arxiv-r0.4", 60))
        for method, n in (("finetuned", count // 2), ("finetuned", count // 10), ("finetuned-iw", count // 2),
                          ("vanilla", count // 2), ("source", None), ("real", None))
        if name != "arxiv-r0.4" or n != 30
    ]  # fmt: skip
    found = rows_by_share(recipe(), tmp_path, rows)
    assert {share: [(row.method, row.n) for row in mine] for share, mine in found.items()} == {
        0.0: [("finetuned", 50), ("finetuned-iw", 50), ("source", None)],
        0.2: [("finetuned", 40), ("finetuned-iw", 40), ("source", None)],
    }
    assert all(row.experiment == ("arxiv-r0.2" if share else "arxiv") for share, mine in found.items() for row in mine)


@pytest.mark.usefixtures("target_rows")
def test_samples_that_are_shown_are_of_the_first_subset_and_draw(tmp_path: Path):
    """At the middle fraction of each world; of the source, which is of no subset, the first draw."""
    done = []
    for share, n in ((0.0, 100), (0.0, 50), (0.0, 10), (0.0, None), (0.2, 80), (0.2, 40), (0.2, 8)):
        for subset, draw, swept in ((6, 4, {}), (5, 3, {}), (6, 3, {}), (5, 4, {}), (5, 3, {"sweep": "gamma=8"})):
            if n is None and subset != 5:
                continue
            method = "source" if n is None else "finetuned"
            at = tmp_path / f"{share}-{n}-{subset}-{draw}{'-swept' if swept else ''}"
            at.mkdir()
            (at / "samples.txt").write_text(f"{at.name}\n")
            about = {"share": share, "n": n, "subset": 0 if n is None else subset, "draw": draw, "method": method}
            about |= swept
            done.append(Piece("sample", at, (), about=about))
    found = shown(recipe(), tmp_path, done)
    assert found == {
        "fine-tuned, n = 50": ["0.0-50-5-3"],
        "source model, unguided": ["0.0-None-5-3"],
        "fine-tuned, r = 0.2, n = 40": ["0.2-40-5-3"],
    }
