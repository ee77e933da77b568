"""Counting for a unigram ratio: what comes at noisy places of held-out rows, and what a model expects there.

Every row is judged by what the others say, so that chance does not pass for a correction.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gtl.denoiser import Denoiser
from gtl.process import Masked
from gtl.ratio.gamma import corruptions, rows_that_fit
from gtl.ratio.unigram import UnigramRatio

__all__ = ["PSEUDO", "calibrate", "log_ratios", "nelbo_by_ratio", "tally"]

PSEUDO = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
"""Values of k among which held-out likelihood chooses."""
GROUPS = 5
"""Parts of one set of rows that judge what the others say."""


def log_ratios(counts: Tensor, pseudo: Sequence[float] = PSEUDO) -> Tensor:
    """log r for each k, from how often tokens came and were expected (2, K): (S, K)."""
    k = torch.tensor(pseudo, dtype=counts.dtype, device=counts.device).unsqueeze(-1)
    return (counts[0] + k).log() - (counts[1] + k).log()


@torch.no_grad()
def tally(model: Denoiser, x: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """How often each token comes at noisy places of x (N, L), and how often the model expects it: (2, K), float64.

    Over at least `rows` corruptions, scaled as if every token of x had been asked for once.
    """
    counts = torch.zeros(2, model.process.num_ids, dtype=torch.float64, device=x.device)
    batch = rows_that_fit(x, model.process.num_ids)
    for part, z, t in corruptions(model, x, rows, batch, generator):
        where = z == model.process.mask_id if model.process.mask_id is not None else z >= 0
        counts[0] += torch.bincount(part[where], minlength=counts.shape[1])
        counts[1] += model(z, t).log_probs[where].exp().sum(0)
    return counts * (x.numel() / counts[0].sum().clamp(min=1))


@torch.no_grad()
def nelbo_by_ratio(model: Denoiser, log_r: Tensor, x: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """The NELBO per token of each row of x (N, L) under the model tilted by each of log_r (S, K): (S, N), float64."""
    process, values = model.process, []
    batch = rows_that_fit(x, process.num_ids)
    for part, z, t in corruptions(model, x, rows, batch, generator):
        log_p = model(z, t).log_probs
        if isinstance(process, Masked):  # the normaliser of every tilt is one matrix product
            row, column = (z == process.mask_id).nonzero(as_tuple=True)
            law, token = log_p[row, column], part[row, column]
            norm = (law.exp() @ log_r.exp().T.to(law)).double().log()
            found = law.gather(-1, token.unsqueeze(-1)).double() + log_r[:, token].T - norm
            total = found.new_zeros(len(part), len(log_r)).index_add(0, row, -found)
            values.append(torch.stack([process.weigh(one, z, t, model.timeless) for one in total.T]))
        else:
            laws = ((log_p + one.to(log_p)).log_softmax(-1) for one in log_r)
            values.append(torch.stack([process.nelbo(part, z, t, law, model.timeless).double() for law in laws]))
    return torch.cat(values, 1).view(len(log_r), -1, len(x)).mean(1) / x.shape[1]


def calibrate(
    models: Sequence[Denoiser], held_out: Sequence[Tensor], rows: int = 1024, seed: int = 0
) -> tuple[UnigramRatio | None, float]:
    """The ratio for k as held-out likelihood has it, or None where no k makes held-out rows likelier by more than a
    standard error; and their NELBO per token with what was chosen, in nats.

    Args:
        models: what is to be corrected, fitted on several sets of sequences.
        held_out: (N, L) for each, target sequences that it was not fitted on.
        rows: corruptions at least, for counting and again for judging, over all models.
        seed: of the corruptions.
    """
    if not models or len(models) != len(held_out):
        raise ValueError(f"{len(models)} models and {len(held_out)} sets of held-out rows do not belong together")
    groups = list(zip(models, held_out, strict=True))
    if len(groups) == 1:
        ((model, x),) = groups
        groups = [(model, x[i::GROUPS]) for i in range(min(GROUPS, len(x)))]
    each = -(-rows // len(groups))
    generator = torch.Generator(held_out[0].device).manual_seed(seed)
    counts = torch.stack([tally(model, x, each, generator) for model, x in groups])
    total, values = counts.sum(0), []
    none = torch.zeros(1, counts.shape[-1], dtype=torch.float64, device=counts.device)
    for own, (model, x) in zip(counts, groups, strict=True):  # judged by rows that it has not counted
        values.append(nelbo_by_ratio(model, torch.cat([none, log_ratios(total - own)]), x, each, generator))
    nelbo = torch.cat(values, 1)
    best = int(nelbo.mean(1).argmin())
    ahead = nelbo[0] - nelbo[best]
    if len(ahead) < 2 or float(ahead.mean()) <= float(ahead.std() / len(ahead) ** 0.5):
        return None, float(nelbo[0].mean())
    return UnigramRatio(models[0].process, log_ratios(total)[best - 1]), float(nelbo[best].mean())
