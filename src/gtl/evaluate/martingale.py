"""The martingale identity: sum_v p(x_l = v | z) r(z with l <- v) = r(z) for every z and every masked l.

A violation proves an error in the ratio or in the denoiser. No violation proves nothing (r = 1 has none), so report the
held-out likelihood gain beside it.
"""

import math

import torch
from torch import Tensor

from gtl.categorical import categorical, random_true
from gtl.denoiser import Denoiser
from gtl.guidance import top_candidates
from gtl.ratio.base import SequenceRatio

__all__ = ["martingale_violation"]


@torch.no_grad()
def martingale_violation(
    denoiser: Denoiser,
    ratio: SequenceRatio,
    x: Tensor,
    generator: torch.Generator | None = None,
    most: int | None = None,
) -> Tensor:
    """log of the left side over the right side at one random masked position of each sequence of x (B, L): (B',).

    Sequences are corrupted at stratified times; those left without a mask are dropped. Zero for an exact pair.

    Args:
        denoiser: p.
        ratio: r.
        x: clean sequences.
        generator: the source of randomness.
        most: of more tokens than that, the likeliest so many are summed and as many draws stand for the others: the
            left side is then an unbiased estimate, at the cost of 2 `most` evaluations of r and not V.
    """
    process = denoiser.process
    if process.mask_id is None:
        raise ValueError(f"the martingale identity is stated for masked noise; this process is {process.name}")
    t = process.times(len(x), x.device, generator)
    z = process.corrupt(x, t, generator)
    kept = (z == process.mask_id).any(-1)
    z, t = z[kept], t[kept]
    position = random_true(z == process.mask_id, generator).unsqueeze(1)
    log_p = denoiser(z, t, position).log_probs
    candidates = top_candidates(log_p, min(most or process.vocabulary, process.vocabulary), process.mask_id)
    weights = log_p.gather(-1, candidates)
    if most is not None and most < process.vocabulary:
        rest = log_p.scatter(-1, candidates, -torch.inf)
        mass = rest.logsumexp(-1, keepdim=True)
        drawn = categorical(rest.masked_fill(mass == -torch.inf, 0.0), generator, most)
        candidates = torch.cat([candidates, drawn], -1)
        weights = torch.cat([weights, (mass - math.log(most)).expand(*mass.shape[:-1], most)], -1)
    mask = torch.full_like(candidates[..., :1], process.mask_id)
    log_r = ratio.log_ratio(z, position, torch.cat([candidates, mask], -1), t)
    mean = torch.logsumexp(weights + log_r[..., :-1], -1)
    return (mean - log_r[..., -1]).squeeze(1)
