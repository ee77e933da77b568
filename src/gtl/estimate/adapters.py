"""`gtl-adapters`: a ratio that is the frozen source with low-rank adapters, over the source as it is.

The adapters are LoRA's, fitted once for both. What a ratio adds is the mean of several fits, and counts: a vocabulary
that adapters below a frozen head cannot learn. Every member costs one more pass of the source. One member without
counts *is* LoRA.
"""

from gtl.estimate.base import Adapted, Problem
from gtl.estimate.lora import recipe
from gtl.estimate.mean import mean_of_fits, with_counts

__all__ = ["adapters"]


def adapters(problem: Problem, method: str) -> Adapted:
    """The mean of several fits, and counts."""
    attempt, final = problem.trained("lora", recipe)
    ratio = mean_of_fits(problem, attempt, final)
    return with_counts(problem, attempt, final, ratio, len(ratio.ratios) * final.fits[-1].weights)
