"""Sparse changes: the entries that the target asks for most are trained and no others, averaged over the folds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_lora import denoiser, problem
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from gtl.denoiser import nelbo, nll
from gtl.estimate import Problem, Training
from gtl.estimate.baselines import recipe as baseline
from gtl.estimate.parts import Part
from gtl.estimate.sparse import choose_places, recipe
from gtl.guidance import Guided
from gtl.ratio import Combination, SparseRatio, UnigramRatio
from gtl.ratio.sparse import by_weight
from gtl.train.loop import mix

KINDS = ("masked", "tied", "uniform", "score")


def vector(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


def sparse_problem(kind: str = "masked", **changes: Any) -> Problem:
    return replace(problem(sparse_share=0.1, **changes), source=denoiser(kind))


def test_the_largest_gradients_of_each_weight():
    """Against the gradient over many more corruptions: what is chosen is close to the best choice."""
    made = sparse_problem()
    places = choose_places(made)
    assert places.equal(places.unique())
    model = denoiser().requires_grad_(True)
    x = made.target.repeat(4000, 1)
    nelbo(model, x, torch.Generator().manual_seed(9)).mean().backward()
    agreed = []
    for weight, _, inside in by_weight(model.parameters(), places):
        assert weight.grad is not None
        size = weight.grad.abs().flatten()
        assert len(inside) == max(1, int(0.1 * len(size)))
        best = size.topk(len(inside))
        assert size[inside].sum() >= 0.9 * best.values.sum()
        agreed.append(torch.isin(inside, best.indices).float())
    assert torch.cat(agreed).mean() > 0.85


@pytest.mark.parametrize("kind", KINDS)
def test_only_they_move(kind: str):
    """Exactly, weight decay or not; and the source stays."""
    made = sparse_problem(kind, weight_decay=0.5)
    before = vector(made.source).clone()
    fit = recipe(made, Part(made.target, None, 6, name="some"))
    moved = (vector(fit.denoiser) != before).nonzero().squeeze(1)
    places = made.known["places"]
    assert torch.isin(moved, places).all()
    assert len(moved) > 0.9 * len(places)
    assert vector(made.source).equal(before)
    assert fit.fits[-1].weights == len(places)
    ratio = fit.as_ratio()
    assert isinstance(ratio, SparseRatio)
    assert torch.allclose(vector(ratio.changed), vector(fit.denoiser), atol=1e-6)


@pytest.mark.gpu
def test_only_they_move_when_compiled():
    made = sparse_problem("tied", precision="bf16", compile=True)
    made.source.cuda()
    before = vector(made.source).clone()
    fit = recipe(made, Part(made.target, None, 6, name="some"))
    moved = (vector(fit.denoiser) != before).nonzero().squeeze(1)
    assert torch.isin(moved, made.known["places"]).all()
    assert len(moved) > 0.9 * len(made.known["places"])


def test_all_of_them_is_fine_tuning():
    made = sparse_problem(sparse_learning_rate=3e-3)
    made.training = replace(made.training, sparse_share=1.0)
    tuned = sparse_problem(finetuned_learning_rate=3e-3, weight_decay=0.0)
    tuned.seed = mix(made.seed, 2)
    part = Part(made.target, None, 6, name="all", number=2)
    wanted = baseline(tuned, part, True).denoiser
    assert vector(recipe(made, part).denoiser).equal(vector(wanted))
    assert not vector(wanted).equal(vector(made.source))


def test_a_ratio_is_the_mean_of_the_fits():
    """Over the final one and the folds, at the same places: no more numbers than one fit has."""
    made = sparse_problem(unigram=False)
    plain, result = made.adapted("sparse"), made.adapted("gtl-sparse")
    attempt, final = made.shared["sparse"]
    mean = torch.stack([vector(each.denoiser) for each in (final, *attempt.tried)]).mean(0)
    assert isinstance(result.ratio, SparseRatio)
    assert torch.allclose(vector(result.ratio.changed), mean, atol=1e-6)
    assert result.weights == plain.weights == len(result.ratio.places)
    assert result.steps == plain.steps
    assert plain.denoiser is final.denoiser
    z = torch.tensor([[3, 1, 3, 2, 3], [3, 3, 3, 3, 0]])
    with torch.no_grad():
        found = Guided(made.source, result.ratio, 1.0)(z).log_probs.exp()
        assert torch.allclose(found, result.ratio.changed(z).log_probs.exp(), atol=1e-5)
    assert len({vector(each.denoiser)[made.known["places"]].sum().item() for each in attempt.tried}) == 2


def test_counts_join():
    made = sparse_problem(budget=120, patience=0, sparse_learning_rate=1e-6)
    made.target = torch.full((24, 5), 2)
    result = made.adapted("gtl-sparse")
    assert isinstance(result.ratio, Combination)
    (_, entries), (weight, unigram) = result.ratio.weighted_terms()
    assert isinstance(entries, SparseRatio)
    assert isinstance(unigram, UnigramRatio)
    assert weight == 1.0
    assert int(unigram.log_r.argmax()) == 2
    assert result.weights == len(entries.places) + 4


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns(kind: str):
    """Sequences of one token: most of what fine-tuning learns, by a twentieth of the weights."""
    made = sparse_problem(kind, budget=240, patience=0, sparse_learning_rate=2e-2, finetuned_learning_rate=2e-2)
    made.training = replace(made.training, sparse_share=0.05)
    made.target = torch.full((24, 5), 2)
    models = made.source, made.adapted("sparse").denoiser, made.adapted("finetuned").denoiser
    before, found, most = (nll(m, made.target, generator=torch.Generator().manual_seed(0)) for m in models)
    assert before - found > 0.6 * (before - most) > 0.3 * before


@pytest.mark.parametrize("share", [0.0, 1.1, float("nan")])
def test_bad_shares(share: float):
    with pytest.raises(ValueError, match="sparse_share"):
        Training(sparse_share=share)
