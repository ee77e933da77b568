"""Importance-weighted fitting, `METHOD-iw`: source rows that look like the target join its rows.

The paper's lemma says that source data weighted by r(x) = q(x) / p(x) is target data. Here r is estimated, calibrated,
clipped, and turned into rows:

0. *Screen.* Of more source rows than models can look at, those whose tokens come in the target are taken (`screen`),
   for each fold by those of the rows that it does not hold out.
1. *Estimate.* The method runs as it always does, except that of several learning rates it takes the one that the first
   fold likes best, with half of the budget: else nothing would be left. The model of each fold then gives a log-ratio
   of whole sequences, log r(x) = NELBO(x ; p) - NELBO(x ; q), by the chain rule; a sequence ratio says it directly.
   Target rows get it from the fold that held them out, source rows from every fold. Where rows were screened, what
   counts of tokens say joins it.
2. *Calibrate.* Isotonic regression of the domain on that number: the best monotone fit of r, which learns where it
   saturates (at 1 / share, where a share of the source is target). One curve, from the rows of all folds: of those that
   a fold holds out it knows one number each.
3. *Clip.* r is capped at c, its median over the target rows, and a source row joins with probability min(r, c) / c:
   rejection sampling. What joins is at most the effective sample size of the clipped weights, (sum w)^2 / sum w^2.
   Where a typical target row has no company in the source, c is infinite and nothing joins.
4. *Go on* from there on target and borrowed rows, with the rest of the budget and a learning rate of its own (many rows
   want a higher one than few), on as many folds as hold out enough rows; keep that only where held-out target rows are
   likelier for it. Where nothing joins, the result is what was fitted so far: with one learning rate, the method's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from gtl.data.tokens import FEW
from gtl.denoiser import Denoiser, NetworkDenoiser, nelbo_at
from gtl.estimate.base import Method, Problem, Recipe
from gtl.estimate.parts import Adapted, Attempt, Trained
from gtl.estimate.screen import screen
from gtl.guidance import Guided
from gtl.process import Masked
from gtl.ratio import SequenceRatio
from gtl.ratio.gamma import rows_that_fit
from gtl.speed import Precision
from gtl.train.loop import Diverged, mix

__all__ = ["ENDING", "Weighing", "borrowing", "log_weights", "out_of_fold", "weigh", "weights_of"]

ENDING = "-iw"
ENOUGH_STEPS, LEAST_STEPS = 120, 20
"""Of a fit that goes on with borrowed rows: fewer folds are looked at rather than fewer steps taken than the first, and
nothing is begun below the second."""


@dataclass
class Weighing:
    """Calibrated, clipped importance weights of source rows."""

    ratio: np.ndarray
    """r of every source row, calibrated; (M,)."""
    clip: float
    """c."""

    @property
    def chance(self) -> np.ndarray:
        """min(r, c) / c of every source row."""
        return np.minimum(1.0, self.ratio / self.clip) if np.isfinite(self.clip) else np.zeros_like(self.ratio)

    @property
    def effective(self) -> float:
        """The effective sample size of the clipped weights."""
        w = self.chance
        return float(w.sum() ** 2 / np.square(w).sum()) if w.any() else 0.0


def weigh(target: np.ndarray, source: np.ndarray, shares: tuple[float, float] = (1.0, 1.0)) -> Weighing:
    """Calibrates log-ratios of held-out target rows (N,) and of source rows (M,), which are such shares of all."""
    if not len(target):
        return Weighing(np.zeros(len(source)), np.inf)
    scores, labels = np.concatenate([target, source]), np.repeat([1.0, 0.0], [len(target), len(source)])
    weights = np.repeat([shares[0] / len(target), shares[1] / len(source)], [len(target), len(source)])
    chance = IsotonicRegression(out_of_bounds="clip").fit(scores, labels, sample_weight=weights).predict(scores)
    with np.errstate(divide="ignore"):
        ratio = chance / (1 - np.minimum(chance, 1.0))
    return Weighing(ratio[len(target) :], float(np.median(ratio[: len(target)])))


@torch.no_grad()
def log_weights(
    source: Denoiser,
    tried: Sequence[Trained],
    x: Tensor,
    seed: int,
    draws: int = 4,
    batch: int = 512,
    precision: Precision = "fp32",
) -> Tensor:
    """log r(x) of whole sequences x (N, L) by each of M trained models: (M, N), on the CPU.

    NELBOs are averaged over `draws` corruptions, their times spread over [0, 1], the same for all models; the source is
    asked once for all of them, and by those that guide it, by each.
    """
    device, process = next(source.parameters()).device, source.process
    ratios = [made.ratio for made in tried if isinstance(made.ratio, SequenceRatio) and made.ratio.absolute]
    if ratios:
        parts = [(part.to(device), torch.zeros(len(part), device=device)) for part in x.split(batch)]
        return torch.stack([torch.cat([ratio.log_value(*part) for part in parts]).cpu() for ratio in ratios])
    models, values, x = [made.model() for made in tried], [], x.to(device)
    generator = torch.Generator(device).manual_seed(seed)
    narrow = all(type(model) is NetworkDenoiser for model in models) and isinstance(process, Masked)
    for part in x.split(batch if narrow else rows_that_fit(x, process.num_ids, batch)):
        times = process.times(draws * len(part), device, generator).sort().values.view(draws, -1)
        total = torch.zeros(len(models), len(part), dtype=torch.float64, device=device)
        for t in times:
            t = t[torch.randperm(len(t), device=device, generator=generator)]
            z = process.corrupt(part, t, generator)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                total += gains(source, models, part, z, t)
        values.append(total / draws)
    return torch.cat(values, 1).cpu()


def gains(source: Denoiser, models: Sequence[Denoiser], x: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """NELBO(x ; p) - NELBO(x ; q) at one corruption, for each of M models: (M, B). Of what is guided, the source's part
    is known already."""
    of_source, of_models = None, []
    for model in models:
        if isinstance(model, Guided):
            q = model(z, t)
            assert q.source is not None
            of_source = source.process.nelbo(x, z, t, q.source, source.timeless) if of_source is None else of_source
            of_models.append(source.process.nelbo(x, z, t, q.log_probs, model.timeless))
        else:
            of_models.append(nelbo_at(model, x, z, t))
    return (nelbo_at(source, x, z, t) if of_source is None else of_source) - torch.stack(of_models)


def out_of_fold(
    problem: Problem, tried: Sequence[Trained], parts: Sequence[tuple[Tensor, Tensor]], draws: int = 4
) -> Tensor:
    """log r(x) of all held-out rows, each by the model of the fold that held it out: (N,), on the CPU."""
    each = zip(tried, parts, strict=True)
    return torch.cat([weights_of(problem, [made], held, draws)[0] for made, (_, held) in each])


def weights_of(problem: Problem, tried: Sequence[Trained], x: Tensor, draws: int = 4) -> Tensor:
    """`log_weights` of a problem's models."""
    return log_weights(problem.source, tried, x, problem.seed, draws, precision=problem.training.precision)


