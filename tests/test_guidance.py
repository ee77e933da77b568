"""The transfer identity p r^gamma / Z, the mask stabiliser, the candidates, and the guided denoiser."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gtl.exact import ExactRatio
from gtl.guidance import Guided, guide, stabilise, top_candidates
from gtl.process import Masked

IDS = 6
MASK = 2
seeds = st.integers(0, 10_000)
gammas = st.floats(0, 5)


def random_logs(seed: int, rows: int = 4, zeros: float = 0.3) -> Tensor:
    """Normalised log-probabilities (rows, IDS), some of them -inf but not all of a row."""
    generator = torch.Generator().manual_seed(seed)
    log_p = 2 * torch.randn(rows, IDS, generator=generator, dtype=torch.float64)
    dropped = torch.rand(rows, IDS, generator=generator) < zeros
    dropped[:, seed % IDS] = False
    return log_p.masked_fill(dropped, -torch.inf).log_softmax(-1)


def random_ratios(seed: int, rows: int = 4, count: int = IDS) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return 3 * torch.randn(rows, count, generator=generator, dtype=torch.float64)


def random_candidates(seed: int, count: int, rows: int = 4) -> Tensor:
    """Distinct ids, among them one that `random_logs` gives mass to."""
    keys = torch.rand(rows, IDS, generator=torch.Generator().manual_seed(seed + 2))
    keys[:, seed % IDS] = 2
    return keys.topk(count, -1).indices


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


# guide


@given(seed=seeds, gamma=gammas)
def test_guide_is_p_times_r_to_the_gamma(seed, gamma):
    log_p, log_r = random_logs(seed), random_ratios(seed)
    weight = log_p.exp() * log_r.exp() ** gamma
    same(guide(log_p, log_r, gamma).exp(), weight / weight.sum(-1, keepdim=True))


@given(seed=seeds, gamma=gammas, count=st.integers(1, IDS))
def test_guide_on_candidates(seed, gamma, count):
    """Only candidates have mass; it is normalised, and within them the formula is the same."""
    log_p, candidates = random_logs(seed), random_candidates(seed, count)
    log_r = random_ratios(seed, count=count)
    guided = guide(log_p, log_r, gamma, candidates)
    outside = torch.ones_like(log_p, dtype=torch.bool).scatter(-1, candidates, False)
    assert bool((guided[outside] == -torch.inf).all())
    same(guided.exp().sum(-1), torch.ones(4, dtype=torch.float64))
    weight = log_p.gather(-1, candidates).exp() * log_r.exp() ** gamma
    same(guided.gather(-1, candidates).exp(), weight / weight.sum(-1, keepdim=True))


@given(seed=seeds, gamma=gammas, shift=st.floats(-50, 50))
def test_guide_ignores_a_constant_per_row(seed, gamma, shift):
    log_p, log_r = random_logs(seed), random_ratios(seed)
    moved = log_r + shift * torch.arange(4, dtype=torch.float64).unsqueeze(-1)
    same(guide(log_p, moved, gamma).exp(), guide(log_p, log_r, gamma).exp())


@given(seed=seeds, count=st.integers(1, IDS))
def test_gamma_zero_is_the_source_among_the_candidates(seed, count):
    log_p, candidates = random_logs(seed), random_candidates(seed, count)
    log_r = random_ratios(seed, count=count)
    log_r[:, 1:].masked_fill_(log_r[:, 1:] < 0, -torch.inf)  # 0 * -inf must not be nan
    kept = torch.zeros_like(log_p).scatter(-1, candidates, 1.0) * log_p.exp()
    same(guide(log_p, log_r, 0.0, candidates).exp(), kept / kept.sum(-1, keepdim=True))


@given(seed=seeds, gamma=gammas)
def test_zero_stays_zero(seed, gamma):
    """-inf in the source stays, whatever the ratio says; -inf in the ratio forbids a token if gamma > 0."""
    log_p, log_r = random_logs(seed), random_ratios(seed)
    log_r[log_p == -torch.inf] = 1000.0
    assert bool((guide(log_p, log_r, gamma)[log_p == -torch.inf] == -torch.inf).all())
    log_r[:, (seed + 1) % IDS] = -torch.inf
    guided = guide(log_p, log_r, gamma + 0.1)
    assert bool((guided[:, (seed + 1) % IDS] == -torch.inf).all())
    same(guided.exp().sum(-1), torch.ones(4, dtype=torch.float64))


@given(seed=seeds, gamma=gammas)
def test_guiding_twice_adds_the_ratios(seed, gamma):
    log_p, first, second = random_logs(seed), random_ratios(seed), random_ratios(seed + 7)
    twice = guide(guide(log_p, first, gamma), second, 0.5)
    same(twice.exp(), guide(log_p, gamma * first + 0.5 * second, 1.0).exp())


def test_gamma_may_differ_between_rows():
    log_p, log_r = random_logs(0), random_ratios(0)
    gamma = torch.tensor([0.0, 0.5, 1.0, 3.0], dtype=torch.float64)
    rows = [guide(log_p[i], log_r[i], float(gamma[i])) for i in range(4)]
    same(guide(log_p, log_r, gamma.unsqueeze(-1)).exp(), torch.stack(rows).exp())


def test_a_ratio_that_leaves_nothing_keeps_the_source():
    log_p = random_logs(0)
    same(guide(log_p, torch.full_like(log_p, -torch.inf), 1.0), log_p)


def test_large_ratios_do_not_overflow():
    """float32, log-ratios of a thousand at gamma 10."""
    log_p = torch.full((1, 3), 1 / 3).log()
    guided = guide(log_p, torch.tensor([[1000.0, -1000.0, 1000.0]]), 10.0)
    torch.testing.assert_close(guided.exp(), torch.tensor([[0.5, 0.0, 0.5]]))


# stabilise


@given(seed=seeds)
def test_stabilise_keeps_the_chance_of_the_mask(seed):
    """q(m) = p(m), normalised, and the tokens keep their proportions."""
    log_p, log_q = random_logs(seed), random_logs(seed + 1, zeros=0)
    log_q[:, (MASK + 1) % IDS] = -torch.inf
    log_q = log_q.log_softmax(-1)
    result = stabilise(log_q, log_p, MASK)
    same(result[:, MASK].exp(), log_p[:, MASK].exp())
    same(result.exp().sum(-1), torch.ones(4, dtype=torch.float64))
    q = log_q.exp().index_fill(-1, torch.tensor([MASK]), 0.0)
    r = result.exp().index_fill(-1, torch.tensor([MASK]), 0.0)
    same(r * q.sum(-1, keepdim=True), q * r.sum(-1, keepdim=True))


def test_stabilise_at_a_certain_mask():
    """p(m) = 1 leaves no token."""
    log_p = torch.full((1, IDS), -torch.inf, dtype=torch.float64)
    log_p[:, MASK] = 0.0
    same(stabilise(random_logs(3, rows=1, zeros=0), log_p, MASK), log_p)


def test_stabilise_where_the_guided_kernel_has_only_the_mask():
    """If the ratio forbids every candidate, the kernel is still a law with the source's chance of staying."""
    log_p = random_logs(5, rows=1, zeros=0)
    log_q = torch.full_like(log_p, -torch.inf)
    log_q[:, MASK] = 0.0
    result = stabilise(log_q, log_p, MASK).exp()
    same(result.sum(-1), torch.ones(1, dtype=torch.float64))
    same(result[:, MASK], log_p[:, MASK].exp())


