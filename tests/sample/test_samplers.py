"""Samplers against the exact law of what they should draw; prompts, traces and seeds for every sampler."""

import math
from collections.abc import Callable

import pytest
import torch

from draws import LEAST_P_VALUE, SAMPLES, seeded
from gtl.exact import (
    ExactDenoiser,
    ExactRatio,
    MarkovChain,
    enumerate_states,
    one_position_law,
)
from gtl.guidance import Guided
from gtl.planner import left_to_right, random_order
from gtl.process import Masked
from gtl.sample import Ancestral, OnePosition, Sampler

SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "random order": OnePosition,
    "left to right": lambda *models, **settings: OnePosition(*models, order=left_to_right, **settings),
    "stabilised": lambda *models, **settings: Ancestral(*models, steps=7, **settings),
    "naive": lambda *models, **settings: Ancestral(*models, steps=7, stabilised=False, **settings),
    "naive, no cache": lambda *models, **settings: Ancestral(
        *models, steps=7, stabilised=False, cache=False, **settings
    ),
}
every_sampler = pytest.mark.parametrize("build", SAMPLERS.values(), ids=SAMPLERS)
kernels = pytest.mark.parametrize("stabilised", [True, False], ids=["stabilised", "naive"])


# the law of one position at a time


@pytest.mark.parametrize("order", [random_order, left_to_right])
@pytest.mark.parametrize(("kind", "mask_id"), [("markov", None), ("table", 1), ("sparse", 0)])
def test_one_position_draws_the_target(make_pair, chi_square, kind, mask_id, order):
    """gamma = 1 with exact parts is q in any order; without a ratio it is p."""
    pair = make_pair(kind, mask_id=mask_id)
    guided = OnePosition(pair.denoiser, pair.ratio, order=order)
    source = OnePosition(pair.denoiser, order=order)
    for sampler, law in ((guided, pair.q_x), (source, pair.p_x)):
        samples = sampler((SAMPLES, 3), generator=seeded())
        assert chi_square(samples, law, pair.process.mask_id) > LEAST_P_VALUE


@pytest.mark.parametrize(("gamma", "n_ratio"), [(2.0, None), (1.0, 2), (0.5, 1), (0.0, 1)])
def test_one_position_follows_its_law(make_pair, chi_square, gamma, n_ratio):
    """Other gammas and pruned candidates: the law enumerated for the same guided denoiser."""
    pair = make_pair("table", mask_id=1)
    law = one_position_law(Guided(pair.denoiser, pair.ratio, gamma, n_ratio), 3)
    sampler = OnePosition(pair.denoiser, pair.ratio, gamma=gamma, n_ratio=n_ratio)
    assert chi_square(sampler((SAMPLES, 3), generator=seeded()), law, 1) > LEAST_P_VALUE


def test_left_to_right_at_gamma_two(make_pair, chi_square):
    """The product of guided conditionals from left to right: at gamma = 2 not the law of random orders."""
    pair = make_pair("table")
    guided = Guided(pair.denoiser, pair.ratio, 2.0)
    law = torch.ones(len(pair.x), dtype=torch.float64)
    for at in range(3):
        z = pair.x.clone()
        z[:, at:] = pair.process.mask_id
        law *= guided(z).log_probs[:, at].exp().gather(-1, pair.x[:, at : at + 1]).squeeze(-1)
    sampler = OnePosition(pair.denoiser, pair.ratio, gamma=2.0, order=left_to_right)
    samples = sampler((SAMPLES, 3), generator=seeded())
    assert chi_square(samples, law, 3) > LEAST_P_VALUE
    assert chi_square(samples, one_position_law(guided, 3), 3) < LEAST_P_VALUE


@every_sampler
def test_all_candidates_are_the_default(make_pair, build):
    """n_ratio = V changes nothing."""
    pair = make_pair("table")
    default = build(pair.denoiser, pair.ratio)((500, 3), generator=seeded())
    assert torch.equal(build(pair.denoiser, pair.ratio, n_ratio=3)((500, 3), generator=seeded()), default)


