"""`lora`: low-rank adapters on the frozen source denoiser, fitted as fine-tuning is, then merged into plain weights.

    W = W_source + (alpha / rank) B A,      A (rank, in) random, B (out, rank) zero at the start.

Only A and B are trained: those of the attention's products and of the MLP of every block and, unless `lora_head` is
off, of the head. Folds, budget and stopping are those of `finetuned`; the learning rate is its own.

In training the sum is formed first, then one product with all tokens: two thin products beside the large one are fewer
operations, but keep a GPU waiting.
"""

import copy
import math
import re
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser
from gtl.estimate.base import Problem
from gtl.estimate.parts import Adapted, Part, Trained
from gtl.train.loop import mix

__all__ = ["Adapters", "add_adapters", "lora", "merge_adapters"]

BLOCKS = r"blocks\.\d+\.(qkv|out|mlp\.0|mlp\.2)"
"""Names of the linear maps of a DiT that get an adapter."""


@dataclass
class Adapters(Trained):
    """A merged denoiser, with the adapters that went into it."""

    adapters: dict[str, Tensor] = field(default_factory=dict)


class LowRank(nn.Module):
    """A linear map with W + scale B A for its W, which is W at first."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.a = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.b = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.a, math.sqrt(5))

    @property
    def weight(self) -> Tensor:
        """The sum."""
        return self.linear.weight + self.scale * (self.b @ self.a)

    @property
    def bias(self) -> Tensor | None:
        """The map's own."""
        return self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def add_adapters(source: NetworkDenoiser, rank: int, alpha: int, head: bool = False) -> NetworkDenoiser:
    """A copy of the source with adapters, which change nothing yet and are all that is to be trained."""
    if not source.network.depth and not head:
        raise ValueError("lora adapts the blocks of a network, and this one has none: use lora_head, or finetuned")
    model = copy.deepcopy(source).requires_grad_(False)
    for name, module in list(model.network.named_modules()):
        if re.fullmatch(f"{BLOCKS}|head" if head else BLOCKS, name):
            assert isinstance(module, nn.Linear)
            model.network.set_submodule(name, LowRank(module, rank, alpha / rank))
    return model


def adapters_of(model: NetworkDenoiser) -> dict[str, Tensor]:
    """The weights that train, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


@torch.no_grad()
def merge_adapters(source: NetworkDenoiser, adapted: NetworkDenoiser) -> NetworkDenoiser:
    """A copy of the source that computes what its adapted copy does, in plain weights."""
    merged = copy.deepcopy(source).requires_grad_(False)
    maps = {name: module for name, module in adapted.network.named_modules() if isinstance(module, LowRank)}
    if "head" in maps:
        merged.network = merged.network.untied()  # the embedding stays as it is
    for name, module in maps.items():
        plain = merged.network.get_submodule(name)
        assert isinstance(plain, nn.Linear)
        plain.weight.copy_(module.weight)
    return merged.eval()


def recipe(problem: Problem, part: Part) -> Adapters:
    """Adapters on the target; they go on from where a start left them."""
    t, seed = problem.training, mix(problem.seed, part.number)
    torch.manual_seed(seed)
    model = add_adapters(problem.source, t.lora_rank, t.lora_alpha, t.lora_head)
    if part.start is not None:
        assert isinstance(part.start, Adapters)
        model.load_state_dict(part.start.adapters, strict=False)
    objective = problem.denoiser_objective(model, part.rows, part.held_out)
    changes = {"learning_rate": t.lora_learning_rate, "warmup": t.finetuned_warmup, "seed": seed}
    fit = problem.fit(part.name, model, objective, part.steps, stop=part.stop, **changes)
    kept = {name: weight.detach().clone() for name, weight in adapters_of(model).items()}
    return Adapters(merge_adapters(problem.source, model), None, [fit], adapters=kept)


def lora(problem: Problem, method: str) -> Adapted:
    """The source denoiser with adapters fitted to the target."""
    return problem.run(method, recipe)
