"""Mixing noise: processes under which any position may change at any time, uniform and general D3PM.

With a generator G (rows sum to zero, G = (Q - I) / gap for a row-stochastic Q) and tau = sigma(t) = -log alpha(t),

    p(z_t = j | z_s = i) = exp( (tau_t - tau_s) G )[i, j],        posterior by Bayes:

    p(z_s = v | z_t) = p(z_t | z_s = v) sum_x p(z_s = v | x) p(x | z_t) / p(z_t | x)

`gap` is the spectral gap of Q, so that alpha is what is left of the slowest mode. A grid of T times makes it a D3PM
whose i-th matrix is exp((tau_i - tau_{i-1}) G); between them it is a continuous-time chain with rates sigma'(t) G.

The NELBO is the continuous-time one, score entropy; with u = 1 - alpha uniform, sigma'(t) dt = du / alpha.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from gtl.categorical import categorical, uniform
from gtl.process.base import LEAST, Process

__all__ = ["Mixing", "Uniform", "entropy_integrand"]


def entropy_integrand(rates: Tensor, score: Tensor, ratio: Tensor) -> Tensor:
    """sum_y rates (s - a log s + a log a - a): rates, s and a (..., K) -> (...). Zero rates count nothing."""
    score, ratio = torch.where(rates > 0, score, 1.0), torch.where(rates > 0, ratio, 1.0)
    terms = score - torch.xlogy(ratio, score) + torch.xlogy(ratio, ratio) - ratio
    return (rates.clamp(min=0) * terms).sum(-1)


class Mixing(Process):
    """What all of them share; everything is float64, for ratios of probabilities near t = 1 are ratios of equals."""

    @abstractmethod
    def spread(self, weight: Tensor, s: Tensor) -> Tensor:
        """sum_x weight(x) p(z_s = v | x) for every v: weight (B, P, K), s (B,) -> (B, P, K)."""

    def given_x(self, z: Tensor, log_x: Tensor, t: Tensor) -> Tensor:
        """p(x | z) / p(z | x), (B, P, K): what posterior and score spread over the tokens."""
        likelihood = self.likelihood(z, torch.zeros_like(t), t)
        return torch.where(likelihood > 0, log_x.double().exp() / likelihood, 0.0)

    def posterior(self, z: Tensor, log_x: Tensor, t: Tensor, s: Tensor) -> Tensor:
        joint = self.likelihood(z, s, t) * self.spread(self.given_x(z, log_x, t), s)
        joint = joint.clamp(min=0)
        return (joint / joint.sum(-1, keepdim=True)).log().to(log_x.dtype)

    @abstractmethod
    def gather(self, score: Tensor, t: Tensor) -> Tensor:
        """The weight whose `spread` at time t is the score: (B, P, K) -> (B, P, K)."""

    def mean(self, z: Tensor, score: Tensor, t: Tensor) -> Tensor:
        """What a learned score makes negative is set to zero."""
        likelihood = self.likelihood(z, torch.zeros_like(t), t)
        joint = (self.gather(score.double(), t) * likelihood).clamp(min=0)
        return (joint / joint.sum(-1, keepdim=True).clamp(min=1e-300)).log()

    def score(self, z: Tensor, log_x: Tensor, t: Tensor) -> Tensor:
        return self.spread(self.given_x(z, log_x, t), t)

    def nelbo(
        self, x: Tensor, z: Tensor, t: Tensor, log_x: Tensor, timeless: bool, place: Tensor | None = None
    ) -> Tensor:
        at = z if place is None else z.gather(1, place.unsqueeze(1))
        return self.nelbo_of_score(x, z, t, self.score(at, log_x, t), place).to(log_x.dtype)

    def nelbo_of_score(self, x: Tensor, z: Tensor, t: Tensor, score: Tensor, place: Tensor | None = None) -> Tensor:
        """The same of a concrete score (B, L, K), or (B, 1, K) at `place`: (B,), float64."""
        length = x.shape[1]
        if place is not None:
            x, z = x.gather(1, place.unsqueeze(1)), z.gather(1, place.unsqueeze(1))
        truth = torch.nn.functional.one_hot(x, self.num_ids).double().log()
        terms = entropy_integrand(self.rates_into(z), score, self.score(z, truth, t)).sum(-1)
        total = terms / self.alpha(t).squeeze(-1).clamp(min=1e-9)
        return total if place is None else total * length

    def some_place(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return (uniform((len(z),), z.device, generator) * z.shape[1]).long()


class Uniform(Mixing):
    """A token is kept with probability alpha_t and is otherwise uniform over all K ids; no matrix is ever built."""

    name = "uniform"

    def _kept(self, s: Tensor, t: Tensor) -> Tensor:
        """alpha_t / alpha_s as (B, 1, 1)."""
        alpha_s, alpha_t = self.alpha(s), self.alpha(t)
        return (alpha_t / alpha_s.clamp(min=LEAST)).clamp(max=1.0).unsqueeze(-1)

    def corrupt(self, x: Tensor, t: Tensor, generator: torch.Generator | None = None) -> Tensor:
        keep = uniform(tuple(x.shape), x.device, generator) < self.alpha(t)
        return torch.where(keep, x, self.prior((x.shape[0], x.shape[1]), x.device, generator))

    def prior(self, shape: tuple[int, int], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
        return (uniform(shape, device, generator) * self.num_ids).long().clamp(max=self.num_ids - 1)

    def prior_probability(self, z: Tensor) -> Tensor:
        return torch.full(z.shape, 1 / self.num_ids, dtype=torch.float64, device=z.device)

    def likelihood(self, z: Tensor, s: Tensor, t: Tensor) -> Tensor:
        kept = self._kept(s, t)
        values = ((1 - kept) / self.num_ids).expand(*z.shape, self.num_ids).clone()
        return values.scatter_add_(-1, z.unsqueeze(-1), kept.expand(*z.shape, 1).contiguous())

    def spread(self, weight: Tensor, s: Tensor) -> Tensor:
        kept = self.alpha(s).unsqueeze(-1)
        return kept * weight + (1 - kept) / self.num_ids * weight.sum(-1, keepdim=True)

    def gather(self, score: Tensor, t: Tensor) -> Tensor:
        kept = self.alpha(t).unsqueeze(-1).clamp(min=LEAST)
        return (score - (1 - kept) / self.num_ids * score.sum(-1, keepdim=True)) / kept

    def rates_into(self, z: Tensor) -> Tensor:
        values = torch.full((*z.shape, self.num_ids), 1 / self.num_ids, dtype=torch.float64, device=z.device)
        return values.scatter_(-1, z.unsqueeze(-1), 1 / self.num_ids - 1)

    def rates_out(self, z: Tensor) -> Tensor:
        return self.rates_into(z)  # G is symmetric


def draw_rows(kernel: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
    """z ~ kernel[b, x, :] for kernel (B, K, K) and x (B, L): (B, L)."""
    rows = kernel.gather(1, x.unsqueeze(-1).expand(-1, -1, kernel.shape[-1]))
    return categorical(rows.log(), generator)