@every_sampler
@pytest.mark.parametrize("gamma", [0.0, 1.5])
def test_constant_gamma_schedule(make_pair, build, gamma):
    """gamma(t) = c is gamma = c."""
    pair = make_pair("table")
    number = build(pair.denoiser, pair.ratio, gamma=gamma)((500, 3), generator=seeded())
    schedule = build(pair.denoiser, pair.ratio, gamma=lambda t: torch.full_like(t, gamma))
    assert torch.equal(schedule((500, 3), generator=seeded()), number)


@every_sampler
def test_tiny_memory_budget(make_pair, build):
    """A ratio that may see few tokens at a time draws the same samples."""
    pair = make_pair("table")
    ratio = pair.ratio
    ratio.max_tokens = 7
    samples = build(pair.denoiser, ratio)((200, 3), generator=seeded())
    assert torch.equal(samples, build(pair.denoiser, pair.ratio)((200, 3), generator=seeded()))


# sparse sources: fewer possible tokens than candidates


@kernels
@pytest.mark.parametrize("mask_id", range(5))
def test_candidates_beyond_what_is_possible(stabilised, mask_id):
    """A cycle is known from one token on. With r = 1, candidates of probability zero must change nothing."""
    process = Masked(5, mask_id)
    cycle = MarkovChain(torch.eye(4).roll(1, -1), process)
    z = enumerate_states(5, 3)
    z = z[(cycle.log_marginal(z) > -torch.inf) & (z != mask_id).any(-1)]
    denoiser = ExactDenoiser(cycle)
    guided = Ancestral(denoiser, ExactRatio(cycle, cycle), n_ratio=3, stabilised=stabilised)
    kernel, expected = (sampler.kernel(z, 0.8, 0.5).exp() for sampler in (guided, Ancestral(denoiser)))
    torch.testing.assert_close(kernel, expected, rtol=0, atol=1e-10)


@kernels
def test_kernel_is_a_law_where_the_ratio_forbids_every_candidate(make_pair, stabilised):
    """The likeliest token of the source is impossible under the target and n_ratio = 1: no nan."""
    pair = make_pair("chain")
    start = torch.tensor([0.98, 0.01, 0.01])
    source = MarkovChain(pair.p.transition, pair.process, start)
    target = MarkovChain(pair.q.transition, pair.process, torch.tensor([0.0, 0.5, 0.5]))
    settings = {"n_ratio": 1, "steps": 4, "stabilised": stabilised}
    sampler = Ancestral(ExactDenoiser(source), ExactRatio(source, target), **settings)
    kernel = sampler.kernel(torch.full((1, 3), 3), 0.8, 0.5).exp()
    torch.testing.assert_close(kernel.sum(-1), torch.ones(1, 3, dtype=torch.float64), rtol=0, atol=1e-10)
    assert bool((sampler((100, 3), generator=seeded()) != 3).all())


# prompts, traces, seeds


@every_sampler
@pytest.mark.parametrize("mask_id", [None, 1])
def test_frozen_tokens_never_change(make_pair, build, mask_id):
    """A different prompt in every row, some rows all frozen or not at all; one state after another."""
    pair = make_pair("table", mask_id=mask_id)
    tokens = pair.x[torch.randint(27, (200,), generator=seeded(1))]
    frozen = torch.rand(200, 3, generator=seeded(2)) < 0.5
    frozen[0], frozen[1] = True, False
    z = torch.where(frozen, tokens, pair.process.mask_id)
    result, trace = build(pair.denoiser, pair.ratio)(z, frozen=frozen, generator=seeded(), trace=True)
    for state in trace.states:
        assert torch.equal(state[frozen], tokens[frozen])
    assert bool((result != pair.process.mask_id).all())


@every_sampler
def test_what_is_not_frozen_is_redrawn(make_pair, build):
    """Free positions of the start are ignored, and a frozen mask of shape (L,) holds for all rows."""
    pair = make_pair("table")
    frozen = torch.tensor([False, True, False])
    starts = [torch.tensor([[a, 2, b]]).expand(100, -1) for a, b in ((0, 0), (1, 2), (3, 3))]
    results = [build(pair.denoiser, pair.ratio)(z, frozen=frozen, generator=seeded()) for z in starts]
    assert all(torch.equal(result, results[0]) for result in results)
    assert bool((results[0][:, 1] == 2).all())
    free = build(pair.denoiser, pair.ratio)(starts[0], generator=seeded())
    assert torch.equal(free, build(pair.denoiser, pair.ratio)((100, 3), generator=seeded()))


