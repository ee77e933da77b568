"""`gtl train`: any network of the project on token files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gtl.data.prepared import Meta, check_meta, same_tokens
from gtl.data.tokens import check_tokens, read_meta, read_split, read_tokens, split
from gtl.denoiser import NetworkDenoiser
from gtl.estimate import NetworkSize
from gtl.evaluate.planner import planner_levels
from gtl.nn.dit import DiT, Pooling
from gtl.planner import Planner
from gtl.process import D3PM, Masked, Process, Uniform
from gtl.progress import Bar
from gtl.rank import is_first
from gtl.ratio import NetworkRatio
from gtl.report.planner import draw
from gtl.run import Run, check_folder
from gtl.schedule import make_schedule
from gtl.train.checkpoint import Model, load_denoiser, load_model, load_planner, load_sequence_ratio, save_model
from gtl.train.classifier import ClassifierObjective
from gtl.train.denoiser import DenoiserObjective
from gtl.train.loop import FitSettings, fit
from gtl.train.objective import Objective
from gtl.train.planner import PlannerObjective
from gtl.train.ratio import RatioObjective

__all__ = ["train"]


def train(
    objective: Literal["denoiser", "classifier", "ratio", "planner"],
    out: str | None = None,
    data: str | None = None,
    source: str | None = None,
    target: str | None = None,
    denoiser: str | None = None,
    like: str | None = None,
    start: str | None = None,
    vocabulary: int | None = None,
    mask_id: int | None = None,
    process: Literal["masked", "uniform", "d3pm"] = "masked",
    matrix: str = "gaussian:1",
    schedule: Literal["log-linear", "cosine", "geometric"] = "log-linear",
    estimator: Literal["direct", "paper"] = "direct",
    classifier: str | None = None,
    noisy_classifier: str | None = None,
    noisy: bool = True,
    label_smoothing: float = 0.0,
    cycle_weight: float = 0.1,
    pooling: Pooling = "sum",
    held_out: float = 0.1,
    network: NetworkSize = NetworkSize(),  # noqa: B008
    fit: FitSettings = FitSettings(),  # noqa: B008
) -> None:
    """Trains a network on folders of gtl prepare or token files (.npy of shape (N, L), or text, a sequence a line).

    Args:
        objective: denoiser (needs --data), classifier or ratio (need --source and --target), or planner (needs --data
            and --denoiser).
        out: folder for checkpoint and metrics; by default a new one under runs/.
        data: what a denoiser or a planner learns from.
        source: sequences of the source domain.
        target: sequences of the target domain.
        denoiser: folder of the frozen denoiser that a planner plans for.
        like: a denoiser's folder, whose token ids and schedule are taken over.
        start: a checkpoint to train on (fine-tuning).
        vocabulary: number of clean token ids, the mask not counted; by default what a prepared folder says, else the
            largest id in the data.
        mask_id: id of the mask; by default what a prepared folder says, else the one after the vocabulary.
        process: the noise of a new model; d3pm takes --matrix.
        matrix: uniform, absorbing, gaussian:WIDTH or banded:WIDTH.
        schedule: of the noise.
        estimator: of a ratio; direct is one noisy classifier, paper needs two trained classifiers.
        classifier: folder of a clean classifier, for the paper's estimator.
        noisy_classifier: folder of a noisy classifier, for the paper's estimator.
        noisy: whether a classifier sees noisy sequences.
        label_smoothing: of classifiers, in torch's convention; undone in the link, so that the optimum is log r.
        cycle_weight: the paper's lambda.
        pooling: of the scalar outputs over positions.
        held_out: fraction of the rows for early stopping; a prepared folder has its own validation rows.
        network: size of a new network.
        fit: how it is trained.
    """
    settings = locals() | {"network": vars(network), "fit": vars(fit)}
    if out is not None:
        check_folder(Path(out))
    names = {"data": data} if objective in ("denoiser", "planner") else {"source": source, "target": target}
    if objective == "planner" and denoiser is None:
        raise ValueError("train planner needs --denoiser, the folder of the model that it plans for")
    for name, path in names.items():
        if path is None:
            raise ValueError(f"train {objective} needs --{name}")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out={held_out} must be a fraction between 0 and 1")
    metas = {str(path): read_meta(str(path)) for path in names.values()}
    rows = {name: read_tokens(str(path)) for name, path in names.items()}
    noise = choose_process(
        rows, start or like or denoiser, vocabulary, mask_id, schedule, process, matrix, same_tokens(metas)
    )
    length = next(iter(rows.values())).shape[1]
    kept, seen = {}, {}
    for name, x in rows.items():
        path = str(names[name])
        check_meta(metas[path], noise.num_ids, noise.mask_id, path)
        check_tokens(x, noise.num_ids, noise.mask_id, path, length=length)
        parts = split(x, held_out, fit.seed) if metas[path] is None else read_split(path, held_out, fit.seed)
        check_tokens(parts[1], noise.num_ids, noise.mask_id, path, least=1, length=length)
        kept[name], seen[name] = parts
    torch.manual_seed(fit.seed)
    model: Model
    goal: Objective
    if objective == "denoiser":
        model = load_denoiser(start) if start else NetworkDenoiser(noise, new_network(noise, network))
        goal = DenoiserObjective(model, kept["data"], seen["data"])
    elif objective == "planner":
        assert denoiser is not None
        device = "cuda" if torch.cuda.is_available() else "cpu"
        frozen = load_denoiser(denoiser).to(device)
        planner = load_planner(start) if start else Planner.build(noise, **vars(network))
        model, goal = planner, PlannerObjective(frozen, planner, kept["data"], seen["data"])
        return train_into(out, objective, settings, model, goal, fit, lambda run: judge(run, frozen, planner, goal))
    else:
        smoothing = 0.0 if (objective, estimator) == ("ratio", "paper") else label_smoothing
        model = (
            load_sequence_ratio(start)
            if start
            else NetworkRatio.build(
                noise, pooling, smoothing, time_conditioned=not isinstance(noise, Masked), **vars(network)
            )
        )
        goal = ratio_objective(objective, estimator, noise, kept, seen, settings)
    train_into(out, objective, settings, model, goal, fit)


def judge(run: Run, denoiser: NetworkDenoiser, planner: Planner, goal: Objective) -> None:
    """A planner's accuracy and calibration on held-out rows, by noise level: rows and a picture."""
    assert goal.held_out is not None
    generator = torch.Generator(next(planner.parameters()).device).manual_seed(0)
    levels = planner_levels(denoiser, planner, goal.held_out["data"][:4096], generator=generator)
    draw(run.folder / "planner.png", levels)
    for level in levels:
        where = "" if level.high - level.low == 1 else f"@{level.low:.1f}-{level.high:.1f}"
        for metric in ("accuracy", "right", "calibration_error"):
            if not run.has("planner", None, 0, metric + where):
                run.add("train", "planner", metric + where, getattr(level, metric), seed=0)


