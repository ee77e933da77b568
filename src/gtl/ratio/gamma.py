"""Choosing gamma by the held-out conditional likelihood of target data.

    gamma* = argmin_gamma NELBO( x_held_out ; q_gamma ),  q_gamma(x_l = v | z) ~ p(x_l = v | z) r(z, l <- v)^gamma

The networks run once; every gamma of the grid reuses their outputs, under the same corruptions.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gtl.denoiser import Denoiser, Prediction
from gtl.guidance import check_gamma, check_n_ratio, guide, top_candidates
from gtl.nn.dit import gather_positions
from gtl.process import Masked, Mixing, Process
from gtl.ratio.base import Ratio

__all__ = ["GAMMAS", "choose_gamma", "corruptions", "nll_by_gamma", "noisy_nelbo", "places_that_fit", "rows_that_fit"]

SCRATCH = 2**22
"""Log-probabilities in a scratch tensor that should stay near the processor."""
CELLS = {"cpu": 2**24, "cuda": 2**28}
"""Log-probabilities that are held at once, in each of a handful of tensors, by device."""
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

    `one_place` looks at one random position of each of them instead of all, for ratios that are dear to evaluate; with
    large vocabularies it is as many as fit.
    """
    process = denoiser.process
    ratio.check(denoiser)
    count = check_n_ratio(n_ratio, process.vocabulary)
    for gamma in gammas:
        check_gamma(gamma)
    total = torch.zeros(len(gammas), dtype=torch.float64)
    seen = 0
    for part, z, time in corruptions(denoiser, x, rows, batch, generator):
        asked = 1 if one_place else places_that_fit(z, process.num_ids)
        if asked is None:
            places = None
            positions = torch.arange(x.shape[1], device=x.device).expand_as(z)
            source = denoiser(z, time)
            if process.mask_id is not None:
                positions = positions.masked_fill(z != process.mask_id, -1)
        else:
            places = positions = process.some_places(z, asked, generator)
            source = denoiser(z, time, positions)
        if isinstance(process, Mixing) and ratio.space == "noisy":
            if asked is not None and asked > 1:
                raise ValueError("noisy ratios under mixing noise are judged at one place: pass one_place=True")
            place = None if places is None else places.squeeze(1)
            total += noisy_nelbo(process, ratio, part, z, time, source, positions, place, gammas).cpu()
        else:
            if count == process.vocabulary:
                candidates, log_r = None, ratio.table(z, positions, time, source)
            else:
                candidates = top_candidates(source.log_probs, count, process.mask_id)
                log_r = ratio.log_ratio(z, positions, candidates, time, source)
            if isinstance(process, Masked) and candidates is None:
                surprise = surprise_by_gamma(part, z, positions, source.log_probs, log_r, gammas)
                if places is not None:
                    surprise = surprise / places.shape[1] * (z == process.mask_id).sum(-1)
                total += torch.stack([process.weigh(one, z, time, denoiser.timeless).sum() for one in surprise]).cpu()
            else:
                total += by_law(process, part, z, time, source, log_r, candidates, places, gammas, denoiser.timeless)
        seen += part.numel()
    return total / seen


def by_law(
    process: Process,
    x: Tensor,
    z: Tensor,
    t: Tensor,
    source: Prediction,
    log_r: Tensor,
    candidates: Tensor | None,
    places: Tensor | None,
    gammas: Sequence[float],
    timeless: bool,
) -> Tensor:
    """The NELBO of x (B, L), summed, at each gamma, from the whole guided law: (G,)."""
    values = []
    for gamma in gammas:
        log_q = guide(source.log_probs, log_r, gamma, candidates, keep_tail=True)
        if places is None:
            values.append(process.nelbo(x, z, t, log_q, timeless).sum())
        else:
            values.append(process.nelbo_at(x, z, t, log_q, timeless, places).sum())
    return torch.stack(values).cpu()


def surprise_by_gamma(
    x: Tensor, z: Tensor, positions: Tensor, log_p: Tensor, log_r: Tensor, gammas: Sequence[float]
) -> Tensor:
    """-log q_gamma(x_l | z), summed over the positions (B, P) of each row that are not -1: (G, B), float64.

    Of the guided law only its normaliser is needed, a few positions at a time so that nothing large is written.
    """
    row, column = (positions >= 0).nonzero(as_tuple=True)
    truth = x[row, positions[row, column]]
    parts = []
    for index in torch.arange(len(row), device=x.device).split(max(1, SCRATCH // log_p.shape[-1])):
        p, r, v = log_p[row[index], column[index]], log_r[row[index], column[index]], truth[index].unsqueeze(-1)
        r = r.to(p.dtype).masked_fill(p == -torch.inf, 0.0)
        own = p.gather(-1, v).squeeze(-1)
        found = []
        for gamma in gammas:
            q = torch.add(p, r, alpha=gamma) if gamma else p  # 0 * inf would be nan
            norm = q.logsumexp(-1)
            found.append(torch.where(norm == -torch.inf, own, q.gather(-1, v).squeeze(-1) - norm))
        parts.append(torch.stack(found))
    values = torch.cat(parts, 1) if parts else log_p.new_zeros(len(gammas), 0)
    return torch.zeros(len(gammas), len(z), dtype=torch.float64, device=z.device).index_add(1, row, -values.double())


def places_that_fit(z: Tensor, num_ids: int) -> int | None:
    """How many positions of each row of z (B, L) to look at, so that their log-probabilities fit; None for all."""
    rows, length = z.shape
    cells = CELLS.get(z.device.type, 2**28)
    return None if rows * length * num_ids <= cells else min(length, max(1, cells // (rows * num_ids)))


def rows_that_fit(x: Tensor, num_ids: int, most: int = 64) -> int:
    """How many rows of x (N, L), `most` at most, to look at everywhere at once, so that their log-probabilities fit."""
    return max(1, min(most, CELLS.get(x.device.type, 2**28) // (x.shape[1] * num_ids)))


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
    return torch.stack(values)


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
