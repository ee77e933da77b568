"""The martingale diagnosis: zero for the oracle, not for a ratio or a denoiser that is wrong."""

from typing import Any

import pytest
import torch

from gtl.categorical import categorical
from gtl.evaluate import martingale
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


@pytest.mark.parametrize("most", [1, 2])
def test_few_candidates_stand_for_all(make_pair, monkeypatch: pytest.MonkeyPatch, most: int):
    """Of four tokens: the left side, averaged over draws of the others under the same corruptions, is what it is."""
    pair = make_pair("table", vocabulary=4, mask_id=1)
    ratio, exact = 1.3 * pair.ratio, violation(pair, pair.denoiser, 1.3 * pair.ratio)
    draws = torch.Generator().manual_seed(7)
    monkeypatch.setattr(martingale, "categorical", lambda log_p, _, count: categorical(log_p, draws, count))
    x = pair.x.repeat(20, 1)
    found = []
    for _ in range(400):
        seed = torch.Generator().manual_seed(0)
        found.append(martingale_violation(pair.denoiser, ratio, x, seed, most).exp())
    found = torch.stack(found)
    error = found.std(0) / 20
    assert float(error.max()) > 0.005  # it is an estimate
    wrong = (found.mean(0) - exact.exp()) / error.clamp(min=1e-3)
    assert float(wrong.abs().max()) < 6
    assert abs(float(wrong.mean())) < 0.2


@pytest.mark.parametrize("most", [3, 4, None])
def test_enough_candidates_are_all(make_pair, most: int | None):
    pair = make_pair("chain")
    x, seed = pair.x.repeat(20, 1), torch.Generator().manual_seed(0)
    few = martingale_violation(pair.denoiser, pair.ratio, x, seed, most)
    assert torch.equal(few, violation(pair, pair.denoiser, pair.ratio))


def test_others_may_be_impossible(make_pair, monkeypatch: pytest.MonkeyPatch):
    """The likeliest are then all that there is; a single other token is drawn for what it is worth."""
    pair, other = make_pair("sparse"), make_pair("chain")
    x, seed = pair.x.repeat(20, 1), torch.Generator().manual_seed(0)

    def drawn(log_p: torch.Tensor, *rest: Any) -> torch.Tensor:
        assert bool(log_p.isfinite().any(-1).all())  # nothing can be drawn of nothing
        return categorical(log_p, *rest)

    monkeypatch.setattr(martingale, "categorical", drawn)
    few = martingale_violation(pair.target_denoiser, other.ratio, x, seed, 2)
    torch.testing.assert_close(few, violation(pair, pair.target_denoiser, other.ratio), rtol=0, atol=1e-9)
