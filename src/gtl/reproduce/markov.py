"""The paper's Table 1: one Markov chain turned into another from n sequences.

Besides METHODS the table has these rows, which train nothing:

    source             the unguided source model, measured against the target
    counting           transitions of the n sequences themselves, one added to each: the statistical limit
    exact              the same sampler with exact models: the sampler's own error
    METHOD-best-gamma  a GTL method with the gamma that does best on the metric itself, as the paper's table reports it
    published-*        the paper's figures, where chain, length and n are the paper's
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gtl.data.markov import read_matrix, sample_chain
from gtl.data.tokens import check_tokens, split
from gtl.denoiser import Denoiser, NetworkDenoiser, nll
from gtl.estimate import METHODS, Adapted, NetworkSize, Problem, Training
from gtl.evaluate.transition import estimate_transitions, transition_kl, transition_nll
from gtl.exact import ExactDenoiser, ExactRatio, MarkovChain
from gtl.guidance import Guided, check_n_ratio
from gtl.nn.dit import DiT
from gtl.process import D3PM, Masked, Mixing, Process, Uniform
from gtl.progress import Bar
from gtl.ratio import Ratio
from gtl.ratio.gamma import GAMMAS, nll_by_gamma
from gtl.report.markov import heat_maps, page
from gtl.run import Run
from gtl.sample import Ancestral, OnePosition, Sampler, TauLeaping
from gtl.sample.base import Callback
from gtl.score import ScoreDenoiser
from gtl.train.checkpoint import load_denoiser, save_model, write_json
from gtl.train.loop import mix

__all__ = ["PRESETS", "Protocol", "reproduce_markov"]

PUBLISHED = {
    "published-vanilla": {1000: 0.0476, 100: 0.1938, 20: 0.5842},
    "published-finetuned": {1000: 0.0393, 100: 0.1118, 20: 0.4004},
    "published-gtl": {1000: 0.0377, 100: 0.0989, 20: 0.3621},
}
BEST = "-best-gamma"
UNTRAINED = ("source", "counting", "exact")


@dataclass
class Protocol:
    """Everything that defines a run of the experiment, apart from the seeds."""

    experiment: str = "markov"
    process: Literal["masked", "uniform", "d3pm", "ctmc"] = "masked"
    """The noise: d3pm is a discretised Gaussian, ctmc uniform rates with a score model trained by score entropy."""
    source_matrix: str = "diagonal:0.1"
    target_matrix: str = "diagonal:0.8"
    mixture: float = 0.0
    """Share of the source sequences that are drawn from the target's chain (the paper's r)."""
    vocabulary: int = 5
    length: int = 20
    m: int = 10_000
    n: list[int] = field(default_factory=lambda: [1000, 100, 20])
    methods: list[str] = field(default_factory=lambda: ["source", "vanilla", "finetuned", "gtl-local", "counting"])
    samples: int = 4096
    validation_samples: int = 128
    """Generated sequences behind the choice of gamma, where samples decide it."""
    sampler: Literal["one-position", "ancestral", "tau-leaping"] = "one-position"
    sampling_steps: int = 20
    n_ratio: int | None = None
    held_out: float = 0.1
    """Fraction of either domain's sequences that is held out. Where that is under 100 target sequences, they are held
    out in turns (`training.folds`); with `folds: 0` at least 4 sequences or half."""
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        known = [*UNTRAINED, *METHODS]
        if not self.methods:
            raise ValueError("methods: give at least one")
        if self.process != "masked" and self.sampler == "one-position":
            raise ValueError(f"sampler=one-position reveals masks; {self.process} noise has none: use ancestral")
        if self.sampling_steps < 1:
            raise ValueError(f"sampling_steps={self.sampling_steps} must be at least 1")
        for method in self.methods:
            if method not in known and method.removesuffix(BEST) not in METHODS:
                raise ValueError(f"unknown method {method!r}; choose among {', '.join(known)}")
        if self.length < 2 or self.samples < 1 or self.m < 2:
            raise ValueError(f"length={self.length}, m={self.m}, samples={self.samples}: too small")
        if not 0 <= self.mixture < 1:
            raise ValueError(f"mixture={self.mixture} must be at least 0 and less than 1")
        for n in self.n:
            if n < 2:
                raise ValueError(f"n={n}: at least 2 target sequences are needed, one to train on and one held out")
        if not self.n:
            raise ValueError("n: give at least one number of target sequences")


PRESETS: dict[str, Protocol] = {
    "small": Protocol(),
    "demo": Protocol(
        methods=["counting", "vanilla", "finetuned", "gtl-local"],
        training=Training(source_steps=400, budget=800, folds=3, batch_size=48),
    ),
    "paper": Protocol(
        experiment="markov-paper",
        methods=[
            "source", "exact", "counting", "gtl-paper-sum", "gtl-paper-mean", "gtl-paper", "gtl-paper-best-gamma",
            "finetuned", "finetuned-epochs", "vanilla", "vanilla-epochs", "gtl-direct-sum",
        ],
        validation_samples=1024,
        sampler="ancestral",
        training=Training(
            denoiser=NetworkSize(320, 4, 5, 0.1),
            ratio=NetworkSize(320, 2, 5, 0.1),
            folds=0,
            source_steps=1200,  # 30 epochs of 10,000 rows in batches of 256
            classifier_steps=4000,
            budget=2 * 4000 + 2 * 2400,  # 60 epochs for a ratio network, over the source data that its loss runs on
            link="auto",
            batch_size=256,
            learning_rate=3e-4,
            warmup=100,
            finetuned_warmup=600,
            weight_decay=0.0,
            stop_ratios=True,
            evaluate_every=50,
            evaluation_rows=1024,
            patience=10,
            gamma_rule="samples",
            pooling="auto",
        ),
    ),
}  # fmt: skip


def reproduce_markov(
    protocol: Protocol, seeds: list[int], out: str | Path | None = None, verb: str = "reproduce-markov"
) -> Run:
    """Runs the experiment and writes results.json, transitions.json, figure.png and report.html into one folder."""
    matrices = [
        read_matrix(spec, protocol.vocabulary, seed)
        for seed, spec in enumerate((protocol.source_matrix, protocol.target_matrix))
    ]
    if matrices[0].shape != matrices[1].shape:
        raise ValueError(f"the matrices are {tuple(matrices[0].shape)} and {tuple(matrices[1].shape)}: sizes differ")
    check_n_ratio(protocol.n_ratio, len(matrices[0]))
    if min(seeds) < 0:
        raise ValueError(f"seed={min(seeds)} must not be negative")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 products
    run = Run(out, verb, asdict(protocol) | {"seeds": seeds}, device)
    with Bar(len(seeds) * planned_units(protocol, len(matrices[0]))) as bar:
        for seed in seeds:
            Experiment(protocol, matrices[0], matrices[1], seed, run, bar, device).carry_out()
    add_published(run, protocol)
    finish(run, protocol, matrices, seeds)
    return run


def make_noise(name: str, size: int) -> Process:
    """The process of an experiment over `size` states."""
    if name == "masked":
        return Masked(size + 1)
    return D3PM(size, "gaussian:1") if name == "d3pm" else Uniform(size)


class Experiment:
    """All methods under one seed."""

    def __init__(
        self, protocol: Protocol, source: Tensor, target: Tensor, seed: int, run: Run, bar: Bar, device: torch.device
    ) -> None:
        self.protocol, self.seed, self.run, self.bar, self.device = protocol, seed, run, bar, device
        self.matrices = source, target
        self.size = len(source)
        self.process = make_noise(protocol.process, self.size)
        draw = [torch.Generator().manual_seed(mix(seed, which)) for which in range(2)]
        alike = round(protocol.mixture * protocol.m)
        x = sample_chain(source, protocol.m, protocol.length, draw[0])
        x[:alike] = sample_chain(target, alike, protocol.length, torch.Generator().manual_seed(mix(seed, 3)))
        check_tokens(x, self.process.num_ids)
        self.source_data = split(x, protocol.held_out, seed)
        self.target_all = target_sequences(target, max(protocol.n), protocol.length, seed)
        self.test = sample_chain(target, 256, protocol.length, draw[1]).to(device)
        self.several = f"seed {seed}, "

    def carry_out(self) -> None:
        """Measures every method at every n."""
        p = self.protocol
        denoiser = self.source_model()
        if "source" in p.methods:
            self.measure("source", None, Adapted(denoiser))
        if "exact" in p.methods:
            laws = [MarkovChain(matrix, self.process).to(self.device) for matrix in self.matrices]
            self.measure("exact", None, Adapted(ExactDenoiser(laws[0]), ExactRatio(laws[0], laws[1])))
        for n in p.n:
            x = self.target_all[:n]
            if "counting" in p.methods and not self.run.has("counting", n, self.seed, "kl"):
                self.record("counting", n, x, pseudo=1.0)
            problem = Problem(
                p.training, denoiser, self.source_data, x, self.seed, p.held_out, self.compare_samples,
                self.bar, self.run.log, f"{self.several}n = {n}: ",
            )  # fmt: skip
            for method in p.methods:
                if method in UNTRAINED or self.run.has(method, n, self.seed, "kl"):
                    continue
                if method.endswith(BEST):
                    self.best_gamma(method, n, problem.adapted(method.removesuffix(BEST)))
                else:
                    self.measure(method, n, problem.adapted(method))

    def compare_samples(self, adapted: Adapted, held_out: Tensor) -> float:
        """How far a model's samples are from held-out target sequences, by their transitions."""
        samples = self.draw(adapted, adapted.gamma, self.protocol.validation_samples)
        return transition_nll(held_out, samples, self.size)

    def source_model(self) -> NetworkDenoiser:
        """The source denoiser, trained once for each seed and kept in the run's folder."""
        folder = self.run.folder / f"source-{self.seed}"
        if (folder / "weights.safetensors").exists():
            return load_denoiser(folder).to(self.device)
        t, p = self.protocol.training, self.process
        size = asdict(t.denoiser)
        torch.manual_seed(self.seed)
        network = DiT(p.num_ids, p.num_ids, time_conditioned=not isinstance(p, Masked), **size)
        model = (ScoreDenoiser if self.protocol.process == "ctmc" else NetworkDenoiser)(p, network)
        problem = Problem(
            t,
            model,
            self.source_data,
            self.source_data[0],
            self.seed,
            bar=self.bar,
            log=self.run.log,
            label=self.several,
        )
        objective = problem.denoiser_objective(model, *self.source_data)
        problem.fit("the source model", model, objective, t.source_steps, patience=0)
        save_model(folder, model)
        return model

    def sampler(self, denoiser: Denoiser, ratio: Ratio | None, gamma: float) -> Sampler:
        """The protocol's sampler."""
        p = self.protocol
        if p.sampler == "one-position":
            return OnePosition(denoiser, ratio, gamma=gamma, n_ratio=p.n_ratio)
        if p.sampler == "tau-leaping":
            return TauLeaping(denoiser, ratio, gamma=gamma, n_ratio=p.n_ratio, steps=p.sampling_steps)
        return Ancestral(denoiser, ratio, gamma=gamma, n_ratio=p.n_ratio, steps=p.sampling_steps)

    def draw(self, adapted: Adapted, gamma: float, count: int, callback: Callback | None = None) -> Tensor:
        """Generated sequences (count, L), the same randomness for every method."""
        generator = torch.Generator(self.device).manual_seed(mix(self.seed, 7))
        sampler = self.sampler(adapted.denoiser, adapted.ratio, gamma)
        return sampler((count, self.protocol.length), generator=generator, callback=callback)

    def measure(self, method: str, n: int | None, adapted: Adapted) -> None:
        """Samples from an adapted model and records what came out."""
        if self.run.has(method, n, self.seed, "kl"):
            return
        p = self.protocol
        where = self.several if n is None else f"{self.several}n = {n}: "
        self.bar.stage(f"{where}sampling {method}", sampling_units(p, self.size, adapted.ratio is not None))
        started = time.perf_counter()
        x = self.draw(adapted, adapted.gamma, p.samples, lambda i, count, _: self.bar.advance((i + 1) / count))
        seconds = adapted.seconds + time.perf_counter() - started
        extra: dict[str, Any] = {"seconds": seconds, "trainable_weights": adapted.weights}
        if adapted.ratio is not None:
            self.add(method, n, "gamma", adapted.gamma)
        self.add(method, n, "nll", self.likelihood(adapted))
        if adapted.steps:
            self.add(method, n, "steps", adapted.steps)
        if adapted.borrowed is not None:
            self.add(method, n, "borrowed", adapted.borrowed)
        self.record(method, n, x, **extra)

    def likelihood(self, adapted: Adapted) -> float:
        """The NELBO per token of test sequences."""
        generator = torch.Generator(self.device).manual_seed(mix(self.seed, 8))
        model, ratio, n_ratio = adapted.denoiser, adapted.ratio, self.protocol.n_ratio
        if ratio is not None and ratio.space == "noisy" and isinstance(self.process, Mixing):
            gammas, rows = [adapted.gamma], 2 * len(self.test)
            return float(nll_by_gamma(model, ratio, self.test, gammas, rows, generator=generator, one_place=True))
        if ratio is not None:
            model = Guided(model, ratio, adapted.gamma, n_ratio, keep_tail=True)
        return nll(model, self.test, draws=2, generator=generator, batch=128)

    def best_gamma(self, method: str, n: int, adapted: Adapted) -> None:
        """Records the gamma that does best on the metric, as the paper's table does."""
        self.bar.stage(f"{self.several}n = {n}: {method}", 0)
        results = {gamma: self.draw(adapted, gamma, self.protocol.samples) for gamma in GAMMAS}
        gamma = min(results, key=lambda gamma: transition_kl(self.matrices[1], results[gamma]))
        self.add(method, n, "gamma", gamma)
        self.record(method, n, results[gamma])

    def add(self, method: str, n: int | None, metric: str, value: float, **extra: Any) -> None:
        if self.run.has(method, n, self.seed, metric):
            return
        self.run.add(self.protocol.experiment, method, metric, value, n=n, seed=self.seed, **extra)

    def record(self, method: str, n: int | None, x: Tensor, pseudo: float = 0.0, **extra: Any) -> None:
        """Writes the estimated matrix, then the row that says it is there."""
        path = self.run.folder / "transitions.json"
        known = read_json(path)
        known[f"{method}/{n}/{self.seed}"] = estimate_transitions(x, self.size, pseudo).tolist()
        write_json(path, known)
        self.add(method, n, "kl", transition_kl(self.matrices[1], x, pseudo), **extra)


