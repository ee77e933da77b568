"""The local ratio: the conditional ratio itself, for all positions and tokens in one forward pass.

    g(z, l, v) = log q(x_l = v | z) / p(x_l = v | z) + const(z, l)

Guidance needs r only as r(z with l <- v) up to a constant for each (z, l), and by the martingale identity that is this
conditional ratio. A network gives it directly: no candidate is scored by intervention, and fitting it by the likelihood
of target tokens under p exp(g) needs no source data (`train/likelihood`). It tilts p(x | z), so it is a clean ratio,
and the same network serves every process.
"""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from gtl.denoiser import Denoiser, NetworkDenoiser, Prediction
from gtl.nn.dit import DiT
from gtl.nn.local import LocalDiT
from gtl.process import Process
from gtl.ratio.base import ConditionalRatio

__all__ = ["Head", "LocalRatio"]

Head = Literal["own", "source", "auto"]


class LocalRatio(ConditionalRatio):
    """A local network as a ratio."""

    kind = "local"

    def __init__(self, process: Process, network: LocalDiT) -> None:
        """Wraps a network with one output for each token id."""
        super().__init__()
        dit = network.dit
        known, outputs = network.borrowed or dit.num_ids, network.borrowed or dit.outputs
        if (known, outputs) != (process.num_ids, process.num_ids):
            raise ValueError(
                f"the network knows {known} ids and has {outputs} outputs; the process has {process.num_ids} ids"
            )
        self.process, self.network = process, network
        self.timeless = not dit.time_conditioned

    @classmethod
    def build(
        cls, denoiser: NetworkDenoiser, features: bool = True, head: Head = "auto", **network: Any
    ) -> "LocalRatio":
        """A fresh local ratio for a denoiser: width, depth, heads, dropout as for `DiT`.

        `features` says whether it reads the denoiser's hidden states or stands on its own trunk alone, and `head`
        whether it has an embedding and a head of its own or works through the source's; auto borrows them where there
        are more tokens than the source is wide.
        """
        process, source = denoiser.process, denoiser.network
        if head == "auto":
            head = "source" if features and process.num_ids > source.width else "own"
        if head == "source" and not features:
            raise ValueError("head=source works through the denoiser's hidden states: it needs features")
        borrowed = process.num_ids if head == "source" else 0
        inputs, outputs = (0, source.width) if borrowed else (process.num_ids, process.num_ids)
        dit = DiT(inputs, outputs, time_conditioned=source.time_conditioned, **network)
        shape = (source.depth + 2, source.width) if features else (0, 0)
        return cls(process, LocalDiT(dit, *shape, borrowed))

    def forward(
        self,
        z: Tensor,
        hidden: Sequence[Tensor] = (),
        t: Tensor | None = None,
        positions: Tensor | None = None,
        readout: Tensor | None = None,
    ) -> Tensor:
        """g (B, P, K) at the positions asked for, all by default."""
        return self.network(z, hidden, t, positions, readout).float()

    def table(self, z: Tensor, positions: Tensor, t: Tensor | None = None, context: Prediction | None = None) -> Tensor:
        if self.network.states and context is None:
            raise ValueError("this ratio reads the denoiser's hidden states: pass context=denoiser(z, t, positions)")
        return self(z, *((), t, positions) if context is None else (context.hidden, t, positions, context.readout))

    def check(self, denoiser: Denoiser) -> None:
        super().check(denoiser)
        if not self.network.states or not isinstance(denoiser, NetworkDenoiser):
            return
        wanted = self.network.states, self.network.features
        found = denoiser.network.depth + 2, denoiser.network.width
        if wanted != found:
            raise ValueError(
                f"this ratio reads {wanted[0]} hidden states of width {wanted[1]}; the denoiser has {found[0]} of "
                f"width {found[1]}: it was fitted for another model"
            )

    def config(self) -> dict[str, Any]:
        return {"network": self.network.config()}

    @classmethod
    def from_config(cls, process: Process, config: dict[str, Any]) -> "LocalRatio":
        return cls(process, LocalDiT.from_config(config["network"]))
