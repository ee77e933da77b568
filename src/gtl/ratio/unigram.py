"""How much more often a token comes than a model expects, as a ratio that looks at nothing else.

    log r(v) = log (c_v + k) - log (e_v + k),      c_v = sum of 1[x_l = v],   e_v = sum of p(x_l = v | z),

over noisy places l of sequences that the model was not fitted on (its own come as expected). k pulls rare tokens toward
r = 1 with the weight of k of them. It is one step of iterative proportional fitting and gives a network with a frozen
head what that cannot learn: a vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from gtl.denoiser import Prediction
from gtl.process import Process
from gtl.ratio.base import ConditionalRatio

__all__ = ["UnigramRatio"]


class UnigramRatio(ConditionalRatio):
    """One number a token."""

    kind = "unigram"
    log_r: Tensor

    def __init__(self, process: Process, log_r: Tensor) -> None:
        """Sets log r, (K,)."""
        super().__init__()
        if log_r.shape != (process.num_ids,):
            raise ValueError(f"log_r {tuple(log_r.shape)}: one number for each of {process.num_ids} ids is needed")
        if not bool(log_r.isfinite().all()):
            raise ValueError("log_r must be finite")
        self.process = process
        self.register_buffer("log_r", log_r.detach().float())

    def table(self, z: Tensor, positions: Tensor, t: Tensor | None = None, context: Prediction | None = None) -> Tensor:
        return self.log_r.expand(*positions.shape, -1)

    def config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config(cls, process: Process, config: dict[str, Any]) -> "UnigramRatio":
        return cls(process, torch.zeros(process.num_ids))
