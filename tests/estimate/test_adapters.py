"""`gtl-adapters`: LoRA's fits as a ratio, averaged; and learning rates that are tried."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_lora import ADAPTERS, problem

from gtl.denoiser import nll
from gtl.estimate import Problem, Training
from gtl.estimate.mean import mean_of_weights
from gtl.guidance import Guided
from gtl.ratio import AdapterRatio, Combination, DifferenceRatio, UnigramRatio
from gtl.ratio.successive import SuccessiveRatio


def logged(made: Problem) -> list[dict[str, Any]]:
    """What is written down from now on."""
    found: list[dict[str, Any]] = []
    made.log = found.append
    return found


def networks(found: list[dict[str, Any]]) -> list[str]:
    """Names of the fits with held-out rows, in order."""
    return list(dict.fromkeys(line["network"] for line in found))


def test_one_member_is_lora():
    made = problem(members=1, unigram=False)
    tuned, guided = made.adapted("lora"), made.adapted("gtl-adapters")
    assert isinstance(guided.ratio, Combination)
    z = torch.tensor([[3, 1, 3, 2, 3], [3, 3, 3, 3, 0]])
    with torch.no_grad():
        found = Guided(made.source, guided.ratio, 1.0)(z).log_probs.exp()
        assert torch.allclose(found, tuned.denoiser(z).log_probs.exp(), atol=1e-5)
    assert guided.weights == tuned.weights == ADAPTERS


@pytest.mark.parametrize(("members", "count"), [(2, 2), (3, 3), (9, 3)])
def test_the_fits_of_the_folds_are_averaged_and_trained_once(members: int, count: int):
    made = problem(members=members, unigram=False)
    found = logged(made)
    tuned = made.adapted("lora")
    seen = list(found)
    guided = made.adapted("gtl-adapters")
    assert found == seen  # nothing was trained for it
    assert networks(found) == ["lora, fold 1 of 2", "lora, fold 2 of 2"]
    assert isinstance(guided.ratio, Combination)
    terms = guided.ratio.weighted_terms()
    assert [weight for weight, _ in terms] == [pytest.approx(1 / count)] * count
    attempt, final = made.shared["lora"]
    wanted = [each.changes for each in (final, *attempt.tried)][:count]  # type: ignore[attr-defined]
    assert [ratio for _, ratio in terms] == wanted
    assert all(isinstance(ratio, AdapterRatio) for ratio in wanted)
    assert len({float(ratio.b[0].sum()) for ratio in wanted}) == count
    assert (guided.weights, guided.steps) == (count * tuned.weights, tuned.steps)


def test_frequencies_of_tokens_are_corrected_by_what_the_folds_did_not_see():
    """The same adapters, and a ratio that likes the target's one token; its numbers count as weights."""
    made = far(lora_learning_rate=1e-6)
    guided = made.adapted("gtl-adapters")
    assert isinstance(guided.ratio, Combination)
    *rest, (weight, unigram) = guided.ratio.weighted_terms()
    assert weight == 1.0
    assert isinstance(unigram, UnigramRatio)
    assert int(unigram.log_r.argmax()) == 2
    assert guided.weights == len(rest) * ADAPTERS + 4
    plain = far(lora_learning_rate=1e-6, unigram=False).adapted("gtl-adapters")
    assert isinstance(plain.ratio, Combination)
    assert [w for w, _ in plain.ratio.weighted_terms()] == [w for w, _ in rest]
    values = [
        nll(Guided(made.source, each.ratio), made.target, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
        for each in (guided, plain)
    ]
    assert values[0] < 0.7 * values[1]
    assert guided.score < 0.7 * plain.score


def test_every_fold_begins_elsewhere():
    """A is random and hardly moves: of fits that began at the same place it would be the same."""
    made = problem(lora_learning_rate=1e-9)
    made.adapted("lora")
    attempt, final = made.shared["lora"]
    found = {float(each.changes.a[0].abs().sum()) for each in (final, *attempt.tried)}  # type: ignore[attr-defined]
    assert len(found) == 3
    assert max(found) - min(found) > 1e-3


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


def test_a_blend_averages_the_fits_of_the_adapters():
    """A term for each fit, together with the weight that the blend gave to adapters."""
    made = problem(finetuned_learning_rate=1e-9)
    found = logged(made)
    ratio = made.adapted("gtl-blend").ratio
    weights = next(line["weights"] for line in found if "weights" in line)
    inner = ratio.parts[0] if isinstance(ratio, SuccessiveRatio) else ratio
    assert isinstance(inner, Combination)
    shares = [weight for weight, each in inner.weighted_terms() if isinstance(each, AdapterRatio)]
    assert len(shares) == 3 * bool(weights["lora"])
    assert sum(shares) == pytest.approx(weights["lora"])
    assert sum(weight for weight, _ in inner.weighted_terms()) == pytest.approx(1.0)


def test_adapters_keep_no_copy_of_the_source():
    made = problem()
    before = copy.deepcopy(made.source.state_dict())
    result = made.adapted("gtl-adapters")
    assert result.ratio is not None
    assert not any(name.startswith("tuned") or ".tuned." in name for name in result.ratio.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in made.source.state_dict().items())


# learning rates


def far(**changes: Any) -> Problem:
    """Sequences of one token, which the source does not favour: the more is learned, the better."""
    made = problem(budget=120, patience=0, **changes)
    made.target = torch.full((24, 5), 2)
    return made


@pytest.mark.parametrize("method", ["finetuned", "lora", "gtl-local", "vanilla"])
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
        ({"members": 0}, "members=0 must be at least 1"),
    ],
)
def test_bad_settings(changes: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        replace(Training(), **changes)
