"""Ways to get from a source model to a target: one function each, under one budget and one selection rule.

Every method sees the same target sequences, split once into training and held-out rows, and may take `budget` gradient
steps over all the networks that it trains. What it keeps (weights, gamma, pooling) it chooses by held-out loss on
target data; no method sees the true chain. A new estimator is a function here and a line in METHODS.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gtl.denoiser import Denoiser, NetworkDenoiser
from gtl.nn.dit import DiT, Pooling
from gtl.progress import Bar
from gtl.ratio import NetworkRatio, Ratio
from gtl.ratio.gamma import GAMMAS, nll_by_gamma
from gtl.train.classifier import ClassifierObjective
from gtl.train.denoiser import DenoiserObjective
from gtl.train.loop import Fit, FitSettings, fit
from gtl.train.objective import Objective
from gtl.train.ratio import RatioObjective

__all__ = ["METHODS", "Adapted", "NetworkSize", "Problem", "Training"]


@dataclass
class NetworkSize:
    """A DiT's size."""

    width: int = 64
    depth: int = 2
    heads: int = 4
    dropout: float = 0.0


@dataclass
class Training:
    """How the networks of an experiment are trained."""

    denoiser: NetworkSize = field(default_factory=NetworkSize)
    """The source model, and vanilla and fine-tuned ones."""
    ratio: NetworkSize = field(default_factory=NetworkSize)
    """Ratio networks and classifiers."""
    source_steps: int = 500
    """Gradient steps of the source model."""
    budget: int = 450
    """Gradient steps of every method after that, over all its networks."""
    classifier_steps: int | None = None
    """Of each of the paper's two classifiers; a third of the budget by default. The ratio network has the rest."""
    batch_size: int = 128
    learning_rate: float = 2e-3
    warmup: int = 20
    """Steps that the learning rate rises."""
    finetuned_warmup: int = 90
    """The same for fine-tuning, which starts from weights worth keeping: full-size first steps wipe them out."""
    weight_decay: float = 0.01
    ema: float = 0.99
    patience: int = 0
    """Evaluations without progress before a network stops; 0 uses the whole budget."""
    stop_ratios: bool = False
    """Whether ratio networks keep the weights with the best held-out loss, as denoisers do, or the last ones. A few
    held-out sequences stop a classifier when it becomes overconfident, long before it is as good as it gets: gamma
    takes care of the scale."""
    evaluate_every: int = 25
    """Steps between two evaluations."""
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    label_smoothing: float = 0.1
    """Of the paper's classifiers, in torch's convention (labels 0.05 and 0.95)."""
    link: Literal["undone", "capped", "auto"] = "capped"
    """Whether the smoothing is undone before the paper's ratio network learns from the classifiers, so that its optimum
    is log r; auto trains both ratio networks, half of the steps each, and keeps the one that validates better."""
    cycle_weight: float = 0.1
    """The paper's lambda."""
    warm_start: bool = True
    """Whether ratio networks start from the source denoiser's first blocks (where the widths agree) or from noise."""
    gamma_rule: Literal["samples", "likelihood"] = "samples"
    """How gamma is chosen on held-out target data: by what the samples look like, or by conditional likelihood."""
    pooling: Literal["sum", "mean", "auto"] = "sum"
    """Of ratio networks; auto trains both and keeps the one that validates better."""
    vanilla_epochs: int = 60
    """Of `vanilla-epochs`, the paper's own baseline: epochs over the target data, last weights kept."""
    finetuned_epochs: int = 90
    """Of `finetuned-epochs`."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be in [0, 1)")
        FitSettings(
            self.source_steps, self.batch_size, self.learning_rate, weight_decay=self.weight_decay, ema=self.ema
        )
        if not 0 < 2 * self.steps_of_a_classifier < self.budget:
            raise ValueError(
                f"two classifiers of {self.steps_of_a_classifier} steps use up a budget of {self.budget} steps"
            )

    @property
    def steps_of_a_classifier(self) -> int:
        """Gradient steps of each of the paper's classifiers."""
        return self.budget // 3 if self.classifier_steps is None else self.classifier_steps


@dataclass
class Adapted:
    """A target model: a denoiser, with a ratio if it is guided."""

    denoiser: Denoiser
    ratio: Ratio | None = None
    gamma: float = 1.0
    score: float = float("nan")
    """Of the guided model on held-out target data at its gamma, by the rule that chose it; lower is better."""
    steps: int = 0
    seconds: float = 0.0
    weights: int = 0
    """Trainable numbers, over all networks."""