# candidates


@given(seed=seeds, count=st.integers(1, 5), zeros=st.sampled_from([0.0, 0.5, 0.9]), mask_id=st.integers(0, 5))
def test_top_candidates(seed, count, zeros, mask_id):
    """The `count` likeliest ids, each once, never the mask, even if fewer tokens are possible."""
    log_p = random_logs(seed, zeros=zeros)
    log_p[:, (mask_id + 1) % IDS] = 0.0
    log_p[:, mask_id] = -torch.inf
    candidates = top_candidates(log_p, count, mask_id)
    assert candidates.shape == (4, count)
    assert all(len(set(row)) == count for row in candidates.tolist())
    assert mask_id not in candidates.unique().tolist()
    same(log_p.gather(-1, candidates).sort(-1, descending=True).values, log_p.topk(count, -1).values)


# the guided denoiser


def brute_force(pair, gamma: float, n_ratio: int | None = None) -> Tensor:
    """q(x_l = v | z) ~ p(x_l = v | z) r(z with l <- v)^gamma over the n_ratio likeliest v: (K^L, L, K)."""
    process, z = pair.process, pair.z
    tokens = [v for v in range(process.num_ids) if v != process.mask_id]
    p = pair.p.log_conditional(z).exp()
    q = torch.zeros_like(p)
    for row, state in enumerate(z):
        for at in range(pair.length):
            if state[at] != process.mask_id:
                q[row, at, state[at]] = 1.0
                continue
            for v in sorted(tokens, key=lambda v: -float(p[row, at, v]))[:n_ratio]:
                changed = state.clone()
                changed[at] = v
                q[row, at, v] = p[row, at, v] * pair.ratio.log_value(changed.unsqueeze(0)).exp() ** gamma
    return q / q.sum(-1, keepdim=True)


