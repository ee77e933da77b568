"""Continuous time: scores and their conversions, score entropy, and Theorem 2 by integrating the reverse equation."""

import numpy as np
import pytest
import scipy.integrate
import torch
from torch import Tensor

from gtl.exact import ExactDenoiser, ExactRatio, Table, enumerate_states, forward_kernel, marginal_law, rate_matrix
from gtl.guidance import Guided
from gtl.nn.dit import DiT
from gtl.process import Masked, Uniform
from gtl.schedule import Cosine, Geometric, LogLinear
from gtl.score import ScoreDenoiser, guide_rates, reverse_rates, score_entropy
from known import LENGTH, SIZE, laws
from known import PROCESSES as ALL

PROCESSES = ALL | {
    "masked-cosine": lambda: Masked(SIZE + 1, schedule=Cosine()),
    "uniform-geometric": lambda: Uniform(SIZE, Geometric()),
}
every_process = pytest.mark.parametrize("name", PROCESSES)


def times(states: Tensor, t: float) -> Tensor:
    return torch.full((len(states),), t, dtype=torch.float64)


def neighbours(law: Tensor, num_ids: int) -> Tensor:
    """law(z with l <- v) for all z, l, v of a law (K^L,): (K^L, L, K)."""
    states = enumerate_states(num_ids, LENGTH)
    place = num_ids ** torch.arange(LENGTH - 1, -1, -1)
    index = torch.arange(len(states))[:, None, None] + (torch.arange(num_ids) - states[..., None]) * place[:, None]
    return law[index]


@pytest.mark.parametrize("schedule", [LogLinear(), Cosine(), Geometric()], ids=["log-linear", "cosine", "geometric"])
def test_the_speed_of_the_noise(schedule):
    t = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    slope = (schedule.sigma(t + 1e-6) - schedule.sigma(t - 1e-6)) / 2e-6
    torch.testing.assert_close(schedule.rate(t), slope, rtol=1e-6, atol=1e-8)


@every_process
def test_rates_are_the_slope_of_the_forward_kernel(name):
    """d/dt p(z_t | z_s) at t = s is sigma'(s) G, and the rates out of every state sum to zero."""
    process = PROCESSES[name]()
    states, step = torch.arange(process.num_ids).unsqueeze(1), 1e-7
    kernel = forward_kernel(process, states, 1, 0.4, 0.4 + step)
    slope = (kernel - torch.eye(process.num_ids)) / step / float(process.schedule.rate(torch.tensor(0.4).double()))
    into = process.rates_into(states).squeeze(1)  # row z, column y: from y into z
    torch.testing.assert_close(slope, into.T, rtol=0, atol=1e-5)
    torch.testing.assert_close(into.sum(0), torch.zeros(process.num_ids).double(), rtol=0, atol=1e-12)


@every_process
@pytest.mark.parametrize("t", [0.05, 0.5, 0.9])
def test_the_score_of_an_exact_denoiser(name, t):
    """p_t(z with l <- y) / p_t(z) wherever a forward transition leads from y to z, and the denoiser back from it."""
    process = PROCESSES[name]()
    p, _ = laws(process)
    states = enumerate_states(process.num_ids, LENGTH)
    law = marginal_law(p, LENGTH, t)
    log_x = ExactDenoiser(p)(states, times(states, t)).log_probs
    score = process.score(states, log_x, times(states, t))
    needed = (process.rates_into(states) > 0) & (law > 0)[:, None, None]
    true = neighbours(law, process.num_ids) / law.clamp(min=1e-300)[:, None, None]
    torch.testing.assert_close(score[needed], true[needed], rtol=1e-9, atol=1e-12)
    back = process.mean(states, score, times(states, t))
    torch.testing.assert_close(back.exp(), log_x.exp(), rtol=0, atol=1e-9)