@pytest.mark.parametrize("order", [random_order, left_to_right])
@pytest.mark.parametrize("prompt", [{0: 2}, {1: 0}, {0: 1, 2: 2}])
def test_infilling_is_conditional_sampling(make_pair, chi_square, prompt, order):
    """One position at a time with a prompt draws from q(x | prompt)."""
    pair = make_pair("table")
    frozen = torch.tensor([at in prompt for at in range(3)])
    z = torch.tensor([prompt.get(at, 3) for at in range(3)]).expand(SAMPLES, -1)
    samples = OnePosition(pair.denoiser, pair.ratio, order=order)(z, frozen=frozen, generator=seeded())
    agrees = torch.stack([pair.x[:, at] == v for at, v in prompt.items()]).all(0)
    assert chi_square(samples, pair.q_x * agrees / pair.q_x[agrees].sum(), 3) > LEAST_P_VALUE


@every_sampler
def test_prompt_errors(make_pair, build):
    pair = make_pair("table")
    sampler = build(pair.denoiser, pair.ratio)
    frozen = torch.tensor([True, False, False])
    with pytest.raises(ValueError, match=r"mask \(3\)"):
        sampler(torch.tensor([[3, 0, 0]]), frozen=frozen)
    with pytest.raises(ValueError, match="4 ids"):
        sampler(torch.tensor([[4, 0, 0]]), frozen=frozen)
    with pytest.raises(ValueError, match="shape"):
        sampler((1, 3), frozen=frozen)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        sampler(torch.tensor([0, 1, 2]))


@every_sampler
def test_trace_and_callback(make_pair, build):
    """steps + 1 states from all masks to the result; a revealed token stays; one callback for each step."""
    pair = make_pair("table", mask_id=1)
    seen = []
    result, trace = build(pair.denoiser, pair.ratio)(
        (50, 3),
        generator=seeded(),
        callback=lambda index, steps, z: seen.append((index, steps, z.clone())),
        trace=True,
    )
    steps = len(seen)
    assert steps in (3, 7)  # one position at a time, ancestral
    assert [(index, total) for index, total, _ in seen] == [(i, steps) for i in range(steps)]
    assert len(trace.states) == len(trace.times) == steps + 1
    assert bool((trace.states[0] == 1).all())
    assert torch.equal(trace.states[-1], result)
    assert (trace.times[0], trace.times[-1]) == (1.0, 0.0)
    for i in range(steps):
        assert trace.times[i + 1] < trace.times[i]
        assert torch.equal(trace.states[i + 1], seen[i][2])
        revealed = trace.states[i] != 1
        assert torch.equal(trace.states[i][revealed], trace.states[i + 1][revealed])


def test_one_position_reveals_one_position(make_pair):
    pair = make_pair("table", length=4)
    _, trace = OnePosition(pair.denoiser, pair.ratio)((50, 4), generator=seeded(), trace=True)
    for index, state in enumerate(trace.states):
        assert bool(((state == 3).sum(-1) == 4 - index).all())
    assert trace.times == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


@every_sampler
def test_the_seed_fixes_the_result(make_pair, build):
    """The same sampler twice (nothing is left over from the first run), and another seed."""
    pair = make_pair("table")
    sampler = build(pair.denoiser, pair.ratio)
    first, again, other = (sampler((200, 3), generator=seeded(seed)) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("build", [OnePosition, Ancestral])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": -1.0}, r"gamma=-1\.0"),
        ({"gamma": math.nan}, "gamma=nan"),
        ({"gamma": math.inf}, "gamma=inf"),
        ({"n_ratio": 0}, "n_ratio=0"),
        ({"n_ratio": 4}, r"n_ratio=4 exceeds the vocabulary \(3\)"),
    ],
)
def test_errors_name_the_value(make_pair, build, settings, message):
    pair = make_pair("table")
    with pytest.raises(ValueError, match=message):
        build(pair.denoiser, pair.ratio, **settings)


def test_ancestral_needs_a_step(make_pair):
    with pytest.raises(ValueError, match="steps=0"):
        Ancestral(make_pair("table").denoiser, steps=0)
