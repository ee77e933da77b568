"""First hitting: the exact jumps of masked noise. A sequence with k masks is next revealed at a time of its own,

    1 - alpha(s) = (1 - alpha(t)) U^(1/k),      U uniform,

at a uniformly random masked position. At most L jumps, whatever the batch and the schedule, and no error of
discretisation for models that depend on the time. For others this is one-position sampling in random order.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from gtl.categorical import categorical, random_true, uniform
from gtl.denoiser import Denoiser
from gtl.guidance import Gamma
from gtl.process import Masked
from gtl.ratio.base import Ratio
from gtl.sample.base import Sampler, uniform_grid

__all__ = ["FirstHitting"]


class FirstHitting(Sampler):
    """One jump of every row in each step."""

    def __init__(
        self,
        denoiser: Denoiser,
        ratio: Ratio | None = None,
        *,
        gamma: Gamma | None = None,
        n_ratio: int | None = None,
    ) -> None:
        """As for `Sampler`."""
        super().__init__(denoiser, ratio, gamma=gamma, n_ratio=n_ratio)
        if not isinstance(self.process, Masked):
            raise ValueError(f"first hitting reveals masks; {self.process.name} noise has none: use TauLeaping")
        self.masked = self.process

    def begin(self) -> None:
        self.model = self.guided()
        self.noise: Tensor | None = None

    def times(self, z: Tensor) -> Iterable[tuple[float, float]]:
        """As many steps as the row with most masks needs; the rows' own times are in `noise`."""
        return uniform_grid(int((z == self.masked.mask_id).sum(-1).max())) if z.numel() else []

    def step(self, z: Tensor, t: float, s: float, generator: torch.Generator | None) -> Tensor:
        masked = z == self.masked.mask_id
        noise = torch.ones(len(z), dtype=torch.float64, device=z.device) if self.noise is None else self.noise
        left = masked.sum(-1)
        self.noise = noise * uniform((len(z),), z.device, generator) ** (1 / left.clamp(min=1))
        position = random_true(masked, generator).unsqueeze(1)
        log_probs = self.model(z, self.masked.schedule.inverse(1 - self.noise), position).log_probs
        return z.scatter(1, position, categorical(log_probs, generator))  # a row without masks draws its own token
