"""`gtl-late`: a ratio with late injection, fitted by the likelihood of target tokens.

    min_r  E_{x ~ q} NELBO( x ; p r / Z ) / L   [ +  logistic loss of A on noisy sequences of both domains / L ]

Source data is not needed; where it is given, the second term makes A an absolute log r, and elsewhere A stays 0.
Under masked noise this is the objective of `train/likelihood`. Candidates are cheap and all masked positions of a row
share a context, so that all of them count where the vocabulary is small, not one that stands for all; a step then says
as much as one of a local ratio. Under other noise a noisy ratio guides rates and not x: the NELBO is the score entropy
of the guided rates (Theorem 2), at one random position.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gtl.denoiser import Denoiser
from gtl.estimate.base import Adapted, Part, Problem, Trained, warm_start
from gtl.guidance import Guided
from gtl.nn.dit import DiT
from gtl.process import Mixing
from gtl.ratio.gamma import GAMMAS, nll_by_gamma, noisy_nelbo
from gtl.ratio.late import LateRatio
from gtl.train.classifier import ClassifierObjective
from gtl.train.likelihood import LikelihoodObjective, held_out_score
from gtl.train.objective import Objective

__all__ = ["QUERIES", "RatesObjective", "TokensObjective", "late", "warm_start_trunk"]

QUERIES = 2**16
"""Candidates of a step, over all rows and positions, up to which all positions count."""


class TokensObjective(LikelihoodObjective):
    """The likelihood objective at all masked positions, in training and in judging, or at one of each row."""

    def __init__(self, guided: Guided, rows: int, x: Tensor, held_out: Tensor | None, source: Tensor | None) -> None:
        """As for `LikelihoodObjective`; `rows` is the size of a batch, which says what is affordable."""
        super().__init__(guided, x, held_out, source=source)
        self.one_place = rows * x.shape[1] * guided.process.vocabulary > QUERIES

    def score(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        guided, x = self.guided, batch["target"]
        return nll_by_gamma(
            guided.denoiser,
            guided.ratio,
            x,
            self.gammas,
            len(x),
            generator=generator,
            batch=512,
            one_place=self.one_place,
        )


class RatesObjective(Objective):
    """Minimises the NELBO per token of target rows under rates that a noisy ratio guides; for mixing noise."""

    def __init__(
        self,
        denoiser: Denoiser,
        ratio: LateRatio,
        x: Tensor,
        held_out: Tensor | None = None,
        source: Tensor | None = None,
    ) -> None:
        """Sets the frozen denoiser, the ratio, target rows (N, L), held-out ones, and source rows for the logistic
        loss."""
        super().__init__({"target": x}, None if held_out is None else {"target": held_out})
        if source is not None:
            self.train["source"] = source
        self.denoiser, self.ratio = denoiser.eval(), ratio
        self.classifier = ClassifierObjective(denoiser.process, self.train)

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        process, x = self.denoiser.process, batch["target"]
        assert isinstance(process, Mixing)
        t = process.times(len(x), x.device, generator)
        z = process.corrupt(x, t, generator)
        place = process.some_place(z, generator)
        positions = place.unsqueeze(1)
        with torch.no_grad():
            source = self.denoiser(z, t, positions)
        total = noisy_nelbo(process, self.ratio, x, z, t, source, positions, place, (1.0,)).sum()
        loss = total.to(x.device) / x.numel()
        if "source" in batch:
            loss = loss + self.classifier.loss(forward, batch, generator) / x.shape[1]
        return loss

    def score(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        return held_out_score(self.denoiser, self.ratio, batch["target"], GAMMAS, generator)


def warm_start_trunk(network: DiT, source: DiT) -> None:
    """`warm_start` of a trunk that may know one id more than the source, the hole, whose embedding stays as it is."""
    if network.width == source.width and network.num_ids > source.num_ids:
        hole = network.embedding.weight[source.num_ids :].to(source.embedding.weight)
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
    return ratio.to(next(problem.source.parameters()).device)


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
        objective = TokensObjective(guided, problem.training.batch_size, part.rows, part.held_out, source)
    fit = problem.fit(part.name, model, objective, part.steps, stop=part.stop)
    return Trained(problem.source, ratio, [fit])


def late(problem: Problem, method: str) -> Adapted:
    """A ratio with late injection."""
    return problem.run(method, recipe)