def new_network(process: Process, size: NetworkSize) -> DiT:
    """An untrained DiT with a head for the tokens of a process."""
    return DiT(process.num_ids, process.num_ids, time_conditioned=not isinstance(process, Masked), **vars(size))


def choose_process(
    rows: dict[str, Tensor],
    like: str | None,
    vocabulary: int | None,
    mask_id: int | None,
    schedule: str,
    name: str,
    matrix: str,
    meta: Meta | None = None,
) -> Process:
    """The process of a checkpoint, or a new one over the ids of the data, which a prepared folder names."""
    if like is not None:
        return load_model(like).process
    if meta is not None and vocabulary is None:
        # the mask is one of a tokenizer's ids: under other noise it is simply never seen
        spare = name == "masked" or meta.mask_id == meta.vocabulary - 1
        vocabulary = meta.vocabulary - spare
        mask_id = meta.mask_id if name == "masked" and mask_id is None else mask_id
    if vocabulary is None:
        vocabulary = 1 + max((int(x.max()) for x in rows.values() if x.numel()), default=0)
    if name != "masked" and mask_id is not None:
        raise ValueError(f"mask_id={mask_id}: {name} noise has no mask of its own")
    if name == "uniform":
        return Uniform(vocabulary, make_schedule(schedule))
    if name == "d3pm":
        return D3PM(vocabulary + (matrix == "absorbing"), matrix, make_schedule(schedule))
    return Masked(vocabulary + 1, vocabulary if mask_id is None else mask_id, make_schedule(schedule))


def ratio_objective(
    objective: str,
    estimator: str,
    process: Process,
    kept: dict[str, Tensor],
    seen: dict[str, Tensor],
    settings: dict[str, Any],
) -> Objective:
    """The loss of a classifier or of a ratio."""
    smoothing = settings["label_smoothing"]
    if objective == "classifier":
        return ClassifierObjective(process, kept, seen, settings["noisy"], smoothing)
    if estimator == "direct":
        return ClassifierObjective(process, kept, seen, True, smoothing)
    folders = settings["classifier"], settings["noisy_classifier"]
    if None in folders:
        raise ValueError("the paper's estimator needs --classifier and --noisy_classifier (gtl train classifier)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    frozen = [load_sequence_ratio(folder).to(device) for folder in folders]
    for folder, each in zip(folders, frozen, strict=True):
        if each.process.config() != process.config():
            raise ValueError(f"{folder}: knows other ids or another schedule than the ratio to be trained")
    return RatioObjective(process, frozen[0], frozen[1], kept, seen, settings["cycle_weight"])


def train_into(
    out: str | None,
    objective: str,
    settings: dict[str, Any],
    model: Model,
    goal: Objective,
    fit_settings: FitSettings,
    judge: Callable[[Run], None] | None = None,
) -> None:
    """Trains the model in a run folder, from its saved state if there is one; `judge` may add what it finds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(out, f"train-{objective}", settings, device)
    said = "was trained already"
    if not run.has(objective, None, fit_settings.seed, "held_out_loss"):
        with Bar(fit_settings.steps) as bar:
            bar.stage(f"training the {objective}", fit_settings.steps)
            result = fit(
                model, goal, fit_settings, run.folder, lambda step: bar.advance(step / fit_settings.steps), run.log
            )
        save_model(run.folder, model)
        if judge is not None:
            judge(run)
        assert result.held_out is not None
        run.add(
            "train", objective, "held_out_loss", result.held_out, seed=fit_settings.seed,
            seconds=result.seconds, trainable_weights=result.weights,
        )  # fmt: skip
        said = f"held-out loss {result.held_out:.4f} at step {result.best_step} of {result.steps}"
    if is_first():
        (run.folder / "state.safetensors").unlink(missing_ok=True)  # only now: until here a killed run goes on from it
    run.finish()
    print(f"{run.folder}: {said}")
