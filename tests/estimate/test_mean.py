"""The fits of folds, averaged; and learning rates that are tried."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_lora import problem

from gtl.denoiser import nll
from gtl.estimate import Problem, Training
from gtl.estimate.mean import mean_of_weights
from gtl.guidance import Guided
from gtl.ratio import Combination, DifferenceRatio, SparseRatio
from gtl.ratio.successive import SuccessiveRatio


def logged(made: Problem) -> list[dict[str, Any]]:
    """What is written down from now on."""
    found: list[dict[str, Any]] = []
    made.log = found.append
    return found


def networks(found: list[dict[str, Any]]) -> list[str]:
    """Names of the fits with held-out rows, in order."""
    return list(dict.fromkeys(line["network"] for line in found))


@pytest.mark.parametrize("far_apart", [False, True])
def test_a_mean_of_weights(far_apart: bool):
    """Of the final fit and of all folds, unless target sequences are less likely under it than under those."""
    made = problem(finetuned_learning_rate=1e-3)
    made.adapted("finetuned")
    attempt, final = made.shared["finetuned"]
    models = [each.denoiser for each in (final, *attempt.tried)]
    if far_apart:  # all are sure of token 2, by a last state and a head that one has with the opposite sign
        made.target = torch.full((24, 5), 2)
        for sign, model in zip((1.0, 1.0, -1.0), models, strict=True):
            network = model.network  # type: ignore[union-attr]
            for weight in (network.norm.constant, network.head.weight, network.head.bias):
                torch.nn.init.zeros_(weight)
            torch.nn.init.constant_(network.norm.constant[0], sign)
            torch.nn.init.constant_(network.norm.constant[1], -1.0)
            torch.nn.init.constant_(network.head.weight[2], sign)
    ratio = mean_of_weights(made, attempt, final)
    assert isinstance(ratio, DifferenceRatio)
    wanted = [torch.stack(each).mean(0) for each in zip(*(model.parameters() for model in models), strict=True)]
    kept = models[0].parameters() if far_apart else wanted
    assert all(torch.equal(a, b) for a, b in zip(ratio.tuned.parameters(), kept, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(wanted, models[0].parameters(), strict=True))


def test_one_split_has_no_mean_of_weights():
    made = problem()
    made.target = made.target.repeat(200, 1)
    made.adapted("finetuned")
    attempt, final = made.shared["finetuned"]
    ratio = mean_of_weights(made, attempt, final)
    assert isinstance(ratio, DifferenceRatio)
    assert ratio.tuned is final.denoiser


def test_a_blend_averages_both(monkeypatch: pytest.MonkeyPatch):
    """The mean of the tuned models and that of the sparse changes, with weights that add up to one."""
    made = problem(sparse_share=0.1)
    monkeypatch.setattr("gtl.estimate.stack.select_weights", lambda evidence: [0.25, 0.75])
    result = made.adapted("gtl-blend")
    inner = result.ratio.parts[0] if isinstance(result.ratio, SuccessiveRatio) else result.ratio
    assert isinstance(inner, Combination)
    (first, tuned), (second, changes) = inner.weighted_terms()
    assert (first, second) == (0.25, 0.75)
    assert isinstance(tuned, DifferenceRatio)
    assert isinstance(changes, SparseRatio)
    for name, model in (("finetuned", tuned.tuned), ("sparse", changes.changed)):
        attempt, final = made.shared[name]
        fits = [each.denoiser.parameters() for each in (final, *attempt.tried)]
        for weight, *each in zip(model.parameters(), *fits, strict=True):
            assert torch.allclose(weight, torch.stack(each).mean(0), atol=1e-6)
    assert result.weights == sum(made.shared[name][1].fits[-1].weights for name in ("finetuned", "sparse"))


# learning rates


def far(**changes: Any) -> Problem:
    """Sequences of one token, which the source does not favour: the more is learned, the better."""
    made = problem(budget=120, patience=0, **changes)
    made.target = torch.full((24, 5), 2)
    return made


@pytest.mark.parametrize("method", ["finetuned", "lora", "sparse", "gtl-local", "vanilla"])
def test_the_better_rate_is_kept(method: str):
    """Both share the budget, on the same folds; the final fit takes up the one that was better."""
    made = far(rates=[1e-6, 1.0])
    found = logged(made)
    result = made.adapted(method)
    names = [f"{method}, rate {rate}, fold {fold} of 2" for rate in ("1e-06", "1") for fold in (1, 2)]
    assert networks(found) == names
    assert made.shared[method][0].rate == 1.0
    assert 5 * (120 // 5 - 2) <= result.steps <= 120
    values = []
    for each in (result, far(rates=[1e-6]).adapted(method)):
        model = each.denoiser if each.ratio is None else Guided(each.denoiser, each.ratio)
        values.append(nll(model, made.target, generator=torch.Generator().manual_seed(0)))
    assert values[0] < 0.7 * values[1]


@pytest.mark.parametrize("method", ["finetuned", "lora", "sparse", "gtl-local"])
def test_a_rate_that_diverges_is_passed_over(method: str):
    """Wherever it stands in the list; where all do, that is said."""
    for rates in ([1.0, 1e30], [1e30, 1.0]):
        made = far(rates=rates)
        made.adapted(method)
        assert made.shared[method][0].rate == 1.0
    with pytest.raises(ValueError, match=r"lower the learning rate|not finite"):
        far(rates=[1e30, 2e30]).adapted(method)


def test_one_rate_is_the_rate_times_it():
    plain = far(lora_learning_rate=4e-3).adapted("lora")
    other = far(lora_learning_rate=2e-3, rates=[2.0]).adapted("lora")
    for one, two in zip(plain.denoiser.parameters(), other.denoiser.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rates": []}, "at least one positive"),
        ({"rates": [1.0, -1.0]}, "at least one positive"),
        ({"rates": [1.0, float("nan")]}, "at least one positive"),
        ({"rates": [1.0, 2.0], "folds": 0}, "several rates need folds"),
        ({"rates": [1.0] * 9, "budget": 100}, "need at least 138 steps"),
    ],
)
def test_bad_settings(changes: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        replace(Training(), **changes)
