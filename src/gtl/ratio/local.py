"""The local ratio: the conditional ratio itself, for all positions and tokens in one forward pass.

    g(z, l, v) = log q(x_l = v | z) / p(x_l = v | z) + const(z, l)

Guidance needs r only as r(z with l <- v) up to a constant for each (z, l), and by the martingale identity that is this
conditional ratio. A network gives it directly: no candidate is scored by intervention, and fitting it by the likelihood
of target tokens under p exp(g) needs no source data (`train/likelihood`). It tilts p(x | z), so it is a clean ratio,
and the same network serves every process.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gtl.denoiser import NetworkDenoiser, Prediction
from gtl.nn.dit import DiT
from gtl.nn.local import LocalDiT
from gtl.process import Process
from gtl.ratio.base import Ratio

__all__ = ["LocalRatio"]


class LocalRatio(Ratio):
    """A local network as a ratio."""

    kind = "local"
    space = "clean"

    def __init__(self, process: Process, network: LocalDiT) -> None:
        """Wraps a network with one output for each token id."""
        super().__init__()
        dit = network.dit
        if (dit.num_ids, dit.outputs) != (process.num_ids, process.num_ids):
            raise ValueError(
                f"the network knows {dit.num_ids} ids and has {dit.outputs} outputs; "
                f"the process has {process.num_ids} ids"
            )
        self.process, self.network = process, network
        self.timeless = not dit.time_conditioned

    @classmethod
    def build(cls, denoiser: NetworkDenoiser, features: bool = True, **network: Any) -> "LocalRatio":
        """A fresh local ratio for a denoiser: width, depth, heads, dropout as for `DiT`.

        `features` says whether it reads the denoiser's hidden states or stands on its own trunk alone.
        """
        process, source = denoiser.process, denoiser.network
        dit = DiT(process.num_ids, process.num_ids, time_conditioned=source.time_conditioned, **network)
        shape = (source.depth + 2, source.width) if features else (0, 0)
        return cls(process, LocalDiT(dit, *shape))

    def forward(
        self,
        z: Tensor,
        hidden: Sequence[Tensor] = (),
        t: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """g (B, P, K) at the positions asked for, all by default."""
        return self.network(z, hidden, t, positions).float()

    def table(self, z: Tensor, positions: Tensor, t: Tensor | None = None, context: Prediction | None = None) -> Tensor:
        if self.network.states and context is None:
            raise ValueError("this ratio reads the denoiser's hidden states: pass context=denoiser(z, t, positions)")
        return self(z, () if context is None else context.hidden, t, positions)

    def log_ratio(
        self,
        z: Tensor,
        positions: Tensor,
        candidates: Tensor,
        t: Tensor | None = None,
        context: Prediction | None = None,
    ) -> Tensor:
        """As the contract says. The mask as a candidate stands for r(z) itself, which by the martingale identity is
        the mean of its continuations under p; without `context` what is said of it means nothing."""
        values = self.table(z, positions, t, context)
        if self.process.mask_id is not None and context is not None:
            mean = torch.logsumexp(context.log_probs.to(values.dtype) + values, -1)
            values = torch.cat(
                [
                    values[..., : self.process.mask_id],
                    mean.unsqueeze(-1),
                    values[..., self.process.mask_id + 1 :],
                ],
                -1,
            )
        return values.gather(-1, candidates)

    def config(self) -> dict[str, Any]:
        """What `from_config` needs."""
        return {"network": self.network.config()}

    @classmethod
    def from_config(cls, process: Process, config: dict[str, Any]) -> "LocalRatio":
        """An untrained ratio of the same shape."""
        return cls(process, LocalDiT.from_config(config["network"]))
