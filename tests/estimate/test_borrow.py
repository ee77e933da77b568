"""Importance-weighted fitting: what joins, how many, and that it does no harm."""

import copy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_lora import denoiser

from gtl.denoiser import Denoiser, NetworkDenoiser
from gtl.estimate import METHODS, Problem, Training, base
from gtl.estimate.baselines import recipe
from gtl.estimate.borrow import Borrowing, Weighing, borrowing, log_weights, weigh, weights_of
from gtl.estimate.knn import recipe as knn_recipe
from gtl.estimate.parts import Part, Trained
from gtl.estimate.screen import Screen, screen
from gtl.exact import ExactDenoiser, ExactRatio, MarkovChain
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.ratio import LocalRatio
from gtl.ratio.base import ConditionalRatio
from gtl.ratio.knn import SETTINGS
from gtl.train.loop import Diverged, Fit


def chain(stay: float, size: int = 3) -> torch.Tensor:
    matrix = torch.full((size, size), (1 - stay) / (size - 1))
    return matrix.fill_diagonal_(stay)


class Conditional(ConditionalRatio):
    """The exact ratio of conditionals, as a local ratio would give it."""

    def __init__(self, source: MarkovChain, target: MarkovChain) -> None:
        super().__init__()
        self.process, self.both = source.process, (ExactDenoiser(source), ExactDenoiser(target))

    def table(self, z, positions, t=None, context=None):
        p, q = (each(z, t, positions).log_probs for each in self.both)
        return torch.where(p == -torch.inf, 0.0, q - p)


def sequences(matrix: torch.Tensor, count: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, len(matrix), (count, 1), generator=generator)
    while x.shape[1] < length:
        x = torch.cat([x, torch.multinomial(matrix[x[:, -1]], 1, generator=generator)], 1)
    return x


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


def tiny_problem(source_rows: torch.Tensor, target: torch.Tensor, budget: int = 120, **changes: Any) -> Problem:
    torch.manual_seed(0)
    source = NetworkDenoiser(Masked(4), DiT(4, 4, 16, 1, 2)).eval()
    training = Training(
        budget=budget, folds=2, batch_size=16, evaluate_every=10, evaluation_rows=32, knn_keys=128, **changes
    )
    return Problem(training, source, (source_rows, source_rows[:0]), target, 0)


def keep_what_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out rows are likelier with borrowed rows, from here on."""
    attempt = Problem.attempt

    def scored(self: Problem, name: str, *rest: Any, **more: Any) -> Any:
        made = attempt(self, name, *rest, **more)
        made.score -= 9 * ("borrowed rows" in name)
        return made

    monkeypatch.setattr(Problem, "attempt", scored)


def test_it_is_the_method_itself_where_nothing_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tiny_problem(sequences(chain(0.2), 60, 8, 0), sequences(chain(0.9), 12, 8, 1))
    nothing = Weighing(np.zeros(60), np.inf)
    monkeypatch.setattr("gtl.estimate.borrow.weigh", lambda *_: nothing)
    for method in ("gtl-local", "finetuned"):
        plain, other = METHODS[method](problem, method), METHODS[f"{method}-iw"](problem, f"{method}-iw")
        assert other.borrowed == 0
        assert (other.score, other.steps) == (plain.score, plain.steps)
        models = [made.denoiser if made.ratio is None else made.ratio for made in (plain, other)]
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(a, b)


def test_no_steps_go_on_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there is half of the budget left."""
    problem = tiny_problem(sequences(chain(0.2), 60, 8, 0), sequences(chain(0.9), 12, 8, 1), budget=240, patience=0)
    problem = replace(problem, training=replace(problem.training, rates=[0.5, 1.0]))
    monkeypatch.setattr("gtl.estimate.borrow.weigh", lambda *_: Weighing(np.zeros(60), np.inf))
    begun = noted_fits(monkeypatch)
    assert METHODS["finetuned-iw"](problem, "finetuned-iw").borrowed == 0
    assert len(begun) == 4  # each rate on the first fold, the other fold, all rows


