"""The planner's objective (the paper's planner algorithm): is the frozen denoiser's first choice right?

y_l = 1[ argmax_v p(x_l = v | z) = x_l ],      loss = mean over masked l of BCE( planner(z)_l, y_l )
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtl.denoiser import Denoiser
from gtl.planner import Planner
from gtl.process import Process, stratified
from gtl.train.objective import Objective

__all__ = ["PlannerObjective", "corrupted", "first_choice_is_right"]


@torch.no_grad()
def first_choice_is_right(denoiser: Denoiser, x: Tensor, z: Tensor) -> Tensor:
    """1[argmax_v p(x_l = v | z) = x_l] at every position: x and z (B, L) -> (B, L)."""
    return denoiser.best(z) == x


def corrupted(process: Process, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Noisy sequences z (B, L) of clean ones, and their times (B,), uniform as in the paper."""
    t = stratified(len(x), x.device, generator)
    return process.corrupt(x, t, generator), t


class PlannerObjective(Objective):
    """Logistic loss at masked positions of the rows named `data`."""

    def __init__(self, denoiser: Denoiser, planner: Planner, x: Tensor, held_out: Tensor | None = None) -> None:
        super().__init__({"data": x}, None if held_out is None else {"data": held_out})
        planner.check(denoiser)
        if not denoiser.timeless:
            raise ValueError("a planner reads the revealed tokens alone: its denoiser must have no time input")
        self.denoiser = denoiser.eval().requires_grad_(False)

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        x, process = batch["data"], self.denoiser.process
        z, _ = corrupted(process, x, generator)
        masked = z.eq(process.mask_id).float()  # type: ignore[arg-type]
        right = first_choice_is_right(self.denoiser, x, z).float()
        loss = F.binary_cross_entropy_with_logits(forward(z), right, reduction="none")
        return (loss * masked).sum() / masked.sum().clamp(min=1)
