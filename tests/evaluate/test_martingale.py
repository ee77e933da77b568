"""The martingale diagnosis: zero for the oracle, not for a ratio or a denoiser that is wrong."""

import pytest
import torch

from gtl.evaluate.martingale import martingale_violation


def violation(pair, denoiser, ratio, seed: int = 0) -> torch.Tensor:
    x = pair.x.repeat(20, 1)
    return martingale_violation(denoiser, ratio, x, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mask_id", [None, 1])
@pytest.mark.parametrize("kind", ["markov", "chain", "table"])
def test_no_violation_by_the_oracle(make_pair, kind, mask_id):
    """log sum_v p(x_l = v | z) r(z, l <- v) - log r(z) = 0, one value for each sequence with a mask."""
    pair = make_pair(kind, mask_id=mask_id)
    values = violation(pair, pair.denoiser, pair.ratio)
    assert 0.6 * 540 < len(values) <= 540  # a share 1 / (L + 1) of maskings has no mask
    assert float(values.abs().max()) < 1e-9


def test_no_violation_proves_nothing(make_pair):
    """r = 1 has none either."""
    pair = make_pair("table")
    assert float(violation(pair, pair.denoiser, 0 * pair.ratio).abs().max()) < 1e-6


@pytest.mark.parametrize("kind", ["markov", "table"])
def test_a_wrong_ratio_violates(make_pair, kind):
    """r^1.3: by Jensen's inequality its mean is above its value on average over the source."""
    pair = make_pair(kind)
    values = violation(pair, pair.denoiser, 1.3 * pair.ratio)
    assert float(values.abs().max()) > 0.05
    assert float(values.mean()) > 0.01


def test_a_wrong_denoiser_violates(make_pair):
    pair = make_pair("table")
    assert float(violation(pair, pair.target_denoiser, pair.ratio).abs().max()) > 0.05


def test_the_value_by_hand(make_pair):
    """One position, everything masked or nothing: log sum_v p(v) r(v)^2 with r(m) = 1."""
    pair = make_pair("table", length=1)
    values = violation(pair, pair.denoiser, 2 * pair.ratio)
    expected = (pair.p_x * (pair.q_x / pair.p_x) ** 2).sum().log()
    torch.testing.assert_close(values, expected.expand_as(values), rtol=0, atol=1e-9)
