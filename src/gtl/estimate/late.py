"""`gtl-late`: a ratio with late injection, fitted by the likelihood of target tokens.

    min_r  E_{x ~ q} NELBO( x ; p r / Z ) / L   [ +  logistic loss of A on noisy sequences of both domains / L ]

Source data is not needed; where it is given, the second term makes A an absolute log r, and elsewhere A stays 0.
Under masked noise this is the objective of `train/likelihood`. Candidates are cheap and all masked positions of a row
share a context, so that all of them count where the vocabulary is small, not one that stands for all; a step then says
as much as one of a local ratio. Under other noise it is that of `train/rates`.
"""

import copy

import torch
from torch import nn

from gtl.estimate.base import Problem, warm_start
from gtl.estimate.parts import Adapted, Part, Trained
from gtl.guidance import Guided
from gtl.nn.dit import DiT
from gtl.process import Mixing
from gtl.ratio.late import LateRatio
from gtl.train.likelihood import LikelihoodObjective
from gtl.train.objective import Objective
from gtl.train.rates import RatesObjective

__all__ = ["QUERIES", "late", "warm_start_trunk"]

QUERIES = 2**16
"""Candidates of a step, over all rows and positions, up to which all positions count."""


def warm_start_trunk(network: DiT, source: DiT) -> None:
    """`warm_start` of a trunk that may know one id more than the source, the hole, whose embedding stays as it is."""
    if network.width == source.width and network.num_ids > source.num_ids:
        hole = network.embedding.weight[source.num_ids :].to(source.embedding.weight) / source.scale
        source = copy.deepcopy(source)
        source.embedding.weight = nn.Parameter(torch.cat([source.embedding.weight, hole]).detach())
    warm_start(network, source)


def fresh_ratio(problem: Problem) -> LateRatio:
    """An untrained ratio, its trunk started from the source denoiser if the experiment asks for that."""
    torch.manual_seed(problem.seed)
    timed = problem.source.network.time_conditioned
    ratio = LateRatio.build(problem.source.process, time_conditioned=timed, **vars(problem.training.ratio))
    if problem.training.warm_start:
        warm_start_trunk(ratio.network.dit, problem.source.network)
    return ratio.to(problem.device)


def recipe(problem: Problem, part: Part) -> Trained:
    """One network; one loss, or two where there is source data."""
    ratio = fresh_ratio(problem)
    source = problem.source_data[0] if len(problem.source_data[0]) else None
    if source is None:  # the likelihood says nothing of A, and Adam would follow what rounding does
        ratio.network.dit.head.requires_grad_(False)
    model: nn.Module
    objective: Objective
    if isinstance(problem.source.process, Mixing):
        model, objective = ratio, RatesObjective(problem.source, ratio, part.rows, part.held_out, source)
    else:
        model = guided = Guided(problem.source, ratio, 1.0)
        one_place = problem.training.batch_size * part.rows.shape[1] * guided.process.vocabulary > QUERIES
        objective = LikelihoodObjective(guided, part.rows, part.held_out, source=source, one_place=one_place)
    fit = problem.fit(part.name, model, objective, part.steps, stop=part.stop)
    return Trained(problem.source, ratio, [fit])


def late(problem: Problem, method: str) -> Adapted:
    """A ratio with late injection."""
    return problem.run(method, recipe)