def target_sequences(target: Tensor, count: int, length: int, seed: int) -> Tensor:
    """The first `count` of an endless list of target sequences, so that a smaller n is a part of a larger one."""
    blocks = [
        sample_chain(target, 1000, length, torch.Generator().manual_seed(mix(seed, 2, block)))
        for block in range(-(-count // 1000))
    ]
    return torch.cat(blocks)[:count]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no file yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def sampling_units(p: Protocol, size: int, guided: bool) -> float:
    """What drawing the samples costs, in gradient steps of a denoiser (about three passes of a batch)."""
    passes = p.samples * p.length / p.training.batch_size
    cost = (
        p.training.ratio.width**2 * p.training.ratio.depth / (p.training.denoiser.width**2 * p.training.denoiser.depth)
    )
    return passes / 3 * (1 + (size * cost if guided else 0))


def planned_units(p: Protocol, size: int) -> float:
    """What one seed costs, in gradient steps."""
    units = p.training.source_steps + sampling_units(p, size, False) * ("source" in p.methods)
    for method in p.methods:
        if method in UNTRAINED or method.endswith(BEST):
            continue
        units += len(p.n) * (p.training.budget + sampling_units(p, size, method.startswith("gtl")))
    return units


def add_published(run: Run, p: Protocol) -> None:
    """The paper's own figures beside ours, where the setting is the paper's."""
    setting = p.process, p.source_matrix, p.target_matrix, p.length, p.vocabulary, p.mixture
    if setting != ("masked", "diagonal:0.1", "diagonal:0.8", 20, 5, 0):
        return
    for method, values in PUBLISHED.items():
        for n in p.n:
            if n in values and not run.has(method, n, None, "kl"):
                run.add(p.experiment, method, "kl", values[n], n=n, device="as published", command="as published")


def finish(run: Run, p: Protocol, matrices: list[Tensor], seeds: list[int]) -> None:
    """Draws the figure and the page, and marks the run as finished."""
    known = read_json(run.folder / "transitions.json")
    shown = [m for m in p.methods if m not in UNTRAINED and not m.endswith(BEST)]
    estimates = {n: {m: known[f"{m}/{n}/{seeds[0]}"] for m in shown} for n in p.n}
    figure = run.folder / "figure.png"
    heat_maps(figure, matrices[0].tolist(), matrices[1].tolist(), estimates)
    facts = {
        "command": run.command,
        "device": run.device,
        "seeds": ", ".join(map(str, seeds)),
        "noise": p.process,
        "chains": f"source {p.source_matrix}, target {p.target_matrix}, {len(matrices[0])} states, length {p.length}"
        + (f"; {p.mixture:.0%} of the source sequences are target" if p.mixture else ""),
        "budget": f"{p.training.source_steps} gradient steps for the source model; at most {p.training.budget} more "
        "for every method, over all its networks",
        "choice": "one split, the weights with the best held-out loss"
        if not p.training.folds
        else f"step and gamma by held-out likelihood, over {p.training.folds} folds where sequences are few; "
        "then trained again on all of them",
        "samples": f"{p.samples} sequences for each estimate, {p.sampler} sampler",
    }
    page(run.folder / "report.html", "Guided transfer between Markov chains", run.rows, figure, facts)
    run.finish()
