"""Ancestral sampling: the law of its steps, and when its cache is right."""

import math

import pytest
import torch
from torch import Tensor

from draws import LEAST_P_VALUE, SAMPLES, seeded
from gtl.denoiser import Prediction
from gtl.exact import (
    ExactDenoiser,
    ExactRatio,
    ancestral_law,
)
from gtl.guidance import Guided
from gtl.planner import left_to_right
from gtl.sample import Ancestral, OnePosition
from gtl.schedule import Cosine, Geometric

kernels = pytest.mark.parametrize("stabilised", [True, False], ids=["stabilised", "naive"])


@kernels
@pytest.mark.parametrize(("gamma", "n_ratio"), [(1.0, None), (2.0, None), (1.0, 2), (0.0, None), (0.0, 1)])
def test_ancestral_follows_its_law(make_pair, chi_square, stabilised, gamma, n_ratio):
    """What is drawn in T = 3 steps against the enumeration of the same kernel, mask id in the middle."""
    pair = make_pair("table", mask_id=1)
    settings = {"gamma": gamma, "n_ratio": n_ratio, "steps": 3, "stabilised": stabilised}
    law = ancestral_law(Ancestral(pair.denoiser, pair.ratio, **settings), 3)
    samples = Ancestral(pair.denoiser, pair.ratio, **settings)((SAMPLES, 3), generator=seeded())
    assert chi_square(samples, law, 1) > LEAST_P_VALUE


@pytest.mark.parametrize("kind", ["table", "sparse"])
@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("n_ratio", [None, 1, 2])
def test_stabilised_kernel_is_the_posterior_of_the_guided_denoiser(make_pair, kind, gamma, n_ratio):
    """Guiding z_s and stabilising is guiding x, at every state, even where the ratio forbids everything."""
    pair = make_pair(kind, mask_id=1)
    log_x = Guided(pair.denoiser, pair.ratio, gamma, n_ratio)(pair.z).log_probs
    t, s = (torch.full((len(pair.z),), u, dtype=torch.float64) for u in (0.8, 0.5))
    expected = pair.process.posterior(pair.z, log_x, t, s).exp()
    kernel = Ancestral(pair.denoiser, pair.ratio, gamma=gamma, n_ratio=n_ratio).kernel(pair.z, 0.8, 0.5).exp()
    torch.testing.assert_close(kernel, expected, rtol=0, atol=1e-10)


def test_naive_without_a_cache_follows_its_law(make_pair, chi_square):
    pair = make_pair("table", mask_id=1)
    sampler = Ancestral(pair.denoiser, pair.ratio, gamma=2.0, steps=3, stabilised=False, cache=False)
    law = ancestral_law(sampler, 3)
    assert chi_square(sampler((SAMPLES, 3), generator=seeded()), law, 1) > LEAST_P_VALUE


@pytest.mark.parametrize(("gamma", "n_ratio"), [(1.0, None), (2.0, 2), (0.0, None)])
def test_a_cache_changes_no_sample(make_pair, gamma, n_ratio):
    pair = make_pair("table", mask_id=1)
    settings = {"gamma": gamma, "n_ratio": n_ratio, "steps": 8, "stabilised": False}
    cached, plain = (Ancestral(pair.denoiser, pair.ratio, cache=cache, **settings) for cache in (True, False))
    assert torch.equal(cached((500, 3), generator=seeded()), plain((500, 3), generator=seeded()))


@kernels
def test_many_ancestral_steps_draw_the_target(make_pair, chi_square, stabilised):
    pair = make_pair("markov")
    sampler = Ancestral(pair.denoiser, pair.ratio, steps=100, stabilised=stabilised)
    assert chi_square(sampler((5000, 3), generator=seeded()), pair.q_x, 3) > LEAST_P_VALUE


def test_ancestral_without_a_ratio_draws_the_source(make_pair, chi_square):
    pair = make_pair("table")
    samples = Ancestral(pair.denoiser, steps=100)((SAMPLES, 3), generator=seeded())
    assert chi_square(samples, pair.p_x, 3) > LEAST_P_VALUE


