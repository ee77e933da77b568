"""`lora`: low-rank adapters on the frozen source denoiser, fitted as fine-tuning is, then merged into plain weights.

    W = W_source + (alpha / rank) B A,      A (rank, in) random, B (out, rank) zero at the start.

Only A and B are trained: those of the attention's products and of the MLP of every block and, unless `lora_head` is
off, of the head. Folds, budget and stopping are those of `finetuned`; the learning rate is its own.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gtl.denoiser import NetworkDenoiser
from gtl.estimate.base import Adapted, Part, Problem, Trained
from gtl.ratio import AdapterRatio, Ratio

__all__ = ["Adapters", "add_adapters", "lora", "merge_adapters"]

BLOCKS = r"blocks\.\d+\.(qkv|out|mlp\.0|mlp\.2)"
"""Names of the linear maps of a DiT that get an adapter."""


@dataclass
class Adapters(Trained):
    """A merged denoiser, with the adapters that went into it."""

    adapters: dict[str, Tensor] = field(default_factory=dict)
    changes: AdapterRatio | None = None
    """The same as a ratio."""

    def as_ratio(self) -> Ratio:
        """The adapters alone, and no second model."""
        assert self.changes is not None
        return self.changes


def add_adapters(source: NetworkDenoiser, rank: int, alpha: int, head: bool = False) -> NetworkDenoiser:
    """A copy of the source with adapters, which change nothing yet and are all that is to be trained."""
    from peft import LoraConfig, inject_adapter_in_model

    if not source.network.depth and not head:
        raise ValueError("lora adapts the blocks of a network, and this one has none: use lora_head, or finetuned")
    model = copy.deepcopy(source).requires_grad_(False)
    names = f"({BLOCKS}|head)" if head else BLOCKS
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names), model.network)
    return model


def adapters_of(model: NetworkDenoiser) -> dict[str, Tensor]:
    """The weights that train, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def changes_of(source: NetworkDenoiser, adapted: NetworkDenoiser) -> AdapterRatio:
    """What the adapters of an adapted copy change, as a ratio."""
    layers: dict[str, Any] = {n: m for n, m in adapted.network.named_modules() if hasattr(m, "get_delta_weight")}
    factors = {n: (m.lora_A["default"].weight, m.lora_B["default"].weight) for n, m in layers.items()}
    return AdapterRatio.of(source, factors, next(iter(layers.values())).scaling["default"])


def merge_adapters(source: NetworkDenoiser, adapted: NetworkDenoiser) -> NetworkDenoiser:
    """A copy of the source that computes what its adapted copy does, in plain weights."""
    return changes_of(source, adapted).changed


def recipe(problem: Problem, part: Part) -> Adapters:
    """Adapters on the target; they go on from where a start left them."""
    t = problem.training
    torch.manual_seed(problem.seed)
    model = add_adapters(problem.source, t.lora_rank, t.lora_alpha, t.lora_head)
    if part.start is not None:
        assert isinstance(part.start, Adapters)
        model.load_state_dict(part.start.adapters, strict=False)
    objective = problem.denoiser_objective(model, part.rows, part.held_out)
    changes = {"stop": part.stop, "learning_rate": t.lora_learning_rate, "warmup": t.finetuned_warmup}
    fit = problem.fit(part.name, model, objective, part.steps, **changes)
    kept = {name: weight.detach().clone() for name, weight in adapters_of(model).items()}
    found = changes_of(problem.source, model)
    return Adapters(found.changed, None, [fit], adapters=kept, changes=found)


def lora(problem: Problem, method: str) -> Adapted:
    """The source denoiser with adapters fitted to the target."""
    return problem.run(method, recipe)
