"""Importance weights: log-ratios of whole sequences, calibrated and clipped."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from borrowed import chain, sequences, tiny_problem
from test_lora import denoiser

from gtl.denoiser import Denoiser, NetworkDenoiser
from gtl.estimate.borrow import Weighing, log_weights, weigh, weights_of
from gtl.estimate.parts import Trained
from gtl.exact import ExactDenoiser, ExactRatio, MarkovChain
from gtl.process import Masked
from gtl.ratio import LocalRatio
from gtl.ratio.base import ConditionalRatio


class Conditional(ConditionalRatio):
    """The exact ratio of conditionals, as a local ratio would give it."""

    def __init__(self, source: MarkovChain, target: MarkovChain) -> None:
        super().__init__()
        self.process, self.both = source.process, (ExactDenoiser(source), ExactDenoiser(target))

    def table(self, z, positions, t=None, context=None):
        p, q = (each(z, t, positions).log_probs for each in self.both)
        return torch.where(p == -torch.inf, 0.0, q - p)


class Parametered(ExactDenoiser):
    """An exact denoiser with a parameter, for code that asks where a model lives."""

    def __init__(self, law: MarkovChain) -> None:
        super().__init__(law)
        self.place = torch.nn.Parameter(torch.zeros(1))


class Wrapped(Denoiser):
    """The same, but for its type."""

    def __init__(self, inner: NetworkDenoiser) -> None:
        super().__init__()
        self.inner, self.process, self.timeless = inner, inner.process, inner.timeless

    def forward(self, z, t=None, positions=None):
        return self.inner(z, t, positions)


def test_the_nelbo_difference_of_exact_models_is_the_log_ratio() -> None:
    process = Masked(4)
    laws = [MarkovChain(chain(stay), process) for stay in (0.2, 0.7)]
    x = sequences(chain(0.5), 40, 6, 0)
    wanted = ExactRatio(*laws).log_value(x)
    source = Parametered(laws[0])
    made = Trained(source, Conditional(*laws), [])
    found = torch.stack([log_weights(source, [made], x, seed, draws=60)[0] for seed in range(10)])
    error = found.std(0) / 10**0.5
    assert float(((found.mean(0) - wanted) / error).abs().max()) < 6
    assert float(error.mean()) < 0.2


def test_a_row_has_its_noise_level_whatever_its_place() -> None:
    """One corruption of each row says the log-ratio on average too, of the first row as of the last."""
    laws = [MarkovChain(chain(stay), Masked(4)) for stay in (0.2, 0.7)]
    source = Parametered(laws[0])
    made, x = Trained(source, Conditional(*laws), []), torch.tensor([[0, 0, 0, 1]] * 8)
    found = torch.stack([log_weights(source, [made], x, seed, draws=1)[0] for seed in range(400)])
    wanted = ExactRatio(*laws).log_value(x)
    assert float(((found.mean(0) - wanted) / (found.std(0) / 20)).abs().max()) < 5


@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_several_models_at_once(kind: str) -> None:
    """Each says what it says alone, of the same corruptions; a network whose head runs at masks alone, what it says
    everywhere; in bf16, about that."""
    sources, x = [denoiser(kind) for _ in range(3)], sequences(chain(0.5), 30, 6, 0)
    for number, other in enumerate(sources[1:]):
        torch.manual_seed(number)
        for weight in other.parameters():
            weight.data += 0.1 * torch.randn_like(weight)
    tried = [Trained(other, None, []) for other in sources[1:]]
    both = log_weights(sources[0], tried, x, 0)
    assert both.shape == (2, 30)
    for made, values in zip(tried, both, strict=True):
        assert torch.allclose(log_weights(sources[0], [made], x, 0)[0], values, atol=1e-5)
    everywhere = [Trained(Wrapped(each), None, []) for each in sources[1:]]
    assert torch.allclose(log_weights(sources[0], everywhere, x, 0), both, atol=1e-4)
    rounded = log_weights(sources[0], tried, x, 0, precision="bf16")
    assert not torch.equal(rounded, both)
    assert float((rounded - both).std()) < 0.1 * float(both.std())


def test_a_sequence_ratio_says_it_itself() -> None:
    process = Masked(4)
    laws = [MarkovChain(chain(stay), process) for stay in (0.2, 0.7)]
    ratio, x = ExactRatio(*laws), sequences(chain(0.5), 10, 6, 0)
    source = Parametered(laws[0])
    assert torch.equal(log_weights(source, [Trained(source, ratio, [])], x, 0)[0], ratio.log_value(x))


def test_a_ratio_is_weighed_at_its_own_strength() -> None:
    laws = [MarkovChain(chain(stay), Masked(4)) for stay in (0.2, 0.7)]
    source, ratio, x = Parametered(laws[0]), Conditional(*laws), sequences(chain(0.5), 10, 6, 0)
    made = Trained(source, ratio, [])
    assert bool(log_weights(source, [made], x, 0).any())
    ratio.gamma = 0.0
    assert float(log_weights(source, [made], x, 0).abs().max()) < 1e-6


def test_what_is_drawn_to_weigh_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corruptions of the problem's seed, four of each row."""
    problem = replace(tiny_problem(sequences(chain(0.2), 60, 8, 0), sequences(chain(0.9), 12, 8, 1)), seed=7)
    other = copy.deepcopy(problem.source)
    for weight in other.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    made = Trained(other, None, [])
    known = {
        (seed, draws): log_weights(problem.source, [made], problem.target, seed, draws)
        for seed in (0, 7)
        for draws in (1, 4)
    }
    found = weights_of(problem, [made], problem.target)
    assert [key for key, values in known.items() if torch.equal(values, found)] == [(7, 4)]


