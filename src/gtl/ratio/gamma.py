"""Choosing gamma by the held-out conditional likelihood of target data.

    gamma* = argmin_gamma NELBO( x_held_out ; q_gamma ),      q_gamma(x_l = v | z) ~ p(x_l = v | z) r(z, l <- v)^gamma

The networks run once; every gamma of the grid reuses their outputs, under the same corruptions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gtl.denoiser import Denoiser
from gtl.guidance import check_gamma, check_n_ratio, guide, top_candidates
from gtl.ratio.base import Ratio

__all__ = ["GAMMAS", "choose_gamma", "nll_by_gamma"]

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
) -> Tensor:
    """The NELBO per token of x (N, L) under each gamma, in nats, over at least `rows` corrupted sequences: (G,)."""
    process = denoiser.process
    count = check_n_ratio(n_ratio, process.vocabulary)
    for gamma in gammas:
        check_gamma(gamma)
    x = x.repeat(-(-rows // len(x)), 1)
    t = process.times(len(x), x.device, generator)
    total = torch.zeros(len(gammas), dtype=torch.float64)
    for part, time in zip(x.split(batch), t.split(batch), strict=True):
        z = process.corrupt(part, time, generator)
        source = denoiser(z, time)
        candidates = top_candidates(source.log_probs, count, process.mask_id)
        positions = torch.arange(x.shape[1], device=x.device).expand_as(z)
        if process.mask_id is not None:
            positions = positions.masked_fill(z != process.mask_id, -1)
        log_r = ratio.log_ratio(z, positions, candidates, time, source)
        for index, gamma in enumerate(gammas):
            log_q = denoiser.carry_over(z, guide(source.log_probs, log_r, gamma, candidates, keep_tail=True))
            total[index] += float(process.nelbo(part, z, time, log_q, denoiser.timeless).sum())
    return total / x.numel()


def choose_gamma(denoiser: Denoiser, ratio: Ratio, x: Tensor, gammas: Sequence[float] = GAMMAS, seed: int = 0) -> float:
    """The gamma under which held-out target data x (N, L) is most likely."""
    generator = torch.Generator(x.device).manual_seed(seed)
    return float(gammas[int(nll_by_gamma(denoiser, ratio, x, gammas, generator=generator).argmin())])
