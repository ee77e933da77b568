"""`gtl-adapters`: a ratio that is the frozen source with low-rank adapters, over the source as it is.

The adapters are LoRA's, fitted once for both. What a ratio adds: the fits of the folds, which the rule of choice makes
anyway, are not thrown away but averaged with the final one (log-ratios form a vector space), and held-out rows choose a
gamma. With one member at gamma 1 it *is* LoRA. Every member costs one more pass of the source.
"""

from dataclasses import replace

import torch

from gtl.estimate.base import Adapted, Problem, Trained, choose
from gtl.estimate.lora import recipe
from gtl.ratio import Combination
from gtl.ratio.gamma import GAMMAS, nll_by_gamma

__all__ = ["adapters"]


def adapters(problem: Problem, method: str) -> Adapted:
    """The mean of several fits, the one on all rows first."""
    attempt, final = problem.trained("lora", recipe)
    curves = []
    for made, (_, held_out) in zip(attempt.tried, problem.parts(), strict=True):
        generator = torch.Generator(problem.device).manual_seed(problem.seed)
        rows, looked_at = held_out.to(problem.device), problem.training.evaluation_rows
        values = nll_by_gamma(problem.source, made.as_ratio(), rows, rows=looked_at, generator=generator)
        curves.append({attempt.step: values.tolist()})
    _, index, score = choose(curves, GAMMAS.index(1.0))
    members = [made.as_ratio() for made in (final, *attempt.tried)][: problem.training.members]
    ratio = Combination([(1 / len(members), member) for member in members])
    ratio.gamma = GAMMAS[index]
    result = problem.result(Trained(problem.source, ratio, final.fits), [*attempt.fits(), *final.fits], score)
    return replace(result, weights=len(members) * result.weights)
