"""`gtl adapt`: a frozen denoiser and a small target dataset in, a ratio with its gamma out."""

import hashlib
import math
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from gtl.data.prepared import check_meta, same_tokens
from gtl.data.tokens import check_tokens, folds, read_meta, read_split, read_tokens, split, write_tokens
from gtl.denoiser import NetworkDenoiser, fingerprint, nll
from gtl.estimate import METHODS, Adapted, Problem, Training, needs_source
from gtl.progress import Bar
from gtl.rank import is_first
from gtl.ratio import Ratio
from gtl.run import Run, check_folder
from gtl.train.checkpoint import load_denoiser, save_model

__all__ = ["adapt"]

LOOKED_AT = 1024
"""Corrupted sequences behind the source's own likelihood."""


def adapt(
    denoiser: str,
    target: str,
    out: str | None = None,
    source: str | None = None,
    method: list[str] | str = "gtl-local",
    rows: int | None = None,
    held_out: float = 0.1,
    seed: int = 0,
    training: Training = Training(),  # noqa: B008
) -> None:
    """Adapts a frozen denoiser to target sequences; steps and gamma are chosen on held-out ones, then all are used.

    Args:
        denoiser: folder of the source model, which stays as it is.
        target: sequences of the target domain (a folder of gtl prepare, whose training rows are used; .npy of shape
            (N, L); or text with one sequence of ids a line).
        out: folder for the checkpoint; by default a new one under runs/. Until the run is over, the networks that it
            trains are kept there too, so that one that was stopped goes on with the fit that it was at.
        source: sequences of the source domain, for the methods that need them (gtl-both, gtl-direct, gtl-paper and
            those with -iw).
        method: gtl-local, gtl-sparse, gtl-knn, and the stacks gtl-local-knn, gtl-stack (that and fine-tuning) and
            gtl-blend (fine-tuning and sparse changes) need no source data; finetuned, lora, sparse and vanilla are
            baselines. gtl-local-iw, finetuned-iw, ... borrow source sequences that look like target. Several
            (--method finetuned gtl-stack) train once what they share, and each has a folder of its own below --out.
        rows: how many of the target's sequences to use, drawn by --seed; all by default.
        held_out: share of the target that is held out at a time; where that is under 100 sequences, folds take turns.
        seed: of the rows, folds, weights and batches.
        training: sizes and budgets.
    """
    settings = locals() | {"training": asdict(training)}
    methods = [method] if isinstance(method, str) else list(dict.fromkeys(method))
    if out is not None:
        check_folder(Path(out))
    if not methods:
        raise ValueError(f"--method names none; choose among {', '.join(METHODS)}")
    for name in methods:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}; choose among {', '.join(METHODS)}")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out={held_out} must be a fraction between 0 and 1")
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_denoiser(denoiser).to(device)
    process = model.process
    check_meta(read_meta(target), process.num_ids, process.mask_id, target)
    x = check_tokens(read_tokens(target), process.num_ids, process.mask_id, target, banned=model.banned).long()
    if rows is not None:
        if not 2 <= rows <= len(x):
            raise ValueError(f"rows={rows}: {target} has {len(x)} sequences, and at least 2 are needed")
        x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:rows]]
    empty = x[:0]
    source_data = empty, empty
    if source is not None:
        metas = {name: read_meta(name) for name in (target, source)}
        same_tokens(metas)
        known = check_tokens(
            read_tokens(source), process.num_ids, process.mask_id, source, length=x.shape[1], banned=model.banned
        )
        parts = split(known, held_out, seed) if metas[source] is None else read_split(source, held_out, seed)
        source_data = parts[0].long(), parts[1].long()
    for name in methods:
        if source is None and needs_source(name):
            raise ValueError(f"{name} compares target with source sequences: give --source, or use gtl-local")
    run = Run(out, "adapt", settings, device)
    data = {"target": (x,), "source": source_data}
    run.made_of({"denoiser": fingerprint(model)} | {name: hashed(*parts) for name, parts in data.items()})
    if rows is not None:
        write_tokens(run.folder / "target.npy", x)
    some, draws = x[:LOOKED_AT], max(1, min(16, LOOKED_AT // len(x)))
    before = nll(model, some.to(device), draws, torch.Generator(device).manual_seed(seed))
    if not run.has("source", len(x), seed, "nll"):
        run.add("adapt", "source", "nll", before, n=len(x), seed=seed)
    count = len(folds(x, training.folds, held_out, seed)) if training.folds else 1
    with Bar(training.budget * len(methods)) as bar:
        kept = run.folder / "fits"
        problem = Problem(training, model, source_data, x, seed, held_out, bar=bar, log=run.log, folder=kept)
        for name in methods:
            folder = run.folder if len(methods) == 1 else run.folder / name
            if run.has(name, len(x), seed, "steps"):  # its last row: it was kept before the run was stopped
                continue
            made = problem.adapted(name)
            keep(run, folder, name, made, len(x), seed)
            judges = made.judged or count
            strength = "" if made.ratio is None else f", gamma {made.gamma:g}"
            if made.borrowed is not None:
                strength += f", {made.borrowed} source sequences borrowed"
            print(
                f"{folder}: held-out nll {made.score:.4f} nats a token over {judges} held-out part{'s'[: judges > 1]} "
                f"(the source alone: {before:.4f}){strength}"
            )
    if len(methods) > 1:
        print("gtl evaluate compares methods under the same noise; the numbers above are each under its own")
    if is_first():
        shutil.rmtree(kept, ignore_errors=True)
    run.finish()


def hashed(*parts: Tensor) -> str:
    """A hash of token arrays."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(str(tuple(part.shape)).encode())
        digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


def keep(run: Run, folder: Path, method: str, made: Adapted, n: int, seed: int) -> None:
    """Saves a target model, with what is known of it as rows."""
    kept = made.denoiser if made.ratio is None else made.ratio
    assert isinstance(kept, Ratio | NetworkDenoiser)
    save_model(folder, kept)
    for metric, value in (
        ("held_out_nll", made.score),
        ("gamma", made.gamma),
        ("borrowed", made.borrowed),
        ("steps", made.steps),
    ):
        if value is None:
            continue
        if not run.has(method, n, seed, metric) and math.isfinite(value):  # nothing is held out of -epochs
            run.add(
                "adapt", method, metric, value, n=n, seed=seed, seconds=made.seconds, trainable_weights=made.weights
            )
