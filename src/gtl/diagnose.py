"""A diagnosis before the bill: what target data and source model say about each way to adapt, in about a minute.

Small fits of the cheap estimators (a local ratio, neighbours, a short fine-tuning, a noisy classifier; sparse changes
where the source is large) go over a few folds of the target, at the learning rate that shorter ones found best: what
suits a network of a few layers ruins a language model. Each then gives log r(x) = NELBO(x ; p) - NELBO(x ; q) of the
rows that it did not see. From that one number a row come

    gain          the mean of log r / L over held-out target rows, with a 95 % interval: nats a token over the source
    AUC           how well log r separates held-out target rows from source rows
    calibration   how often rows with a given sigmoid(log r) are target rows, and the expected error of that
    sample size   the effective number of source rows after reweighting (`estimate/borrow`)

and, at single tokens, the *token overlap* 1 / E_q[ q(x_l | z) / p(x_l | z) ]: the share of the source's draws that
survives reweighting, 1 for equal domains. Where it is small, the source hardly ever proposes what the target wants, and
pruned candidates and importance weights fail (the paper's bounded-ratio assumption).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.special import expit
from sklearn.metrics import roc_auc_score
from torch import Tensor

from gtl.data.tokens import folds, split
from gtl.denoiser import NetworkDenoiser
from gtl.estimate import Problem, Training
from gtl.estimate.base import Recipe
from gtl.estimate.baselines import recipe as baseline
from gtl.estimate.borrow import out_of_fold, weigh, weights_of
from gtl.estimate.knn import recipe as knn
from gtl.estimate.local import recipe as local
from gtl.estimate.parts import Attempt
from gtl.estimate.sequence import direct
from gtl.estimate.settings import LARGE
from gtl.estimate.sparse import recipe as sparse
from gtl.evaluate.martingale import martingale_violation
from gtl.guidance import Guided
from gtl.progress import Bar
from gtl.ratio import SequenceRatio
from gtl.ratio.weights import Evidence, gather_evidence, join, select_weights, weighted_law
from gtl.sample import Ancestral, OnePosition

__all__ = ["Diagnosis", "Gain", "diagnose", "estimators"]

LITTLE_OVERLAP = 0.05
"""Below this share of surviving draws at a token the domains overlap too little."""
MOST_TARGET = 512
"""Target rows that are looked at."""
SOURCE_TOKENS, BATCH_TOKENS, HELD_OUT_TOKENS = 40_960, 960, 2560
"""Tokens of source rows that are looked at, of a batch, and of an evaluation, about: long sequences come fewer."""
FOLDS, CANDIDATES = 3, 256
ON_A_GPU = 4
"""As many times the tokens in a batch and in an evaluation."""
RATES = [1.0, 0.3, 0.1]
"""What the default learning rate is multiplied by in the short fits."""
ESTIMATORS: dict[str, Recipe] = {
    "local": local,
    "knn": knn,
    "finetuned": lambda problem, part: baseline(problem, part, True),
    "sequence": direct("sum"),
    "sparse": sparse,
}
STACKED = ("finetuned", "local")
TITLES = {
    "local": "a local ratio (gtl-local)",
    "knn": "neighbours (gtl-knn)",
    "sparse": "sparse changes (gtl-sparse)",
}


@dataclass
class Gain:
    """What an estimator gains over the source on held-out target rows, in nats a token."""

    name: str
    gain: float
    low: float
    high: float
    seconds: float


@dataclass
class Diagnosis:
    """Everything that was found."""

    target_rows: int
    source_rows: int
    source_sampled: bool
    """Whether the source rows are samples of the source model, for want of data."""
    gains: list[Gain]
    stack_weights: dict[str, float]
    """The weights of fine-tuning and local ratio in the best sum of them."""
    auc: float
    calibration_error: float
    reliability: list[tuple[float, float, int]]
    """(mean predicted, observed share of target, rows) of ten bins."""
    effective_rows: float
    """The effective number of source rows after calibrated, clipped reweighting."""
    token_overlap: float
    martingale_rms: float | None
    """Of the sequence ratio, masked noise only; 0 for an exact pair."""
    advice: str = ""
    use: str = ""
    """gtl, fine-tuning, both or neither."""
    warnings: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    log_ratios: dict[str, list[float]] = field(default_factory=dict)
    """log r of held-out target rows and of source rows."""


def diagnose(
    denoiser: NetworkDenoiser,
    target: Tensor,
    source: Tensor | None = None,
    seed: int = 0,
    steps: int = 240,
    bar: Bar | None = None,
    log: Callable[[dict[str, Any]], None] | None = None,
) -> Diagnosis:
    """Looks at a source model and target rows (N, L), with source rows (M, L) where there are some.

    Args:
        denoiser: the source model.
        target: clean target rows.
        source: clean source rows; without them the model's own samples stand in.
        seed: of folds, fits and corruptions.
        steps: gradient steps of each fit; there are three folds of two networks or three, and one sequence ratio.
        bar: shows progress.
        log: called with what the fits log.
    """
    device = next(denoiser.parameters()).device
    masked = denoiser.process.mask_id is not None
    shuffle = torch.Generator().manual_seed(seed)
    target = target[torch.randperm(len(target), generator=shuffle)[:MOST_TARGET]]
    length = target.shape[1]
    most = max(256, SOURCE_TOKENS // length)
    sampled = source is None
    if source is None:
        if bar is not None:
            bar.stage("sampling from the source model", steps)
        sampler = OnePosition(denoiser) if masked else Ancestral(denoiser, steps=64)
        start = torch.Generator(device).manual_seed(seed)
        source = sampler((most // 2, length), generator=start).cpu()
    source = source[torch.randperm(len(source), generator=shuffle)[:most]]
    more = ON_A_GPU if device.type == "cuda" else 1
    training = Training(
        batch_size=max(8, more * BATCH_TOKENS // length),
        evaluate_every=40,
        evaluation_rows=max(16, more * HELD_OUT_TOKENS // length),
        patience=0,
        rates=RATES,
        knn_keys=8192,
    )
    problem = Problem(training, denoiser, split(source, 0.1, seed), target, seed, bar=bar, log=log)
    parts = folds(target, FOLDS, 1 / FOLDS, seed)
    attempts = {name: try_out(problem, name, parts, steps) for name in estimators(denoiser)}
    if bar is not None:
        bar.stage("what held-out rows say", steps)
    gains = {name: held_out_gain(problem, attempt, parts) for name, attempt in attempts.items()}
    tried = attempts["local"].tried
    of_target = out_of_fold(problem, tried, parts).numpy()
    of_source = weights_of(problem, tried, source).mean(0).numpy()
    evidence = stack_evidence(problem, attempts, parts)
    weights = select_weights(evidence)
    bins, error = reliability(of_target, of_source)
    found = Diagnosis(
        target_rows=len(target),
        source_rows=len(source),
        source_sampled=sampled,
        gains=[interval(name, gains[name], sum(fit.seconds for fit in attempts[name].fits())) for name in gains],
        stack_weights=dict(zip(STACKED, weights, strict=True)),
        auc=float(roc_auc_score(np.repeat([1, 0], [len(of_target), len(of_source)]), [*of_target, *of_source])),
        calibration_error=error,
        reliability=bins,
        effective_rows=weigh(of_target, of_source).effective,
        token_overlap=token_overlap(evidence, weights),
        martingale_rms=violation(problem, attempts, parts) if masked else None,
        log_ratios={"target": of_target.tolist(), "source": of_source.tolist()},
    )
    advise(found, gains)
    return found


def estimators(denoiser: NetworkDenoiser) -> list[str]:
    """Those that suit a source: sequence ratios are for masked noise, sparse changes for large networks."""
    large = sum(weight.numel() for weight in denoiser.parameters()) >= LARGE
    skipped = {"sequence": denoiser.process.mask_id is None, "sparse": not large}
    return [name for name in ESTIMATORS if not skipped.get(name, False)]


def try_out(problem: Problem, name: str, parts: list[tuple[Tensor, Tensor]], steps: int) -> Attempt:
    """An estimator on every fold, at the rate that is best in a third of the steps on the first."""
    recipe = ESTIMATORS[name]
    if name not in ("finetuned", "local", "sparse"):
        return problem.attempt(name, recipe, parts[: 1 if name == "sequence" else FOLDS], steps)
    short = problem.best_rate(name, recipe, parts[:1], -(-steps // 3))
    found = replace(problem, rate=short.rate).attempt(name, recipe, parts, steps)
    found.others = short.fits()
    return found


@torch.no_grad()
def held_out_gain(problem: Problem, attempt: Attempt, parts: list[tuple[Tensor, Tensor]]) -> np.ndarray:
    """log r / L of every held-out row by the fold that held it out, in nats a token: (N,).

    A sequence ratio is dear: it has one fold, and weighs the likeliest candidates at one place of each corruption.
    """
    source, process, device = problem.source, problem.source.process, problem.device
    length, ratio = problem.target.shape[1], attempt.tried[0].ratio
    if not isinstance(ratio, SequenceRatio):
        return out_of_fold(problem, attempt.tried, parts, draws=8).numpy() / length
    model = Guided(source, ratio, None, min(CANDIDATES, process.vocabulary), keep_tail=True)
    generator = torch.Generator(device).manual_seed(problem.seed)
    x = parts[0][1].to(device)
    total = torch.zeros(len(x), dtype=torch.float64, device=device)
    for _ in range(16):
        t = process.times(len(x), device, generator)
        z = process.corrupt(x, t, generator)
        place = process.some_place(z, generator)
        q = model(z, t, place.unsqueeze(1))
        assert q.source is not None
        total += process.nelbo(x, z, t, q.source, source.timeless, place)
        total -= process.nelbo(x, z, t, q.log_probs, model.timeless, place)
    return total.cpu().numpy() / 16 / length


def interval(name: str, gains: np.ndarray, seconds: float) -> Gain:
    """The mean of gains (N,) with a 95 % interval."""
    mean, error = float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(len(gains)))
    return Gain(name, mean, mean - 1.96 * error, mean + 1.96 * error, seconds)


def stack_evidence(problem: Problem, attempts: dict[str, Attempt], parts: list[tuple[Tensor, Tensor]]) -> Evidence:
    """What fine-tuning and local ratio say of held-out tokens."""
    evidence = []
    for number, (_, held) in enumerate(parts):
        ratios = [attempts[name].tried[number].as_ratio() for name in STACKED]
        evidence.append(gather_evidence(problem.source, ratios, held.to(problem.device), 512, problem.seed))
    return join(evidence)


def token_overlap(evidence: Evidence, weights: list[float]) -> float:
    """1 / E_q[q / p] at single tokens, q the weighted sum's model; E_q[q / p] is the mean of sum_v q(v)^2 / p(v)."""
    log_q = weighted_law(evidence, weights)
    ratio = torch.where(log_q == -torch.inf, -torch.inf, 2 * log_q - evidence.log_p)
    return float(1 / ratio.exp().sum(-1).mean())


