"""The paper's ratio network: one number for a whole sequence, log r_phi(z).

The same network is a domain classifier. With the target labelled 0 and the source labelled 1, as in the paper,

    d(z) = p(z) / (p(z) + q(z)) = sigmoid(-log r(z)),      log r(z) = log (1 - d(z)) / d(z),

so classifiers and ratios are one class, and only their training objectives differ. A classifier that was trained with
label smoothing eps (labels eps/2 and 1 - eps/2) has sigmoid(s) = eps/2 + (1 - eps) sigmoid(log r) as the optimum of its
output s; `log_value` solves that for log r.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gtl.nn.dit import DiT, PooledDiT, Pooling
from gtl.nn.fused import fused_interventions, fusible, shared_context
from gtl.process import Process
from gtl.ratio.base import SequenceRatio

__all__ = ["NetworkRatio", "unsmooth"]

CLOSEST = 1e-4
"""How close to 0 or 1 an unsmoothed probability may come: log r is kept within 9.2 where smoothing is undone."""


def unsmooth(s: Tensor, smoothing: float) -> Tensor:
    """log r of the output s of a classifier that was trained with label smoothing: (B,) -> (B,)."""
    if not smoothing:
        return s
    return torch.logit((torch.sigmoid(s) - smoothing / 2) / (1 - smoothing), eps=CLOSEST)


class NetworkRatio(SequenceRatio):
    """log r_phi(z) by a pooled DiT."""

    kind = "sequence"

    def __init__(self, process: Process, network: PooledDiT, smoothing: float = 0.0) -> None:
        """Wraps a network; `smoothing` is the label smoothing that it was trained with."""
        super().__init__()
        if not 0 <= smoothing < 1:
            raise ValueError(f"label_smoothing={smoothing} must be in [0, 1)")
        if network.dit.num_ids != process.num_ids:
            raise ValueError(f"the network knows {network.dit.num_ids} ids; the process has {process.num_ids}")
        self.process, self.network, self.smoothing = process, network, smoothing
        self.timeless = not network.dit.time_conditioned

    @classmethod
    def build(
        cls, process: Process, pooling: Pooling = "sum", smoothing: float = 0.0, **network: Any
    ) -> "NetworkRatio":
        """A fresh ratio network: width, depth, heads, dropout, time_conditioned as for `DiT`."""
        return cls(process, PooledDiT(DiT(process.num_ids, 1, **network), pooling), smoothing)

    def forward(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        """The network's output s (B,), which training works on: log r but for label smoothing."""
        return self.network(z, t)

    def log_value(self, z: Tensor, t: Tensor | None = None, extra: Tensor | None = None) -> Tensor:
        """log r(z); `extra` (B, L, width) is added to the token embeddings."""
        return unsmooth(self.network(z, t, extra), self.smoothing)

    def _scorer(
        self, z: Tensor, row: Tensor, place: Tensor, tokens: Tensor, t: Tensor | None
    ) -> Callable[[slice], Tensor]:
        dit = self.network.dit
        if not fusible(dit, z):
            return super()._scorer(z, row, place, tokens, t)
        context, scale = shared_context(dit, z), 1 if self.network.pooling == "sum" else 1 / z.shape[1]

        def values(part: slice) -> Tensor:
            total = fused_interventions(dit, z, context, row, place, tokens, part)
            return unsmooth(total * scale, self.smoothing)

        return values

    def source_probability(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        """The classifier's d(z), near 0 for target-like and near 1 for source-like sequences: (B,)."""
        return torch.sigmoid(-self.log_value(z, t))

    def config(self) -> dict[str, Any]:
        network = self.network
        return {"network": network.dit.config(), "pooling": network.pooling, "smoothing": self.smoothing}

    @classmethod
    def from_config(cls, process: Process, config: dict[str, Any]) -> "NetworkRatio":
        return cls(process, PooledDiT(DiT(**config["network"]), config["pooling"]), config["smoothing"])
