"""Choosing gamma, or the weights of a sum of ratios, by the held-out conditional likelihood of target data.

    gamma* = argmin_gamma NELBO( x_held_out ; q_gamma ),  q_gamma(x_l = v | z) ~ p(x_l = v | z) r(z, l <- v)^gamma
    w*     = argmin_w NELBO( x_held_out ; q_w ),          q_w(x_l = v | z) ~ p(x_l = v | z) prod_i r_i(z, l <- v)^w_i

The networks run once; every gamma of the grid reuses their outputs, under the same corruptions. The second is convex in
w, for it is the likelihood of a log-linear model.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from gtl.denoiser import Denoiser, Prediction
from gtl.guidance import check_gamma, check_n_ratio, guide, top_candidates
from gtl.nn.dit import gather_positions
from gtl.process import Mixing
from gtl.ratio.base import Combination, Ratio

__all__ = [
    "GAMMAS",
    "Evidence",
    "best_weights",
    "choose_gamma",
    "choose_weights",
    "gather_evidence",
    "join",
    "log_likelihood",
    "nll_by_gamma",
    "select_weights",
]

IMPOSSIBLE = 1e4
"""A log-ratio beyond which a token is certain, or out of the question, at any weight worth having."""
GAMMAS = (0.0, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)


@torch.no_grad()
def nll_by_gamma(
    denoiser: Denoiser,
    ratio: Ratio,
    x: Tensor,
    gammas: Sequence[float] = GAMMAS,
    rows: int = 512,
    n_ratio: int | None = None,
    generator: torch.Generator | None = None,
    batch: int = 64,
    one_place: bool = False,
) -> Tensor:
    """The NELBO per token of x (N, L) under each gamma, in nats, over at least `rows` corrupted sequences: (G,).

    `one_place` looks at one random position of each of them instead of all, for ratios that are dear to evaluate.
    """
    process = denoiser.process
    count = check_n_ratio(n_ratio, process.vocabulary)
    for gamma in gammas:
        check_gamma(gamma)
    total = torch.zeros(len(gammas), dtype=torch.float64)
    seen = 0
    for part, z, time in corruptions(denoiser, x, rows, batch, generator):
        place = process.some_place(z, generator) if one_place else None
        if place is None:
            positions = torch.arange(x.shape[1], device=x.device).expand_as(z)
            source = denoiser(z, time)
            if process.mask_id is not None:
                positions = positions.masked_fill(z != process.mask_id, -1)
        else:
            positions = place.unsqueeze(1)
            source = denoiser(z, time, positions)
        if isinstance(process, Mixing) and ratio.space == "noisy":
            total += noisy_nelbo(process, ratio, part, z, time, source, positions, place, gammas)
        else:
            if count == process.vocabulary:
                candidates, log_r = None, ratio.table(z, positions, time, source)
            else:
                candidates = top_candidates(source.log_probs, count, process.mask_id)
                log_r = ratio.log_ratio(z, positions, candidates, time, source)
            for index, gamma in enumerate(gammas):
                log_q = guide(source.log_probs, log_r, gamma, candidates, keep_tail=True)
                total[index] += float(process.nelbo(part, z, time, log_q, denoiser.timeless, place).sum())
        seen += part.numel()
    return total / seen


def noisy_nelbo(
    process: Mixing,
    ratio: Ratio,
    x: Tensor,
    z: Tensor,
    t: Tensor,
    source: Prediction,
    positions: Tensor,
    place: Tensor | None,
    gammas: Sequence[float],
) -> Tensor:
    """The NELBO of x (B, L), summed, at each gamma, where a noisy ratio guides the rates (Theorem 2): (G,)."""
    tokens = gather_positions(z, positions)
    every = torch.arange(process.num_ids, device=z.device).expand(*positions.shape, -1)
    log_r = ratio.log_ratio(z, positions, every, t, source).double()
    gap = log_r - log_r.gather(-1, tokens.unsqueeze(-1))
    score = process.score(tokens, source.log_probs, t)
    values = [process.nelbo_of_score(x, z, t, score * torch.exp(gamma * gap), place).sum() for gamma in gammas]
    return torch.stack(values).cpu()


def corruptions(
    denoiser: Denoiser, x: Tensor, rows: int, batch: int, generator: torch.Generator | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Clean rows, noisy rows and times, in batches: at least `rows`, x (N, L) repeated as often as it takes."""
    process = denoiser.process
    x = x.repeat(-(-rows // len(x)), 1)
    t = process.times(len(x), x.device, generator)
    for part, time in zip(x.split(batch), t.split(batch), strict=True):
        yield part, process.corrupt(part, time, generator), time


def choose_gamma(denoiser: Denoiser, ratio: Ratio, x: Tensor, gammas: Sequence[float] = GAMMAS, seed: int = 0) -> float:
    """The gamma under which held-out target data x (N, L) is most likely."""
    generator = torch.Generator(x.device).manual_seed(seed)
    return float(gammas[int(nll_by_gamma(denoiser, ratio, x, gammas, generator=generator).argmin())])


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


def log_likelihood(evidence: Evidence, weights: Sequence[float]) -> Tensor:
    """log q_w of every held-out token: (M,)."""
    log_q = (evidence.log_p + evidence.log_r @ torch.tensor(weights).to(evidence.log_r)).log_softmax(-1)
    return log_q.gather(-1, evidence.token.unsqueeze(-1)).squeeze(-1)


def select_weights(evidence: Evidence) -> list[float]:
    """The weights, adding up to 1, of a sum that begins with the best ratio and takes on another only where held-out
    tokens become likelier by more than a standard error (over sequences): their noise is not worth less."""

    def alone(member: int) -> list[float]:
        return [float(i == member) for i in range(evidence.log_r.shape[-1])]

    others = set(range(evidence.log_r.shape[-1]))
    first = max(others, key=lambda i: float(log_likelihood(evidence, alone(i)).mean()))
    chosen, weights = [first], alone(first)
    while others := others - {*chosen}:
        trials = {i: best_weights(evidence, [*chosen, i], total=1.0) for i in others}
        best = max(others, key=lambda i: float(log_likelihood(evidence, trials[i]).mean()))
        ahead = log_likelihood(evidence, trials[best]) - log_likelihood(evidence, weights)
        count = torch.bincount(evidence.row).clamp(min=1)
        mean = (torch.bincount(evidence.row, ahead) / count)[torch.bincount(evidence.row) > 0]
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
