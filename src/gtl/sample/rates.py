"""Samplers on reverse rates: Euler and tau-leaping steps of the continuous-time chain (Theorem 2), with correctors.

With R the guided reverse rates out of z at time t, per unit of sigma, and h = sigma(t) - sigma(s), position by position

    Euler          y with chance h R(z -> y), capped at 1 in all; else z stays
    tau-leaping    z stays with chance exp(-h sum_y R(z -> y)); else y in proportion to R(z -> y)

The rates are frozen over a step, and the last step is one exact denoising step, so that nothing noisy is left. A
corrector step at time s leaves p_s unchanged: it runs the forward and the reverse chain at once, R + G.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from gtl.categorical import categorical
from gtl.denoiser import Denoiser
from gtl.guidance import Gamma, guide
from gtl.ratio.base import Ratio
from gtl.sample.base import Sampler, uniform_grid
from gtl.score import guide_rates, reverse_rates, with_diagonal

__all__ = ["Euler", "TauLeaping"]


class Euler(Sampler):
    """First-order steps."""

    def __init__(
        self,
        denoiser: Denoiser,
        ratio: Ratio | None = None,
        *,
        gamma: Gamma | None = None,
        n_ratio: int | None = None,
        steps: int = 64,
        correctors: int = 0,
        corrector_size: float = 0.1,
    ) -> None:
        """Sets the models.

        Args:
            denoiser: the frozen source model.
            ratio: the target-to-source ratio; None samples from the source.
            gamma: guidance strength, or a schedule gamma(t); by default the one that was chosen for the ratio.
            n_ratio: as for `Sampler`; a noisy ratio weighs every id.
            steps: T.
            correctors: corrector steps after each step but the last.
            corrector_size: how far each of them goes, in units of sigma.
        """
        super().__init__(denoiser, ratio, gamma=gamma, n_ratio=n_ratio)
        if steps < 1 or correctors < 0 or not corrector_size > 0:
            raise ValueError(f"steps={steps}, correctors={correctors}, corrector_size={corrector_size}: out of range")
        self.steps, self.correctors, self.corrector_size = steps, correctors, corrector_size
        self.begin()

    def begin(self) -> None:
        self.model, self._noisy = self.parts()

    def times(self, z: Tensor) -> Iterable[tuple[float, float]]:
        return uniform_grid(self.steps)

    def step(self, z: Tensor, t: float, s: float, generator: torch.Generator | None) -> Tensor:
        z = categorical(self.kernel(z, t, s), generator)
        for _ in range(self.correctors if s > 0 else 0):
            z = categorical(self.corrector(z, s), generator)
        return z

    def rates(self, z: Tensor, t: Tensor) -> Tensor:
        """The guided reverse rates out of z (B, L) at times t (B,), per unit of sigma: (B, L, K)."""
        source = self.model(z, t)
        rates = reverse_rates(self.process, z, self.process.score(z, source.log_probs, t))
        if self._noisy is None:
            return rates
        return guide_rates(rates, self._log_ratios(self._noisy, z, t), z, self.strength(t))

    def _log_ratios(self, ratio: Ratio, z: Tensor, t: Tensor) -> Tensor:
        """log r of every id at every position, the token itself and the mask among them: (B, L, K)."""
        positions = torch.arange(z.shape[1], device=z.device).expand_as(z)
        every = torch.arange(self.process.num_ids, device=z.device).expand(*z.shape, -1)
        return ratio.log_ratio(z, positions, every, t)

    def kernel(self, z: Tensor, t: float, s: float) -> Tensor:
        """The log-probabilities of z_s at every position, (B, L, K)."""
        time = torch.full((len(z),), t, device=z.device, dtype=torch.float64)
        after = torch.full_like(time, s)
        if s > 0:
            return self.move(self.rates(z, time), z, self.process.sigma(time) - self.process.sigma(after))
        log_x = self.process.posterior(z, self.model(z, time).log_probs, time, after)
        if self._noisy is None:
            return log_x
        return guide(log_x, self._log_ratios(self._noisy, z, after), self.strength(time))

    def corrector(self, z: Tensor, t: float) -> Tensor:
        """The log-probabilities after one corrector step at time t, (B, L, K)."""
        time = torch.full((len(z),), t, device=z.device, dtype=torch.float64)
        both = with_diagonal(self.rates(z, time) + self.process.rates_out(z), z)
        return self.move(both, z, torch.full_like(time, self.corrector_size))

    def move(self, rates: Tensor, z: Tensor, span: Tensor) -> Tensor:
        """The log-probabilities of where rates (B, L, K) lead from z (B, L) over a span (B,) of sigma."""
        leave = rates.scatter(-1, z.unsqueeze(-1), 0.0) * span[:, None, None]
        total = leave.sum(-1, keepdim=True)
        leave = leave / total.clamp(min=1.0)
        return leave.scatter(-1, z.unsqueeze(-1), (1 - total).clamp(min=0.0)).log()


class TauLeaping(Euler):
    """Steps that never overshoot: the chance to stay is that of no jump at all."""

    def move(self, rates: Tensor, z: Tensor, span: Tensor) -> Tensor:
        leave = rates.scatter(-1, z.unsqueeze(-1), 0.0)
        total = leave.sum(-1, keepdim=True)
        stay = torch.exp(-total * span[:, None, None])
        leave = leave / total.clamp(min=1e-300) * (1 - stay)
        return leave.scatter(-1, z.unsqueeze(-1), stay).log()
