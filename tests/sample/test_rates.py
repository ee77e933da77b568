"""Samplers in continuous time, by enumeration: Euler, tau-leaping, first hitting, remasking, correctors."""

import pytest
import torch

from gtl.exact import ExactDenoiser, ExactRatio, ancestral_law, enumerate_states, factorised, marginal_law
from gtl.process import Masked, Uniform
from gtl.sample import Ancestral, Euler, FirstHitting, Remasking, TauLeaping, Thinning
from known import LENGTH, PROCESSES, Conditional, laws, total_variation

every_process = pytest.mark.parametrize("name", PROCESSES)
leaps = pytest.mark.parametrize("kind", [Euler, TauLeaping])


@every_process
@leaps
@pytest.mark.parametrize("space", ["noisy", "clean", None])
def test_they_converge(name, kind, space):
    """Halving the steps' size takes a third or more off the total variation, guided as unguided."""
    p, q = laws(PROCESSES[name]())
    ratio = {"noisy": ExactRatio(p, q), "clean": Conditional(p, q), None: None}[space]
    law = p if space is None else q
    start = marginal_law(law, LENGTH, 1.0)
    gaps = [
        total_variation(ancestral_law(kind(ExactDenoiser(p), ratio, steps=steps), LENGTH, start), law.p)
        for steps in (16, 32, 64)
    ]
    assert gaps[2] < 0.03
    assert gaps[0] / gaps[1] >= 1.5
    assert gaps[1] / gaps[2] >= 1.5


@every_process
@leaps
def test_kernels_are_distributions(name, kind):
    """At every step and with correctors, few steps or many; nothing noisy is left at the end."""
    process = PROCESSES[name]()
    p, q = laws(process)
    states = enumerate_states(process.num_ids, LENGTH)
    sampler = kind(ExactDenoiser(p), Conditional(p, q), steps=3)
    for t, s in sampler.times(states):
        reached = marginal_law(p, LENGTH, t) > 0
        total = sampler.kernel(states, t, s).exp().sum(-1)[reached]
        torch.testing.assert_close(total, torch.ones_like(total))
    if process.mask_id is not None:
        assert float(ancestral_law(sampler, LENGTH).sum()) == pytest.approx(1)


@every_process
@leaps
def test_samples_follow_the_law(name, kind, chi_square):
    process = PROCESSES[name]()
    p, q = laws(process)
    mask_id = process.num_ids if process.mask_id is None else process.mask_id
    for ratio in (ExactRatio(p, q), Conditional(p, q)):
        sampler = kind(ExactDenoiser(p), ratio, steps=6)
        x = sampler((20_000, LENGTH), generator=torch.Generator().manual_seed(0))
        assert chi_square(x, ancestral_law(sampler, LENGTH), mask_id) > 1e-3


@every_process
@leaps
def test_correctors_leave_the_marginal_alone(name, kind):
    """q_t stays q_t up to the square of the step; a wrong law moves toward it."""
    process = PROCESSES[name]()
    p, q = laws(process)
    states = enumerate_states(process.num_ids, LENGTH)
    before, other = marginal_law(q, LENGTH, 0.7), marginal_law(p, LENGTH, 0.7)
    moved = []
    for size in (0.05, 0.025):
        sampler = kind(ExactDenoiser(p), ExactRatio(p, q), correctors=1, corrector_size=size)
        kernel = factorised(sampler.corrector(states, 0.7)).nan_to_num(0.0)
        moved.append(total_variation(before @ kernel, before))
    assert moved[0] < 0.01
    assert moved[0] / moved[1] > 3
    assert total_variation(other @ kernel, before) < total_variation(other, before)


@leaps
def test_correctors_help_coarse_steps(kind):
    """Eight steps with correctors end closer to the target than eight without."""
    p, q = laws(Uniform(3))
    gaps = []
    for correctors in (0, 3):
        sampler = kind(ExactDenoiser(p), ExactRatio(p, q), steps=8, correctors=correctors)
        states = enumerate_states(3, LENGTH)
        law = marginal_law(q, LENGTH, 1.0)
        for t, s in sampler.times(states):
            law = law @ factorised(sampler.kernel(states, t, s))
            for _ in range(correctors if s > 0 else 0):
                law = law @ factorised(sampler.corrector(states, s))
        gaps.append(total_variation(law, q.p))
    assert gaps[1] < gaps[0]


@pytest.mark.parametrize("name", ["masked"])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_first_hitting_jumps_at_most_once_a_position(name, rows):
    p, q = laws(PROCESSES[name]())
    calls = []
    denoiser = ExactDenoiser(p)
    denoiser.register_forward_hook(lambda *_: calls.append(1))
    x = FirstHitting(denoiser, ExactRatio(p, q))((rows, LENGTH), generator=torch.Generator().manual_seed(0))
    assert len(calls) == LENGTH
    assert bool((x != p.process.mask_id).all())


