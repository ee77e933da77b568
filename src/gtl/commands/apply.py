"""`gtl sample` and `gtl evaluate`: checkpoints in, sequences and numbers out."""

from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from gtl.data.tokens import check_tokens, read_tokens, write_tokens
from gtl.denoiser import Denoiser, NetworkDenoiser, masked_nll, nll
from gtl.evaluate.martingale import martingale_violation
from gtl.guidance import Guided, check_gamma, check_n_ratio
from gtl.progress import Bar
from gtl.ratio import Ratio, SequenceRatio
from gtl.ratio.taylor import taylor
from gtl.run import Run, check_folder
from gtl.sample import Ancestral, Euler, FirstHitting, OnePosition, Remasking, Sampler, TauLeaping, Thinning
from gtl.train.checkpoint import load_denoiser, read_ratio

__all__ = ["evaluate", "sample"]


SamplerName = Literal["one-position", "ancestral", "euler", "tau-leaping", "exact-jump", "remasking"]


def make_sampler(
    name: SamplerName | None, model: Denoiser, ratio: Ratio | None, gamma: float | None, n_ratio: int | None, steps: int
) -> Sampler:
    """A sampler by name, or the default of the process."""
    masked = model.process.mask_id is not None
    name = name or ("one-position" if masked else "ancestral")
    exact = OnePosition if name == "one-position" else FirstHitting if masked else Thinning
    if name in ("one-position", "exact-jump"):
        return exact(model, ratio, gamma=gamma, n_ratio=n_ratio)
    kind = {"ancestral": Ancestral, "euler": Euler, "tau-leaping": TauLeaping, "remasking": Remasking}[name]
    return kind(model, ratio, gamma=gamma, n_ratio=n_ratio, steps=steps)


Scoring = Literal["intervention", "taylor"]


def open_models(
    denoiser: str,
    ratio: str | None,
    gamma: float | Literal["auto"],
    n_ratio: int | None,
    out: str | None,
    scoring: Scoring,
) -> tuple[NetworkDenoiser, Ratio | None, float | None, torch.device]:
    """The models, the guidance strength (None for the ratio's own) and the device; bad input is refused."""
    if out is not None:
        check_folder(Path(out))
    strength = None if gamma == "auto" else float(gamma)
    if strength is not None:
        check_gamma(strength)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_denoiser(denoiser).to(device)
    weight = None if ratio is None else read_ratio(ratio, strength is None).to(device)
    if weight is not None and scoring == "taylor":
        weight = taylor(weight)
    check_n_ratio(n_ratio, model.process.vocabulary)
    return model, weight, strength, device


def sample(
    denoiser: str,
    out: str | None = None,
    ratio: str | None = None,
    gamma: float | Literal["auto"] = "auto",
    n_ratio: int | None = None,
    scoring: Scoring = "intervention",
    count: int = 64,
    length: int | None = None,
    prompt: str | None = None,
    sampler: SamplerName | None = None,
    steps: int = 128,
    batch_size: int = 4096,
    seed: int = 0,
) -> None:
    """Draws sequences from a denoiser, guided by a ratio if one is given, into samples.npy.

    Args:
        denoiser: folder of the source model.
        out: folder for the samples; by default a new one under runs/.
        ratio: folder of a ratio, or of a fine-tuned denoiser (which counts as its difference from the source), or a sum
            of them, as in "0.5 * runs/physics + 0.5 * runs/biology".
        gamma: guidance strength; auto is the one that was chosen when the ratio was fitted.
        n_ratio: candidates weighed at a position; all by default.
        scoring: of a sequence ratio's candidates; taylor is first-order, all of them for one pass forward and back.
        count: how many sequences; with a prompt, how many for each of its rows.
        length: tokens in a sequence; with a prompt it is the prompt's.
        prompt: token file whose mask ids are to be filled in; all other tokens stay.
        sampler: one-position (the default for masked noise) is exact and takes as many steps as there are masks, and so
            is exact-jump; ancestral (the default otherwise), euler, tau-leaping and remasking take --steps.
        steps: of those that take them.
        batch_size: sequences drawn at once.
        seed: of the draws.
    """
    settings = dict(locals())
    if count < 1 or batch_size < 1:
        raise ValueError(f"count={count} and batch_size={batch_size} must be at least 1")
    model, weight, strength, device = open_models(denoiser, ratio, gamma, n_ratio, out, scoring)
    process = model.process
    if prompt is not None and process.mask_id is None:
        raise ValueError(f"--prompt marks what to fill in by masks; {process.name} noise has none")
    if prompt is not None:
        start = check_tokens(read_tokens(prompt), process.num_ids, None, prompt, least=1).to(device)
        start = start.repeat_interleave(count, 0)
    elif length is None or length < 1:
        raise ValueError("give --length, the tokens in a sequence, or a --prompt")
    else:
        start = torch.full((count, length), process.mask_id or 0, device=device)
    frozen = torch.zeros_like(start, dtype=torch.bool) if process.mask_id is None else start.ne(process.mask_id)
    draw = make_sampler(sampler, model, weight, strength, n_ratio, steps)
    draw.parts()  # models that do not fit are refused before anything is written
    generator = torch.Generator(device).manual_seed(seed)
    run = Run(out, "sample", settings, device)
    parts = []
    with Bar(len(start)) as bar:
        for z, keep in zip(start.split(batch_size), frozen.split(batch_size), strict=True):
            bar.stage("sampling", len(z))
            parts.append(draw(z, keep, generator, lambda i, total, _: bar.advance((i + 1) / total)))
    write_tokens(run.folder / "samples.npy", torch.cat(parts))
    run.finish()
    print(f"{run.folder / 'samples.npy'}: {len(start)} sequences of {start.shape[1]} tokens")


