"""Remasking: ancestral steps for masked noise that take some revealed tokens back, so that mistakes can be mended.

    a revealed token is masked again with chance rho <= min(1, (1 - alpha_s) / alpha_t),
    a masked one is revealed with chance (alpha_s - (1 - rho) alpha_t) / (1 - alpha_t):

the marginals of the process are those of plain ancestral sampling whatever rho is; rho = eta times its largest value.
"""

import torch
from torch import Tensor

from gtl.categorical import bernoulli
from gtl.denoiser import Denoiser
from gtl.guidance import Gamma
from gtl.process import Masked
from gtl.ratio.base import Ratio
from gtl.sample.ancestral import Ancestral

__all__ = ["Remasking"]


class Remasking(Ancestral):
    """Stabilised ancestral sampling with remasking."""

    def __init__(
        self,
        denoiser: Denoiser,
        ratio: Ratio | None = None,
        *,
        gamma: Gamma | None = None,
        n_ratio: int | None = None,
        steps: int = 64,
        eta: float = 0.1,
    ) -> None:
        """As for `Ancestral`, and eta in [0, 1], how much of what may be masked again is."""
        if not 0 <= eta <= 1:
            raise ValueError(f"eta={eta} must be between 0 and 1")
        if not isinstance(denoiser.process, Masked):
            raise ValueError(f"remasking needs masked noise; this process is {denoiser.process.name}")
        self.eta = eta
        super().__init__(denoiser, ratio, gamma=gamma, n_ratio=n_ratio, steps=steps)

    def chances(self, process: Masked, t: float, s: float, device: torch.device) -> tuple[Tensor, Tensor]:
        """The chance that a revealed token is masked again, and that a masked one is revealed: (1, 1) each."""
        alpha_t, alpha_s = (process.alpha(torch.tensor([u], device=device)) for u in (t, s))
        again = self.eta * ((1 - alpha_s) / alpha_t.clamp(min=1e-300)).clamp(max=1.0)
        return again, (alpha_s - (1 - again) * alpha_t) / (1 - alpha_t)

    def step(self, z: Tensor, t: float, s: float, generator: torch.Generator | None) -> Tensor:
        assert isinstance(self.process, Masked)
        again, reveal = self.chances(self.process, t, s, z.device)
        forget = bernoulli(again, tuple(z.shape), generator) & (z != self.process.mask_id)
        z = self.reveal(self.process, z, reveal, t, generator)
        return z.masked_fill(forget, self.process.mask_id)

    def kernel(self, z: Tensor, t: float, s: float) -> Tensor:
        assert isinstance(self.process, Masked)
        again, reveal = (chance.unsqueeze(-1) for chance in self.chances(self.process, t, s, z.device))
        time = torch.full((len(z),), t, device=z.device, dtype=torch.float64)
        log_x = self.model(z, time).log_probs.double()
        masked = (z == self.process.mask_id).unsqueeze(-1)
        kernel = log_x + torch.where(masked, reveal, 1 - again).log()
        stay = torch.where(masked, 1 - reveal, again).clamp(min=0.0).log()
        kernel[..., self.process.mask_id] = stay.squeeze(-1)
        return kernel
