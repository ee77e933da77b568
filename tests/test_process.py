"""The masked process: its forward marginals, its posterior by Bayes' rule, and its evidence lower bound."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtl.guidance import Guided
from gtl.process import Masked, make_process
from gtl.schedule import Cosine, Geometric, LogLinear

SCHEDULES = [LogLinear(), Cosine(), Geometric()]
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)


def times(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@schedules
@pytest.mark.parametrize("mask_id", [None, 2])
def test_corrupt_masks_with_chance_one_minus_alpha(generator, schedule, mask_id):
    process = Masked(6, mask_id, schedule)
    tokens = torch.tensor([v for v in range(6) if v != process.mask_id])
    t = times(0.1, 0.5, 0.9)
    x = tokens[torch.randint(5, (3, 40_000), generator=generator)]
    z = process.corrupt(x, t, generator)
    masked = z == process.mask_id
    assert torch.equal(z[~masked], x[~masked])
    chance = 1 - schedule.alpha(t)
    error = (masked.double().mean(-1) - chance).abs()
    assert bool((error <= 4 * (chance * (1 - chance) / 40_000).sqrt() + 1e-12).all())


def test_corrupt_at_the_ends(generator):
    """Nothing is masked at t = 0, whatever the schedule; all is at t = 1 for log-linear noise."""
    x = torch.randint(3, (2, 5000), generator=generator)
    assert torch.equal(Masked(4, schedule=Geometric()).corrupt(x, times(0.0, 0.0), generator), x)
    assert bool((Masked(4).corrupt(x, times(1.0, 1.0), generator) == 3).all())


@pytest.mark.parametrize("mask_id", [None, 0, 2])
def test_prior_is_all_masks(mask_id):
    process = Masked(6, mask_id)
    z = process.prior((2, 7), torch.device("cpu"))
    assert z.shape == (2, 7)
    assert bool((z == (5 if mask_id is None else mask_id)).all())
    assert process.vocabulary == 5


@schedules
@pytest.mark.parametrize("count", [1, 64])
def test_times_make_the_mask_rate_uniform(generator, schedule, count):
    """One of the times falls in each of `count` equal cells of 1 - alpha."""
    rate = 1 - schedule.alpha(Masked(4, schedule=schedule).times(count, torch.device("cpu"), generator))
    cells = (rate.sort().values * count).floor().long()
    assert torch.equal(cells, torch.arange(count))


def bayes(process: Masked, z_t: int, p_x: torch.Tensor, alpha_t: float, alpha_s: float) -> torch.Tensor:
    """p(z_s | z_t) = sum_x p(z_t | z_s) p(z_s | x) p(x | z_t) / p(z_t | x), from the forward kernels."""

    def kernel(after: int, before: int, keep: float) -> float:
        return keep * (after == before) + (1 - keep) * (after == process.mask_id)

    result = torch.zeros(process.num_ids, dtype=torch.float64)
    for z_s, x in itertools.product(range(process.num_ids), repeat=2):
        if p_x[x] > 0:
            path = kernel(z_t, z_s, alpha_t / alpha_s) * kernel(z_s, x, alpha_s)
            result[z_s] += path * p_x[x] / kernel(z_t, x, alpha_t)
    return result


@schedules
@pytest.mark.parametrize("mask_id", [None, 2])
@pytest.mark.parametrize(("t", "s"), [(0.9, 0.4), (0.5, 0.45), (0.7, 0.0)])
def test_posterior_is_bayes_rule(schedule, mask_id, t, s):
    """At every value of z_t, s = 0 being clean."""
    process = Masked(6, mask_id, schedule)
    alpha_t = float(schedule.alpha(times(t)))
    alpha_s = 1.0 if s == 0 else float(schedule.alpha(times(s)))
    p_masked = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    p_masked[process.mask_id] = 0
    p_x = torch.eye(6, dtype=torch.float64)  # a revealed token is known
    p_x[process.mask_id] = p_masked / p_masked.sum()
    z = torch.arange(6).unsqueeze(0)
    log_x = p_x.log().unsqueeze(0)
    log_z = process.posterior(z, log_x, times(t), times(s))
    expected = torch.stack([bayes(process, z_t, p_x[z_t], alpha_t, alpha_s) for z_t in range(6)])
    torch.testing.assert_close(log_z[0].exp(), expected, rtol=0, atol=1e-12)
    assert torch.equal(log_x, p_x.log().unsqueeze(0)), "the input was changed in place"


@given(
    t=st.floats(0.02, 1),
    fraction=st.floats(0, 0.99),
    seed=st.integers(0, 1000),
    schedule=st.sampled_from(SCHEDULES),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_posterior_is_normalised_and_keeps_revealed_tokens(t, fraction, seed, schedule, dtype):
    generator = torch.Generator().manual_seed(seed)
    process = Masked(6, 2, schedule)
    z = torch.randint(6, (3, 4), generator=generator)
    own = torch.full((3, 4, 6), -torch.inf, dtype=dtype).scatter(-1, z.unsqueeze(-1), 0.0)
    log_x = torch.randn(3, 4, 6, generator=generator, dtype=dtype)
    log_x[..., 2] = -torch.inf
    log_x = torch.where((z == 2).unsqueeze(-1), log_x.log_softmax(-1), own)
    log_z = process.posterior(z, log_x, times(t).expand(3), times(t * fraction).expand(3))
    torch.testing.assert_close(log_z.exp().sum(-1), torch.ones(3, 4, dtype=dtype), rtol=0, atol=1e-5)
    assert torch.equal(log_z[z != 2], own[z != 2])


def test_reveal_at_known_times():
    """Log-linear noise: (t - s) / t; the last step reveals everything."""
    reveal = Masked(4).reveal(times(0.8, 0.5), times(0.6, 0.0))
    torch.testing.assert_close(reveal, times(0.25, 1.0).unsqueeze(-1))


# The evidence lower bound of an exact denoiser


def maskings(x: torch.Tensor, mask_id: int) -> torch.Tensor:
    """x (L,) under each of the 2^L mask patterns."""
    pattern = torch.tensor(list(itertools.product([False, True], repeat=len(x))))
    return x.expand(len(pattern), -1).masked_fill(pattern, mask_id)


def exact_nelbo(denoiser, x: torch.Tensor) -> float:
    """sum over subsets M of 1 / (|M| C(L, |M|)) sum_{l in M} -log p(x_l | x outside M)."""
    mask_id, total = denoiser.process.mask_id, 0.0
    for z in maskings(x, mask_id):
        size = int((z == mask_id).sum())
        if size:
            log_p = denoiser(z.unsqueeze(0)).log_probs[0, torch.arange(len(x)), x][z == mask_id]
            total -= float(log_p.sum()) / (size * math.comb(len(x), size))
    return total


@pytest.mark.parametrize(("kind", "mask_id"), [("table", None), ("table", 1), ("markov", 0)])
def test_exact_nelbo_is_the_log_likelihood(make_pair, kind, mask_id):
    """The any-order autoregressive identity: with exact conditionals the bound is tight, -log p(x)."""
    pair = make_pair(kind, mask_id=mask_id)
    for x, p in zip(pair.x, pair.p_x, strict=True):
        assert exact_nelbo(pair.denoiser, x) == pytest.approx(-math.log(p), abs=1e-10)


@schedules
@pytest.mark.parametrize("timeless", [True, False])
def test_nelbo_integrand_has_the_right_mean(make_pair, schedule, timeless):
    """E over u = 1 - alpha uniform and over all 2^L maskings, by quadrature: no sampling.

    The guided denoiser is not the conditional of any one law, so its bound is not just -log p(x).
    """
    pair = make_pair("table", mask_id=1, schedule=schedule)
    denoiser = Guided(pair.denoiser, pair.ratio, gamma=2.0)
    nodes, weights = np.polynomial.legendre.leggauss(12)
    for x in pair.x[::5]:
        z = maskings(x, pair.process.mask_id)
        log_x = denoiser(z).log_probs
        size = (z == pair.process.mask_id).sum(-1).double()
        mean = 0.0
        for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
            t = schedule.inverse(times(1 - node)).expand(len(z))
            chance = node**size * (1 - node) ** (pair.length - size)
            value = pair.process.nelbo(x.expand_as(z), z, t, log_x, timeless)
            mean += weight * float((chance * value).sum())
        assert mean == pytest.approx(exact_nelbo(denoiser, x), rel=1e-9)


def test_config_round_trip():
    process = Masked(6, 2, Geometric(1e-3, 8.0))
    again = make_process(process.config())
    assert again.config() == process.config()
    assert (again.num_ids, again.mask_id, again.schedule.sigma_max) == (6, 2, 8.0)


def test_errors_name_the_value():
    with pytest.raises(ValueError, match="num_ids=1"):
        Masked(1)
    with pytest.raises(ValueError, match="mask_id=7"):
        Masked(6, 7)