def evaluate(
    denoiser: str,
    data: str,
    out: str | None = None,
    ratio: str | None = None,
    gamma: float | Literal["auto"] = "auto",
    n_ratio: int | None = None,
    scoring: Scoring = "intervention",
    draws: int = 8,
    seed: int = 0,
) -> None:
    """Measures held-out likelihood and, for a ratio, its gain and how far it violates the martingale identity.

    Args:
        denoiser: folder of the source model.
        data: held-out sequences of the target.
        out: folder for the results; by default a new one under runs/.
        ratio: folder of a ratio, or of a fine-tuned denoiser (which counts as its difference from the source), or a sum
            of them, as in "0.5 * runs/physics + 0.5 * runs/biology".
        gamma: guidance strength; auto is the one that was chosen when the ratio was fitted.
        n_ratio: candidates weighed at a position, all by default; other tokens keep the source's probability.
        scoring: of a sequence ratio's candidates; taylor is first-order, all of them for one pass forward and back.
        draws: corruptions of every sequence.
        seed: of the corruptions.
    """
    settings = dict(locals())
    if draws < 1:
        raise ValueError(f"draws={draws} must be at least 1")
    model, weight, strength, device = open_models(denoiser, ratio, gamma, n_ratio, out, scoring)
    process = model.process
    x = check_tokens(read_tokens(data), process.num_ids, process.mask_id, data, least=1).to(device)
    models: dict[str, Denoiser] = {"source": model}
    if weight is not None:
        models["guided"] = Guided(model, weight, strength, n_ratio, keep_tail=True)
    run = Run(out, "evaluate", settings, device)

    def fresh() -> torch.Generator:
        return torch.Generator(device).manual_seed(seed)

    with Bar(2 * len(models)) as bar:
        for name, each in models.items():
            for metric, function in (("nll", nll), ("masked_nll", masked_nll)):
                if run.has(name, len(x), seed, metric) or (metric == "masked_nll" and process.mask_id is None):
                    continue
                bar.stage(f"{metric} of the {name} model", 1)
                value = function(each, x, draws, fresh(), batch=128)
                run.add("evaluate", name, metric, value, n=len(x), seed=seed)
    if weight is not None:
        values = {(row.method, row.metric): row.value for row in run.rows}
        more = {"nll_gain": values["source", "nll"] - values["guided", "nll"]}
        if isinstance(weight, SequenceRatio) and weight.absolute:  # others obey the identity by themselves
            gap = martingale_violation(model, weight, x.repeat(draws, 1), fresh()).double()
            more |= {"martingale_rms": float(gap.square().mean().sqrt()), "martingale_mean": float(gap.mean())}
        for metric, value in more.items():
            if not run.has("guided", len(x), seed, metric):
                run.add("evaluate", "guided", metric, value, n=len(x), seed=seed)
    run.finish()
    table = Table("model", "metric", "value")
    for row in run.rows:
        table.add_row(row.method, row.metric, f"{row.value:.5f}")
    Console().print(table)
    print(f"rows in {run.folder / 'results.json'}")