def reliability(target: np.ndarray, source: np.ndarray) -> tuple[list[tuple[float, float, int]], float]:
    """Ten bins of the chance sigmoid(log r) against the share of target rows, both domains counted equally, and the
    mean distance between the two."""
    chance = expit(np.concatenate([target, source]))
    label = np.repeat([1.0, 0.0], [len(target), len(source)])
    weight = np.repeat([0.5 / len(target), 0.5 / len(source)], [len(target), len(source)])
    which = np.minimum((10 * chance).astype(int), 9)
    bins, error = [], 0.0
    for index in range(10):
        here = which == index
        if not here.any():
            continue
        share = weight[here].sum()
        predicted, observed = (float((weight * value)[here].sum() / share) for value in (chance, label))
        bins.append((predicted, observed, int(here.sum())))
        error += share * abs(predicted - observed)
    return bins, float(error)


def violation(problem: Problem, attempts: dict[str, Attempt], parts: list[tuple[Tensor, Tensor]]) -> float:
    """The martingale violation (root mean square) of the sequence ratio on held-out rows."""
    ratio, held = attempts["sequence"].tried[0].ratio, parts[0][1]
    assert isinstance(ratio, SequenceRatio)
    rows = held.repeat(-(-256 // len(held)), 1).to(problem.device)
    generator = torch.Generator(problem.device).manual_seed(problem.seed)
    gaps = martingale_violation(problem.source, ratio, rows, generator, CANDIDATES)
    return float(gaps.square().mean().sqrt())


def advise(found: Diagnosis, gains: dict[str, np.ndarray]) -> None:
    """Writes the verdict, one sentence, with warnings and hints."""
    by_name = {gain.name: gain for gain in found.gains}
    best = max((name for name in TITLES if name in by_name), key=lambda name: by_name[name].gain)
    ahead = gains[best] - gains["finetuned"]
    mean, error = float(ahead.mean()), float(ahead.std(ddof=1) / np.sqrt(len(ahead)))
    how = f"{by_name[best].gain:.3f} against {by_name['finetuned'].gain:.3f} nats a token over the source"
    little = found.token_overlap < LITTLE_OVERLAP
    if max(gain.low for gain in found.gains) <= 0:
        found.use = "neither"
        reason = "the domains overlap too little" if little else "no estimator gains anything for sure on held-out rows"
        found.advice = f"Use neither: {reason}; get more target data, or a source that is closer."
    elif mean > error:
        found.use = "gtl"
        found.advice = f"Use {TITLES[best]}: it is ahead of fine-tuning on held-out rows ({how})."
    elif mean < -error:
        found.use = "fine-tuning"
        found.advice = f"Use fine-tuning: it is ahead of {TITLES[best]} on held-out rows ({how})."
    else:
        found.use = "both"
        sum_of_both = "gtl-blend" if best == "sparse" else "gtl-stack"
        found.advice = f"Use both ({sum_of_both}): {TITLES[best]} and fine-tuning are level on held-out rows ({how})."
    if little:
        found.warnings.append(
            f"The domains overlap too little: at a token one source draw in {1 / found.token_overlap:.0f} survives "
            "reweighting. Keep gamma at 1 and weigh all candidates; sequence-level ratios will mislead."
        )
    if found.effective_rows >= found.target_rows:
        found.hints.append(
            f"The source holds target-like rows (an effective {found.effective_rows:.0f} of {found.source_rows}): "
            f"let the fit borrow them ({'sparse-iw' if best == 'sparse' else 'gtl-local-iw'}, finetuned-iw)."
        )
    if found.target_rows < 10:
        found.warnings.append(f"{found.target_rows} target rows are very few: the intervals are optimistic.")
