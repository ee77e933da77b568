"""Held-out likelihood of a source and of its guided model, in bounded memory.

    NELBO(x) = E_t E_z [ w(t, z) sum_{l that counts in z} -log q(x_l | z) ],      perplexity_bound = exp(NELBO / L)

Of the k positions that count (under masked noise the masked ones), any M drawn uniformly stand for all: k / M times
their sum has the same mean, so the bound stays unbiased. Where M < k, only the gain over the source is taken from them,

    NELBO(q) = NELBO(p), all positions  -  k / M sum_{l drawn} [ log q(x_l | z) - log p(x_l | z) ],

which has the same mean again and far less variance than the first line.

**Candidates.** With n_ratio < V the model is `guide(..., keep_tail=True)`: the set S of the source's n_ratio likeliest
tokens shares P_S = sum_S p in proportion to p r^gamma, and any other token keeps p. S depends on z alone, so this is
one normalised model, P_S + (1 - P_S) = 1, and `nll` is its bound. Adding the true token x to the candidates wherever it
is missing (metrics `..._with_truth`) asks a model of its own for each x. What these give the x outside of S,

    q~(x) = p(x) w(x) (P_S + p(x)) / (Z_S + p(x) w(x)),        w = r^gamma,  Z_S = sum_S p w,

adds up, with S, to the mass

    M = 1 + sum_{x not in S} p(x) (rho(x) - 1) / (1 + rho(x) p(x) / P_S),        rho(x) = w(x) P_S / Z_S,

which is 1 only by chance: it exceeds 1 where the ratio weighs the tail above the candidates, as it does where the
target likes what the source finds rare. Only q~ / M is a distribution, and its mean cross-entropy is that of q~ plus
E log M. So the number with the truth is too low by E log M (nats a position) where M > 1, and too high where M < 1. E M
is reported as `mass_with_truth`, from one tail token v ~ p a position: 1 + (1 - P_S) (q~(v) / p(v) - 1) has mean M. By
Jensen's inequality E log M is at most log E M.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gtl.categorical import categorical, uniform
from gtl.denoiser import Denoiser
from gtl.guidance import check_n_ratio, guide, top_candidates
from gtl.nn.dit import gather_positions
from gtl.process import Masked, Process, stratified
from gtl.ratio import Combination, Ratio, SequenceRatio
from gtl.ratio.successive import SuccessiveRatio
from gtl.schedule import LogLinear

__all__ = ["likelihood", "scored_one_by_one", "some_places"]

ROWS = 64
"""Corrupted sequences drawn at once; what runs through a network at once is bounded by `cells`."""


class Weighed(NamedTuple):
    """Log-probabilities of both models (B, P, K); log q~ of the true token and the mass M (B, P), see above."""

    source: Tensor
    guided: Tensor | None = None
    truth: Tensor | None = None
    mass: Tensor | None = None


def scored_one_by_one(ratio: Ratio) -> bool:
    """Whether a network of the ratio runs once for every candidate, which is too dear for all positions."""
    if isinstance(ratio, Combination):
        return any(scored_one_by_one(part) for _, part in ratio.weighted_terms())
    if isinstance(ratio, SuccessiveRatio):
        return any(map(scored_one_by_one, ratio.ratios()))
    return type(ratio).log_ratio is SequenceRatio.log_ratio


def counted(process: Process, z: Tensor) -> Tensor:
    """Which positions of z (B, L) count in the NELBO: (B, L)."""
    return z == process.mask_id if isinstance(process, Masked) else torch.ones_like(z, dtype=torch.bool)


def some_places(process: Process, z: Tensor, most: int, generator: torch.Generator | None = None) -> Tensor:
    """Up to `most` of the positions that count, each as likely as any other, without repeats: (B, P), -1 is padding."""
    inside = counted(process, z)
    keys = uniform(tuple(z.shape), z.device, generator).masked_fill(~inside, -1.0)
    order = keys.argsort(-1, descending=True)[:, : min(most, int(inside.sum(-1).max()))]
    return order.masked_fill(~inside.gather(1, order), -1)


class Part(NamedTuple):
    """Corrupted sequences and where to look at them.

    x, z: (B, L), clean and noisy.
    t: (B,)
    positions: (B, P), -1 is padding.
    share: (B,), 1 / M: the M positions of a row that are looked at, in this part and in others, stand for all.
    """

    x: Tensor
    z: Tensor
    t: Tensor
    positions: Tensor
    share: Tensor

    def totals(self, process: Process, log_q: Tensor, timeless: bool) -> Tensor:
        """The NELBO and the cross-entropy at positions that count, of log_q (B, P, K), each summed: (2,), float64."""
        row, column = (self.positions >= 0).nonzero().unbind(1)
        x, z, place, at = self.x[row], self.z[row], self.positions[row, column], log_q[row, column].unsqueeze(1)
        nelbo = process.nelbo(x, z, self.t[row], at, timeless, place).double()
        surprise = -at.squeeze(1).gather(-1, x.gather(1, place.unsqueeze(1))).squeeze(-1).double()
        surprise = surprise * counted(process, z).sum(-1)
        return (torch.stack([nelbo, surprise]) * self.share[row]).sum(-1).cpu()

    def mean(self, process: Process, values: Tensor) -> Tensor:
        """Values (B, P) at positions that count, summed: (2,), of which the first means nothing."""
        weight = (counted(process, self.z).sum(-1) * self.share).unsqueeze(1)
        return (torch.where(self.positions >= 0, values.double(), 0.0) * weight).sum().cpu().expand(2)

    def chunks(self, wide: int, cells: int) -> Iterator["Part"]:
        """The same in parts of b rows and p positions with b * p * wide <= cells, where that is possible."""
        most = max(1, cells // wide)
        for columns in self.positions.split(min(most, max(1, self.positions.shape[1])), 1):
            rows = max(1, most // max(1, columns.shape[1]))
            for at in range(0, len(self.x), rows):
                x, z, t, positions, share = (v[at : at + rows] for v in (*self[:3], columns, self.share))
                positions = positions[:, (positions >= 0).any(0)]
                if positions.shape[1]:
                    yield Part(x, z, t, positions, share)


def weigh(
    denoiser: Denoiser,
    ratio: Ratio | None,
    part: Part,
    gamma: float,
    n_ratio: int,
    generator: torch.Generator | None = None,
) -> Weighed:
    """What the models say of a part."""
    process, (x, z, t, positions, _) = denoiser.process, part
    source = denoiser(z, t, positions)
    log_p = source.log_probs
    if ratio is None:
        return Weighed(log_p)
    if n_ratio == process.vocabulary:
        return Weighed(log_p, guide(log_p, ratio.table(z, positions, t, source), gamma))
    top = top_candidates(log_p, n_ratio, process.mask_id)
    if not isinstance(process, Masked):
        return Weighed(log_p, guide(log_p, ratio.log_ratio(z, positions, top, t, source), gamma, top, keep_tail=True))
    truth = gather_positions(x, positions).unsqueeze(-1)
    tail = log_p.scatter(-1, top, -torch.inf)
    mass = tail.logsumexp(-1).exp()
    other = categorical(torch.where((mass > 0).unsqueeze(-1), tail, log_p), generator).unsqueeze(-1)
    log_r = ratio.log_ratio(z, positions, torch.cat([top, truth, other], -1), t, source)
    guided = guide(log_p, log_r[..., :-2], gamma, top, keep_tail=True)

    def added(token: Tensor, log_r_of_it: Tensor) -> Tensor:
        """log q~ of a token (B, P, 1) that joins the candidates: (B, P)."""
        p = torch.cat([log_p.gather(-1, top), log_p.gather(-1, token)], -1)
        q = guide(p, torch.cat([log_r[..., :-2], log_r_of_it], -1), gamma) + p.logsumexp(-1, keepdim=True)
        return torch.where((top == token).any(-1), guided.gather(-1, token).squeeze(-1), q[..., -1])

    gain = added(other, log_r[..., -1:]) - log_p.gather(-1, other).squeeze(-1)
    return Weighed(log_p, guided, added(truth, log_r[..., -2:-1]), 1 + torch.where(mass > 0, mass * gain.expm1(), 0.0))


def corrupted(
    process: Process, x: Tensor, times: Callable[..., Tensor], generators: tuple[torch.Generator, torch.Generator]
) -> Iterator[Part]:
    """Every row of x (N, L) corrupted once, at `times`, with all positions that count in random order."""
    t = times(len(x), x.device, generators[0])
    for clean, time in zip(x.split(ROWS), t.split(ROWS), strict=True):
        z = process.corrupt(clean, time, generators[0])
        yield some(Part(clean, z, time, some_places(process, z, x.shape[1], generators[1]), time), x.shape[1])


def some(part: Part, most: int) -> Part:
    """The first `most` positions of each row, a random set of those that count."""
    positions = part.positions[:, :most]
    return part._replace(positions=positions, share=1 / (positions >= 0).sum(-1).clamp(min=1).double())


def measure(
    denoiser: Denoiser,
    ratio: Ratio | None,
    x: Tensor,
    times: Callable[..., Tensor],
    gamma: float,
    n_ratio: int,
    places: int,
    seed: int,
    cells: int,
    on_rows: Callable[[int], None],
) -> tuple[dict[str, Tensor], int]:
    """Totals (2,) of x (N, L), each row corrupted once: of the `source` everywhere; of the source `there`, where the
    guided model is looked at; of the `guided` model; of that with the `truth`; of the `mass`. And how many masks."""
    process, length, count = denoiser.process, x.shape[1], 0
    totals = {name: torch.zeros(2, dtype=torch.float64) for name in ("source", "there", "guided", "truth", "mass")}
    timeless = denoiser.timeless and (ratio is None or ratio.timeless)
    generators = (torch.Generator(x.device).manual_seed(seed), torch.Generator(x.device).manual_seed(seed + 2**20))
    for whole in corrupted(process, x, times, generators):
        count += int((whole.z == process.mask_id).sum()) if process.mask_id is not None else 0
        apart = ratio is not None and places < length
        for part in whole.chunks(max(process.num_ids, length), cells):
            said = weigh(denoiser, None if apart else ratio, part, gamma, n_ratio, generators[1])
            totals["source"] += part.totals(process, said.source, denoiser.timeless)
            add_guided(totals, process, part, said, timeless)
        for part in some(whole, places).chunks(max(process.num_ids, length), cells) if apart else ():
            add_guided(totals, process, part, weigh(denoiser, ratio, part, gamma, n_ratio, generators[1]), timeless)
        on_rows(len(whole.x))
    return totals, count


def add_guided(totals: dict[str, Tensor], process: Process, part: Part, said: Weighed, timeless: bool) -> None:
    """Adds what the guided model said, if it was asked, and what the source said of the same."""
    if said.guided is None:
        return
    totals["there"] += part.totals(process, said.source, timeless)
    totals["guided"] += part.totals(process, said.guided, timeless)
    if said.truth is not None and said.mass is not None:
        token = gather_positions(part.x, part.positions).unsqueeze(-1)
        totals["truth"] += part.totals(process, said.guided.scatter(-1, token, said.truth.unsqueeze(-1)), timeless)
        totals["mass"] += part.mean(process, said.mass)


@torch.no_grad()
def likelihood(
    denoiser: Denoiser,
    x: Tensor,
    ratio: Ratio | None = None,
    gamma: float = 1.0,
    n_ratio: int | None = None,
    places: int | None = None,
    draws: int = 8,
    seed: int = 0,
    cells: int | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> dict[str, dict[str, float]]:
    """The likelihood of x (N, L) under the `source` and, with a ratio, under the `guided` model.

    For each a dictionary: `nll`, the NELBO per token in nats; `perplexity_bound`, its exponential; `masked_nll`, the
    mean cross-entropy at masked positions, t uniform (masked noise only). For a guided model with pruned candidates the
    same `_with_truth`, and `mass_with_truth` (see above).

    Args:
        denoiser: the source.
        x: held-out sequences.
        ratio: what guides it.
        gamma: guidance strength.
        n_ratio: candidates weighed at a position, all by default.
        places: positions of a corrupted sequence that the guided model is looked at, all by default.
        draws: corruptions of every sequence.
        seed: of the corruptions, which both models share, and of the positions.
        cells: most numbers in one tensor of log-probabilities; by default 2^25, and 2^28 on a GPU.
        on_progress: called with the share that is done.
    """
    process = denoiser.process
    candidates = check_n_ratio(n_ratio, process.vocabulary)
    if ratio is not None:
        ratio.check(denoiser)
    if places is not None and places < 1:
        raise ValueError(f"places={places} must be at least 1")
    cells = cells or (2**28 if x.is_cuda else 2**25)
    x = x.repeat(draws, 1)
    laws: list[Callable[..., Tensor]] = [process.times]
    if process.mask_id is not None and not isinstance(process.schedule, LogLinear):
        laws.append(stratified)  # `masked_nll` has t uniform; with the log-linear schedule both laws are one
    done = 0

    def on_rows(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done / (len(x) * len(laws)))

    arguments = (gamma, candidates, places or x.shape[1], seed, cells, on_rows)
    passes = [measure(denoiser, ratio, x, times, *arguments) for times in laws]
    (bound, _), (masked, count) = passes[0], passes[-1]

    def metrics(name: str, suffix: str = "") -> dict[str, float]:
        """The two of a model, by its gain over the source."""
        values = {f"nll{suffix}": float((bound["source"] - bound["there"] + bound[name])[0]) / x.numel()}
        values[f"perplexity_bound{suffix}"] = math.exp(min(values[f"nll{suffix}"], 700.0))
        if process.mask_id is not None:
            values[f"masked_nll{suffix}"] = float((masked["source"] - masked["there"] + masked[name])[1]) / count
        return values

    if process.mask_id is not None and not count:
        raise ValueError("no position was masked in any draw; use more --draws")
    found = {"source": metrics("there")}
    if ratio is not None:
        found["guided"] = metrics("guided")
        if isinstance(process, Masked) and candidates < process.vocabulary:
            found["guided"] |= metrics("truth", "_with_truth")
            found["guided"]["mass_with_truth"] = float(masked["mass"][1]) / count
    return found