@dataclass
class Problem:
    """One source model, one set of target sequences."""

    training: Training
    source: NetworkDenoiser
    source_data: tuple[Tensor, Tensor]
    """Training and held-out rows."""
    target_data: tuple[Tensor, Tensor]
    seed: int
    score: Callable[[Adapted], float]
    """How well the samples of a model match the held-out target rows; lower is better."""
    bar: Bar | None = None
    log: Callable[[dict[str, Any]], None] | None = None
    label: str = ""
    memory: dict[str, Adapted] = field(default_factory=dict)

    def adapted(self, method: str) -> Adapted:
        """The result of a method, which runs at most once."""
        if method not in self.memory:
            self.memory[method] = METHODS[method](self)
        return self.memory[method]

    def fit(self, name: str, model: nn.Module, objective: Objective, steps: int, **changes: Any) -> Fit:
        """Trains one network under the experiment's settings."""
        t = self.training
        settings = FitSettings(
            steps=steps,
            batch_size=t.batch_size,
            learning_rate=t.learning_rate,
            warmup=t.warmup,
            weight_decay=t.weight_decay,
            ema=t.ema,
            patience=t.patience,
            evaluate_every=t.evaluate_every,
            precision=t.precision,
            compile=t.compile,
            seed=self.seed,
        )
        bar, log = self.bar, self.log
        if bar is not None:
            bar.stage(f"{self.label}training {name}", steps)
        return fit(
            model,
            objective,
            replace(settings, **changes),
            on_step=None if bar is None else lambda step: bar.advance(step / steps),
            log=None if log is None else lambda metrics: log({"network": f"{self.label}{name}", **metrics}),
        )

    def fresh_denoiser(self) -> NetworkDenoiser:
        """An untrained denoiser of the source's size."""
        torch.manual_seed(self.seed)
        config = self.source.network.config()
        return NetworkDenoiser(self.source.process, DiT(**config))

    def fresh_ratio(self, pooling: Pooling, smoothing: float = 0.0) -> NetworkRatio:
        """An untrained ratio network."""
        torch.manual_seed(self.seed)
        ratio = NetworkRatio.build(self.source.process, pooling, smoothing, **vars(self.training.ratio))
        if self.training.warm_start:
            warm_start(ratio.network.dit, self.source.network)
        return ratio

    def domains(self) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        """Training rows of both domains and, where ratio networks stop early, held-out ones."""
        both = [{"source": s, "target": t} for s, t in zip(self.source_data, self.target_data, strict=True)]
        return both[0], both[1] if self.training.stop_ratios else None