def test_it_is_kept_only_where_held_out_rows_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of noise join by force: they must be thrown out again, whatever the weights said."""
    source = torch.tensor([0, 1] * 4).repeat(300, 1)  # nothing ever stays
    problem = tiny_problem(source, sequences(chain(0.9), 12, 8, 1), budget=900, patience=2)
    everything = Weighing(np.ones(300), 1.0)
    monkeypatch.setattr("gtl.estimate.borrow.weigh", lambda *_: everything)
    plain, other = METHODS["gtl-local"](problem, "gtl-local"), METHODS["gtl-local-iw"](problem, "gtl-local-iw")
    assert other.borrowed == 0
    assert other.score == plain.score
    assert plain.steps < other.steps <= problem.training.budget


@pytest.mark.parametrize("where", ["fold 1", "all rows"])
def test_what_diverges_with_borrowed_rows_is_not_taken(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tiny_problem(sequences(chain(0.9), 60, 8, 5), sequences(chain(0.9), 12, 8, 1), budget=900, patience=2)
    monkeypatch.setattr("gtl.estimate.borrow.weigh", lambda *_: Weighing(np.ones(60), 1.0))
    plain, fit, failed = METHODS["finetuned"](problem, "finetuned"), Problem.fit, []

    def diverging(self: Problem, name: str, *rest: Any, **changes: Any) -> Any:
        if "borrowed rows" in name and where in name:
            failed.append(name)
            raise Diverged("the loss became nan")
        return fit(self, name, *rest, **changes)

    monkeypatch.setattr(Problem, "fit", diverging)
    made = METHODS["finetuned-iw"](problem, "finetuned-iw")
    assert len(failed) == 1
    assert (made.borrowed, made.score) == (0, plain.score)
    for a, b in zip(made.denoiser.parameters(), plain.denoiser.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", ["sparse-iw", "gtl-local-iw", "gtl-knn-iw"])
def test_in_bf16(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tiny_problem(sequences(chain(0.9), 60, 8, 5), sequences(chain(0.9), 12, 8, 1))
    weighed_in: list[str] = []

    def noted(*rest: Any, **more: Any) -> torch.Tensor:
        weighed_in.append(more["precision"])
        return log_weights(*rest, **more)

    monkeypatch.setattr("gtl.estimate.borrow.log_weights", noted)
    made = METHODS[method](replace(problem, training=replace(problem.training, precision="bf16")), method)
    assert made.borrowed is not None
    assert weighed_in == ["bf16"] * 3  # held-out rows of two folds, source rows


def test_two_methods_weigh_for_themselves(tmp_path: Path) -> None:
    """What one says of the rows is kept under its own name, so that the other's fit does not depend on it."""
    mixed = torch.cat([sequences(chain(0.9), 60, 8, 5), sequences(chain(0.2), 60, 8, 0)])
    problem = tiny_problem(mixed, sequences(chain(0.9), 12, 8, 1))
    problem.folder = tmp_path
    for method in ("finetuned-iw", "gtl-local-iw"):
        METHODS[method](problem, method)
    said = [problem.known[f"{method}-source"] for method in ("finetuned-iw", "gtl-local-iw")]
    assert not torch.equal(*said)


