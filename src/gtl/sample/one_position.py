"""One position at a time: the exact sampler for masked noise.

Revealing a single position from q(x_l | z), in an order that does not look at masked content, draws exactly from q,
because q(x) = prod_k q(x_{l_k} | x_{l_1}, ..., x_{l_{k-1}}) for any order. Every step costs one pass of the denoiser,
with logits at one position of each row, and n_ratio candidates of the ratio.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch import Tensor

from gtl.categorical import categorical, random_true
from gtl.denoiser import Denoiser
from gtl.guidance import Gamma
from gtl.ratio.base import Ratio
from gtl.sample.base import Sampler

__all__ = ["OnePosition", "Order", "left_to_right", "random_order"]

Order = Callable[[Tensor, torch.Generator | None], Tensor]
"""From masked (B, L) to the position to reveal in every row (B,)."""


random_order: Order = random_true
"""A uniformly random masked position of every row."""


def left_to_right(masked: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The first masked position of every row."""
    return masked.to(torch.uint8).argmax(-1)


class OnePosition(Sampler):
    """Reveals one position of every row in each step, as many steps as the row with most masks needs."""

    def __init__(
        self,
        denoiser: Denoiser,
        ratio: Ratio | None = None,
        *,
        gamma: Gamma | None = None,
        n_ratio: int | None = None,
        order: Order = random_order,
    ) -> None:
        """As for `Sampler`, and the order in which positions are revealed."""
        super().__init__(denoiser, ratio, gamma=gamma, n_ratio=n_ratio)
        if self.process.mask_id is None:
            raise ValueError(f"one-position sampling reveals masks; {self.process.name} noise has none: use Ancestral")
        self.mask_id, self.order = self.process.mask_id, order

    def begin(self) -> None:
        self.model = self.guided()

    def times(self, z: Tensor) -> Iterable[tuple[float, float]]:
        steps = int((z == self.mask_id).sum(-1).max()) if z.numel() else 0
        grid = self.process.schedule.inverse(1 - torch.arange(steps, -1, -1).double() / z.shape[1])
        return list(pairwise(grid.tolist()))

    def step(self, z: Tensor, t: float, s: float, generator: torch.Generator | None) -> Tensor:
        position = self.order(z == self.mask_id, generator).unsqueeze(1)
        time = torch.full((len(z),), t, device=z.device)
        log_probs = self.model(z, time, position).log_probs  # a row with no mask left draws its own token again
        return z.scatter(1, position, categorical(log_probs, generator))