@pytest.mark.parametrize("mask_id", [None, 1])
@pytest.mark.parametrize(("gamma", "n_ratio"), [(0.5, None), (1.0, 3), (2.0, None), (1.0, 2), (3.0, 1)])
def test_guided_denoiser_by_brute_force(make_pair, gamma, n_ratio, mask_id):
    pair = make_pair("table", mask_id=mask_id)
    guided = Guided(pair.denoiser, pair.ratio, gamma, n_ratio)
    same(guided(pair.z).log_probs.exp(), brute_force(pair, gamma, n_ratio))


@pytest.mark.parametrize("kind", ["markov", "chain", "table"])
def test_theorem_1_token_by_token(make_pair, kind):
    """gamma = 1: guided source = the target's denoiser: q(x_l | z) = p(x_l | z) r(z, l <- x_l) / r(z)."""
    pair = make_pair(kind, mask_id=1)
    guided, target = Guided(pair.denoiser, pair.ratio), pair.target_denoiser
    same(guided(pair.z).log_probs.exp(), target(pair.z).log_probs.exp())


def test_gamma_zero_is_the_source(make_pair):
    pair = make_pair("table")
    guided = Guided(pair.denoiser, pair.ratio, 0.0)
    assert torch.equal(guided(pair.z).log_probs, pair.denoiser(pair.z).log_probs)


@pytest.mark.parametrize("gamma", [0.0, 0.7])
@pytest.mark.parametrize("n_ratio", [1, 2, 3])
def test_constant_schedule_is_the_number(make_pair, gamma, n_ratio):
    """For every gamma, 0 included, and for pruned candidates too."""
    pair = make_pair("table")
    t = torch.ones(len(pair.z), dtype=torch.float64)
    number = Guided(pair.denoiser, pair.ratio, gamma, n_ratio)(pair.z, t)
    schedule = Guided(pair.denoiser, pair.ratio, lambda t: torch.full_like(t, gamma), n_ratio)(pair.z, t)
    same(schedule.log_probs.exp(), number.log_probs.exp())


def test_gamma_schedule(make_pair):
    """gamma(t) is a strength for each row; without t it is an error."""
    pair = make_pair("table")
    t = torch.linspace(0.1, 1, len(pair.z), dtype=torch.float64)
    ramp = Guided(pair.denoiser, pair.ratio, lambda t: 2 * t)
    for row in (0, 17, 42):
        alone = Guided(pair.denoiser, pair.ratio, 2 * float(t[row]))(pair.z[row : row + 1])
        same(ramp(pair.z, t).log_probs[row].exp(), alone.log_probs[0].exp())
    assert not ramp.timeless
    with pytest.raises(ValueError, match="time"):
        ramp(pair.z)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": -0.5}, r"gamma=-0\.5"),
        ({"gamma": float("nan")}, "gamma=nan"),
        ({"gamma": float("inf")}, "gamma=inf"),
        ({"n_ratio": 0}, "n_ratio=0"),
        ({"n_ratio": -3}, "n_ratio=-3"),
        ({"n_ratio": 4}, r"n_ratio=4 exceeds the vocabulary \(3\)"),
    ],
)
def test_errors_name_the_value(make_pair, settings, message):
    pair = make_pair("table")
    with pytest.raises(ValueError, match=message):
        Guided(pair.denoiser, pair.ratio, **settings)


def test_a_ratio_of_another_process_is_refused(make_pair):
    pair, other = make_pair("markov"), make_pair("markov", mask_id=0)
    assert Masked(4).mask_id == 3
    with pytest.raises(ValueError, match="mask 0"):
        Guided(pair.denoiser, ExactRatio(other.p, other.q))


@pytest.mark.parametrize("keep_tail", [False, True])
def test_guide_keeps_the_type_of_the_source(keep_tail):
    """A float64 ratio over a float32 denoiser, candidates pruned or not."""
    log_p, log_r = torch.randn(2, 4).log_softmax(-1), torch.randn(2, 2, dtype=torch.float64)
    candidates = torch.tensor([[0, 1], [3, 2]])
    assert guide(log_p, log_r, 1.0, candidates, keep_tail).dtype == torch.float32