def test_the_source_is_asked_once() -> None:
    """For plain networks; a guided one has asked it already, and says so."""
    made = tiny_problem(sequences(chain(0.2), 60, 8, 0), sequences(chain(0.9), 12, 8, 1))
    asked = 0

    def count(*_: object) -> None:
        nonlocal asked
        asked += 1

    made.source.network.blocks[0].register_forward_pre_hook(count)
    others = [copy.deepcopy(made.source) for _ in range(2)]
    tried = [Trained(other, None, []) for other in others]
    guided = [Trained(made.source, LocalRatio.build(made.source, width=8, depth=1, heads=2), []) for _ in range(2)]
    for models, times in ((tried, 3), (guided, 2)):
        asked = 0
        log_weights(made.source, models, made.target, 0, draws=1)
        assert asked == times  # a copy of the source counts as well


def test_rows_that_join_follow_the_target() -> None:
    """Rejection sampling by the exact ratio: a mixed source gives back its target rows and hardly anything else."""
    laws = [MarkovChain(chain(stay), Masked(4)) for stay in (0.2, 0.9)]
    ratio = ExactRatio(*laws)
    target, alike = sequences(chain(0.9), 60, 12, 1), sequences(chain(0.9), 200, 12, 2)
    source = torch.cat([alike, sequences(chain(0.2), 3800, 12, 3)])
    weighing = weigh(ratio.log_value(target).numpy(), ratio.log_value(source).numpy())
    join = np.random.default_rng(0).random(len(source)) < weighing.chance
    assert join[:200].mean() > 0.6
    assert join[:200].sum() / join.sum() > 0.9
    assert join.sum() <= weighing.effective * 1.15 + 5
    assert 10 < weighing.clip < 60  # 1 / share is 20


def test_the_clip_is_the_median_of_the_target() -> None:
    """Of five target rows the middle one has the ratio of its level, as many target as source rows in proportion."""
    target, source = np.array([0.0, 1, 1, 2, 3]), np.repeat([0.0, 1, 2, 3], [40, 10, 4, 2])
    weighing = weigh(target, source)
    assert weighing.clip == pytest.approx((2 / 5) / (10 / 56))
    assert weighing.chance == pytest.approx(np.repeat([(1 / 5) / (40 / 56) / weighing.clip, 1, 1, 1], [40, 10, 4, 2]))


def test_scores_that_differ_by_a_rounding_are_all_weighed() -> None:
    """The largest of all among them, which the curve does not know."""
    source = np.array([*np.linspace(-1, 0.9, 40), 1.0])
    weighing = weigh(np.array([0.2, 0.4, 0.6, 1 + 4.5e-16]), source)
    assert np.isfinite(weighing.clip)
    assert (weighing.chance >= 0).all()
    assert weighing.chance[-1] == 1


def test_nothing_joins_without_overlap() -> None:
    weighing = weigh(np.array([5.0, 6.0, 7.0, 9.0]), np.linspace(-9, 4, 50))
    assert np.isinf(weighing.clip)
    assert not weighing.chance.any()
    assert weighing.effective == 0


def test_calibration_is_monotone_and_averages_to_one() -> None:
    generator = np.random.default_rng(0)
    target, source = generator.normal(0.5, 1, 400), generator.normal(0, 1, 4000)
    weighing = weigh(target, source)
    order = np.argsort(source)
    assert (np.diff(weighing.ratio[order]) >= -1e-12).all()
    finite = weighing.ratio[np.isfinite(weighing.ratio)]
    assert finite.mean() == pytest.approx(1, abs=0.05)  # E_p[r] = 1 where the source covers the target
    exact = np.exp(0.5 * source - 0.125)
    middle = np.abs(source) < 1.5
    assert np.abs(np.log(weighing.ratio[middle]) - np.log(exact[middle])).mean() < 0.2


def test_effective_sample_size() -> None:
    assert Weighing(np.array([2.0, 2.0, 0.0, 0.0]), 2.0).effective == pytest.approx(2)
    assert Weighing(np.array([4.0, 1.0]), 2.0).effective == pytest.approx(1.5**2 / 1.25)