@every_process
@pytest.mark.parametrize("target", [False, True])
def test_theorem_2(name, target):
    """The reverse rates, integrated from the exact law at t = 1 to 1e-3, give the law there: the source's own rates
    that of p, reweighted by the ratio that of q. One denoising step then gives q itself.

    t = 1 is where alpha = exp(-20), the end of the geometric schedule; the others are at sigma = infinity there."""
    process = PROCESSES[name]()
    p, q = laws(process)
    states = enumerate_states(process.num_ids, LENGTH)
    denoiser, ratio, law = ExactDenoiser(p), ExactRatio(p, q), q if target else p

    def matrix(t: float) -> Tensor:
        time = times(states, t)
        rates = reverse_rates(process, states, process.score(states, denoiser(states, time).log_probs, time))
        if target:
            positions = torch.arange(LENGTH).expand_as(states)
            every = torch.arange(process.num_ids).expand(*states.shape, -1)
            rates = guide_rates(rates, ratio.log_ratio(states, positions, every, time), states)
        return rate_matrix(rates.nan_to_num(0.0), process.num_ids)

    at = matrix(0.3)
    torch.testing.assert_close(at.sum(1), torch.zeros(len(states)).double(), rtol=0, atol=1e-9)
    schedule = process.schedule

    def slope(log_sigma: float, values: object) -> Tensor:
        """d law / d log sigma, backwards in time."""
        sigma = torch.tensor(log_sigma, dtype=torch.float64).exp()
        t = float(schedule.inverse(torch.exp(-sigma)))
        return -sigma * (torch.as_tensor(values) @ matrix(t))

    first = float(schedule.inverse(torch.tensor(-20.0, dtype=torch.float64).exp()))
    span = [float(schedule.sigma(torch.tensor(t, dtype=torch.float64)).log()) for t in (first, 1e-3)]
    start = marginal_law(law, LENGTH, first)
    solved = scipy.integrate.solve_ivp(slope, span, start.numpy(), "DOP853", rtol=1e-9, atol=1e-11)
    end = torch.from_numpy(solved.y[:, -1])
    torch.testing.assert_close(end, marginal_law(law, LENGTH, 1e-3), rtol=0, atol=1e-8)
    time = times(states, 1e-3)
    last = ExactDenoiser(law)(states, time).log_probs.exp()
    step = torch.ones(len(states), len(states), dtype=torch.float64)
    for position in range(LENGTH):
        step *= last[:, position][:, states[:, position]]
    clean = slice(None) if process.mask_id is None else (states != process.mask_id).all(-1)
    torch.testing.assert_close((end @ step)[clean], law.p, rtol=0, atol=1e-5)


