"""Theorem 1 by enumeration, for every process: the source's reverse kernel, reweighted by r(z_s), is the target's."""

from itertools import pairwise

import pytest
import torch

from gtl.exact import (
    ExactDenoiser,
    ExactRatio,
    ancestral_law,
    enumerate_states,
    forward_kernel,
    joint_kernel,
    marginal_law,
)
from gtl.guidance import guide
from gtl.process import Masked
from gtl.sample import Ancestral
from known import LENGTH, PROCESSES, SIZE, Conditional, laws, total_variation

every_process = pytest.mark.parametrize("name", PROCESSES)


@every_process
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_joint_kernel_reweighted_ends_in_the_target(name, steps):
    """Started from the exact q at t = 1; q_t at every step on the way; the unguided kernel ends in p."""
    process = PROCESSES[name]()
    p, q = laws(process)
    states = enumerate_states(process.num_ids, LENGTH)
    guided, plain = marginal_law(q, LENGTH, 1.0), marginal_law(p, LENGTH, 1.0)
    grid = [1 - i / steps for i in range(steps + 1)]
    for t, s in pairwise(grid):
        kernel = joint_kernel(p, LENGTH, t, s)
        time = torch.full((len(states),), s, dtype=torch.float64)
        log_r = ExactRatio(p, q).log_value(states, time).nan_to_num(nan=0.0, neginf=-torch.inf)
        guided = guided @ guide(kernel, log_r.expand_as(kernel)).exp().nan_to_num(0.0)
        plain = plain @ kernel.exp().nan_to_num(0.0)
        torch.testing.assert_close(guided, marginal_law(q, LENGTH, s), rtol=0, atol=1e-12)
    clean = states if process.mask_id is None else states[(states != process.mask_id).all(-1)]
    assert len(clean) == SIZE**LENGTH
    for law, target in ((guided, q), (plain, p)):
        ends = law if process.mask_id is None else law[(states != process.mask_id).all(-1)]
        torch.testing.assert_close(ends, target.p, rtol=0, atol=1e-6)


@every_process
def test_the_lemma(name):
    """E_q[KL] = E_p[r KL] for any reverse model, and the reweighted source kernel has the least of it."""
    process = PROCESSES[name]()
    p, q = laws(process)
    t, s = 0.6, 0.3
    states = enumerate_states(process.num_ids, LENGTH)
    into, across = (forward_kernel(process, states, LENGTH, *span) for span in ((0.0, s), (s, t)))
    clean = [int((states == x).all(-1).nonzero()) for x in p.x]
    noisy = forward_kernel(process, states, LENGTH, 0.0, t)
    true = into[clean].unsqueeze(1) * across.T.unsqueeze(0)  # (x, z_t, z_s)
    true = true / true.sum(-1, keepdim=True).clamp(min=1e-300)

    def losses(kernel: torch.Tensor) -> tuple[float, float]:
        gap = torch.where(true > 0, true * (true / kernel.clamp(min=1e-300)).log(), 0.0).sum(-1)
        under_q = (q.p[:, None] * noisy[clean] * gap).sum()
        return float(under_q), float((p.p[:, None] * noisy[clean] * (q.p / p.p)[:, None] * gap).sum())

    log_r = ExactRatio(p, q).log_value(states, torch.full((len(states),), s, dtype=torch.float64))
    kernel = joint_kernel(p, LENGTH, t, s)
    best = guide(kernel, log_r.nan_to_num(nan=0.0, neginf=-torch.inf).expand_as(kernel)).exp().nan_to_num(0.0)
    least = losses(best)
    assert least[0] == pytest.approx(least[1], rel=1e-9)
    generator = torch.Generator().manual_seed(0)
    for size in (0.01, 1.0):
        other = best * torch.exp(size * torch.randn(best.shape, generator=generator, dtype=torch.float64))
        values = losses(other / other.sum(-1, keepdim=True).clamp(min=1e-300))
        assert values[0] == pytest.approx(values[1], rel=1e-9)
        assert values[0] > least[0]


@every_process
def test_the_wrong_level_is_wrong(name):
    """r at the level before the step (sigma_t, as the paper prints it) does not give the target."""
    process = PROCESSES[name]()
    if isinstance(process, Masked) or process.mask_id is not None:
        pytest.skip("under absorbing noise the ratio has no level")
    p, q = laws(process)
    states = enumerate_states(process.num_ids, LENGTH)
    kernel = joint_kernel(p, LENGTH, 0.5, 0.2)
    time = torch.full((len(states),), 0.5, dtype=torch.float64)
    wrong = guide(kernel, ExactRatio(p, q).log_value(states, time).expand_as(kernel)).exp()
    after = marginal_law(q, LENGTH, 0.5) @ wrong
    assert total_variation(after, marginal_law(q, LENGTH, 0.2)) > 1e-3


@every_process
@pytest.mark.parametrize("space", ["noisy", "clean"])
def test_the_factorised_kernel_converges(name, space):
    """From T to 2T steps total variation falls by at least 1.6 once T >= 4 L, guided as unguided."""
    process = PROCESSES[name]()
    p, q = laws(process)
    ratio = ExactRatio(p, q) if space == "noisy" else Conditional(p, q)
    denoiser = ExactDenoiser(p)
    for law, guide_by in ((q, ratio), (p, None)):
        start = marginal_law(law, LENGTH, 1.0)
        gaps = [
            total_variation(ancestral_law(Ancestral(denoiser, guide_by, steps=steps), LENGTH, start), law.p)
            for steps in (8, 16, 32)
        ]
        assert gaps[0] / gaps[1] >= 1.6
        assert gaps[1] / gaps[2] >= 1.6


@every_process
def test_the_prior_is_the_law_at_the_end(name):
    """What starting from the prior costs: nothing for schedules that reach alpha = 0."""
    process = PROCESSES[name]()
    p, _ = laws(process)
    states = enumerate_states(process.num_ids, LENGTH)
    prior = process.prior_probability(states).prod(-1)
    assert float(prior.sum()) == pytest.approx(1)
    assert total_variation(prior, marginal_law(p, LENGTH, 1.0)) < 1e-7


@every_process
def test_samples_follow_the_enumerated_law(name, chi_square):
    """The sampler draws what `ancestral_law` says, for both kinds of ratio."""
    process = PROCESSES[name]()
    p, q = laws(process)
    for ratio in (ExactRatio(p, q), Conditional(p, q)):
        sampler = Ancestral(ExactDenoiser(p), ratio, steps=3)
        x = sampler((20_000, LENGTH), generator=torch.Generator().manual_seed(0))
        mask_id = process.num_ids if process.mask_id is None else process.mask_id
        assert chi_square(x, ancestral_law(sampler, LENGTH), mask_id) > 1e-3
