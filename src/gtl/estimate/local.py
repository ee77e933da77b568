"""`gtl-local`: a local ratio on the frozen denoiser, fitted by the likelihood of target tokens. No source data."""

import copy

import torch

from gtl.estimate.base import Problem
from gtl.estimate.parts import Adapted, Part, Trained
from gtl.guidance import Guided
from gtl.ratio import LocalRatio, Ratio
from gtl.train.likelihood import LikelihoodObjective

__all__ = ["local"]


def recipe(problem: Problem, part: Part) -> Trained:
    """One small network, one loss."""
    t = problem.training
    torch.manual_seed(problem.seed)
    if part.start is None:
        ratio: Ratio = LocalRatio.build(problem.source, t.features, t.head, **vars(t.ratio))
    else:
        assert part.start.ratio is not None
        ratio = copy.deepcopy(part.start.ratio)
    guided = Guided(problem.source, ratio, 1.0)
    objective = LikelihoodObjective(guided, part.rows, part.held_out, t.pseudo, places=t.places)
    fit = problem.fit(part.name, guided, objective, part.steps, stop=part.stop)
    return Trained(problem.source, ratio, [fit])


def local(problem: Problem, method: str) -> Adapted:
    """A local ratio."""
    return problem.run(method, recipe)