@every_process
def test_score_entropy_is_minimal_at_the_true_score(name):
    """In expectation over x given z; any other score costs more, by the divergence between the two."""
    process = PROCESSES[name]()
    p, _ = laws(process)
    t = 0.4
    states = enumerate_states(process.num_ids, LENGTH)
    time, law = times(states, t), marginal_law(p, LENGTH, t)
    score = process.score(states, ExactDenoiser(p)(states, time).log_probs, time)

    def expected(score: Tensor) -> float:
        total = 0.0
        for x, weight in zip(p.x, p.p, strict=True):
            chance = weight * forward_kernel(process, x[None], LENGTH, 0.0, t)[0]
            seen = (chance > 0).nonzero().squeeze(-1)
            values = score_entropy(process, x.expand(len(seen), -1), states[seen], time[seen], score[seen])
            total += float(chance[seen] @ values)
        return total

    best = expected(score)
    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 0.1, 1.0):
        noise = torch.randn(score.shape, generator=generator, dtype=torch.float64)
        assert expected(score * torch.exp(size * noise)) > best
    free = torch.zeros_like(score, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [free], max_iter=1000, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )
    needed = (process.rates_into(states) > 0) & (law > 0)[:, None, None]

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = free.new_zeros(())
        for x, weight in zip(p.x, p.p, strict=True):
            chance = weight * forward_kernel(process, x[None], LENGTH, 0.0, t)[0]
            seen = (chance > 0).nonzero().squeeze(-1)
            terms = score_entropy(process, x.expand(len(seen), -1), states[seen], time[seen], free[seen].exp())
            value = value + chance[seen] @ terms
        value.backward()
        return value

    optimizer.step(closure)
    torch.testing.assert_close(free.detach().exp()[needed], score[needed], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", [LogLinear(), Cosine(), Geometric()], ids=["log-linear", "cosine", "geometric"])
def test_score_entropy_is_the_masked_nelbo(schedule):
    """Absorbing noise, normalised mean-parameterised scores: the same integrand, the constant K included."""
    process, generator = Masked(5, schedule=schedule), torch.Generator().manual_seed(0)
    x = torch.randint(4, (64, 6), generator=generator)
    t = process.times(64, x.device, generator)
    z = process.corrupt(x, t, generator)
    log_x = torch.randn(64, 6, 5, generator=generator, dtype=torch.float64)
    log_x[..., 4] = -torch.inf
    own = torch.full_like(log_x, -torch.inf).scatter(-1, z.unsqueeze(-1), 0.0)
    log_x = torch.where((z == 4).unsqueeze(-1), log_x.log_softmax(-1), own)
    nelbo = process.nelbo(x, z, t, log_x, timeless=False)
    entropy = score_entropy(process, x, z, t, process.score(z, log_x, t)) / process.alpha(t).squeeze(-1)
    torch.testing.assert_close(entropy, nelbo, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["uniform", "gaussian", "cyclic"])
def test_the_nelbo_of_mixing_noise_bounds_the_likelihood(name):
    """Integrated over u = 1 - alpha by quadrature it is the entropy for an exact law of one token, and more for any
    other denoiser."""
    process = PROCESSES[name]()
    generator = torch.Generator().manual_seed(3)
    table = torch.rand(SIZE, generator=generator, dtype=torch.float64) + 0.1
    p = Table(table, process)
    points, mass = np.polynomial.legendre.leggauss(200)
    nodes, weights = torch.from_numpy((points + 1) / 2), torch.from_numpy(mass / 2)
    states = torch.arange(SIZE).unsqueeze(1)

    def bound(denoiser: object) -> float:
        total = 0.0
        for u, w in zip(nodes.tolist(), weights.tolist(), strict=True):
            t = float(process.schedule.inverse(torch.tensor(1 - u, dtype=torch.float64)))
            kernel = forward_kernel(process, states, 1, 0.0, t)
            log_x = denoiser(states, times(states, t)).log_probs  # type: ignore[operator]
            for x in range(SIZE):
                values = process.nelbo(states[x].expand(SIZE, 1), states, times(states, t), log_x, False)
                total += w * float(p.p[x]) * float(kernel[x] @ values)
        return total

    entropy = float(-(p.p * p.p.log()).sum())
    assert bound(ExactDenoiser(p)) == pytest.approx(entropy, abs=2e-3)
    assert bound(ExactDenoiser(Table(torch.ones(SIZE, dtype=torch.float64), process))) > entropy + 1e-3


def test_a_score_network_is_a_denoiser():
    """Normalised, refuses to run without a time, and implies the score that it gave."""
    process = Uniform(4)
    torch.manual_seed(0)
    model = ScoreDenoiser(process, DiT(4, 4, width=16, depth=1, heads=2, time_conditioned=True)).eval()
    z, t = torch.randint(4, (5, 6)), torch.full((5,), 0.6)
    prediction = model(z, t)
    torch.testing.assert_close(prediction.log_probs.exp().sum(-1), torch.ones(5, 6))
    positions = torch.tensor([[3, 0]]).expand(5, -1)
    torch.testing.assert_close(model(z, t, positions).log_probs, prediction.log_probs[:, [3, 0]])
    score = process.score(z, prediction.log_probs, t)
    torch.testing.assert_close(score, torch.ones_like(score), rtol=1e-4, atol=1e-4)  # the head starts at zero: s = 1
    with pytest.raises(ValueError, match="pass t"):
        model(z)
    with pytest.raises(ValueError, match="time_conditioned"):
        ScoreDenoiser(process, DiT(4, 4, width=16, depth=1, heads=2))


def test_guided_is_a_denoiser_under_uniform_noise():
    """A clean ratio tilts p(x | z); a noisy one is refused there, for it weighs z_s."""
    process = Uniform(SIZE)
    p, q = laws(process)
    with pytest.raises(ValueError, match="weighs z_s"):
        Guided(ExactDenoiser(p), ExactRatio(p, q))