def baseline(problem: Problem, model: NetworkDenoiser, name: str, epochs: int | None = None) -> Adapted:
    """Trains a denoiser on the target data, early-stopped within the budget, or for the paper's epochs."""
    rows, held_out = problem.target_data
    if epochs is None:
        warmup = problem.training.finetuned_warmup if name == "finetuned" else problem.training.warmup
        run = problem.fit(name, model, DenoiserObjective(model, rows, held_out), problem.training.budget, warmup=warmup)
    else:
        every = torch.cat([rows, held_out])
        steps = epochs * -(-len(every) // problem.training.batch_size)
        run = problem.fit(name, model, DenoiserObjective(model, every), steps, ema=0.0)
    return Adapted(model, steps=run.steps, seconds=run.seconds, weights=run.weights)


def vanilla(problem: Problem) -> Adapted:
    """A denoiser trained on the target alone."""
    return baseline(problem, problem.fresh_denoiser(), "vanilla")


def finetuned(problem: Problem) -> Adapted:
    """The source denoiser trained on, on the target."""
    return baseline(problem, copy.deepcopy(problem.source), "finetuned")


def vanilla_epochs(problem: Problem) -> Adapted:
    """Vanilla as the paper trains it."""
    return baseline(problem, problem.fresh_denoiser(), "vanilla-epochs", problem.training.vanilla_epochs)


def finetuned_epochs(problem: Problem) -> Adapted:
    """Fine-tuned as the paper trains it."""
    return baseline(problem, copy.deepcopy(problem.source), "finetuned-epochs", problem.training.finetuned_epochs)


def guided(problem: Problem, ratio: NetworkRatio, fits: list[Fit]) -> Adapted:
    """The frozen source with a trained ratio, gamma chosen on held-out target data by the rule of the experiment."""
    steps, seconds, weights = (sum(getattr(f, key) for f in fits) for key in ("steps", "seconds", "weights"))
    made = Adapted(problem.source, ratio, steps=steps, seconds=seconds, weights=weights)
    if problem.training.gamma_rule == "samples":
        index, score = descend(lambda index: problem.score(replace(made, gamma=GAMMAS[index])), len(GAMMAS))
    else:
        held_out = problem.target_data[1].to(next(ratio.parameters()).device)
        generator = torch.Generator(held_out.device).manual_seed(problem.seed)
        scores = nll_by_gamma(problem.source, ratio, held_out, GAMMAS, generator=generator)
        index, score = int(scores.argmin()), float(scores.min())
    return replace(made, gamma=GAMMAS[index], score=score)


def descend(value: Callable[[int], float], count: int) -> tuple[int, float]:
    """A minimum of a function on 0 .. count-1 whose neighbours are not smaller, found downhill from the middle."""
    seen: dict[int, float] = {}

    def at(index: int) -> float:
        if index not in seen:
            seen[index] = value(index) if 0 <= index < count else float("inf")
        return seen[index]

    here = count // 2
    while (there := min((here - 1, here + 1), key=at)) in range(count) and at(there) < at(here):
        here = there
    return here, at(here)


def better_pooling(problem: Problem, method: str) -> Adapted:
    """The result of METHOD-sum or METHOD-mean, whichever gives held-out target data the higher likelihood."""
    wanted = problem.training.pooling
    names = [f"{method}-{pooling}" for pooling in (("sum", "mean") if wanted == "auto" else (wanted,))]
    return min((problem.adapted(name) for name in names), key=lambda result: result.score)


def warm_start(network: DiT, source: DiT) -> None:
    """Copies the source's embedding, first blocks and last norm into a network of the same width.

    A denoiser has already learned which neighbours tell about a token; a ratio that starts from there needs a fraction
    of the steps, and of the target data, that one from noise needs.
    """
    if (network.width, network.heads) != (source.width, source.heads):
        return
    known = {k: v for k, v in source.state_dict().items() if not k.startswith("head.")}
    network.load_state_dict({k: known.get(k, v).clone() for k, v in network.state_dict().items()})


def gtl_direct(problem: Problem, pooling: Pooling) -> Adapted:
    """The direct estimator: one network, logistic loss on noisy sequences."""
    ratio = problem.fresh_ratio(pooling)
    objective = ClassifierObjective(problem.source.process, *problem.domains())
    return guided(problem, ratio, [problem.fit(f"gtl-direct-{pooling}", ratio, objective, problem.training.budget)])


def gtl_paper(problem: Problem, pooling: Pooling) -> Adapted:
    """The paper's estimator: a clean and a noisy classifier, then the ratio network from both."""
    t, process, fits = problem.training, problem.source.process, []
    train, held_out = problem.domains()
    clean, noisy = (problem.fresh_ratio(pooling, t.label_smoothing) for _ in range(2))
    for name, classifier in (("clean", clean), ("noisy", noisy)):
        objective = ClassifierObjective(process, train, held_out, classifier is noisy, t.label_smoothing)
        label = f"gtl-paper-{pooling}, {name} classifier"
        fits.append(problem.fit(label, classifier, objective, t.steps_of_a_classifier))
    links = ("undone", "capped") if t.link == "auto" else (t.link,)
    results = []
    for link in links:
        if link == "capped":
            clean, noisy = (NetworkRatio(process, each.network) for each in (clean, noisy))
        ratio = problem.fresh_ratio(pooling)
        last = RatioObjective(process, clean, noisy, train, held_out, t.cycle_weight)
        steps = (t.budget - 2 * t.steps_of_a_classifier) // len(links)
        fits.append(problem.fit(f"gtl-paper-{pooling}, ratio ({link})", ratio, last, steps))
        results.append(guided(problem, ratio, fits))
    best = min(results, key=lambda result: result.score)
    return replace(best, steps=results[-1].steps, seconds=results[-1].seconds, weights=results[-1].weights)


METHODS: dict[str, Callable[[Problem], Adapted]] = {
    "vanilla": vanilla,
    "vanilla-epochs": vanilla_epochs,
    "finetuned": finetuned,
    "finetuned-epochs": finetuned_epochs,
    "gtl-direct": lambda problem: better_pooling(problem, "gtl-direct"),
    "gtl-direct-sum": lambda problem: gtl_direct(problem, "sum"),
    "gtl-direct-mean": lambda problem: gtl_direct(problem, "mean"),
    "gtl-paper": lambda problem: better_pooling(problem, "gtl-paper"),
    "gtl-paper-sum": lambda problem: gtl_paper(problem, "sum"),
    "gtl-paper-mean": lambda problem: gtl_paper(problem, "mean"),
}
