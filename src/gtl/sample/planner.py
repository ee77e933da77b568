"""Planner sampling (Algorithm 1): an order picks positions, the guided denoiser fills them in.

Every step reveals `per_step` positions of each row: a row of L masks takes L / per_step steps. With one position a step
that draws exactly from q, whatever the order (see `planner`); with more, each token is drawn on its own given what was
revealed before, as in ancestral sampling. A step costs one pass of the order's network, one of the denoiser with logits
at `per_step` positions of each row, and n_ratio candidates of the ratio for each of them. Nothing in the loop reads the
device.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from gtl.categorical import categorical
from gtl.denoiser import Denoiser
from gtl.guidance import Gamma
from gtl.planner import Order, next_positions, random_order
from gtl.ratio.base import Ratio
from gtl.sample.base import Sampler

__all__ = ["OnePosition", "PlannerSampler"]


class PlannerSampler(Sampler):
    """Reveals `per_step` positions of every row in each step, in the order given."""

    def __init__(
        self,
        denoiser: Denoiser,
        ratio: Ratio | None = None,
        *,
        gamma: Gamma | None = None,
        n_ratio: int | None = None,
        order: Order = random_order,
        per_step: int = 1,
    ) -> None:
        """As for `Sampler`, and the order in which positions are revealed, so many a step."""
        super().__init__(denoiser, ratio, gamma=gamma, n_ratio=n_ratio)
        if self.process.mask_id is None:
            raise ValueError(f"this sampler reveals masks; {self.process.name} noise has none: use Ancestral")
        if per_step < 1:
            raise ValueError(f"per_step={per_step} must be at least 1")
        self.mask_id, self.order, self.per_step = self.process.mask_id, order, per_step

    def begin(self) -> None:
        self.model = self.guided()

    def times(self, z: Tensor) -> Iterable[tuple[float, float]]:
        masks = int((z == self.mask_id).sum(-1).max()) if z.numel() else 0
        left = torch.tensor([*range(masks, 0, -self.per_step), 0]).double()
        return list(pairwise(self.process.schedule.inverse(1 - left / max(1, z.shape[1])).tolist()))

    def step(self, z: Tensor, t: float, s: float, generator: torch.Generator | None) -> Tensor:
        masked = z == self.mask_id
        positions = next_positions(self.order, z, masked, min(self.per_step, z.shape[1]), generator)
        time = torch.full((len(z),), t, device=z.device)
        log_probs = self.model(z, time, positions).log_probs  # a revealed position draws its own token again
        return z.scatter(1, positions, categorical(log_probs, generator))


class OnePosition(PlannerSampler):
    """One position of every row in each step, in random order by default: the exact sampler for masked noise.

    Revealing a single position from q(x_l | z) draws exactly from q, because q(x) = prod_k q(x_{l_k} | x_{l_1}, ...,
    x_{l_{k-1}}) for any order.
    """
