"""From source model to target model: the folds, the rule of choice, the budget, and every method at toy size."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gtl.data.tokens import FEW, folds
from gtl.denoiser import NetworkDenoiser, nll
from gtl.estimate import METHODS, Adapted, NetworkSize, Problem, Training
from gtl.estimate.base import warm_start
from gtl.estimate.choice import choose, descend
from gtl.estimate.parts import Part, Trained
from gtl.estimate.settings import LARGE
from gtl.guidance import Guided
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.ratio import NetworkRatio
from gtl.ratio.gamma import GAMMAS
from gtl.train.loop import Fit

VOCABULARY, LENGTH = 3, 4
SIZE = NetworkSize(width=16, depth=1, heads=2, dropout=0.1)
TRAINING = Training(
    denoiser=SIZE, ratio=SIZE, budget=18, folds=2, evaluation_rows=8, batch_size=4, evaluate_every=2, warmup=2,
    finetuned_warmup=2, vanilla_epochs=3, finetuned_epochs=2,
)  # fmt: skip


def numbered(count: int) -> Tensor:
    """Rows that can be told apart."""
    return torch.arange(2 * count).view(count, 2)


def first(x: Tensor) -> list[int]:
    return sorted(x[:, 0].tolist())


# folds


@pytest.mark.parametrize(("count", "rows"), [(5, 23), (5, 5), (2, 6), (4, 2), (10, 7)])
def test_every_row_is_held_out_once(count, rows):
    x = numbered(rows)
    parts = folds(x, count, 0.1)
    assert len(parts) == min(count, rows)
    assert sorted(v for _, held_out in parts for v in first(held_out)) == first(x)
    for train, held_out in parts:
        assert sorted(first(train) + first(held_out)) == first(x)
        assert abs(len(held_out) - rows / len(parts)) < 1


def test_one_split_where_held_out_rows_are_not_few():
    assert FEW == 100
    assert len(folds(numbered(999), 5, 0.1)) == 5
    parts = folds(numbered(1000), 5, 0.1)
    assert [(len(train), len(held_out)) for train, held_out in parts] == [(900, 100)]
    assert sorted(first(parts[0][0]) + first(parts[0][1])) == first(numbered(1000))


def test_folds_are_seeded():
    x = numbered(20)
    a, b, c = ([held_out.tolist() for _, held_out in folds(x, 4, 0.1, seed)] for seed in (0, 0, 1))
    assert a == b != c
    assert a[0] != x[:5].tolist()


# the rule of choice


def test_choose_takes_the_least_mean():
    """(10, second gamma) is nobody's best but everybody's."""
    curves = [{5: [1.0, 9.0], 10: [4.0, 2.0]}, {5: [9.0, 1.0], 10: [3.0, 2.0]}]
    assert choose(curves) == (10, 1, 2.0)


def test_choose_looks_at_shared_steps_only():
    """A fold that stopped early says nothing of later steps, however good they are elsewhere."""
    curves = [{2: [3.0], 4: [2.0]}, {2: [3.0], 4: [2.5], 6: [0.0]}]
    assert choose(curves) == (4, 0, 2.25)


@pytest.mark.parametrize(("gains", "index"), [([1.0, 1.2, 0.9], 0), ([1.0, -0.9, 0.2], 1), ([0.5], 0)])
def test_a_favourite_gives_way_only_to_evidence(gains, index):
    """Ahead by more than a standard error over the folds; one fold has no error, so its best counts."""
    curves = [{2: [1.0, 1.0 + gain], 4: [9.0, 9.0]} for gain in gains]
    step, chosen, score = choose(curves, favourite=1)
    assert (step, chosen) == (2, index)
    assert score == pytest.approx(1.0 if index == 0 else 1.0 + sum(gains) / len(gains))


def test_ties_go_to_the_earlier_step():
    assert choose([{8: [1.0, 2.0], 2: [3.0, 1.0], 4: [1.0, 1.0]}]) == (2, 1, 1.0)


@pytest.mark.parametrize("best", range(7))
def test_descend_finds_the_minimum(best):
    assert descend(lambda i: (i - best) ** 2, 7) == (best, 0)


# settings


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"folds": 1}, "folds=1"),
        ({"folds": -2}, "folds=-2"),
        ({"budget": 8}, "budget=8"),
        ({"budget": 2, "folds": 0}, "budget=2"),
        ({"gamma_rule": "samples"}, "folds=0"),
        ({"link": "auto"}, "folds=0"),
        ({"label_smoothing": 1.0}, "label_smoothing=1"),
        ({"classifier_steps": 9}, "budget of 18"),
        ({"classifier_steps": 3}, "budget of 18"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"learning_rate": math.nan}, "learning_rate=nan"),
    ],
)
def test_settings_out_of_range(change: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        replace(TRAINING, **change)


def test_settings_at_the_edge():
    assert replace(TRAINING, budget=9).budget == 9
    assert replace(TRAINING, budget=3, folds=0).folds == 0
    assert replace(TRAINING, folds=0, gamma_rule="samples", link="auto").link == "auto"


# Problem.run


def problem(**changes: Any) -> Problem:
    """An untrained source model, and six target sequences."""
    torch.manual_seed(0)
    process = Masked(VOCABULARY + 1)
    source = NetworkDenoiser(process, DiT(VOCABULARY + 1, VOCABULARY + 1, **vars(SIZE)))
    nn.init.normal_(source.network.head.weight, std=0.3)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(VOCABULARY, (count, LENGTH), generator=generator) for count in (20, 6, 6)]
    return Problem(replace(TRAINING, **changes), source.eval(), (rows[0], rows[1]), rows[2], seed=3)


def with_distinct_rows(made: Problem) -> Problem:
    made.target = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * LENGTH)[:6].clone()
    return made


class Recorder:
    """A recipe that trains nothing: every fold's curve comes from a list, and every part is kept."""

    def __init__(self, curves: list[dict[int, list[float]]], guided: bool = True) -> None:
        self.curves, self.guided = [*curves, {}], guided
        self.parts: list[Part] = []
        self.ratios: list[NetworkRatio] = []

    def __call__(self, problem: Problem, part: Part) -> Trained:
        curve = self.curves[len(self.parts)]
        self.parts.append(part)
        self.ratios.append(NetworkRatio.build(problem.source.process, width=8, depth=0, heads=2))
        fits = [
            Fit(2, 2, None, 1.0, 100, {}),
            Fit(part.stop or part.steps - 2, 1, None, 1.0, 10, curve),
        ]
        return Trained(problem.source, self.ratios[-1] if self.guided else None, fits)


