"""The local network: from tokens, and a frozen network's hidden states, to one number for every position and token.

    h_0 = embedding(z) + W sum_i softmax(m)_i LN(hidden_i),      blocks,      g = head(h)      (B, L, K)

The frozen states say what the source model knows of a position; the embedding and the network's own blocks find what
the target needs and the source never looked at (a chain that forgets at once teaches no long memory). The head starts
at zero, so g = 0 at first. Without blocks (depth 0) every position is on its own, and only those asked for are
computed.

With 30,000 tokens an embedding and a head of its own would be nearly all of the network. It can do without: the frozen
embedding is among the states, and g can go through the frozen head E (K, D),

    g = E W' h + b,        W' (D, width),

so that words which the source knows to be alike are moved together.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtl.nn.dit import DiT, gather_positions

__all__ = ["LocalDiT"]


class LocalDiT(nn.Module):
    """A small DiT that may read the hidden states of a large one."""

    hot = ("forward",)

    def __init__(self, dit: DiT, states: int = 0, features: int = 0, borrowed: int = 0) -> None:
        """Wraps the trunk.

        Args:
            dit: blocks and head, one output for each token id, or `features` outputs where the head is borrowed.
            states: how many hidden states of the frozen network are mixed; 0 leaves it out.
            features: their width.
            borrowed: token ids of the frozen head that g goes through; 0 for a head of its own.
        """
        super().__init__()
        if (states == 0) != (features == 0) or min(states, features, borrowed) < 0:
            raise ValueError(f"states={states} and features={features}: give both, or none")
        if borrowed and (dit.num_ids, dit.outputs) != (0, features):
            raise ValueError(f"borrowed={borrowed}: the trunk must read {features} features alone and give as many")
        self.dit, self.states, self.features, self.borrowed = dit, states, features, borrowed
        if borrowed:
            self.bias = nn.Parameter(torch.zeros(borrowed))
        if states:
            self.mix = nn.Parameter(torch.zeros(states))
            self.project = nn.Linear(features, dit.width, bias=False)
            nn.init.normal_(self.project.weight, std=dit.width**-0.5)

    def forward(
        self,
        z: Tensor,
        hidden: Sequence[Tensor] = (),
        t: Tensor | None = None,
        positions: Tensor | None = None,
        readout: Tensor | None = None,
    ) -> Tensor:
        """g at the positions (B, P) asked for, all by default.

        Args:
            z: (B, L), tokens.
            hidden: the frozen network's states, (B, L, features) each.
            t: (B,), times, where the trunk is conditioned on them.
            positions: (B, P); -1 is padding.
            readout: (K, features), the frozen head's weights, where it is borrowed.
        """
        if self.states and [h.shape[-1] for h in hidden] != [self.features] * self.states:
            found = f"{len(hidden)} of width {hidden[0].shape[-1]}" if hidden else "none"
            raise ValueError(f"this network reads {self.states} hidden states of width {self.features}; got {found}")
        if positions is not None and not self.dit.depth:  # nothing is mixed over positions
            z, *hidden = (gather_positions(x, positions) for x in (z, *hidden))
            positions = None
        extra = None
        if self.states:
            weights = self.mix.softmax(0)
            mixed = [w * F.layer_norm(h, h.shape[-1:]) for w, h in zip(weights, hidden, strict=True)]
            extra = self.project(torch.stack(mixed).sum(0))
        h = self.dit.trunk(z, t, extra)
        out = self.dit.head(h if positions is None else gather_positions(h, positions))
        if not self.borrowed:
            return out
        if readout is None or readout.shape != (self.borrowed, self.features):
            found = "none" if readout is None else f"one of shape {tuple(readout.shape)}"
            raise ValueError(f"this network borrows a head of shape {(self.borrowed, self.features)}; got {found}")
        return F.linear(out, readout.detach().to(out.dtype)) + self.bias

    def config(self) -> dict[str, Any]:
        """What `from_config` needs."""
        names = ("states", "features", "borrowed")
        return {"dit": self.dit.config(), **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LocalDiT":
        """A network of the same shape."""
        return cls(DiT(**config["dit"]), config["states"], config["features"], config.get("borrowed", 0))
