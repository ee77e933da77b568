"""A fine-tuned model minus its source is a ratio: log q_tuned(x_l = v | z) - log p(x_l = v | z).

At gamma = 1 guidance by it is the fine-tuned model itself; beyond 1 it is domain guidance, below 1 a geometric mixture
of the two. Added to other ratios it stacks them on fine-tuning.
"""

from typing import Any

import torch
from torch import Tensor

from gtl.denoiser import NetworkDenoiser, Prediction
from gtl.nn.dit import DiT
from gtl.process import Process
from gtl.ratio.base import ConditionalRatio
from gtl.score import ScoreDenoiser

__all__ = ["DifferenceRatio", "difference"]


def difference(tuned: Prediction, source: Prediction) -> Tensor:
    """log q - log p of two predictions; 0 where p is."""
    return torch.where(source.log_probs == -torch.inf, 0.0, tuned.log_probs - source.log_probs)


class DifferenceRatio(ConditionalRatio):
    """The ratio of a tuned denoiser to whichever denoiser it guides. One more pass of a full-size network."""

    kind = "difference"

    def __init__(self, tuned: NetworkDenoiser) -> None:
        """Wraps the tuned denoiser, frozen."""
        super().__init__()
        self.tuned, self.process, self.timeless = tuned.requires_grad_(False), tuned.process, tuned.timeless

    def table(self, z: Tensor, positions: Tensor, t: Tensor | None = None, context: Prediction | None = None) -> Tensor:
        if context is None:
            raise ValueError("a difference needs its source's prediction: pass context=denoiser(z, t, positions)")
        return difference(self.tuned(z, t, positions), context)

    def config(self) -> dict[str, Any]:
        score = isinstance(self.tuned, ScoreDenoiser)
        return {"network": self.tuned.network.config(), "banned": list(self.tuned.banned), "score": score}

    @classmethod
    def from_config(cls, process: Process, config: dict[str, Any]) -> "DifferenceRatio":
        kind = ScoreDenoiser if config["score"] else NetworkDenoiser
        return cls(kind(process, DiT(**config["network"]), tuple(config["banned"])))