def row(*values: tuple[int, float]) -> list[float]:
    """Scores that are 9 but for the given gammas."""
    scores = [9.0] * len(GAMMAS)
    for gamma, value in values:
        scores[gamma] = value
    return scores


def test_run_chooses_over_folds_and_fits_all_rows():
    made = with_distinct_rows(problem())
    recipe = Recorder([{1: row((2, 1.0), (5, 2.0)), 3: row((5, 0.5))}, {1: row((2, 3.0)), 3: row((5, 1.0))}])
    result = made.run("test", recipe)
    *tried, final = recipe.parts
    assert len(tried) == 2
    assert [part.steps for part in recipe.parts] == [6, 6, 6]
    assert sum(part.steps for part in recipe.parts) <= made.training.budget
    held_out = [tuple(x) for part in tried for x in part.held_out.tolist()]
    assert sorted(held_out) == sorted(map(tuple, made.target.tolist()))
    for part in tried:
        assert part.stop is None
        assert not {*map(tuple, part.rows.tolist())} & {*map(tuple, part.held_out.tolist())}
        assert len(part.rows) + len(part.held_out) == 6
    assert torch.equal(final.rows, made.target)
    assert final.held_out is None
    assert final.stop == 3
    assert result.ratio is recipe.ratios[-1]
    assert result.gamma == result.ratio.gamma == GAMMAS[5]
    assert [ratio.gamma for ratio in recipe.ratios[:2]] == [GAMMAS[5]] * 2
    assert result.score == pytest.approx(0.75)
    assert result.steps == (2 + 4) + (2 + 4) + (2 + 3)
    assert result.weights == 110
    assert Guided(result.denoiser, result.ratio).gamma == GAMMAS[5]


