"""Networks made fast for sampling: bf16 weights, and torch.compile on their hot parts.

Logits, log-probabilities and draws stay as they are (float32, float32, float64), so only the networks' own arithmetic
is coarser. A module names the methods that are worth compiling in `hot`; shapes are taken as fixed, since a sampler
asks for the same ones in every step.
"""

from typing import Literal

import torch
from torch import nn

__all__ = ["Precision", "speed_up"]

Precision = Literal["fp32", "bf16"]


def speed_up(module: nn.Module, precision: Precision = "bf16", compile: bool = True) -> None:
    """Turns the weights of a model's networks to bf16 and compiles them, in place."""
    if precision == "bf16":
        module.to(torch.bfloat16)
    if compile:
        for part in module.modules():
            for name in getattr(part, "hot", ()):
                setattr(part, name, torch.compile(getattr(part, name), dynamic=False))
