"""Fitting a ratio by likelihood: a guided denoiser is a denoiser, so train it as one, with the source frozen.

    min_r  E_{x ~ q} NELBO( x ; p r / Z ) / L  +  (c / n) E_z mean_l KL( p(x_l | z) || q_r(x_l | z) )

The first term is the conditional likelihood of target tokens under the guided model, which is what sampling uses; its
optimum is the conditional ratio q(x_l = v | z) / p(x_l = v | z). It needs no source data. The second pulls r toward 1
with the weight of c among n sequences.

For sequence ratios, whose candidates cost a network evaluation each, one random position of a sequence stands for all;
they may take the logistic loss on top, which does need source data. With large vocabularies as many positions as fit
into memory stand for all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gtl.denoiser import Denoiser
from gtl.guidance import Guided
from gtl.ratio.base import Ratio, SequenceRatio
from gtl.ratio.gamma import GAMMAS, nll_by_gamma, places_that_fit
from gtl.train.classifier import logistic
from gtl.train.objective import Objective

__all__ = ["Judged", "LikelihoodObjective"]


class LikelihoodObjective(Objective):
    """Minimises the guided model's NELBO per token over target rows."""

    def __init__(
        self,
        guided: Guided,
        x: Tensor,
        held_out: Tensor | None = None,
        pseudo: float = 0.0,
        source: Tensor | None = None,
        logistic_weight: float = 1.0,
        gammas: Sequence[float] = GAMMAS,
        one_place: bool | None = None,
        places: int | None = None,
    ) -> None:
        """Sets data and regularisation, and freezes the source.

        Args:
            guided: the frozen denoiser with the ratio to fit, at gamma 1.
            x: (N, L), target rows.
            held_out: the same, for early stopping.
            pseudo: c, the weight of the pull toward r = 1, in sequences.
            source: (M, L), source rows; where they are given, a sequence ratio takes the logistic loss as well.
            logistic_weight: of that loss, which is one number a sequence, against the NELBO of a sequence.
            gammas: the strengths among which early stopping looks for the best one.
            one_place: whether one position of a row stands for all, in training and in judging; by default for
                sequence ratios.
            places: positions of a row that stand for all in training; by default as many as fit.
        """
        super().__init__({"target": x}, None if held_out is None else {"target": held_out})
        if guided.gamma != 1:
            raise ValueError(f"gamma={guided.gamma}: a ratio is fitted at gamma 1 and its gamma chosen afterwards")
        if pseudo < 0:
            raise ValueError(f"pseudo={pseudo} must not be negative")
        self.ratio = guided.ratio
        self.one_place = isinstance(guided.ratio, SequenceRatio) if one_place is None else one_place
        if source is not None:
            if not isinstance(guided.ratio, SequenceRatio):
                raise ValueError("the logistic loss is for sequence ratios: a local one has no absolute value")
            self.train["source"] = source
        guided.denoiser.requires_grad_(False)
        self.guided, self.pseudo, self.logistic_weight, self.gammas = guided, pseudo, logistic_weight, tuple(gammas)
        self.places = places

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        process, x = self.guided.process, batch["target"]
        t = process.times(len(x), x.device, generator)
        z = process.corrupt(x, t, generator)
        count = 1 if self.one_place else places_that_fit(z, process.num_ids)
        if self.places is not None:
            count = min(self.places, x.shape[1] if count is None else count)
        places = None if count is None else process.some_places(z, count, generator)
        made = forward(z, t, places)
        if places is None:
            loss = process.nelbo(x, z, t, made.log_probs, self.guided.timeless).mean() / x.shape[1]
        else:
            loss = process.nelbo_at(x, z, t, made.log_probs, self.guided.timeless, places).mean() / x.shape[1]
        if self.pseudo:
            loss = loss + self.pseudo / len(self.train["target"]) * divergence(made.source, made.log_probs)
        if "source" in batch:
            loss = loss + self.logistic_weight / x.shape[1] * self._logistic(z, t, batch["source"], generator)
        return loss

    def _logistic(self, z: Tensor, t: Tensor, source: Tensor, generator: torch.Generator | None) -> Tensor:
        """The loss of the ratio as a domain classifier on noisy sequences, the target's as they are."""
        assert isinstance(self.ratio, SequenceRatio)
        process = self.guided.process
        times = process.times(len(source), source.device, generator)
        s = self.ratio.log_value(
            torch.cat([z, process.corrupt(source, times, generator)]), torch.cat([t, times.to(t.dtype)])
        )
        return torch.cat([logistic(s[: len(z)], False), logistic(s[len(z) :], True)]).mean()

    def score(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        guided = self.guided
        asked = self.gammas, generator, self.one_place, guided.n_ratio
        return held_out_score(guided.denoiser, guided.ratio, batch["target"], *asked)


class Judged(Objective):
    """Another objective's loss, stopped by the conditional likelihood of held-out target rows."""

    def __init__(
        self,
        objective: Objective,
        denoiser: Denoiser,
        ratio: Ratio,
        held_out: Tensor,
        gammas: Sequence[float] = GAMMAS,
        n_ratio: int | None = None,
    ) -> None:
        super().__init__(objective.train, {"target": held_out})
        self.objective, self.denoiser, self.ratio, self.gammas = objective, denoiser.eval(), ratio, tuple(gammas)
        self.n_ratio = n_ratio

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        return self.objective.loss(forward, batch, generator)

    def score(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        one_place = isinstance(self.ratio, SequenceRatio)
        asked = self.gammas, generator, one_place, self.n_ratio
        return held_out_score(self.denoiser, self.ratio, batch["target"], *asked)


def held_out_score(
    denoiser: Denoiser,
    ratio: Ratio,
    x: Tensor,
    gammas: Sequence[float],
    generator: torch.Generator | None,
    one_place: bool,
    n_ratio: int | None = None,
) -> Tensor:
    """The NELBO per token of x (N, L) at every gamma, over n_ratio candidates: (G,)."""
    return nll_by_gamma(denoiser, ratio, x, gammas, len(x), n_ratio, generator, 512, one_place)


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Mean over positions of KL(p || q): (B, P, K) twice -> scalar. Where p is 0, so is its part."""
    gap = (log_p - log_q).masked_fill(log_p == -torch.inf, 0.0)
    return (log_p.exp() * gap).sum(-1).mean()
