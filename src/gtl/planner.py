"""Which position next (the paper's planner).

An order gives every position a score from the tokens that are revealed, and the masked position with the highest one is
next. No order may look at masked content; whatever it makes of the revealed tokens, revealing one position at a time
from q(x_l | z) then draws exactly from q, by the chain rule along the order that came up.

The planner is a network with one logit for each position, at any length: the log-odds that the frozen denoiser's
likeliest token is the true one there. Taken as they are the logits give a deterministic order, easy positions first;
with a temperature T

    l ~ softmax( logit_l / T  over masked l )

(drawn by Gumbel noise), which for a constant planner is the uniformly random order.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gtl.categorical import uniform
from gtl.denoiser import Denoiser
from gtl.nn.dit import DiT
from gtl.process import Process

__all__ = ["Order", "Planner", "confidence", "left_to_right", "next_positions", "planned", "random_order"]

Order = Callable[[Tensor, torch.Generator | None], Tensor]
"""From the state z (B, L) to scores (B, L), the highest first; what it says of revealed positions means nothing."""

MOST_ELEMENTS = 2**28
"""Log-probabilities that `confidence` holds at once."""


def random_order(z: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A uniformly random order."""
    return uniform((z.shape[0], z.shape[1]), z.device, generator)


def left_to_right(z: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The first masked position first."""
    return -torch.arange(z.shape[1], dtype=torch.float64, device=z.device).expand_as(z)


def confidence(denoiser: Denoiser) -> Order:
    """Where the denoiser is surest first: max_v log p(x_l = v | z). One more pass of it in every step."""

    def order(z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        rows = max(1, MOST_ELEMENTS // (z.shape[1] * denoiser.process.num_ids))
        return torch.cat([denoiser(part).log_probs.amax(-1) for part in z.split(rows)])

    if not denoiser.timeless:
        raise ValueError("an order by confidence needs a denoiser without a time input")
    return order


def next_positions(order: Order, z: Tensor, masked: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """The `count` masked positions of every row that come next, (B, count); revealed ones where a row has fewer."""
    scores = order(z, generator).masked_fill(~masked, -torch.inf)
    return scores.argmax(-1, keepdim=True) if count == 1 else scores.topk(count, -1).indices


class Planner(nn.Module):
    """One logit a position: how likely the denoiser's first choice is right."""

    kind = "planner"

    def __init__(self, process: Process, network: DiT) -> None:
        """Wraps a network with a scalar head."""
        super().__init__()
        if process.mask_id is None:
            raise ValueError(f"a planner says which mask is next; {process.name} noise has none")
        if network.outputs != 1:
            raise ValueError(f"a planner needs a scalar head; this network has {network.outputs} outputs")
        if network.num_ids != process.num_ids:
            raise ValueError(f"the network knows {network.num_ids} ids; the process has {process.num_ids}")
        if network.time_conditioned:
            raise ValueError("a planner reads the revealed tokens alone: build its network without a time input")
        self.process, self.network = process, network

    @classmethod
    def build(cls, process: Process, **network: Any) -> "Planner":
        """A fresh planner: width, depth, heads, dropout as for `DiT`."""
        return cls(process, DiT(process.num_ids, 1, **network))

    def forward(self, z: Tensor) -> Tensor:
        """Logits (B, L) of the state z (B, L)."""
        return self.network(z).squeeze(-1).float()

    def check(self, denoiser: Denoiser) -> None:
        """Refuses a denoiser over other ids."""
        self.process.check_ids(denoiser.process, "planner")

    def config(self) -> dict[str, Any]:
        """What `from_config` needs."""
        return {"network": self.network.config()}

    @classmethod
    def from_config(cls, process: Process, config: dict[str, Any]) -> "Planner":
        """A planner of the same shape, its weights still to be loaded."""
        return cls(process, DiT(**config["network"]))


def planned(planner: Planner, temperature: float = 0.0) -> Order:
    """The planner's order, deterministic at temperature 0."""
    if not 0 <= temperature < torch.inf:
        raise ValueError(f"temperature={temperature} must be a finite number of at least 0")

    def order(z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        scores = planner(z).double()
        if not temperature:
            return scores
        u = uniform((z.shape[0], z.shape[1]), z.device, generator).clamp(min=torch.finfo(torch.float64).tiny)
        return scores / temperature - torch.log(-torch.log(u))

    return order
