"""The paper's ratio network: one number for a whole sequence, log r_phi(z).

The same network is a domain classifier. With the target labelled 0 and the source labelled 1, as in the paper,

    d(z) = p(z) / (p(z) + q(z)) = sigmoid(-log r(z)),      log r(z) = log (1 - d(z)) / d(z),

so classifiers and ratios are one class, and only their training objectives differ.
"""

from typing import Any

import torch
from torch import Tensor

from gtl.nn.dit import DiT, PooledDiT, Pooling
from gtl.process import Process
from gtl.ratio.base import SequenceRatio

__all__ = ["NetworkRatio"]


class NetworkRatio(SequenceRatio):
    """log r_phi(z) by a pooled DiT."""

    def __init__(self, process: Process, network: PooledDiT) -> None:
        super().__init__()
        if network.dit.num_ids != process.num_ids:
            raise ValueError(f"the network knows {network.dit.num_ids} ids; the process has {process.num_ids}")
        self.process, self.network = process, network
        self.timeless = not network.dit.time_conditioned

    @classmethod
    def build(cls, process: Process, pooling: Pooling = "sum", **network: Any) -> "NetworkRatio":
        """A fresh ratio network: width, depth, heads, dropout, time_conditioned as for `DiT`."""
        return cls(process, PooledDiT(DiT(process.num_ids, 1, **network), pooling))

    def forward(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        return self.network(z, t)

    def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        return self.network(z, t)

    def source_probability(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        """The classifier's d(z), near 0 for target-like and near 1 for source-like sequences: (B,)."""
        return torch.sigmoid(-self.network(z, t))
