"""Fitting a noisy ratio by likelihood under mixing noise: there it guides rates, not x.

    min_r  E_{x ~ q} NELBO( x ; R_p r(z with l <- y) / r(z) ) / L   [ +  logistic loss on noisy sequences / L ]

The NELBO is the score entropy of the guided rates (Theorem 2), at one random position of each sequence.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gtl.denoiser import Denoiser
from gtl.process import Mixing
from gtl.ratio.base import SequenceRatio
from gtl.ratio.gamma import GAMMAS, noisy_nelbo
from gtl.train.classifier import ClassifierObjective
from gtl.train.likelihood import held_out_score
from gtl.train.objective import Objective

__all__ = ["RatesObjective"]


class RatesObjective(Objective):
    """Minimises the NELBO per token of target rows under rates that a noisy ratio guides; for mixing noise."""

    def __init__(
        self,
        denoiser: Denoiser,
        ratio: SequenceRatio,
        x: Tensor,
        held_out: Tensor | None = None,
        source: Tensor | None = None,
    ) -> None:
        """Sets the frozen denoiser, the ratio, target rows (N, L), held-out ones, and source rows for the logistic
        loss."""
        super().__init__({"target": x}, None if held_out is None else {"target": held_out})
        if source is not None:
            self.train["source"] = source
        self.denoiser, self.ratio = denoiser.eval(), ratio
        self.classifier = ClassifierObjective(denoiser.process, self.train)

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        process, x = self.denoiser.process, batch["target"]
        assert isinstance(process, Mixing)
        t = process.times(len(x), x.device, generator)
        z = process.corrupt(x, t, generator)
        place = process.some_place(z, generator)
        positions = place.unsqueeze(1)
        with torch.no_grad():
            source = self.denoiser(z, t, positions)
        loss = noisy_nelbo(process, self.ratio, x, z, t, source, positions, place, (1.0,)).sum() / x.numel()
        if "source" in batch:
            loss = loss + self.classifier.loss(forward, batch, generator) / x.shape[1]
        return loss

    def score(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        return held_out_score(self.denoiser, self.ratio, batch["target"], GAMMAS, generator, one_place=True)
