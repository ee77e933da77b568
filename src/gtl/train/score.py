"""The score model's objective: the score entropy, which in expectation over t is the NELBO, per token."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gtl.score import ScoreDenoiser, score_entropy
from gtl.train.objective import Objective

__all__ = ["ScoreObjective"]


LEAST_ALPHA = 1e-3
"""Near t = 1 the integrand is a difference of equals that a network gets wrong, and 1 / alpha would know no bound."""


class ScoreObjective(Objective):
    """Minimises E[score entropy] / L over the rows named `data`; 1 - alpha is uniform, so the weight is 1 / alpha."""

    def __init__(self, model: ScoreDenoiser, x: Tensor, held_out: Tensor | None = None) -> None:
        super().__init__({"data": x}, None if held_out is None else {"data": held_out})
        self.process = model.process

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        x, process = batch["data"], self.process
        t = process.times(len(x), x.device, generator)
        z = process.corrupt(x, t, generator)
        entropy = score_entropy(process, x, z, t, forward(z, t).score)
        return (entropy / process.alpha(t).squeeze(-1).clamp(min=LEAST_ALPHA)).mean().float() / x.shape[1]
