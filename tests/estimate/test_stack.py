"""A stack's neighbours join only if held-out rows are sure of them."""

import numpy as np
import pytest

from gtl.estimate.stack import best_setting
from gtl.ratio.knn import SETTINGS

NONE = next(i for i, (_, weight) in enumerate(SETTINGS) if not weight)
OTHER = NONE + 3


@pytest.mark.parametrize(("errors", "joins"), [(2.5, True), (1.5, False), (-3.0, False)])
def test_two_standard_errors(errors: float, joins: bool) -> None:
    """A setting that is ahead of none at all by so many standard errors over 100 sequences."""
    noise = np.random.default_rng(0).standard_normal(100)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    values = np.full((len(SETTINGS), 100), 9.0)
    values[NONE] = 1.0
    values[OTHER] = 1.0 - (noise + errors / 10)
    assert best_setting(values) == (OTHER if joins else NONE)


def test_one_sequence_proves_nothing() -> None:
    values = np.full((len(SETTINGS), 1), 9.0)
    values[NONE], values[OTHER] = 1.0, 0.5
    assert best_setting(values) == NONE