@pytest.mark.parametrize(("count", "budget"), [(5, 18), (4, 17), (9, 40)])
def test_the_budget_is_shared_by_all_fits(count, budget):
    """As many folds as rows at most, rounded down."""
    made = problem(folds=2)
    made.training.folds, made.training.budget = count, budget
    recipe = Recorder([{1: row((0, 1.0))}] * min(count, 6))
    made.run("test", recipe)
    assert len(recipe.parts) == min(count, 6) + 1
    assert budget - len(recipe.parts) < sum(part.steps for part in recipe.parts) <= budget


def test_plenty_of_data_is_split_once():
    made = problem()
    made.target = made.target.repeat(200, 1)
    recipe = Recorder([{2: row((1, 1.0))}])
    made.run("test", recipe)
    tried, final = recipe.parts
    assert (len(tried.rows), len(tried.held_out), len(final.rows)) == (1080, 120, 1200)
    assert (tried.steps, final.steps, final.stop) == (9, 9, 2)


def test_a_denoiser_has_no_gamma():
    recipe = Recorder([{1: [2.0], 2: [1.0]}, {1: [2.0], 2: [3.0]}], guided=False)
    result = problem().run("test", recipe)
    assert (result.ratio, result.gamma, result.score) == (None, 1.0, 2.0)
    assert recipe.parts[-1].stop == 1


def test_without_folds_nothing_is_trained_twice():
    made = problem(folds=0)
    recipe = Recorder([{}])
    result = made.run("test", recipe)
    (part,) = recipe.parts
    assert (part.steps, part.stop, len(part.rows) + len(part.held_out)) == (18, None, 6)
    assert result.gamma == result.ratio.gamma
    assert math.isfinite(result.score)


def test_a_method_runs_once():
    made = problem()
    result = made.adapted("gtl-local")
    assert made.adapted("gtl-local") is result


# every method


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def likelihood(result: Adapted, x: Tensor) -> float:
    """The guided model's bound, which is that of the denoiser where there is no ratio."""
    model = result.denoiser if result.ratio is None else Guided(result.denoiser, result.ratio)
    return nll(model, x, draws=2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method):
    """Within its budget (a stack within those of its trained members), the source bit for bit as it was, and a
    target model that can be judged."""
    made = problem()
    before = weights(made.source)
    result = made.adapted(method)
    assert all(torch.equal(value, before[name]) for name, value in made.source.state_dict().items())
    most = made.training.budget * {"gtl-stack": 2, "gtl-blend": 2}.get(method, 1)
    assert (0 if "gtl-knn" in method else 1) <= result.steps <= most
    assert math.isfinite(likelihood(result, made.target))
    assert (result.ratio is None) == (not method.startswith("gtl-"))
    if result.ratio is not None:
        assert result.denoiser is made.source
        assert result.gamma == result.ratio.gamma
        assert result.gamma in GAMMAS
        assert not result.ratio.training
    if not method.endswith("-epochs"):
        assert math.isfinite(result.score)
    assert (result.weights > 0) == ("gtl-knn" not in method)  # neighbours train nothing


@pytest.mark.parametrize("method", ["finetuned", "gtl-local", "gtl-sequence", "gtl-direct", "gtl-paper"])
def test_methods_without_folds(method):
    made = problem(folds=0)
    before = weights(made.source)
    result = made.adapted(method)
    assert all(torch.equal(value, before[name]) for name, value in made.source.state_dict().items())
    assert 1 <= result.steps <= made.training.budget
    assert math.isfinite(likelihood(result, made.target))


@pytest.mark.parametrize("method", ["vanilla", "gtl-local", "gtl-sequence-mean"])
def test_methods_are_seeded(method):
    """The same seed gives the same model whatever the global generator holds; another seed does not."""
    models = []
    for seed, noise in ((3, 0), (3, 1), (4, 0)):
        made = problem()
        made.seed = seed
        torch.manual_seed(noise)
        result = made.adapted(method)
        models.append(weights(result.denoiser if result.ratio is None else result.ratio))
    a, b, c = models
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


