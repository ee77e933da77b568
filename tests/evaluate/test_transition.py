"""The Markov metric: mean over rows, unweighted, of KL(true row || estimated row)."""

import math

import pytest
import torch

from gtl.data.markov import make_matrix, sample_chain
from gtl.evaluate.transition import count_transitions, estimate_transitions, transition_kl


def test_counts_by_hand():
    """Pairs within a sequence only, never across two."""
    x = torch.tensor([[0, 0, 1, 2], [2, 0, 1, 0]])
    expected = torch.tensor([[1, 2, 0], [1, 0, 1], [1, 0, 0]])
    assert torch.equal(count_transitions(x, 3), expected.double())


def test_estimate_by_hand():
    """Row-normalised; an unseen state gets a uniform row; pseudo-counts are added to every pair."""
    x = torch.tensor([[0, 0, 0, 1]])
    expected = torch.tensor([[2 / 3, 1 / 3], [0.5, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(estimate_transitions(x, 2), expected)
    expected[0] = torch.tensor([3 / 5, 2 / 5])
    torch.testing.assert_close(estimate_transitions(x, 2, pseudo=1.0), expected)


def test_kl_by_hand():
    """Rows count the same however often their state is visited: here four transitions from 0, two from 1."""
    x = torch.tensor([[0, 0, 0, 0, 1, 1, 0]])  # 0: three to 0, one to 1; 1: one to 0, one to 1
    true = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    first = 0.6 * math.log(0.6 / 0.75) + 0.4 * math.log(0.4 / 0.25)
    second = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert transition_kl(true, x) == pytest.approx((first + second) / 2, rel=1e-6)


def test_kl_of_a_match_is_zero():
    x = torch.tensor([[0, 0, 1, 1, 0]])  # each pair once
    assert transition_kl(torch.full((2, 2), 0.5), x) == pytest.approx(0.0, abs=1e-12)


def test_unseen_pairs_are_finite():
    """A pair of the truth that never occurs counts as half a transition; an unseen row is then uniform."""
    x = torch.tensor([[0, 0, 0]])
    value = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert transition_kl(torch.full((2, 2), 0.5), x) == pytest.approx(value / 2)


def test_impossible_pairs():
    """What the truth forbids adds nothing by itself, seen or not."""
    true = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert transition_kl(true, torch.tensor([[0, 1, 0, 1]])) == pytest.approx(0.0, abs=1e-12)
    assert transition_kl(true, torch.tensor([[0, 0, 1, 0, 1, 0]])) == pytest.approx(math.log(3 / 2) / 2)


@pytest.mark.parametrize("spec", ["diagonal:0.8", "anti-diagonal:0.6", "dirichlet:4"])
def test_kl_of_true_samples_is_the_statistical_limit(spec):
    """About (V - 1) / (2 n) a row at n transitions from it; another chain is far off."""
    true = make_matrix(spec, 5)
    x = sample_chain(true, 5000, 20, torch.Generator().manual_seed(0))
    per_row = x.shape[0] * 19 / 5
    assert 0 < transition_kl(true, x) < 5 * 4 / (2 * per_row)
    assert transition_kl(make_matrix("diagonal:0.1", 5), x) > 0.05


@pytest.mark.parametrize("spec", ["diagonal:0.8", "dirichlet:1"])
def test_sampled_chains(spec):
    """First state uniform, transitions by the matrix: all within 5 standard errors."""
    true = make_matrix(spec, 4)
    x = sample_chain(true, 20_000, 6, torch.Generator().manual_seed(1))
    first = torch.bincount(x[:, 0], minlength=4) / len(x)
    assert bool(((first - 0.25).abs() < 5 * math.sqrt(0.1875 / len(x))).all())
    error = (true * (1 - true) / count_transitions(x, 4).sum(1, keepdim=True)).sqrt()
    assert bool(((estimate_transitions(x, 4) - true).abs() < 5 * error).all())
