"""The diagnosis: learning rates are looked for, and the advice follows from gains."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gtl import diagnose as module
from gtl.denoiser import NetworkDenoiser
from gtl.diagnose import Diagnosis, advise, diagnose, estimators, interval, try_out
from gtl.estimate import METHODS, Problem, Training
from gtl.estimate.parts import Part, Trained
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.train.loop import Diverged, Fit

PARTS = [(torch.zeros(4, 3).long(), torch.zeros(2, 3).long())] * 3


@pytest.fixture
def problem() -> Problem:
    torch.manual_seed(0)
    process = Masked(5)
    source = NetworkDenoiser(process, DiT(process.num_ids, process.num_ids, width=16, depth=1, heads=2))
    rows = torch.zeros(6, 3).long()
    return Problem(Training(rates=module.RATES), source, (rows, rows), rows, 0)


@pytest.mark.parametrize("best", module.RATES)
def test_the_rate_of_a_fit_is_the_one_that_short_fits_found_best(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, best: float
):
    """Every rate has a third of the steps on the first fold; all folds then have the best, and diverged ones lose."""
    asked = []

    def recipe(problem: Problem, part: Part) -> Trained:
        asked.append((problem.rate, part.number, part.steps))
        if problem.rate != best and problem.rate == max(module.RATES):
            raise Diverged("too fast")
        curve = {part.steps: [1.0 if problem.rate == best else 2.0]}
        return Trained(problem.source, None, [Fit(part.steps, part.steps, None, 1.0, 1, curve)])

    monkeypatch.setitem(module.ESTIMATORS, "finetuned", recipe)
    found = try_out(problem, "finetuned", PARTS, 31)
    assert asked == [(rate, 1, 11) for rate in module.RATES] + [(best, fold, 31) for fold in (1, 2, 3)]
    assert found.rate == best
    assert len(found.tried) == 3
    assert len(found.others) == (3 if best == max(module.RATES) else 2)
    assert [fit.steps for fit in found.fits()] == [31] * 3 + [11] * len(found.others)


def test_without_a_rate_that_works_there_is_an_error(problem: Problem, monkeypatch: pytest.MonkeyPatch):
    def recipe(problem: Problem, part: Part) -> Trained:
        raise Diverged(f"at {problem.rate:g}")

    monkeypatch.setitem(module.ESTIMATORS, "local", recipe)
    with pytest.raises(Diverged, match=r"at 0\.1"):
        try_out(problem, "local", PARTS, 9)


def test_a_rate_that_ruins_the_source_is_not_what_fine_tuning_is_judged_by(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
):
    """A source that is as good as it gets: at a wild rate fine-tuning loses a lot, and a diagnosis must not say so."""
    target = torch.randint(4, (48, 3), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(module, "Training", lambda **given: Training(**given, learning_rate=10.0))
    gain = {}
    for rates in ([1.0], [1.0, 1e-5]):
        monkeypatch.setattr(module, "RATES", rates)
        found = diagnose(problem.source, target, target, steps=20)
        gain[len(rates)] = next(each.gain for each in found.gains if each.name == "finetuned")
    assert gain[1] < -0.05
    assert gain[2] > -0.01


def test_sparse_changes_are_tried_where_the_source_is_large(problem: Problem, monkeypatch: pytest.MonkeyPatch):
    assert "sparse" not in estimators(problem.source)
    weights = sum(weight.numel() for weight in problem.source.parameters())
    monkeypatch.setattr(module, "LARGE", weights)
    assert "sparse" in estimators(problem.source)
    found = diagnose(problem.source, torch.randint(4, (9, 3)), torch.randint(4, (9, 3)), steps=3)
    assert {gain.name for gain in found.gains} == {"local", "knn", "finetuned", "sequence", "sparse"}
    monkeypatch.setattr(module, "LARGE", weights + 1)
    assert "sparse" not in estimators(problem.source)


@pytest.mark.parametrize(
    ("name", "ahead", "use", "said", "borrow"),
    [
        ("sparse", 0.1, "gtl", "gtl-sparse", "sparse-iw"),
        ("sparse", 0.0, "both", "gtl-blend", "sparse-iw"),
        ("sparse", -0.1, "fine-tuning", "gtl-sparse", "sparse-iw"),
        ("local", 0.1, "gtl", "gtl-local", "gtl-local-iw"),
        ("local", 0.0, "both", "gtl-stack", "gtl-local-iw"),
        ("local", -0.1, "fine-tuning", "gtl-local", "gtl-local-iw"),
    ],
)
def test_advice(name: str, ahead: float, use: str, said: str, borrow: str):
    """It names the best estimator, what joins it with fine-tuning, and what lets it borrow; all of them exist."""
    noise = np.linspace(-0.05, 0.05, 50)
    gains = {"knn": noise, "local": noise + 0.1, "finetuned": noise + 0.5 - ahead}
    gains[name] = np.roll(noise, 1) + 0.5
    found = Diagnosis(
        40, 90, False, [interval(*each, 1.0) for each in gains.items()], {}, 0.9, 0.1, [], 50.0, 0.5, None
    )
    advise(found, gains)
    assert found.use == use
    assert said in found.advice
    assert any(borrow in hint for hint in found.hints)
    assert {said, borrow} <= set(METHODS)
    poor = replace(found, token_overlap=0.01, warnings=[], hints=[])
    advise(poor, gains)
    assert any("overlap" in warning for warning in poor.warnings)