@pytest.mark.parametrize("weighed", [40, 20_000])
def test_which_rows_join_depends_on_the_seed(weighed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draw does, and without a screen the order of the rows."""
    problem = tiny_problem(
        sequences(chain(0.9), 60, 8, 5), sequences(chain(0.9), 12, 8, 1), 900, patience=2, weighed=weighed
    )
    monkeypatch.setattr("gtl.estimate.borrow.weigh", lambda _, scores, *__: Weighing(np.full(len(scores), 0.5), 1.0))
    joined: list[list[list[int]]] = []

    def noted(inner: Problem, part: Part) -> Trained:
        if part.held_out is None and part.start is not None:
            joined.append(sorted(part.rows.tolist()))
        return recipe(inner, part, True)

    keep_what_joins(monkeypatch)
    monkeypatch.setattr(Problem, "parts", lambda self: [(self.target[:6], self.target[6:])])
    for seed in (0, 0, 1):
        Borrowing(**vars(replace(problem, seed=seed, shared={}, known={}))).run("finetuned-iw", noted)
    assert joined[0] == joined[1] != joined[2]


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


@pytest.mark.parametrize("method", ["vanilla-iw", "finetuned-iw", "gtl-local-iw", "gtl-knn-iw"])
def test_it_stays_within_the_budget_and_needs_source_rows(method: str) -> None:
    mixed = torch.cat([sequences(chain(0.9), 60, 8, 5), sequences(chain(0.2), 60, 8, 0)])
    problem = tiny_problem(mixed, sequences(chain(0.9), 12, 8, 1))
    made = METHODS[method](problem, method)
    assert made.borrowed is not None
    assert made.steps <= problem.training.budget
    with pytest.raises(ValueError, match="give source data"):
        METHODS[method](tiny_problem(mixed[:0], problem.target), method)


def noted_fits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, float]]:
    """Name, steps and rate of every fit from here on."""
    begun, fit = [], Problem.fit

    def noted(self: Problem, name: str, *rest: Any, **changes: Any) -> Any:
        begun.append((name, rest[2], self.rate))
        return fit(self, name, *rest, **changes)

    monkeypatch.setattr(Problem, "fit", noted)
    return begun


def test_several_rates_leave_steps_for_borrowed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without early stopping: each rate on the first fold alone, then the other folds and all rows; the same once more
    with borrowed rows, in equal steps, as target rows are few."""
    problem = tiny_problem(sequences(chain(0.9), 60, 8, 5), sequences(chain(0.9), 12, 8, 1), budget=240, patience=0)
    problem = replace(problem, training=replace(problem.training, rates=[0.5, 1.0, 2.0]))
    monkeypatch.setattr("gtl.estimate.borrow.ENOUGH_STEPS", 20)
    monkeypatch.setattr("gtl.estimate.borrow.weigh", lambda *_: Weighing(np.ones(60), 1.0))
    begun = noted_fits(monkeypatch)
    made = METHODS["finetuned-iw"](problem, "finetuned-iw")
    names, each = [name for name, _, _ in begun], 240 // (2 * (3 + 1 + 1))
    for called in ("finetuned-iw", "finetuned-iw, with borrowed rows"):
        assert [name for name in names if name.startswith(f"{called}, rate") and "fold 1 of 1" in name] == [
            f"{called}, rate {rate:g}, fold 1 of 1" for rate in (0.5, 1, 2)
        ]
        assert sum(name.startswith(f"{called}, rate") and "fold 2 of 2" in name for name in names) == 1
    assert len(names) == (10 if made.borrowed else 9)
    assert made.borrowed in (0, 60)
    assert all(steps >= each for _, steps, _ in begun)
    assert 5 * each < made.steps <= 240


def test_borrowed_rows_have_a_rate_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both halves choose for themselves, by the first fold; what follows has the rate of its half."""
    problem = tiny_problem(sequences(chain(0.9), 60, 8, 5), sequences(chain(0.9), 12, 8, 1), budget=240, patience=0)
    problem = replace(problem, training=replace(problem.training, rates=[0.5, 1.0, 2.0]))
    monkeypatch.setattr("gtl.estimate.borrow.ENOUGH_STEPS", 20)
    monkeypatch.setattr("gtl.estimate.borrow.weigh", lambda *_: Weighing(np.ones(60), 1.0))
    best, attempt = {"finetuned-iw": 0.5, "finetuned-iw, with borrowed rows": 2.0}, Problem.attempt

    def scored(self: Problem, name: str, *rest: Any, **more: Any) -> Any:
        made = attempt(self, name, *rest, **more)
        made.score = abs(self.rate - best[name.partition(", rate")[0]]) - 9 * ("borrowed" in name)
        return made

    monkeypatch.setattr(Problem, "attempt", scored)
    begun = noted_fits(monkeypatch)
    made = METHODS["finetuned-iw"](problem, "finetuned-iw")
    assert made.borrowed == 60
    for called, rate in best.items():
        mine = [(name, used) for name, _, used in begun if name.partition(", rate")[0] == called]
        assert [used for name, used in mine if "fold 2" in name or "all rows" in name] == [rate, rate]


def test_with_borrowed_rows_it_goes_on_from_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rate of a fold from that fold's own model, and the final fit from the final one."""
    problem = tiny_problem(sequences(chain(0.9), 60, 8, 5), sequences(chain(0.9), 12, 8, 1), budget=240, patience=0)
    problem = replace(problem, training=replace(problem.training, rates=[0.5, 1.0]))
    monkeypatch.setattr("gtl.estimate.borrow.ENOUGH_STEPS", 20)
    monkeypatch.setattr("gtl.estimate.borrow.weigh", lambda *_: Weighing(np.ones(60), 1.0))
    seen: list[tuple[Part, float, Trained]] = []

    def noted(inner: Problem, part: Part) -> Trained:
        seen.append((part, inner.rate, recipe(inner, part, True)))
        return seen[-1][2]

    made = Borrowing(**vars(problem)).run("finetuned-iw", noted)
    assert made.borrowed == 60
    first = [one for one in seen if one[0].start is None]
    (chosen,) = (rate for part, rate, _ in first if part.held_out is None)
    (final,) = (part for part, _, _ in first if part.held_out is None)
    assert torch.equal(final.rows, problem.target)
    known = {part.number: model for part, rate, model in first if rate == chosen}
    second = [part for part, _, _ in seen if "borrowed rows" in part.name]
    assert sorted(part.number for part in second) == [0, 1, 1, 2]
    assert all(part.start is known[part.number] for part in second)


def uneven(monkeypatch: pytest.MonkeyPatch) -> tuple[Problem, list[tuple[Part, Trained]], list[np.ndarray], Any]:
    """A problem of which every fold's model says something else of source rows, and the half of them that it likes
    better joins; parts and models as they come, what was said of target rows, and what a model says."""
    generator = torch.Generator().manual_seed(0)
    every = torch.cartesian_prod(*[torch.arange(3)] * 5)
    every = every[torch.randperm(len(every), generator=generator)]
    problem = tiny_problem(every[:60], every[60:72], budget=240, patience=0)
    problem = replace(problem, training=replace(problem.training, rates=[0.5, 1.0]))
    seen: list[tuple[Part, Trained]] = []
    told: list[np.ndarray] = []
    likes = torch.randn(3, 5, generator=generator)

    def said(number: int, x: torch.Tensor) -> torch.Tensor:
        return x.float() @ likes[number]

    def weights_of(_: Problem, tried: list[Trained], x: torch.Tensor, *rest: Any) -> torch.Tensor:
        numbers = [next(part.number for part, made in seen if made is one) for one in tried]
        return torch.stack([said(number, x) for number in numbers])

    def half(target: np.ndarray, scores: np.ndarray, *rest: Any) -> Weighing:
        told.append(target)
        return Weighing((scores > np.median(scores)).astype(float), 1.0)

    monkeypatch.setattr("gtl.estimate.borrow.ENOUGH_STEPS", 20)
    monkeypatch.setattr("gtl.estimate.borrow.weights_of", weights_of)
    monkeypatch.setattr("gtl.estimate.borrow.weigh", half)
    return problem, seen, told, said


def test_the_rows_that_join_are_those_that_were_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each fold by that fold's own model, which alone has not seen its held-out rows; in the final fit by all."""
    problem, seen, told, said = uneven(monkeypatch)

    def noted(inner: Problem, part: Part) -> Trained:
        seen.append((part, recipe(inner, part, True)))
        return seen[-1][1]

    made = Borrowing(**vars(problem)).run("finetuned-iw", noted)
    assert made.borrowed == 30
    rows, parts = problem.source_data[0], problem.parts()
    for target in told:
        assert np.allclose(target, torch.cat([said(number, held) for number, (_, held) in enumerate(parts, 1)]))
    scores = {number: said(number, rows) for number in (1, 2)}
    scores[0] = (scores[1] + scores[2]) / 2
    second = [part for part, _ in seen if "borrowed rows" in part.name]
    assert sorted(part.number for part in second) == [0, 1, 1, 2]
    for part in second:
        own = parts[part.number - 1][0] if part.number else problem.target
        wanted = torch.cat([own, rows[scores[part.number] > np.median(scores[part.number])]])
        assert sorted(part.rows.tolist()) == sorted(wanted.tolist())
        if part.held_out is not None:
            assert torch.equal(part.held_out, parts[part.number - 1][1])


def test_each_fold_borrows_from_what_its_own_rows_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more source rows than are weighed, and by what models and counts say together (here, the opposite of what
    models say); the final fit from what all of them took."""
    problem, seen, _, said = uneven(monkeypatch)
    problem = replace(problem, training=replace(problem.training, weighed=24))
    keep_what_joins(monkeypatch)
    monkeypatch.setattr(Screen, "combine", lambda _, target, source: (target, -source))

    def noted(inner: Problem, part: Part) -> Trained:
        seen.append((part, recipe(inner, part, True)))
        return seen[-1][1]

    made = Borrowing(**vars(problem)).run("finetuned-iw", noted)
    assert made.borrowed == 12
    parts = problem.parts()
    known = screen(problem.source_data[0], parts, 4, 24)
    assert len({tuple(mine.tolist()) for mine in known.taken}) == 3
    second = [part for part, _ in seen if "borrowed rows" in part.name]
    assert sorted(part.number for part in second) == [0, 1, 1, 2]
    for part in second:
        own = parts[part.number - 1][0] if part.number else problem.target
        rows = known.rows[known.taken[part.number - 1]]
        scores = said(part.number, rows) if part.number else (said(1, rows) + said(2, rows)) / 2
        wanted = torch.cat([own, rows[-scores > np.median(-scores)]])
        assert sorted(part.rows.tolist()) == sorted(wanted.tolist())


@pytest.mark.parametrize(("score", "borrowed", "judged"), [(1.01, 0, None), (0.99, 60, 1)])
def test_it_is_kept_for_the_folds_that_were_tried(
    score: float, borrowed: int, judged: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two: what held-out rows of that one said before counts, and not what those of both did."""
    problem = tiny_problem(sequences(chain(0.9), 60, 8, 5), sequences(chain(0.9), 12, 8, 1), budget=240, patience=0)
    problem = replace(problem, training=replace(problem.training, rates=[0.5, 1.0]))
    monkeypatch.setattr("gtl.estimate.borrow.ENOUGH_STEPS", 40)
    monkeypatch.setattr("gtl.estimate.borrow.weigh", lambda *_: Weighing(np.ones(60), 1.0))
    attempt = Problem.attempt

    def scored(self: Problem, name: str, *rest: Any, **more: Any) -> Any:
        made = attempt(self, name, *rest, **more)
        if "borrowed rows" in name:
            assert len(made.tried) == 1
            made.score = score
        else:
            for trained, value in zip(made.tried, (1.0, 3.0), strict=False):
                trained.fits[-1].curve = {5: [value + 2], 10: [value]}
            made.score = 2.0
        return made

    monkeypatch.setattr(Problem, "attempt", scored)
    made = METHODS["finetuned-iw"](problem, "finetuned-iw")
    assert (made.borrowed, made.judged) == (borrowed, judged)
    assert made.score == (score if borrowed else 2.0)


def test_what_was_screened_is_so_much_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = torch.cat([sequences(chain(0.9), 30, 8, 5), sequences(chain(0.2), 30, 8, 0)])
    problem = tiny_problem(mixed, sequences(chain(0.9), 12, 8, 1))
    problem = replace(problem, training=replace(problem.training, weighed=20))
    taken = []

    def noted(target: np.ndarray, scores: np.ndarray, shares: tuple[float, float]) -> Weighing:
        taken.append((len(scores), shares))
        return Weighing(np.zeros(len(scores)), np.inf)

    monkeypatch.setattr("gtl.estimate.borrow.weigh", noted)
    METHODS["finetuned-iw"](problem, "finetuned-iw")
    known = screen(mixed, problem.parts(), 4, 20)
    assert known.shares != (1.0, 1.0)
    assert taken == [(20, known.shares)]


DIVERGING = {
    "none": [],
    "one": ["rate 2"],
    "two": ["rate 0.5", "rate 2"],
    "the best, where it was not tried first": ["finetuned-iw, rate 1, fold 2"],
    "the same with borrowed rows, which leaves no room": ["borrowed rows, rate 1, fold 2"],
    "all with borrowed rows": ["borrowed rows"],
    "the last fit": ["borrowed rows, rate 1, all rows"],
}


@pytest.mark.parametrize(
    ("method", "which"), [("finetuned", "one"), ("finetuned", "two"), *product(["finetuned-iw"], DIVERGING)]
)
def test_every_step_counts(method: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of fits that diverge as well, so that the method stays in its budget; another rate takes their place.
    Other methods' do not."""
    problem = tiny_problem(sequences(chain(0.9), 60, 8, 5), sequences(chain(0.9), 12, 8, 1), budget=480, patience=0)
    problem = replace(problem, training=replace(problem.training, rates=[0.5, 1.0, 2.0]))
    problem.spent.append(Fit(10_000, 0, None, 0.0, 0, {}))
    monkeypatch.setattr("gtl.estimate.borrow.ENOUGH_STEPS", 20)
    monkeypatch.setattr("gtl.estimate.borrow.weigh", lambda *_: Weighing(np.ones(60), 1.0))
    attempt, begin, fit = Problem.attempt, Problem.fit, base.fit
    names: list[str] = []
    taken: list[int] = []

    def scored(self: Problem, name: str, *rest: Any, **more: Any) -> Any:
        made = attempt(self, name, *rest, **more)
        made.score = abs(self.rate - 1.0) - 9 * ("borrowed" in name)
        return made

    def named(self: Problem, name: str, *rest: Any, **changes: Any) -> Any:
        names.append(name)
        return begin(self, name, *rest, **changes)

    def counted(*rest: Any, **more: Any) -> Any:
        made = fit(*rest, **more)
        taken.append(made.steps)
        if any(part in names[-1] for part in DIVERGING[which]):
            error = Diverged("the loss became nan")
            error.steps = made.steps
            raise error
        return made

    monkeypatch.setattr(Problem, "attempt", scored)
    monkeypatch.setattr(Problem, "fit", named)
    monkeypatch.setattr(base, "fit", counted)
    made = METHODS[method](problem, method)
    assert made.steps == sum(taken) <= 480
    if method == "finetuned":
        assert len(taken) == {"one": 6, "two": 5}[which]  # of a rate that diverges, the first fold alone
    else:
        assert made.borrowed == (60 if which in list(DIVERGING)[:4] else 0)


def test_where_no_rate_holds_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each diverges on the second fold, and there is room for all of them."""
    problem = tiny_problem(sequences(chain(0.9), 60, 8, 5), sequences(chain(0.9), 12, 8, 1), budget=480, patience=1)
    problem = replace(problem, training=replace(problem.training, rates=[0.5, 1.0]))
    fit = Problem.fit

    def diverging(self: Problem, name: str, *rest: Any, **changes: Any) -> Any:
        if "fold 2" in name:
            raise Diverged(f"{name}: the loss became nan")
        return fit(self, name, *rest, **changes)

    monkeypatch.setattr(Problem, "fit", diverging)
    with pytest.raises(Diverged, match="the loss became nan"):
        METHODS["finetuned-iw"](problem, "finetuned-iw")


def test_what_is_said_of_borrowed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many join, and how many the clipped weights are worth."""
    problem = tiny_problem(sequences(chain(0.9), 60, 8, 5), sequences(chain(0.9), 12, 8, 1))
    weighing = Weighing(np.linspace(0.2, 2, 60), 1.0)
    monkeypatch.setattr("gtl.estimate.borrow.weigh", lambda *_: weighing)
    notes: list[dict[str, Any]] = []
    problem = replace(problem, log=notes.append, label="n = 12, ")
    METHODS["gtl-knn-iw"](problem, "gtl-knn-iw")
    (said,) = [note for note in notes if "borrowed" in note]
    assert said["network"] == "n = 12, gtl-knn-iw"
    assert said["effective"] == weighing.effective
    assert 34 <= said["borrowed"] < 60


def test_a_row_is_drawn_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what two folds look at, the same rows join where their models agree on every chance."""
    generator = torch.Generator().manual_seed(0)
    every = torch.cartesian_prod(*[torch.arange(3)] * 5)
    every = every[torch.randperm(len(every), generator=generator)]
    problem = tiny_problem(every[:200], every[200:212], weighed=120)
    monkeypatch.setattr("gtl.estimate.borrow.weigh", lambda _, scores, *__: Weighing(np.full(len(scores), 0.5), 1.0))
    joined: dict[int, set[tuple[int, ...]]] = {}

    def noted(inner: Problem, part: Part) -> Trained:
        if "borrowed rows" in part.name:
            joined[part.number] = {tuple(row) for row in part.rows.tolist()} & {
                tuple(row) for row in every[:200].tolist()
            }
        return recipe(inner, part, True)

    keep_what_joins(monkeypatch)
    monkeypatch.setattr("gtl.estimate.borrow.ENOUGH_STEPS", 1)
    Borrowing(**vars(replace(problem, training=replace(problem.training, budget=400, patience=1)))).run("a-iw", noted)
    known = screen(every[:200], problem.parts(), 4, 120)
    looked_at = [{tuple(row) for row in known.rows[mine].tolist()} for mine in known.taken]
    assert {1, 2, 0} <= joined.keys()
    for one, other in ((0, 1), (1, 2)):
        both = looked_at[one - 1] & looked_at[other - 1]
        assert len(both) > 20
        assert joined[one] & both == joined[other] & both
        assert 0 < len(joined[one] & both) < len(both)


def test_what_trains_nothing_needs_no_steps() -> None:
    """So few that no network would go on with them."""
    mixed = torch.cat([sequences(chain(0.9), 60, 8, 5), sequences(chain(0.2), 60, 8, 0)])
    problem = tiny_problem(mixed, sequences(chain(0.9), 12, 8, 1), budget=10)
    seen: list[str] = []

    def noted(inner: Problem, part: Part) -> Trained:
        seen.append(part.name)
        return knn_recipe(inner, part)

    Borrowing(**vars(problem)).run("gtl-knn-iw", noted)
    assert any("borrowed rows" in name for name in seen)


def test_neighbours_are_judged_by_the_same_corruptions() -> None:
    """However many rows the store has: where they count for nothing, held-out rows are as likely."""
    problem = tiny_problem(sequences(chain(0.9), 60, 8, 5), sequences(chain(0.9), 40, 8, 1))
    problem = replace(problem, training=replace(problem.training, knn_keys=32_768))
    own, held = problem.target[:30], problem.target[30:]
    few, many = (
        knn_recipe(problem, Part(rows, held, 0)).fits[0].curve[0] for rows in (own, torch.cat([own, own.flip(0)[:9]]))
    )
    alone = next(index for index, (_, weight) in enumerate(SETTINGS) if not weight)
    assert few[alone] == many[alone]
    assert few != many


def test_a_fit_that_diverges_says_how_far_it_came() -> None:
    problem = tiny_problem(sequences(chain(0.2), 6, 8, 0), sequences(chain(0.9), 12, 8, 1))
    for weight in problem.source.parameters():
        weight.data.fill_(float("nan"))
    with pytest.raises(Diverged):
        METHODS["finetuned"](problem, "finetuned")
    (spent,) = problem.spent
    assert spent.steps == 10
    assert spent.seconds > 0


def test_too_few_steps_for_two_halves_are_not_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tiny_problem(sequences(chain(0.9), 60, 8, 5), sequences(chain(0.9), 12, 8, 1), budget=100, patience=0)
    problem = replace(problem, training=replace(problem.training, rates=[0.5, 1.0, 2.0]))
    begun = noted_fits(monkeypatch)
    METHODS["finetuned-iw"](problem, "finetuned-iw")
    assert begun
    assert all(name.startswith("finetuned, rate") for name, _, _ in begun)


@pytest.mark.parametrize(
    ("there", "few", "enough", "used"),
    [(2, 7, 20, 2), (2, 7, 40, 1), (2, 6, 20, 1), (2, 1, 20, 1), (3, 5, 15, 2), (3, 9, 15, 3)],
)
def test_as_many_folds_as_hold_out_enough(
    there: int, few: int, enough: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With borrowed rows: 12 rows in two folds hold out 6 each, in three 4."""
    problem = tiny_problem(sequences(chain(0.9), 60, 8, 5), sequences(chain(0.9), 12, 8, 1), budget=240, patience=0)
    problem = replace(problem, training=replace(problem.training, rates=[1.0, 2.0], folds=there))
    monkeypatch.setattr("gtl.estimate.borrow.ENOUGH_STEPS", enough)
    monkeypatch.setattr("gtl.estimate.borrow.FEW", few)
    monkeypatch.setattr("gtl.estimate.borrow.weigh", lambda *_: Weighing(np.ones(60), 1.0))
    begun = noted_fits(monkeypatch)
    METHODS["finetuned-iw"](problem, "finetuned-iw")
    second = [name for name, _, _ in begun if "borrowed rows" in name and "fold" in name]
    assert len(second) == 2 + used - 1


def test_borrowing_changes_nothing_of_the_problem() -> None:
    seen = []
    problem = tiny_problem(sequences(chain(0.2), 6, 8, 0), sequences(chain(0.9), 6, 8, 1))
    borrowing(lambda inner, name: seen.append(inner))(problem, "x")  # type: ignore[arg-type,return-value,func-returns-value]
    assert vars(seen[0]) == vars(problem)
