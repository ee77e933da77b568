"""The denoiser's objective: the NELBO per token on one dataset. Vanilla and fine-tuned baselines are this too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gtl.denoiser import Denoiser, nelbo
from gtl.train.objective import Objective

__all__ = ["DenoiserObjective"]


class DenoiserObjective(Objective):
    """Minimises E[NELBO(x)] / L over the rows named `data`."""

    def __init__(self, denoiser: Denoiser, x: Tensor, held_out: Tensor | None = None) -> None:
        super().__init__({"data": x}, None if held_out is None else {"data": held_out})
        self.denoiser = denoiser

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        x = batch["data"]
        return nelbo(self.denoiser, x, generator, forward).mean() / x.shape[1]
