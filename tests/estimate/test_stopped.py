"""An adaptation that was stopped goes on with the fit that it was at, and ends bit for bit like one that was not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_sparse import sparse_problem

from gtl.estimate import Adapted, Problem, base
from gtl.guidance import Guided
from gtl.progress import Bar
from gtl.train.loop import Diverged
from gtl.train.state import State

GROUP = ("finetuned", "gtl-sparse", "gtl-blend")
CHANGES: dict[str, Any] = {"budget": 40, "folds": 2, "rates": (0.5, 1), "evaluate_every": 2, "unigram": True}


class Stopping(Bar):
    """Presses Ctrl-C at the k-th step."""

    def __init__(self, at: int) -> None:
        super().__init__(1, Console(quiet=True))
        self.left = at

    def advance(self, fraction: float) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by every gradient step."""
    taken, follow = [], State.follow

    def counted(state: State, decay: float) -> None:
        taken.append(state.step)
        follow(state, decay)

    monkeypatch.setattr(State, "follow", counted)
    return taken


def all_of(made: Problem, methods: tuple[str, ...]) -> list[Adapted]:
    return [made.adapted(method) for method in methods]


def law(made: Adapted, problem: Problem) -> torch.Tensor:
    """What a target model expects of one corruption."""
    z, t = torch.full_like(problem.target[:2], problem.source.process.mask_id or 0), torch.full((2,), 0.9)
    model = made.denoiser if made.ratio is None else Guided(made.denoiser, made.ratio)
    return model(z, t).log_probs


@pytest.mark.parametrize("methods", [GROUP, ("lora",), ("finetuned-iw",), ("gtl-paper-sum",), ("gtl-local",)])
def test_goes_on_where_it_stopped(tmp_path: Path, steps: list[int], methods: tuple[str, ...]):
    """No step is taken twice, wherever it stopped."""
    changes = CHANGES | ({"budget": 160, "patience": 2} if "finetuned-iw" in methods else {})

    def fresh(**more: Any) -> Problem:
        return replace(sparse_problem(**changes), **more)

    expected = all_of(fresh(), methods)
    whole = len(steps)
    if "finetuned-iw" in methods:
        assert expected[0].borrowed
    for at in sorted({2, whole // 3, 3 * whole // 4}):
        steps.clear()
        folder = tmp_path / str(at)
        with pytest.raises(KeyboardInterrupt):
            all_of(fresh(bar=Stopping(at), folder=folder), methods)
        assert at <= len(steps) < whole
        made = all_of(fresh(folder=folder), methods)
        assert len(steps) == whole
        for one, other in zip(made, expected, strict=True):
            assert (one.score, one.gamma, one.steps, one.weights, one.borrowed) == (
                other.score, other.gamma, other.steps, other.weights, other.borrowed,
            )  # fmt: skip
            assert torch.equal(law(one, fresh()), law(other, fresh()))


def test_another_rate_may_win_after_a_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was kept of the rate that won before is not in the way."""
    made = replace(sparse_problem(**CHANGES), folder=tmp_path)
    attempt = Problem.attempt

    def diverges(self: Problem, name: str, *rest: Any) -> Any:
        if self.rate == losing:
            raise Diverged("for once")
        return attempt(self, name, *rest)

    monkeypatch.setattr(Problem, "attempt", diverges)
    results = []
    for losing in CHANGES["rates"]:  # noqa: B007  # `diverges` sees it
        results.append(replace(made, shared={}, memory={}).adapted("finetuned"))
    assert results[0].score != results[1].score


def test_a_divergence_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Were it not to come again, another rate would win after a stop than before."""
    fit, begun = base.fit, []

    def diverges(model: Any, objective: Any, settings: Any, folder: Path, **more: Any) -> Any:
        begun.append(folder.name)
        if "rate-1-fold-2" in folder.name and not begun.count("again"):
            error = Diverged("the loss became nan")
            error.steps, error.seconds = 7, 1.5
            raise error
        return fit(model, objective, settings, folder, **more)

    monkeypatch.setattr(base, "fit", diverges)
    first = replace(sparse_problem(**CHANGES), folder=tmp_path)
    made = first.adapted("finetuned")
    begun.append("again")
    second = replace(sparse_problem(**CHANGES), folder=tmp_path)
    again = second.adapted("finetuned")
    assert (again.score, again.steps) == (made.score, made.steps)
    assert not [name for name in begun[begun.index("again") :] if "rate-1-fold-2" in name]
    assert [(one.steps, one.seconds) for one in second.spent if not one.curve and one.steps == 7] == [(7, 1.5)]
    for one, other in zip(made.denoiser.parameters(), again.denoiser.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_is_made_once_is_kept(tmp_path: Path):
    """Which entries move must not change with a stop, were it only by a rounding."""
    made = sparse_problem()
    places = replace(made, folder=tmp_path).once("places", lambda: torch.tensor([3, 1]))
    again = replace(made, folder=tmp_path, known={}).once("places", lambda: torch.tensor([4]))
    assert again.equal(places)
    assert replace(made, known={}).once("places", lambda: torch.tensor([4])).tolist() == [4]
