"""`gtl demo` and `gtl reproduce`."""

from dataclasses import replace
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from gtl.commands.arxiv import reproduce_arxiv
from gtl.report.markov import TITLES
from gtl.report.table import heading, pivot
from gtl.reproduce.markov import PRESETS, Protocol, reproduce_markov
from gtl.run import Run

__all__ = ["demo", "reproduce"]


def show(run: Run) -> None:
    """Prints the KL table and where everything is."""
    columns, lines = pivot(run.rows, "kl")
    table = Table(title="KL to the true target chain (nats; lower is better)", title_justify="left")
    table.add_column("method")
    for n in columns:
        table.add_column(heading(n), justify="right")
    for method, cells in lines:
        style = "bold" if method.startswith("gtl") else "dim" if method.startswith("published") else ""
        table.add_row(TITLES.get(method, method), *cells, style=style)
    console = Console()
    console.print(table)
    console.print(f"Open {run.folder / 'report.html'} for the figure.", highlight=False)


def demo(out: str | None = None, seed: int = 0) -> None:
    """Turns a frozen source model into a target model, on a CPU within six minutes.

    Args:
        out: folder for the results; by default a new one under runs/.
        seed: of data, weights and sampling.
    """
    show(reproduce_markov(PRESETS["demo"], [seed], out, "demo"))


def reproduce(
    experiment: Literal["markov", "arxiv"],
    preset: Literal["small", "demo", "paper"] = "small",
    out: str | None = None,
    recipe: str | None = None,
    stages: list[str] | None = None,
    shares: list[float] | None = None,
    jobs: int = 1,
    minutes: float | None = None,
    process: Literal["masked", "uniform", "d3pm", "ctmc"] | None = None,
    name: str | None = None,
    seeds: int = 1,
    first_seed: int = 0,
    source_matrix: str | None = None,
    target_matrix: str | None = None,
    mixture: float | None = None,
    vocabulary: int | None = None,
    length: int | None = None,
    m: int | None = None,
    n: list[int] | None = None,
    methods: list[str] | None = None,
    samples: int | None = None,
    sampler: Literal["one-position", "ancestral", "tau-leaping"] | None = None,
    sampling_steps: int | None = None,
    n_ratio: int | None = None,
    source_steps: int | None = None,
    budget: int | None = None,
    classifier_steps: int | None = None,
    folds: int | None = None,
    patience: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    label_smoothing: float | None = None,
    link: Literal["undone", "capped", "auto"] | None = None,
    pseudo: float | None = None,
    features: bool | None = None,
    warm_start: bool | None = None,
    gamma_rule: Literal["likelihood", "samples"] | None = None,
    pooling: Literal["sum", "mean", "auto"] | None = None,
    precision: Literal["fp32", "bf16"] | None = None,
    compile: bool | None = None,
) -> None:
    """Runs one of the paper's experiments; what is not given comes from the preset.

    Args:
        experiment: markov is the paper's Table 1; arxiv its language experiments, from a --recipe.
        preset: small is sized for a CPU, demo for two cores and six minutes; paper is the paper's own protocol, meant
            for a GPU.
        out: folder for the results; by default a new one under runs/.
        recipe: of arxiv, a file such as recipes/arxiv-small.yaml.
        stages: of arxiv, some of prepare, train, diagnose, adapt, likelihood, sample, measure, judge, figures; all by
            default. What is done already is passed over.
        shares: of arxiv, the worlds to work on, by the share of the target in their source; all by default.
        jobs: of arxiv, commands that run side by side.
        minutes: of arxiv, a time limit; the same command goes on after it.
        process: the noise; d3pm is a discretised Gaussian, ctmc uniform rates with a score model. Other than masked, it
            is sampled in 64 steps (ancestral, or tau-leaping for ctmc).
        name: what the rows call the experiment, for chains other than the paper's.
        seeds: how many, counted from first_seed.
        first_seed: the first seed.
        source_matrix: diagonal:D, anti-diagonal:D, dirichlet:ALPHA, or a .npy file with a row-stochastic matrix.
        target_matrix: likewise.
        mixture: share of the source sequences that come from the target's chain (the paper's r).
        vocabulary: states of a named matrix.
        length: tokens in a sequence.
        m: source sequences.
        n: numbers of target sequences, for example --n 1000 100 20.
        methods: rows of the table, for example --methods vanilla finetuned gtl-local.
        samples: generated sequences behind each estimate.
        sampler: one-position is exact; ancestral is the paper's.
        sampling_steps: of the ancestral sampler.
        n_ratio: candidates weighed at a position; all by default.
        source_steps: gradient steps of the source model.
        budget: gradient steps of every method after that, over all its networks.
        classifier_steps: of each of the paper's two classifiers.
        folds: parts of which each is held out once where target sequences are few; 0 keeps one split.
        patience: evaluations without progress before a network stops.
        batch_size: rows in a gradient step.
        learning_rate: the highest.
        label_smoothing: of the paper's classifiers.
        link: whether the paper's ratio network learns from classifiers whose label smoothing is undone.
        pseudo: sequences that the local ratio's pull toward r = 1 is worth.
        features: whether the local ratio reads the denoiser's hidden states.
        warm_start: whether sequence ratios start from the source denoiser's first blocks.
        gamma_rule: on held-out target data, by conditional likelihood or (with folds 0) by the samples' transitions.
        pooling: of sequence ratios; auto trains both and keeps the one that validates better.
        precision: of matrix products.
        compile: whether networks are trained through torch.compile.
    """
    given = {key: value for key, value in locals().items() if value is not None}
    for key in ("experiment", "preset", "out", "seeds", "first_seed", "recipe", "stages", "shares", "jobs", "minutes"):
        given.pop(key, None)
    if experiment == "arxiv":
        if recipe is None:
            raise ValueError("reproduce arxiv needs --recipe, for example recipes/arxiv-small.yaml")
        plain = {"preset": (preset, "small"), "seeds": (seeds, 1), "first_seed": (first_seed, 0)}
        if wrong := [*given, *(key for key, (value, usual) in plain.items() if value != usual)]:
            raise ValueError(f"--{wrong[0]} is for markov; of arxiv it stands in the recipe")
        return reproduce_arxiv(recipe, out, stages, shares, jobs, minutes)
    if (recipe, stages, shares, minutes, jobs) != (None, None, None, None, 1):
        raise ValueError("--recipe, --stages, --shares, --jobs and --minutes are for arxiv")
    if process not in (None, "masked"):
        given.setdefault("name", f"{experiment}-{process}")
        given.setdefault("sampler", "tau-leaping" if process == "ctmc" else "ancestral")
        given.setdefault("sampling_steps", 64)
    if "name" in given:
        given["experiment"] = given.pop("name")
    if seeds < 1:
        raise ValueError(f"seeds={seeds} must be at least 1")
    protocol = adjusted(PRESETS[preset], given)
    show(reproduce_markov(protocol, list(range(first_seed, first_seed + seeds)), out, f"reproduce-{experiment}"))


def adjusted(protocol: Protocol, given: dict[str, Any]) -> Protocol:
    """A preset with some settings replaced, those of the training among them."""
    outer = {key: given[key] for key in given if hasattr(protocol, key)}
    inner = {key: given[key] for key in given if key not in outer}
    if "budget" in inner and "classifier_steps" not in inner:
        inner["classifier_steps"] = None  # a third of the new budget, whatever the preset says
    return replace(protocol, **outer, training=replace(protocol.training, **inner))
