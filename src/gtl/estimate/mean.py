"""The fits of the folds, which the rule of choice makes anyway, are not thrown away.

1. Their weights and those of the final fit are averaged into one model, where that is as likely as they are.
2. Each says what it expects of rows that it has not seen, and what comes more often or less becomes a unigram ratio
   (`ratio/unigram`).
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeVar

import torch

from gtl.denoiser import Denoiser, nll
from gtl.estimate.base import Problem
from gtl.estimate.parts import Adapted, Attempt, Trained
from gtl.estimate.unigram import calibrate
from gtl.ratio import Ratio

__all__ = ["averaged", "mean_of_weights", "with_counts"]

Model = TypeVar("Model", bound=Denoiser)
LOOKED_UP = 1024
"""Target sequences, at most, that say whether a mean of weights is any good."""
COUNTED = 2048
"""Held-out corruptions, at least, that are counted."""
MOST = 4096
"""Held-out rows of a fold, at most, among them."""


@torch.no_grad()
def averaged(models: Sequence[Model]) -> Model:
    """A copy of the first model with the mean of all models' weights."""
    mean = copy.deepcopy(models[0])
    for weight, *each in zip(*(model.parameters() for model in (mean, *models)), strict=True):
        weight.copy_(torch.stack(each).mean(0))
    return mean


def mean_of_weights(problem: Problem, attempt: Attempt, final: Trained) -> Ratio:
    """The model whose weights are the mean over several fits, one where sequences are not few.

    Fits from one start are mostly close enough for that. Where they are not, so that target sequences are less likely
    than under the fits on average (which a mean of laws cannot be), the final fit stands alone.
    """
    models = [final.denoiser, *(made.denoiser for made in attempt.tried)]
    if len(models) < 3:
        return final.as_ratio()
    mean = averaged(models)
    rows, draws = problem.target[:LOOKED_UP].to(problem.device), max(1, 512 // len(problem.target))
    values = [nll(m, rows, draws, torch.Generator(problem.device).manual_seed(problem.seed)) for m in (mean, *models)]
    return replace(final, denoiser=mean if values[0] <= fmean(values[1:]) else final.denoiser).as_ratio()


def with_counts(problem: Problem, attempt: Attempt, final: Trained, ratio: Ratio, numbers: int) -> Adapted:
    """A ratio of so many numbers, made of those fits, with counts where that is asked for and held-out rows agree."""
    score = attempt.score
    if problem.training.unigram:
        held_out = [rows[:MOST].to(problem.device) for _, rows in problem.parts()]
        unigram, score = calibrate([made.denoiser for made in attempt.tried], held_out, COUNTED, problem.seed)
        if unigram is not None:
            ratio, numbers = ratio + unigram, numbers + unigram.log_r.numel()
    made = problem.result(Trained(problem.source, ratio, final.fits), [*attempt.fits(), *final.fits], score)
    return replace(made, weights=numbers)
