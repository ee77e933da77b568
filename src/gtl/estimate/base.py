"""From a source model and n target sequences to a target model: one way a file, one budget, one rule of choice.

A *recipe* trains on the rows that it is given and records, as it goes, how likely held-out rows are under the model
that it would give at each step and each gamma. `Problem.run` takes it over K folds (one split where data is plenty),
chooses step, gamma and learning rate where the mean over folds is best, and runs it once more on all rows up to that
step. Every network that is trained on the way counts against the budget, one that diverges as well, and every method,
baselines included, goes this way. What is trained is kept in a folder, if there is one: a run that was stopped goes on
with the fit that it was at, and methods that share fits find those of before.

With `folds: 0` nothing is trained twice: one split, the best weights kept, gamma chosen for them (as the paper does).
Importance weights, which go on with what was chosen, are an exception.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from safetensors.torch import load_file, save
from torch import Tensor, nn

from gtl.data.tokens import folds, split
from gtl.denoiser import NetworkDenoiser
from gtl.estimate.choice import choose, descend
from gtl.estimate.parts import Adapted, Attempt, Part, Trained
from gtl.estimate.settings import Training
from gtl.nn.dit import DiT, Pooling
from gtl.progress import Bar
from gtl.ratio import KNNRatio, NetworkRatio, Ratio
from gtl.ratio.gamma import GAMMAS, nll_by_gamma
from gtl.score import ScoreDenoiser
from gtl.train.checkpoint import atomic, write_json
from gtl.train.denoiser import DenoiserObjective
from gtl.train.likelihood import Judged
from gtl.train.loop import Diverged, Fit, FitSettings, fit
from gtl.train.objective import Objective
from gtl.train.score import ScoreObjective

__all__ = ["Method", "Problem", "Recipe", "warm_start"]

SAVE_EVERY = 1000
"""Steps between two saved states of a fit. It is also saved when it is stopped, if not in the midst of an evaluation,
and when it is over."""
DIVERGED = "diverged.json"
"""In the folder of a fit that did."""


@dataclass
class Problem:
    """One source model, one set of target sequences."""

    training: Training
    source: NetworkDenoiser
    source_data: tuple[Tensor, Tensor]
    """Training and held-out rows; both may be empty for methods that need no source data."""
    target: Tensor
    seed: int
    held_out: float = 0.1
    """Share of the target rows in the one held-out part, where they are not few."""
    samples: Callable[[Adapted, Tensor], float] | None = None
    """How far a model's samples are from held-out target rows, for `gamma_rule: samples`."""
    bar: Bar | None = None
    log: Callable[[dict[str, Any]], None] | None = None
    label: str = ""
    rate: float = 1.0
    """What learning rates are multiplied by, see `Training.rates`."""
    memory: dict[str, Adapted] = field(default_factory=dict)
    shared: "dict[str, tuple[Attempt, Trained]]" = field(default_factory=dict)
    known: dict[str, Tensor] = field(default_factory=dict)
    spent: list[Fit] = field(default_factory=list)
    """Every fit so far, those that diverged among them."""
    folder: Path | None = None
    """Where fits are kept as they go, so that after a stop none begins anew."""

    def adapted(self, method: str) -> Adapted:
        """The result of a method, which runs at most once."""
        from gtl.estimate import METHODS

        if method not in self.memory:
            self.memory[method] = METHODS[method](self, method)
        return self.memory[method]

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives, made at most once."""
        path = None if self.folder is None else self.folder / f"{name}.safetensors"
        if name not in self.known:
            there = path is not None and path.is_file()
            value = load_file(path)[name] if there else make()  # type: ignore[arg-type]
            self.known[name] = broadcast(value.to(self.device))
            if path is not None and not there:
                with atomic(path) as handle:
                    handle.write(save({name: value.cpu()}))
        return self.known[name]

    @property
    def device(self) -> torch.device:
        """Where the source model is."""
        return next(self.source.parameters()).device

    @property
    def size(self) -> int:
        """The source model's weights."""
        return sum(weight.numel() for weight in self.source.parameters())

    @property
    def candidates(self) -> int:
        """Tokens that a sequence ratio weighs at a position while it is fitted and judged."""
        return self.training.candidates(self.source.process.vocabulary)

    def run(self, method: str, recipe: "Recipe") -> Adapted:
        """A recipe under the experiment's rule of choice."""
        return self._once(method, recipe) if not self.training.folds else self._folds(method, recipe)

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """(rows, held-out rows) of each fold, or of the one split."""
        if self.training.folds:
            return folds(self.target, self.training.folds, self.held_out, self.seed)
        return [split(self.target, max(self.held_out, 4 / len(self.target)), self.seed)]

    def attempt(
        self,
        name: str,
        recipe: "Recipe",
        parts: list[tuple[Tensor, Tensor]],
        steps: int,
        starts: "Sequence[Trained] | None" = None,
        known: "Sequence[Trained]" = (),
    ) -> "Attempt":
        """A recipe on every fold, and the step and setting that are best on the mean of what is held out; the first
        folds may be `known`."""
        tried = [*known]
        for index, (rows, held_out) in list(enumerate(parts))[len(known) :]:
            where = f"{name}, fold {index + 1} of {len(parts)}"
            start = None if starts is None else starts[index]
            tried.append(recipe(self, Part(rows, held_out, steps, name=where, start=start, number=index + 1)))
        step, index, score = choose([trained.fits[-1].curve for trained in tried], tried[0].favourite())
        for trained in tried:
            trained.settle(index)
        return Attempt(tried, steps, step, index, score, self.rate)

    def at_rates(
        self,
        name: str,
        recipe: "Recipe",
        parts: list[tuple[Tensor, Tensor]],
        steps: int,
        starts: "Sequence[Trained] | None" = None,
    ) -> "tuple[list[Attempt], list[Fit]]":
        """An attempt at each learning rate, the best first, and the fits of those that diverged, which are none."""
        attempts: list[Attempt] = []
        lost: list[Fit] = []
        diverged = Diverged()
        for rate in self.training.rates:
            begun = len(self.spent)
            try:
                at_rate, called = replace(self, rate=rate), self.called(name, rate)
                attempts.append(at_rate.attempt(called, recipe, parts, steps, starts))
            except Diverged as error:  # another rate may do
                diverged = error
                lost += self.spent[begun:]
        if not attempts:
            raise diverged
        return sorted(attempts, key=lambda each: each.score), lost

    def best_rate(self, name: str, recipe: "Recipe", parts: list[tuple[Tensor, Tensor]], steps: int) -> "Attempt":
        """The best of an attempt at each learning rate."""
        (best, *others), lost = self.at_rates(name, recipe, parts, steps)
        best.others = [*(fit for each in others for fit in each.fits()), *lost]
        return best

    def finish(
        self, name: str, recipe: "Recipe", rows: Tensor, attempt: "Attempt", start: Trained | None = None
    ) -> Trained:
        """The recipe once more on all rows, up to the chosen step, with the chosen setting."""
        problem, called = replace(self, rate=attempt.rate), self.called(name, attempt.rate)
        final = recipe(problem, Part(rows, None, attempt.steps, attempt.step, f"{called}, all rows", start))
        final.settle(attempt.index)
        return final

    def called(self, name: str, rate: float) -> str:
        """What fits at a rate are called."""
        return name if len(self.training.rates) == 1 else f"{name}, rate {rate:g}"

    def trained(self, name: str, recipe: "Recipe") -> "tuple[Attempt, Trained]":
        """A recipe on every fold and then on all rows, once for all methods that build on it."""
        if name not in self.shared:
            parts = self.parts()
            steps = self.training.budget // (len(parts) * len(self.training.rates) + 1)
            attempt = self.best_rate(name, recipe, parts, steps)
            self.shared[name] = attempt, self.finish(name, recipe, self.target, attempt)
        return self.shared[name]

    def _folds(self, method: str, recipe: "Recipe") -> Adapted:
        attempt, final = self.trained(method, recipe)
        return self.result(final, [*attempt.fits(), *final.fits], attempt.score)

    def _once(self, method: str, recipe: "Recipe") -> Adapted:
        rows, held_out = self.parts()[0]
        made = recipe(self, Part(rows, held_out, self.training.budget, name=method))
        if made.ratio is None or isinstance(made.ratio, KNNRatio):
            made.settle(choose([made.fits[-1].curve])[1])
            return self.result(made, made.fits, made.fits[-1].held_out or float("nan"))
        results = []
        for ratio in (made.ratio, *made.rivals):
            index, score = self._gamma(ratio, held_out)
            ratio.gamma = GAMMAS[index]
            results.append(self.result(replace(made, ratio=ratio), made.fits, score))
        return min(results, key=lambda result: result.score)

    def _gamma(self, ratio: Ratio, held_out: Tensor) -> tuple[int, float]:
        """The index of the best gamma of a trained ratio, and its score."""
        if self.training.gamma_rule == "samples":
            if self.samples is None:
                raise ValueError("gamma_rule=samples: there is nothing to compare samples by; use likelihood")
            compare, model = self.samples, Adapted(self.source, ratio)
            return descend(lambda i: compare(replace(model, gamma=GAMMAS[i]), held_out), len(GAMMAS))
        held_out = held_out.to(self.device)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        scores = nll_by_gamma(self.source, ratio, held_out, GAMMAS, n_ratio=self.candidates, generator=generator)
        return int(scores.argmin()), float(scores.min())

    def result(self, made: Trained, fits: list[Fit], score: float) -> Adapted:
        """The target model, with what it cost."""
        steps, seconds = sum(f.steps for f in fits), sum(f.seconds for f in fits)
        weights = sum(f.weights for f in made.fits)
        gamma = 1.0 if made.ratio is None else made.ratio.eval().gamma
        return Adapted(made.denoiser, made.ratio, gamma, score, steps, seconds, weights)

    def fit(self, name: str, model: nn.Module, objective: Objective, steps: int, **changes: Any) -> Fit:
        """Trains one network under the experiment's settings."""
        t = self.training
        settings = FitSettings(
            steps, seed=self.seed, batch_size=t.batch_size, learning_rate=t.learning_rate, warmup=t.warmup,
            weight_decay=t.weight_decay, ema=t.ema, patience=t.patience, evaluate_every=t.evaluate_every,
            evaluation_rows=t.evaluation_rows, precision=t.precision, compile=t.compile, save_every=SAVE_EVERY,
        )  # fmt: skip
        settings = replace(settings, **changes)
        settings.learning_rate *= self.rate
        bar, log = self.bar, self.log
        folder = None if self.folder is None else self.folder / re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
        if bar is not None:
            bar.stage(f"{self.label}training {name}", steps)
        try:
            remembered(folder)
            made = fit(
                model,
                objective,
                settings,
                folder,
                on_step=None if bar is None else lambda step: bar.advance(step / steps),
                log=None if log is None else lambda metrics: log({"network": f"{self.label}{name}", **metrics}),
            )
        except Diverged as error:
            self.spent.append(Fit(error.steps, 0, None, error.seconds, 0, {}))
            if folder is not None:
                write_json(folder / DIVERGED, {"why": str(error), "steps": error.steps, "seconds": error.seconds})
            raise
        self.spent.append(made)
        return made

    def judged(self, objective: Objective, ratio: Ratio, part: Part) -> Objective:
        """The objective of a ratio's last network, judged by held-out likelihood where the rule is that."""
        if part.held_out is None or not self.training.folds:
            return objective
        return Judged(objective, self.source, ratio, part.held_out, n_ratio=self.candidates)

    def fresh_denoiser(self) -> NetworkDenoiser:
        """An untrained denoiser of the source's size."""
        torch.manual_seed(self.seed)
        config = self.source.network.config()
        return type(self.source)(self.source.process, DiT(**config))

    def denoiser_objective(self, model: NetworkDenoiser, rows: Tensor, held_out: Tensor | None = None) -> Objective:
        """The loss of a denoiser on rows, with others to judge it by."""
        if isinstance(model, ScoreDenoiser):
            return ScoreObjective(model, rows, held_out)
        return DenoiserObjective(model, rows, held_out)

    def fresh_sequence_ratio(self, pooling: Pooling, smoothing: float = 0.0) -> NetworkRatio:
        """An untrained sequence ratio."""
        torch.manual_seed(self.seed)
        timed = self.source.network.time_conditioned
        ratio = NetworkRatio.build(
            self.source.process, pooling, smoothing, time_conditioned=timed, **vars(self.training.ratio)
        )
        if self.training.warm_start:
            warm_start(ratio.network.dit, self.source.network)
        return ratio.to(self.device)

    def domains(self, part: Part) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        """Training rows of both domains and, where ratio networks stop early by their own loss, held-out ones."""
        if not len(self.source_data[0]):
            raise ValueError("this estimator compares target with source sequences: give source data as well")
        train = {"source": self.source_data[0], "target": part.rows}
        if part.held_out is None or self.training.folds or not self.training.stop_ratios:
            return train, None
        return train, {"source": self.source_data[1], "target": part.held_out}


def remembered(folder: Path | None) -> None:
    """A fit that diverged before a stop does so again: where numbers are not the same to the last bit, it might not."""
    if folder is not None and (folder / DIVERGED).is_file():
        known = json.loads((folder / DIVERGED).read_text())
        error = Diverged(known["why"])
        error.steps, error.seconds = known["steps"], known["seconds"]
        raise error


Recipe = Callable[[Problem, Part], Trained]
Method = Callable[[Problem, str], Adapted]
"""From a problem and the method's name to a target model."""


def warm_start(network: DiT, source: DiT) -> None:
    """Copies the source's embedding, first blocks and last norm into a network of the same width.

    A denoiser has already learned which neighbours tell about a token; a ratio that starts from there needs a fraction
    of the steps, and of the target data, that one from noise needs.
    """
    if (network.width, network.heads) != (source.width, source.heads):
        return
    known = {k: v for k, v in source.state_dict().items() if not k.startswith("head.")}
    known["embedding.weight"] = known["embedding.weight"] * source.scale
    network.load_state_dict({k: known.get(k, v).clone() for k, v in network.state_dict().items()})