@pytest.mark.parametrize("method", ["vanilla", "finetuned", "gtl-local", "gtl-sequence"])
def test_no_source_data_is_needed(method):
    made = problem()
    made.source_data = (made.target[:0], made.target[:0])
    assert made.adapted(method).steps > 0


@pytest.mark.parametrize("method", ["gtl-both", "gtl-direct", "gtl-paper"])
def test_missing_source_data_is_refused(method):
    made = problem()
    made.source_data = (made.target[:0], made.target[:0])
    with pytest.raises(ValueError, match="source data"):
        made.adapted(method)


def test_auto_pooling_keeps_the_better_one():
    made = problem(pooling="auto")
    result = made.adapted("gtl-direct")
    both = [made.adapted(f"gtl-direct-{pooling}") for pooling in ("sum", "mean")]
    assert result is min(both, key=lambda each: each.score)
    assert [each.ratio.network.pooling for each in both] == ["sum", "mean"]


def test_warm_start_copies_all_but_the_head():
    """Into a network of the same width; any other is left as it is."""
    made = problem()
    ratio = made.fresh_sequence_ratio("sum")
    for name, value in ratio.network.dit.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(value, made.source.network.state_dict()[name])
    torch.manual_seed(5)
    narrow = DiT(4, 1, width=8, depth=1, heads=2)
    before = copy.deepcopy(narrow.state_dict())
    warm_start(narrow, made.source.network)
    assert all(torch.equal(value, before[name]) for name, value in narrow.state_dict().items())
    made.training.warm_start = False
    cold = made.fresh_sequence_ratio("sum")
    assert not torch.equal(cold.network.dit.embedding.weight, made.source.network.embedding.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_a_warm_start_takes_over_what_the_source_embeds(tied):
    source = DiT(7, 7, 16, 2, 2, tied=tied)
    network = DiT(7, 1, 16, 1, 2)
    warm_start(network, source)
    z = torch.arange(7).unsqueeze(0)
    torch.testing.assert_close(network.layers(z)[1], source.layers(z)[1])


@pytest.mark.parametrize(
    ("asked", "vocabulary", "count"), [(None, 5, 5), (None, 1024, 1024), (None, 2000, 256), (64, 2000, 64), (64, 5, 5)]
)
def test_candidates_of_a_fit(asked, vocabulary, count):
    assert Training(n_ratio=asked).candidates(vocabulary) == count


@pytest.mark.parametrize(
    ("given", "small", "large"),
    [
        ({}, (2e-3, 2e-3), (3e-4, 8e-4)),
        ({"learning_rate": 1e-4}, (1e-4, 1e-4), (1e-4, 1e-4)),
        ({"finetuned_learning_rate": 5e-3}, (5e-3, 5e-3), (5e-3, 5e-3)),
        ({"finetuned_learning_rate": 5e-3, "sparse_learning_rate": 6e-3}, (5e-3, 6e-3), (5e-3, 6e-3)),
    ],
)
def test_large_sources_are_tuned_gently_unless_told_otherwise(
    given: dict[str, float], small: tuple[float, float], large: tuple[float, float]
):
    training = Training(**given)  # type: ignore[arg-type]
    for weights, rates in ((LARGE - 1, small), (LARGE, large)):
        assert (training.tuning_rate(weights), training.sparse_rate(weights)) == rates


@pytest.mark.parametrize("method", ["finetuned", "sparse"])
def test_fits_have_the_rate_of_their_source(method: str, monkeypatch: pytest.MonkeyPatch):
    seen = []

    def noted(self: Problem, *_: object, **changes: float) -> None:
        seen.append(changes["learning_rate"])
        raise InterruptedError

    monkeypatch.setattr(Problem, "fit", noted)
    for large in (1, 10**9):
        monkeypatch.setattr("gtl.estimate.settings.LARGE", large)
        with pytest.raises(InterruptedError):
            problem().adapted(method)
    assert seen == [{"finetuned": 3e-4, "sparse": 8e-4}[method], 2e-3]
