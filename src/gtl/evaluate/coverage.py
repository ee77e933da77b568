"""Coverage: how much of the target the source's likeliest tokens leave out.

    outside(n) = share of all masked l, over x ~ target, t and z, whose x_l is not among the n likeliest of p(x_l | z)

Noisy sequences have more masked tokens and count for more. Pruning to n_ratio = n candidates gives these tokens no
probability, whatever the ratio says of them. The paper takes them for negligible: it bounds the ratio on the candidates
alone. The n likeliest are those with fewer than n tokens that are likelier, so one rank of x_l serves every n.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gtl.denoiser import MOST_CELLS, Denoiser, NetworkDenoiser
from gtl.guidance import check_n_ratio
from gtl.memory import by_chunks
from gtl.process import stratified

__all__ = ["outside"]


def ranks(denoiser: Denoiser, x: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """How many tokens are likelier than the true one at each masked position of z: x, z (B, L), t (B,) -> (M,)."""
    if type(denoiser) is not NetworkDenoiser:
        masked = z == denoiser.process.mask_id
        log_p, truth = denoiser(z, t).log_probs[masked], x[masked].unsqueeze(-1)
        return (log_p > log_p.gather(-1, truth)).sum(-1)
    hidden, where = denoiser.masked_states(z, t)
    parts = []
    for part in where.split(denoiser.at_once(z)):
        logits, truth = denoiser.logits(hidden[part]), x.flatten()[part].unsqueeze(-1)
        parts.append((logits > logits.gather(-1, truth)).sum(-1))
    return torch.cat(parts) if parts else where


@torch.no_grad()
def outside(
    denoiser: Denoiser,
    x: Tensor,
    counts: Sequence[int],
    draws: int = 16,
    generator: torch.Generator | None = None,
    batch: int = 1024,
) -> dict[int, float]:
    """The share of held-out target tokens that n candidates leave out (metric `outside`), for each n.

    Args:
        denoiser: the source, under masked noise.
        x: (N, L), held-out target sequences.
        counts: the n to look at, each from 1 to the vocabulary.
        draws: corruptions of every sequence, t uniform.
        generator: of the corruptions.
        batch: sequences that run through the network at once.
    """
    process = denoiser.process
    if process.mask_id is None:
        raise ValueError(f"outside is defined for masked noise; this process is {process.name}")
    limits = torch.tensor([check_n_ratio(n, process.vocabulary) for n in counts], device=x.device)
    rows = x.repeat(draws, 1)

    def lost_and_all(part: slice) -> tuple[Tensor, int]:
        clean = rows[part].long()
        t = stratified(len(clean), x.device, generator)
        rank = ranks(denoiser, clean, process.corrupt(clean, t, generator), t)
        return (rank.unsqueeze(-1) >= limits).sum(0), len(rank)

    if type(denoiser) is not NetworkDenoiser:
        batch = min(batch, max(1, MOST_CELLS // (x.shape[1] * process.num_ids)))
    parts, _ = by_chunks(lost_and_all, len(rows), batch, generator, "the coverage")
    total = sum(count for _, count in parts)
    if not total:
        raise ValueError("outside: no position was masked in any draw; use more draws")
    lost = torch.stack([part for part, _ in parts]).sum(0)
    return {n: count / total for n, count in zip(counts, lost.tolist(), strict=True)}
