"""Networks made fast: torch.compile, and for sampling bf16 weights.

Logits, log-probabilities and draws stay as they are (float32, float32, float64), so only the networks' own arithmetic
is coarser. A module names the methods that are worth compiling in `hot`; shapes are taken as fixed, since a sampler
asks for the same ones in every step.
"""

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

__all__ = ["Precision", "compiled", "speed_up"]

Precision = Literal["fp32", "bf16"]


def compiled(function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    """torch.compile, without a fusion of torch 2.10 to 2.13 that leaves gradients of layer norms' scales and shifts
    unwritten where there are many tokens (pytorch issue 193061)."""
    import torch._inductor.config as config

    flawed = hasattr(config.triton, "mix_order_reduction")
    return torch.compile(function, dynamic=dynamic, options={"triton.mix_order_reduction": False} if flawed else None)


class Compiled:
    """A compiled method; a copy of its module gets one of its own, which works on the copy's weights."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method, self.run = method, compiled(method, dynamic=False)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.run(*args, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Compiled":
        return Compiled(copy.deepcopy(self.method, memo))


def speed_up(module: nn.Module, precision: Precision = "bf16", compile: bool = True) -> None:
    """Turns the weights of a model's networks to bf16 and compiles them, in place."""
    if precision == "bf16":
        module.to(torch.bfloat16)
    if compile:
        for part in module.modules():
            for name in getattr(part, "hot", ()):
                setattr(part, name, Compiled(getattr(part, name)))
