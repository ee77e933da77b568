"""The transfer identity (Theorem 1): the target's reverse transition is the source's, reweighted by the ratio.

    q(z_s | z_t)  =  p(z_s | z_t) r(z_s)^gamma / sum over z_s,        r(z) = E_p[ q(x) / p(x) | z ] = q(z) / p(z)

applied position by position to single-token interventions (the paper's sequence formulation). Two ways for masked
noise:

- on z_s, the naive algorithm: the mask is one more candidate, weighted by r(z_t) itself;
- on x, `Guided`: the token of a position is guided given that the position is revealed, and the chance of staying
  masked is left as it is. That is the paper's mask stabiliser. By the martingale identity
  sum_v p(x_l = v | z) r(z, l <- v) = r(z) both agree for an exact ratio at gamma = 1.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gtl.denoiser import Denoiser, Prediction
from gtl.nn.dit import gather_positions
from gtl.ratio.base import Ratio

__all__ = ["Gamma", "Guided", "check_gamma", "check_n_ratio", "guide", "stabilise", "top_candidates"]

Gamma = float | Callable[[Tensor], Tensor]
"""A guidance strength, or a schedule gamma(t) from times (B,) to strengths (B,)."""


def guide(
    log_p: Tensor,
    log_r: Tensor,
    gamma: float | Tensor = 1.0,
    candidates: Tensor | None = None,
    keep_tail: bool = False,
) -> Tensor:
    """p r^gamma, normalised.

    Args:
        log_p: (..., K), the source's log-probabilities.
        log_r: (..., N), log-ratios of the candidates, up to a constant for each row.
        gamma: guidance strength, a number or a tensor that broadcasts against log_r.
        candidates: (..., N), the token ids that log_r speaks of; all K in order by default.
        keep_tail: whether other tokens keep the source's probability, the candidates sharing what is theirs; by default
            other tokens get none (the paper's pruning).

    Returns:
        (..., K), normalised. A row in which the ratio leaves nothing (possible only with
        pruned candidates or disjoint supports) keeps the source's distribution over the candidates.
    """
    p = log_p if candidates is None else log_p.gather(-1, candidates)
    if not isinstance(gamma, Tensor):
        gamma = torch.full((), gamma, dtype=log_r.dtype, device=log_r.device)  # as_tensor would wait for the device
    q = torch.where((p == -torch.inf) | (gamma == 0), p, p + gamma * log_r)  # 0 * inf would be nan
    q = torch.where(q.amax(-1, keepdim=True) == -torch.inf, p, q).log_softmax(-1)
    if candidates is None:
        return q
    if keep_tail:
        return log_p.scatter(-1, candidates, (q + p.logsumexp(-1, keepdim=True)).to(log_p.dtype))
    return torch.full_like(log_p, -torch.inf).scatter(-1, candidates, q.to(log_p.dtype))


def stabilise(log_q: Tensor, log_p: Tensor, mask_id: int) -> Tensor:
    """The position-independent mask stabiliser: q(z_s = m) = p(z_s = m), the tokens rescaled to what remains.

    Args:
        log_q: (..., K), guided log-probabilities of z_s up to a constant; what they say of the mask is ignored.
        log_p: (..., K), the source's kernel.
        mask_id: m.
    """
    stay = log_p[..., mask_id : mask_id + 1]
    tokens, source = log_q.clone(), log_p.clone()
    tokens[..., mask_id] = source[..., mask_id] = -torch.inf
    tokens = torch.where(tokens.amax(-1, keepdim=True) == -torch.inf, source, tokens)  # nothing left: the source's
    tokens = tokens.log_softmax(-1) + torch.log1p(-stay.exp())
    tokens[..., mask_id] = stay.squeeze(-1)
    return torch.where(stay == 0, log_p, tokens)


def top_candidates(log_p: Tensor, n_ratio: int, mask_id: int | None = None) -> Tensor:
    """The n_ratio likeliest tokens of log_p (..., K), never the mask: (..., n_ratio)."""
    ids = log_p.shape[-1]
    if n_ratio == ids - (mask_id is not None):
        every = torch.arange(ids, device=log_p.device)
        every = every if mask_id is None else every[every != mask_id]
        return every.expand(*log_p.shape[:-1], len(every))
    if mask_id is not None:
        log_p = log_p.clamp(min=torch.finfo(log_p.dtype).min)  # impossible tokens still come before the mask
        log_p[..., mask_id] = -torch.inf
    return log_p.topk(n_ratio, -1).indices


def check_gamma(gamma: Gamma) -> None:
    """Refuses a negative, infinite or undefined guidance strength."""
    if not callable(gamma) and not (math.isfinite(gamma) and gamma >= 0):
        raise ValueError(f"gamma={gamma} must be a finite number of at least 0")


def check_n_ratio(n_ratio: int | None, vocabulary: int) -> int:
    """The number of candidates, all by default; refuses one outside 1 .. V."""
    if n_ratio is None:
        return vocabulary
    if n_ratio < 1:
        raise ValueError(f"n_ratio={n_ratio} must be at least 1")
    if n_ratio > vocabulary:
        raise ValueError(f"n_ratio={n_ratio} exceeds the vocabulary ({vocabulary})")
    return n_ratio


class Guided(Denoiser):
    """log q(x_l = v | z): a frozen denoiser reweighted by a ratio is again a denoiser.

    Anything that takes a denoiser (samplers, likelihood bounds) therefore takes a guided one. Exact for masked noise
    with any ratio and for every process with a clean ratio.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        ratio: Ratio,
        gamma: Gamma | None = None,
        n_ratio: int | None = None,
        keep_tail: bool = False,
    ) -> None:
        """Sets the models; `gamma` is by default the one that was chosen for the ratio, and `keep_tail` (see `guide`)
        keeps likelihoods finite where candidates are pruned."""
        super().__init__()
        gamma = ratio.gamma if gamma is None else gamma
        check_gamma(gamma)
        process = denoiser.process
        ratio.check(denoiser)
        if ratio.space == "noisy" and process.name != "masked":
            raise ValueError(f"a noisy ratio under {process.name} noise weighs z_s, not x: guide the posterior instead")
        self.denoiser, self.ratio, self.gamma, self.keep_tail = denoiser, ratio, gamma, keep_tail
        self.n_ratio = check_n_ratio(n_ratio, process.vocabulary)
        self.process = process
        denoiser.eval()
        self.timeless = denoiser.timeless and ratio.timeless and not callable(gamma)

    def train(self, mode: bool = True) -> "Guided":
        """Training is the ratio's: the denoiser is frozen and stays in evaluation mode."""
        super().train(mode)
        self.denoiser.eval()
        return self

    def strength(self, z: Tensor, t: Tensor | None) -> float | Tensor:
        """gamma, or gamma(t) as (B, 1, 1)."""
        if not callable(self.gamma):
            return self.gamma
        if t is None:
            raise ValueError("a gamma(t) schedule needs the time t")
        return self.gamma(t).view(-1, 1, 1)

    def forward(self, z: Tensor, t: Tensor | None = None, positions: Tensor | None = None) -> Prediction:
        source = self.denoiser(z, t, positions)
        gamma = self.strength(z, t)
        if isinstance(gamma, (int, float)) and gamma == 0 and self.n_ratio == self.process.vocabulary:
            return source._replace(source=source.log_probs)
        if positions is None:
            positions = torch.arange(z.shape[1], device=z.device).expand(len(z), -1)
        tokens = gather_positions(z, positions)
        if self.process.mask_id is not None and positions.shape[1] > 1:  # revealed tokens carry over: nothing to weigh
            positions = positions.masked_fill(tokens != self.process.mask_id, -1)
        if self.n_ratio == self.process.vocabulary:
            guided = guide(source.log_probs, self.ratio.table(z, positions, t, source), gamma)
        else:
            candidates = top_candidates(source.log_probs, self.n_ratio, self.process.mask_id)
            log_r = self.ratio.log_ratio(z, positions, candidates, t, source)
            guided = guide(source.log_probs, log_r, gamma, candidates, self.keep_tail)
        log_probs = self.carry_over(tokens, guided)
        return Prediction(log_probs, source.hidden, source.log_probs, readout=source.readout)
