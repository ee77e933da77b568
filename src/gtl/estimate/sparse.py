"""`sparse`: a small share of the source's weights is trained on, the others stay; `gtl-sparse` is that as a ratio.

    S = in each weight the same share of entries, those with the largest |g|,    g = the target's gradient at the source

Adam moves one entry about as far as any other, so at first the loss falls by (step size) sum_S |g|. Of each weight, and
not of all at once: gradients of different layers are on different scales, and the embedding would get next to nothing,
where rows belong to words that the source has hardly seen. Low-rank adapters cannot reach those at all.

All fits have the same entries, chosen by the gradient on all target rows. So which entries move, though not where to,
knows of the rows that a fold holds out, and the weights of several fits can be averaged without becoming more:
`gtl-sparse` is the mean over the folds and the final fit, and counts (`mean.py`). It costs one more pass of the source.
Folds, budget and stopping are those of `finetuned`.

In training all weights have a gradient and most of it is dropped: the memory of fine-tuning, and one graph for both.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gtl.denoiser import NetworkDenoiser
from gtl.estimate.base import Problem
from gtl.estimate.mean import mean_of_weights, with_counts
from gtl.estimate.parts import Adapted, Part, Trained
from gtl.ratio import Ratio, SparseRatio
from gtl.ratio.sparse import by_weight
from gtl.train.loop import mix

__all__ = ["choose_places", "guided", "recipe", "sparse"]

ROWS = 1024
"""Corrupted target rows, about, behind the gradient that chooses."""


@dataclass
class Sparse(Trained):
    """A denoiser that differs from the source at some places."""

    source: NetworkDenoiser | None = None
    places: Tensor | None = None

    def as_ratio(self) -> Ratio:
        """The differences alone, and no second model."""
        assert self.source is not None
        assert self.places is not None
        assert isinstance(self.denoiser, NetworkDenoiser)
        return SparseRatio.of(self.source, self.denoiser, self.places)


def choose_places(problem: Problem) -> Tensor:
    """In each weight the entries with the largest gradients, as `ratio/sparse` counts them: (K,), in rising order."""
    t, device = problem.training, problem.device
    model = copy.deepcopy(problem.source).requires_grad_(True).eval()
    order = torch.randperm(len(problem.target), generator=torch.Generator().manual_seed(problem.seed))
    x = problem.target[order[:ROWS]].to(device)
    x = x.repeat(-(-min(ROWS, 64 * len(x)) // len(x)), 1)
    objective = problem.denoiser_objective(model, x)
    forward, (name,) = objective.wrap(model), objective.train
    generator = torch.Generator(device).manual_seed(problem.seed)
    for rows in x.split(t.batch_size):
        with torch.autocast(device.type, torch.bfloat16, enabled=t.precision == "bf16"):
            loss = objective.loss(forward, {name: rows}, generator)
        (loss * (len(rows) / len(x))).backward()
    places, first = [], 0
    for weight in model.parameters():
        size = torch.zeros_like(weight) if weight.grad is None else weight.grad.abs()
        count = max(1, int(t.sparse_share * weight.numel()))
        places.append(first + size.flatten().topk(count).indices.sort().values)
        first += weight.numel()
    return torch.cat(places)


def recipe(problem: Problem, part: Part) -> Sparse:
    """The source trained on at some places."""
    t, places = problem.training, problem.once("places", lambda: choose_places(problem))
    begun = problem.source if part.start is None else part.start.denoiser
    assert isinstance(begun, NetworkDenoiser)
    model = copy.deepcopy(begun).requires_grad_(True)
    for weight, _, inside in by_weight(model.parameters(), places):
        kept = torch.zeros_like(weight, dtype=torch.bool)
        kept.view(-1)[inside] = True
        weight.register_hook(lambda gradient, kept=kept: gradient.where(kept, 0.0))
    changes: dict[str, Any] = {
        "learning_rate": t.sparse_rate(problem.size),
        "warmup": t.finetuned_warmup,
        "weight_decay": 0.0,
    }
    objective = problem.denoiser_objective(model, part.rows, part.held_out)
    seed = mix(problem.seed, part.number)
    fit = problem.fit(part.name, model, objective, part.steps, stop=part.stop, seed=seed, **changes)
    found = copy.deepcopy(model).requires_grad_(False)  # without the hooks
    return Sparse(found, None, [replace(fit, weights=len(places))], source=problem.source, places=places)


def sparse(problem: Problem, method: str) -> Adapted:
    """The source denoiser with some entries fitted to the target."""
    return problem.run(method, recipe)


def guided(problem: Problem, method: str) -> Adapted:
    """The mean of several fits as a ratio, and counts."""
    attempt, final = problem.trained("sparse", recipe)
    ratio = mean_of_weights(problem, attempt, final)
    return with_counts(problem, attempt, final, ratio, final.fits[-1].weights)
