"""The weights of a sum of ratios, by the held-out conditional likelihood of target data.

    w* = argmin_w NELBO( x_held_out ; q_w ),        q_w(x_l = v | z) ~ p(x_l = v | z) prod_i r_i(z, l <- v)^w_i

Convex in w, for it is the likelihood of a log-linear model. The networks run once, and what they say of held-out places
is kept (`Evidence`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from gtl.denoiser import Denoiser
from gtl.ratio.base import Combination, Ratio
from gtl.ratio.gamma import corruptions

__all__ = [
    "Evidence",
    "best_weights",
    "choose_weights",
    "gather_evidence",
    "join",
    "log_likelihood",
    "select_weights",
    "weighted_law",
]

IMPOSSIBLE = 1e4
"""A log-ratio beyond which a token is certain, or out of the question, at any weight worth having."""


class Evidence(NamedTuple):
    """What the weights of a sum are chosen from: held-out tokens, and what source and ratios say of their places."""

    log_p: Tensor
    """(M, K)"""
    log_r: Tensor
    """(M, K, R)"""
    token: Tensor
    """(M,)"""
    row: Tensor
    """(M,), the sequence that each comes from."""


@torch.no_grad()
def gather_evidence(
    denoiser: Denoiser, ratios: Sequence[Ratio], x: Tensor, rows: int = 4096, seed: int = 0, batch: int = 64
) -> Evidence:
    """One random noisy place of each of at least `rows` corruptions of held-out target data x (N, L)."""
    process, generator = denoiser.process, torch.Generator(x.device).manual_seed(seed)
    parts: list[tuple[Tensor, ...]] = []
    seen = 0
    for ratio in ratios:
        ratio.check(denoiser)
    for part, z, time in corruptions(denoiser, x, rows, batch, generator):
        row = torch.arange(seen, seen + len(part), device=x.device) % len(x)
        seen += len(part)
        place = process.some_place(z, generator).unsqueeze(1)
        counts = z.gather(1, place).squeeze(1) == process.mask_id if process.mask_id is not None else z[:, 0] >= 0
        source = denoiser(z, time, place)
        log_r = torch.stack([ratio.table(z, place, time, source).squeeze(1) for ratio in ratios], -1)
        values = source.log_probs.squeeze(1), log_r, part.gather(1, place).squeeze(1), row
        parts.append(tuple(value[counts] for value in values))
    log_p, log_r, token, row = (torch.cat(each) for each in zip(*parts, strict=True))
    log_p = log_p.double()
    log_r = log_r.double().masked_fill((log_p == -torch.inf).unsqueeze(-1), 0.0)
    return Evidence(log_p, log_r.clamp(-IMPOSSIBLE, IMPOSSIBLE), token, row)  # 0 * inf would be nan


def best_weights(evidence: Evidence, members: Sequence[int] | None = None, total: float | None = None) -> list[float]:
    """The weights, at least 0, under which held-out tokens are likeliest.

    Args:
        evidence: what is known of held-out tokens.
        members: the ratios that may count, all by default; others get 0.
        total: what the weights add up to; free by default.
    """
    size = evidence.log_r.shape[-1]
    members = list(range(size) if members is None else members)
    log_r, token = evidence.log_r[..., members], evidence.token
    every, count = torch.arange(len(token), device=token.device), len(members)

    def value(w: np.ndarray) -> tuple[float, np.ndarray]:
        """The mean negative log-likelihood and its gradient, E_q[r_i] - r_i(truth)."""
        log_q = (evidence.log_p + log_r @ torch.from_numpy(w).to(log_r)).log_softmax(-1)
        slope = torch.einsum("mk,mkr->r", log_q.exp(), log_r) - log_r[every, token].sum(0)
        return float(-log_q[every, token].mean()), (slope / len(token)).cpu().numpy()

    settings: dict[str, Any] = {"method": "L-BFGS-B", "bounds": [(0.0, None)] * count}
    if total is not None:
        bound = {"type": "eq", "fun": lambda w: w.sum() - total, "jac": lambda w: np.ones(count)}
        settings = {"method": "SLSQP", "bounds": [(0.0, total)] * count, "constraints": [bound]}
    scale = 1.0 if total is None else total
    found = minimize(value, np.full(count, scale / count), jac=True, **settings)
    if not np.isfinite(found.fun):
        raise ValueError("a ratio gave values that are not numbers on the held-out rows")
    best = min((found.x, *(scale * np.eye(count))), key=lambda w: value(w)[0])  # never worse than one of them alone
    weights = [0.0] * size
    for member, weight in zip(members, best.tolist(), strict=True):
        weights[member] = max(0.0, weight)
    return weights


def weighted_law(evidence: Evidence, weights: Sequence[float]) -> Tensor:
    """log q_w of every token at every place: (M, K)."""
    return (evidence.log_p + evidence.log_r @ torch.tensor(weights).to(evidence.log_r)).log_softmax(-1)


def log_likelihood(evidence: Evidence, weights: Sequence[float]) -> Tensor:
    """log q_w of every held-out token: (M,)."""
    return weighted_law(evidence, weights).gather(-1, evidence.token.unsqueeze(-1)).squeeze(-1)


def select_weights(evidence: Evidence) -> list[float]:
    """The weights, adding up to 1, of a sum that begins with the best ratio and takes on another only where held-out
    tokens become likelier by more than a standard error over sequences."""

    def alone(member: int) -> list[float]:
        return [float(i == member) for i in range(evidence.log_r.shape[-1])]

    others = set(range(evidence.log_r.shape[-1]))
    first = max(others, key=lambda i: float(log_likelihood(evidence, alone(i)).mean()))
    chosen, weights = [first], alone(first)
    while others := others - {*chosen}:
        trials = {i: best_weights(evidence, [*chosen, i], total=1.0) for i in others}
        best = max(others, key=lambda i: float(log_likelihood(evidence, trials[i]).mean()))
        ahead = log_likelihood(evidence, trials[best]) - log_likelihood(evidence, weights)
        count = torch.bincount(evidence.row)
        mean = (torch.bincount(evidence.row, ahead) / count)[count > 0]
        if len(mean) < 2 or float(mean.mean()) <= float(mean.std() / len(mean) ** 0.5):
            break
        chosen, weights = [*chosen, best], trials[best]
    return weights


def join(evidence: Sequence[Evidence]) -> Evidence:
    """Evidence from several sets of sequences as one."""
    firsts = np.cumsum([0] + [int(each.row.max()) + 1 for each in evidence])
    shifted = [each._replace(row=each.row + int(first)) for each, first in zip(evidence, firsts, strict=False)]
    return Evidence(*(torch.cat(each) for each in zip(*shifted, strict=True)))


def choose_weights(
    denoiser: Denoiser, ratios: Sequence[Ratio], x: Tensor, rows: int = 4096, seed: int = 0, batch: int = 64
) -> Combination:
    """The sum of ratios, with weights of at least 0, under which held-out target data x (N, L) is most likely."""
    if not ratios:
        raise ValueError("choose_weights: give at least one ratio")
    weights = best_weights(gather_evidence(denoiser, ratios, x, rows, seed, batch))
    return Combination(list(zip(weights, ratios, strict=True)))
