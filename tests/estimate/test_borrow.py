"""Importance-weighted fitting: what joins, how many, and that it does no harm."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from borrowed import chain, keep_what_joins, sequences, tiny_problem

from gtl.estimate import METHODS, Problem
from gtl.estimate.baselines import recipe
from gtl.estimate.borrow import Borrowing, Weighing, borrowing, log_weights
from gtl.estimate.knn import recipe as knn_recipe
from gtl.estimate.parts import Part, Trained
from gtl.estimate.screen import Screen, screen
from gtl.ratio.knn import SETTINGS


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


@pytest.mark.parametrize("method", ["vanilla-iw", "finetuned-iw", "gtl-local-iw", "gtl-knn-iw"])
def test_it_stays_within_the_budget_and_needs_source_rows(method: str) -> None:
    mixed = torch.cat([sequences(chain(0.9), 60, 8, 5), sequences(chain(0.2), 60, 8, 0)])
    problem = tiny_problem(mixed, sequences(chain(0.9), 12, 8, 1))
    made = METHODS[method](problem, method)
    assert made.borrowed is not None
    assert made.steps <= problem.training.budget
    with pytest.raises(ValueError, match="give source data"):
        METHODS[method](tiny_problem(mixed[:0], problem.target), method)


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


def test_borrowing_changes_nothing_of_the_problem() -> None:
    seen = []
    problem = tiny_problem(sequences(chain(0.2), 6, 8, 0), sequences(chain(0.9), 6, 8, 1))
    borrowing(lambda inner, name: seen.append(inner))(problem, "x")  # type: ignore[arg-type,return-value,func-returns-value]
    assert vars(seen[0]) == vars(problem)
