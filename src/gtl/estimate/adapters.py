"""`gtl-adapters`: a ratio that is the frozen source with low-rank adapters, over the source as it is.

The adapters are LoRA's, fitted once for both. What a ratio adds:

1. the fits of the folds, which the rule of choice makes anyway, are not thrown away but averaged with the final one: a
   geometric mean of laws is likelier than its members on average;
2. the fit of each fold says what it expects of rows that it has not seen, and what comes more often or less becomes a
   unigram ratio (`ratio/unigram`), a vocabulary that adapters below a frozen head cannot learn.

Every member costs one more pass of the source. One member without counts *is* LoRA.
"""

from dataclasses import replace

from gtl.estimate.base import Adapted, Attempt, Problem, Trained
from gtl.estimate.lora import recipe
from gtl.estimate.unigram import calibrate
from gtl.ratio import Combination

__all__ = ["adapters", "mean_of_fits"]

ROWS = 2048
"""Held-out corruptions, at least, that are counted."""
MOST = 4096
"""Held-out rows of a fold, at most, among them."""


def mean_of_fits(problem: Problem, attempt: Attempt, final: Trained) -> Combination:
    """The mean of several fits, the one on all rows first."""
    members = [made.as_ratio() for made in (final, *attempt.tried)][: problem.training.members]
    return Combination([(1 / len(members), member) for member in members])


def adapters(problem: Problem, method: str) -> Adapted:
    """The mean of several fits, and counts."""
    attempt, final = problem.trained("lora", recipe)
    ratio, score = mean_of_fits(problem, attempt, final), attempt.score
    numbers = len(ratio.ratios) * final.fits[-1].weights
    if problem.training.unigram:
        held_out = [rows[:MOST].to(problem.device) for _, rows in problem.parts()]
        unigram, score = calibrate([made.denoiser for made in attempt.tried], held_out, ROWS, problem.seed)
        if unigram is not None:
            ratio, numbers = ratio + unigram, numbers + unigram.log_r.numel()
    made = problem.result(Trained(problem.source, ratio, final.fits), [*attempt.fits(), *final.fits], score)
    return replace(made, weights=numbers)
