"""`gtl sample`: checkpoints in, sequences out."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gtl.commands.models import Scoring, open_models
from gtl.data.tokenizer import load_tokenizer
from gtl.data.tokens import check_tokens, read_tokens, write_tokens
from gtl.denoiser import Denoiser
from gtl.evaluate.texts import Reader
from gtl.memory import by_chunks
from gtl.planner import Order, confidence, left_to_right, planned, random_order
from gtl.progress import Bar
from gtl.ratio import Ratio
from gtl.run import Run
from gtl.sample import (
    Ancestral,
    Euler,
    FirstHitting,
    OnePosition,
    PlannerSampler,
    Remasking,
    Sampler,
    TauLeaping,
    Thinning,
)
from gtl.speed import Precision, speed_up
from gtl.train.checkpoint import load_planner

__all__ = ["sample"]


SamplerName = Literal["one-position", "planner", "ancestral", "euler", "tau-leaping", "exact-jump", "remasking"]
OrderName = Literal["planner", "random", "confidence", "left-to-right"]


def make_order(
    name: OrderName | None,
    model: Denoiser,
    planner: str | None,
    temperature: float,
    precision: Precision,
    compile: bool,
) -> Order:
    """An order by name; a planner's where one is given."""
    name = name or ("random" if planner is None else "planner")
    if (name == "planner") != (planner is not None):
        raise ValueError("--order planner and --planner FOLDER go together (gtl train planner makes one)")
    if planner is None:
        if temperature:
            raise ValueError(f"--order_temperature is of a planner's order; this order is {name}")
        return {"random": random_order, "left-to-right": left_to_right}.get(name) or confidence(model)
    network = load_planner(planner)
    network.check(model)
    speed_up(network.to(next(model.parameters()).device), precision, compile)
    return planned(network, temperature)


def make_sampler(
    name: SamplerName | None,
    model: Denoiser,
    ratio: Ratio | None,
    gamma: float | None,
    n_ratio: int | None,
    steps: int,
    order: Callable[[], Order] = lambda: random_order,
    per_step: int = 1,
) -> Sampler:
    """A sampler by name, or the default of the process."""
    masked = model.process.mask_id is not None
    if name == "planner":
        return PlannerSampler(model, ratio, gamma=gamma, n_ratio=n_ratio, order=order(), per_step=per_step)
    name = name or ("one-position" if masked else "ancestral")
    exact = OnePosition if name == "one-position" else FirstHitting if masked else Thinning
    if name in ("one-position", "exact-jump"):
        return exact(model, ratio, gamma=gamma, n_ratio=n_ratio)
    kind = {"ancestral": Ancestral, "euler": Euler, "tau-leaping": TauLeaping, "remasking": Remasking}[name]
    return kind(model, ratio, gamma=gamma, n_ratio=n_ratio, steps=steps)


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
    planner: str | None = None,
    order: OrderName | None = None,
    order_temperature: float = 0.0,
    per_step: int = 1,
    tokenizer: str | None = None,
    precision: Precision = "fp32",
    compile: bool = False,
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
            is exact-jump; planner reveals --per_step positions a step in an --order; ancestral (the default otherwise),
            euler, tau-leaping and remasking take --steps.
        steps: of those that take them.
        planner: folder of a planner, for its order.
        order: of the planner sampler; by default the planner's, or a random one where there is none.
        order_temperature: of a planner's order; 0 is deterministic, easy positions first.
        per_step: positions that the planner sampler reveals at once; 1 is exact.
        tokenizer: name, folder or file of a tokenizer (or a folder of gtl prepare), to write samples.txt as well.
        precision: of the networks; draws are exact either way.
        compile: whether to run the networks through torch.compile; pays for many sequences on a GPU.
        batch_size: sequences drawn at once; fewer where memory runs out.
        seed: of the draws.
    """
    settings = dict(locals())
    if count < 1 or batch_size < 1:
        raise ValueError(f"count={count} and batch_size={batch_size} must be at least 1")
    if sampler not in (None, "planner") and (planner, order, per_step) != (None, None, 1):
        raise ValueError(f"--planner, --order and --per_step are for --sampler planner, not {sampler}")
    if (planner, order, per_step) != (None, None, 1):
        sampler = "planner"
    words = None if tokenizer is None else load_tokenizer(tokenizer)
    model, weight, strength, device = open_models(denoiser, ratio, gamma, n_ratio, out, scoring)
    process = model.process
    if prompt is not None and process.mask_id is None:
        raise ValueError(f"--prompt marks what to fill in by masks; {process.name} noise has none")
    if prompt is not None:
        start = check_tokens(read_tokens(prompt), process.num_ids, None, prompt, least=1).to(device).long()
        start = start.repeat_interleave(count, 0)
    elif length is None or length < 1:
        raise ValueError("give --length, the tokens in a sequence, or a --prompt")
    else:
        start = torch.full((count, length), process.mask_id or 0, device=device)
    frozen = torch.zeros_like(start, dtype=torch.bool) if process.mask_id is None else start.ne(process.mask_id)
    ordered = partial(make_order, order, model, planner, order_temperature, precision, compile)
    draw = make_sampler(sampler, model, weight, strength, n_ratio, steps, ordered, per_step)
    draw.parts()  # models that do not fit are refused before anything is written
    for network in (model, weight):
        if network is not None:
            speed_up(network, precision, compile)
    generator = torch.Generator(device).manual_seed(seed)
    run = Run(out, "sample", settings, device)
    with Bar(len(start)) as bar:
        bar.stage("sampling", len(start))

        def batch(part: slice) -> Tensor:
            done, size = part.start / len(start), (part.stop - part.start) / len(start)
            return draw(start[part], frozen[part], generator, lambda i, n, _: bar.advance(done + size * (i + 1) / n))

        parts, _ = by_chunks(batch, len(start), batch_size, generator, "the sampler")
    write_tokens(run.folder / "samples.npy", torch.cat(parts))
    if words is not None:
        run.write(
            "samples.txt", "".join(" ".join(text.split()) + "\n" for text in Reader(words).texts(torch.cat(parts)))
        )
    run.finish()
    print(f"{run.folder / 'samples.npy'}: {len(start)} sequences of {start.shape[1]} tokens")
