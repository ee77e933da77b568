"""Importance-weighted fitting: which rates are tried, in how many steps, and what a divergence costs."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from borrowed import chain, noted_fits, sequences, tiny_problem

from gtl.estimate import METHODS, Problem, base
from gtl.estimate.borrow import Borrowing, Weighing
from gtl.estimate.knn import recipe as knn_recipe
from gtl.estimate.parts import Part, Trained
from gtl.train.loop import Diverged, Fit


def test_no_steps_go_on_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there is half of the budget left."""
    problem = tiny_problem(sequences(chain(0.2), 60, 8, 0), sequences(chain(0.9), 12, 8, 1), budget=240, patience=0)
    problem = replace(problem, training=replace(problem.training, rates=[0.5, 1.0]))
    monkeypatch.setattr("gtl.estimate.borrow.weigh", lambda *_: Weighing(np.zeros(60), np.inf))
    begun = noted_fits(monkeypatch)
    assert METHODS["finetuned-iw"](problem, "finetuned-iw").borrowed == 0
    assert len(begun) == 4  # each rate on the first fold, the other fold, all rows


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