class Timed(ExactDenoiser):
    """A denoiser that depends on the time: p early, q late."""

    timeless = False

    def __init__(self, p, q):
        super().__init__(p)
        self.late = ExactDenoiser(q)

    def forward(self, z, t=None, positions=None):
        early, late = super().forward(z, t, positions), self.late(z, t, positions)
        first = t.view(-1, 1, 1) > 0.5
        return early._replace(log_probs=torch.where(first, early.log_probs, late.log_probs))


def test_first_hitting_sees_the_right_times(chi_square):
    """Against ancestral sampling of a model of time with so many steps that two jumps hardly ever share one."""
    p, q = laws(Masked(4))
    fine = ancestral_law(Ancestral(Timed(p, q), steps=512), LENGTH)
    x = FirstHitting(Timed(p, q))((10_000, LENGTH), generator=torch.Generator().manual_seed(1))
    assert chi_square(x, fine, 3) > 1e-3
    coarse = Ancestral(Timed(p, q), steps=2)((10_000, LENGTH), generator=torch.Generator().manual_seed(1))
    assert chi_square(coarse, fine, 3) < 1e-3


def test_first_hitting_is_exact(chi_square):
    p, q = laws(Masked(4))
    x = FirstHitting(ExactDenoiser(p), ExactRatio(p, q))((20_000, LENGTH), generator=torch.Generator().manual_seed(0))
    assert chi_square(x, q.p, 3) > 1e-3
    with pytest.raises(ValueError, match="use TauLeaping"):
        FirstHitting(ExactDenoiser(laws(Uniform(3))[0]))


@pytest.mark.parametrize(("name", "windows"), [("uniform", 2), ("uniform-cosine", 16), ("gaussian", 8), ("cyclic", 4)])
def test_thinning_is_exact(name, windows, chi_square):
    """Whatever the windows, its samples are the target's own law, for both kinds of ratio, and the source's without."""
    p, q = laws(PROCESSES[name]())
    for ratio, law in ((ExactRatio(p, q), q), (Conditional(p, q), q), (None, p)):
        sampler = Thinning(ExactDenoiser(p), ratio, windows=windows)
        x = sampler((2_000, LENGTH), generator=torch.Generator().manual_seed(0))
        assert chi_square(x, law.p, p.process.num_ids) > 1e-3
        other = p if law is q else q
        assert chi_square(x, other.p, p.process.num_ids) < 1e-3


def test_thinning_checks_its_bound(monkeypatch):
    """A bound that is too tight fails, and the windows are cut until it holds."""
    p, q = laws(Uniform(3))
    monkeypatch.setattr("gtl.sample.thinning.SAFETY", 0.9)
    sampler = Thinning(ExactDenoiser(p), ExactRatio(p, q), windows=4)
    x = sampler((50, LENGTH), generator=torch.Generator().manual_seed(0))
    assert sampler.halved > 0
    assert bool((x < 3).all())
    with pytest.raises(ValueError, match="use FirstHitting"):
        Thinning(ExactDenoiser(laws(Masked(4))[0]))


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
def test_remasking(eta, chi_square):
    """Its samples follow its enumerated law; without remasking it is ancestral sampling; it converges to q."""
    p, q = laws(Masked(4))
    denoiser, ratio = ExactDenoiser(p), ExactRatio(p, q)
    sampler = Remasking(denoiser, ratio, steps=4, eta=eta)
    law = ancestral_law(sampler, LENGTH)
    assert chi_square(sampler((20_000, LENGTH), generator=torch.Generator().manual_seed(0)), law, 3) > 1e-3
    if eta == 0:
        torch.testing.assert_close(law, ancestral_law(Ancestral(denoiser, ratio, steps=4), LENGTH))
    gaps = [
        total_variation(ancestral_law(Remasking(denoiser, ratio, steps=n, eta=eta), LENGTH), q.p) for n in (16, 32, 64)
    ]
    assert gaps[2] < gaps[1] < gaps[0]


def test_bad_settings():
    p, _ = laws(Masked(4))
    for build, message in (
        (lambda: Remasking(ExactDenoiser(p), eta=1.5), "eta=1.5"),
        (lambda: Remasking(ExactDenoiser(laws(Uniform(3))[0])), "masked noise"),
        (lambda: Euler(ExactDenoiser(p), steps=0), "steps=0"),
        (lambda: TauLeaping(ExactDenoiser(p), corrector_size=0.0), "corrector_size=0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


@every_process
@pytest.mark.parametrize("kind", [Ancestral, Euler, TauLeaping, Thinning, Remasking, FirstHitting])
def test_frozen_tokens_stay(name, kind):
    process = PROCESSES[name]()
    p, q = laws(process)
    if kind in (Remasking, FirstHitting) and name != "masked":
        pytest.skip("for masked noise")
    if kind is Thinning and process.mask_id is not None:
        pytest.skip("for noise without masks")
    z = p.x[torch.arange(200) % len(p.x)]
    frozen = torch.tensor([True, False]).expand_as(z)
    x = kind(ExactDenoiser(p), Conditional(p, q))(z, frozen=frozen, generator=torch.Generator().manual_seed(0))
    assert torch.equal(x[:, 0], z[:, 0])
    assert not torch.equal(x[:, 1], z[:, 1])