class Borrowing(Problem):
    """A problem whose recipes may borrow rows from the source."""

    def quick_rate(
        self,
        name: str,
        recipe: Recipe,
        parts: list[tuple[Tensor, Tensor]],
        steps: int,
        room: int,
        starts: Sequence[Trained] | None = None,
    ) -> Attempt:
        """An attempt at the learning rate that the first fold likes best: the other folds are tried at no other. Where
        one of them diverges, the next best, if so many steps have room for that and for the final fit."""
        begun = len(self.spent)
        first, lost = self.at_rates(name, recipe, parts[:1], steps, starts)
        for best in first:
            mark, at_rate, called = len(self.spent), replace(self, rate=best.rate), self.called(name, best.rate)
            try:
                found = at_rate.attempt(called, recipe, parts, steps, starts, known=best.tried)
                break
            except Diverged:
                lost += self.spent[mark:]
                taken = sum(fit.steps for fit in self.spent[begun:])
                if best is first[-1] or taken + len(parts) * steps > room:
                    raise
        found.others = [*(fit for each in first if each is not best for fit in each.fits()), *lost]
        return found

    def begun(self, method: str, recipe: Recipe, parts: list[tuple[Tensor, Tensor]]) -> tuple[Attempt, Trained]:
        """The method on every fold and on all rows, before anything is borrowed."""
        rates, folds = len(self.training.rates), len(parts)
        steps = self.training.budget // (2 * (rates + folds))  # each rate, the other folds, all rows; and once more
        if rates == 1 or steps < LEAST_STEPS:  # what early stopping leaves will do, or nothing will
            return self.trained(method.removesuffix(ENDING), recipe)
        first = self.quick_rate(method, recipe, parts, steps, self.training.budget)
        return first, self.finish(method, recipe, self.target, first)

    def run(self, method: str, recipe: Recipe) -> Adapted:
        rows = self.source_data[0]
        if not len(rows):
            raise ValueError(f"{method} borrows from source sequences: give source data as well")
        parts, screened, shares = self.parts(), None, (1.0, 1.0)
        if len(rows) > self.training.weighed:
            screened = screen(rows, parts, self.source.process.num_ids, self.training.weighed)
            rows, taken, shares = screened.rows, screened.taken, screened.shares
        else:
            rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed))]
            taken = torch.ones(len(parts) + 1, len(rows), dtype=torch.bool)
        first, final = self.begun(method, recipe, parts)
        first_half = [*first.fits(), *final.fits]
        alone = self.result(final, first_half, first.score)
        target = self.once(f"{method}-target", lambda: out_of_fold(self, first.tried, parts)).cpu()
        source = self.once(f"{method}-source", lambda: weights_of(self, first.tried, rows)).cpu()
        if screened is not None:
            target, source = screened.combine(target, source)
        draw = np.random.default_rng(mix(self.seed, 9)).random(len(rows))

        def joined(own: Tensor, scores: Tensor, mine: Tensor) -> tuple[Tensor, Weighing]:
            weighing = weigh(target.numpy(), scores[mine].numpy(), shares)
            return torch.cat(
                [own, rows[mine][torch.from_numpy(draw[mine.numpy()] < weighing.chance)].to(own)]
            ), weighing

        every, weighing = joined(self.target, source.mean(0), taken[-1])
        count, left = len(every) - len(self.target), self.training.budget - alone.steps
        if self.log is not None:
            self.log({"network": f"{self.label}{method}", "borrowed": count, "effective": weighing.effective})
        rates, held_out = len(self.training.rates), np.cumsum([len(held) for _, held in parts])
        enough = 1 + int((held_out[:-1] < FEW).sum())
        used = max(1, min(enough, left // ENOUGH_STEPS - rates))
        steps = left // (rates + used)
        if not count or (alone.steps and steps < LEAST_STEPS):
            return replace(alone, borrowed=0)
        larger = [
            (joined(own, scores, mine)[0], held)
            for (own, held), scores, mine in zip(parts, source, taken[:-1], strict=True)
        ]
        called, mark = f"{method}, with borrowed rows", len(self.spent)
        before = [min(min(values) for values in made.fits[-1].curve.values()) for made in first.tried[:used]]
        try:
            second = self.quick_rate(called, recipe, larger[:used], max(1, steps), left, first.tried)
            fits = [*first_half, *second.fits()]
            if second.score >= sum(before) / used:
                return replace(self.result(final, fits, first.score), borrowed=0)
            final = self.finish(called, recipe, every, second, final)
        except Diverged:  # what was fitted without them is there
            return replace(self.result(final, [*first_half, *self.spent[mark:]], first.score), borrowed=0)
        made = self.result(final, [*fits, *final.fits], second.score)
        return replace(made, borrowed=count, judged=used)


def borrowing(method: Method) -> Method:
    """The same method with borrowed rows."""
    return lambda problem, name: method(Borrowing(**vars(problem)), name)
