"""What pieces measured becomes the rows of one table."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from gtl.reproduce.collect import rows_of
from gtl.reproduce.pieces import Piece
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
