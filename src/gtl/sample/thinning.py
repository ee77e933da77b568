"""Exact jumps under mixing noise: thinning. No error of discretisation, whatever the number of windows.

The reverse chain is followed jump by jump. In a window of sigma every row has a bound B on its total rate; candidate
times come at rate B, and one at which the total rate is R becomes a jump with chance R / B, to a single position and
token in proportion to their rates. B is `SAFETY` times the larger of the rates at the window's two ends. It is checked
at every candidate: where it fails, the row's window is cut in half and its bound taken anew. The noise below
1 - alpha = 1e-3 is removed by one exact denoising step. Costs one evaluation for each candidate and two for each jump.
"""

import math
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from gtl.categorical import categorical, uniform
from gtl.denoiser import Denoiser
from gtl.guidance import Gamma
from gtl.process import Mixing
from gtl.ratio.base import Ratio
from gtl.sample.rates import Euler

__all__ = ["Thinning"]

SAFETY = 1.5
FIRST, LAST = 20.0, -math.log1p(-1e-3)
"""Sigma where the chain starts (alpha = 2e-9, the prior to that precision) and where it is denoised in one step."""


class Thinning(Euler):
    """Follows the guided reverse chain jump by jump."""

    def __init__(
        self,
        denoiser: Denoiser,
        ratio: Ratio | None = None,
        *,
        gamma: Gamma | None = None,
        n_ratio: int | None = None,
        windows: int = 32,
    ) -> None:
        """As for `Sampler`, and how many windows of sigma, evenly spaced in its logarithm, the chain is cut into."""
        super().__init__(denoiser, ratio, gamma=gamma, n_ratio=n_ratio, steps=windows)
        if not isinstance(self.process, Mixing):
            raise ValueError(f"thinning is for noise without masks; for {self.process.name} noise use FirstHitting")
        self.halved = 0
        """How often a bound failed and a window was cut in half, in all runs."""

    def times(self, z: Tensor) -> Iterable[tuple[float, float]]:
        first = min(FIRST, float(self.process.sigma(torch.ones(1, dtype=torch.float64))))
        sigma = torch.logspace(math.log10(first), math.log10(LAST), self.steps + 1, dtype=torch.float64)
        return [*pairwise(self._time(sigma).tolist()), (float(self._time(sigma[-1:])), 0.0)]

    def _time(self, sigma: Tensor) -> Tensor:
        return self.process.schedule.inverse(torch.exp(-sigma))

    def _leave(self, z: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """The rates out of the rows of z, frozen positions and the tokens themselves at zero: (R, L, K)."""
        part = z[rows]
        rates = self.rates(part, self._time(sigma[rows])).scatter(-1, part.unsqueeze(-1), 0.0)
        if self.frozen is not None:
            rates = rates.masked_fill(self.frozen.expand_as(z)[rows].unsqueeze(-1), 0.0)
        return rates

    def step(self, z: Tensor, t: float, s: float, generator: torch.Generator | None) -> Tensor:
        if s == 0:
            return categorical(self.kernel(z, t, s), generator)
        ends = (float(self.process.sigma(torch.tensor([u], dtype=torch.float64))) for u in (t, s))
        now, end = (torch.full((len(z),), u, dtype=torch.float64, device=z.device) for u in ends)
        until, bound = end.clone(), torch.zeros_like(now)
        rows = torch.arange(len(z), device=z.device)
        self._bound(z, now, until, bound, rows)
        z = z.clone()
        while len(rows):
            wait = -torch.log1p(-uniform((len(rows),), z.device, generator)) / bound[rows].clamp(min=1e-300)
            past = now[rows] - wait <= until[rows]
            reached, tried = rows[past], rows[~past]
            now[reached] = until[reached]
            until[reached] = end[reached]
            fresh = [reached[now[reached] > end[reached]]]
            if len(tried):
                at = now.clone()
                at[tried] = now[tried] - wait[~past]
                rates = self._leave(z, at, tried)
                total = rates.sum((-1, -2))
                failed = total > bound[tried]
                self.halved += int(failed.sum())
                cut = tried[failed]
                until[cut] = (now[cut] + until[cut]) / 2
                now[tried[~failed]] = at[tried[~failed]]
                jump = ~failed & (uniform((len(tried),), z.device, generator) * bound[tried] < total)
                moved = tried[jump]
                if len(moved):
                    place = categorical(rates[jump].flatten(1).log(), generator)
                    z[moved, place // rates.shape[-1]] = place % rates.shape[-1]
                fresh += [cut, moved]
            changed = torch.cat(fresh)
            self._bound(z, now, until, bound, changed)
            rows = (now > end).nonzero().squeeze(-1)
        return z

    def _bound(self, z: Tensor, now: Tensor, until: Tensor, bound: Tensor, rows: Tensor) -> None:
        """Sets the bounds of the rows from both ends of their windows."""
        if len(rows):
            totals = [self._leave(z, sigma, rows).sum((-1, -2)) for sigma in (now, until)]
            bound[rows] = SAFETY * torch.maximum(*totals)