@kernels
@pytest.mark.parametrize("schedule", [None, Cosine(), Geometric()], ids=["log-linear", "cosine", "geometric"])
def test_masks_leave_at_the_rate_of_the_schedule(make_pair, schedule, stabilised):
    """At time s a share 1 - alpha(s) is masked; for the naive kernel this is the martingale identity."""
    pair = make_pair("table", length=4, schedule=schedule)
    sampler = Ancestral(pair.denoiser, pair.ratio, steps=5, stabilised=stabilised)
    _, trace = sampler((4000, 4), generator=seeded(), trace=True)
    assert trace.times == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    for s, state in zip(trace.times[1:-1], trace.states[1:-1], strict=True):
        chance = 1 - float(pair.process.schedule.alpha(torch.tensor(s, dtype=torch.float64)))
        rate = float((state == pair.process.mask_id).double().mean())
        assert abs(rate - chance) < 4 * math.sqrt(chance * (1 - chance) / 16_000)


def test_gamma_schedule_sees_the_time(make_pair, chi_square):
    """L = 2: the first token is drawn at t = 1, gamma = 2, the second at t = 1/2, gamma = 0."""
    pair = make_pair("table", length=2)
    sampler = OnePosition(pair.denoiser, pair.ratio, gamma=lambda t: 4 * t - 2, order=left_to_right)
    z = pair.x.clone()
    z[:, 1] = 3
    first = Guided(pair.denoiser, pair.ratio, 2.0)(torch.full_like(z, 3)).log_probs[:, 0].exp()
    second = pair.denoiser(z).log_probs[:, 1].exp()
    law = first.gather(-1, pair.x[:, :1]).squeeze(-1) * second.gather(-1, pair.x[:, 1:]).squeeze(-1)
    assert chi_square(sampler((SAMPLES, 2), generator=seeded()), law, 3) > LEAST_P_VALUE


# a cache is right only without a time input


class Fading(ExactDenoiser):
    """A denoiser whose certainty depends on t."""

    timeless = False

    def forward(self, z: Tensor, t: Tensor | None = None, positions: Tensor | None = None) -> Prediction:
        log_probs = super().forward(z, t, positions).log_probs
        return Prediction((log_probs * (2 - t.view(-1, 1, 1))).log_softmax(-1))


class FadingRatio(ExactRatio):
    """A ratio that depends on t."""

    timeless = False

    def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        return super().log_value(z) * (2 - 2 * t)


@pytest.mark.parametrize("timed", ["denoiser", "ratio"])
def test_cache_is_off_for_models_of_time(make_pair, timed):
    """With time as an input a cache is refused, and by default there is none."""
    pair = make_pair("table")
    denoiser = Fading(pair.p) if timed == "denoiser" else pair.denoiser
    ratio = FadingRatio(pair.p, pair.q) if timed == "ratio" else pair.ratio
    with pytest.raises(ValueError, match="cannot be reused at another"):
        Ancestral(denoiser, ratio, stabilised=False, cache=True)
    samples = [
        Ancestral(denoiser, ratio, steps=8, stabilised=False, cache=cache)((2000, 3), generator=seeded())
        for cache in (None, False)
    ]
    assert torch.equal(*samples)


@kernels
@pytest.mark.parametrize("timed", ["denoiser", "ratio"])
def test_models_of_time_follow_their_law(make_pair, chi_square, timed, stabilised):
    """The denoiser and the ratio are asked at the times of the enumerated kernel."""
    pair = make_pair("table")
    denoiser = Fading(pair.p) if timed == "denoiser" else pair.denoiser
    ratio = FadingRatio(pair.p, pair.q) if timed == "ratio" else pair.ratio
    sampler = Ancestral(denoiser, ratio, steps=4, stabilised=stabilised)
    samples = sampler((SAMPLES, 3), generator=seeded())
    assert chi_square(samples, ancestral_law(sampler, 3), 3) > LEAST_P_VALUE


class Counting(ExactRatio):
    """Counts the sequences that are weighed."""

    weighed = 0

    def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        self.weighed += len(z)
        return super().log_value(z)


def test_work_of_each_kernel(make_pair):
    """Stabilised: V candidates for every position, once. Naive: a cache saves work and changes no sample."""
    pair = make_pair("table")
    counts, samples = [], []
    for stabilised, cache in ((True, True), (False, True), (False, False)):
        ratio = Counting(pair.p, pair.q)
        sampler = Ancestral(pair.denoiser, ratio, steps=10, stabilised=stabilised, cache=cache)
        samples.append(sampler((50, 3), generator=seeded()))
        counts.append(ratio.weighed)
    assert counts[0] == 50 * 3 * 3
    assert counts[0] < counts[1] < counts[2]
    assert torch.equal(samples[1], samples[2])
