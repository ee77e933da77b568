"""`gtl prepare`: text in, token arrays of disjoint domains out."""

import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from gtl.data.documents import open_source, sha256_of
from gtl.data.domains import read_rules
from gtl.data.encode import ALL, Task
from gtl.data.prepare import Made, choose_text, describe, pack_all, token_type
from gtl.data.tokenizer import add_mask, load_tokenizer, num_ids, separator_of
from gtl.progress import Bar
from gtl.run import Run, versions
from gtl.train.checkpoint import write_json

__all__ = ["prepare"]


def prepare(
    input: list[str] | str,
    out: str | None = None,
    tokenizer: str | None = None,
    length: int = 128,
    domain: list[str] | None = None,
    exclusive: bool = False,
    text: list[str] | None = None,
    id: str = "id",
    validation: float = 0.1,
    seed: int = 0,
    mask_token: str | None = None,
    separator: str | None = None,
    subset: str | None = None,
    split: str = "train",
    skip_bad: bool = False,
    workers: int | None = None,
) -> None:
    """Tokenises text and packs it into segments of one length: a folder a domain, for --data, --source and --target.

    Args:
        input: files (JSONL such as Kaggle's arXiv snapshot, CSV, text with a document a line, each plain, .gz or .xz;
            parquet), or Hugging Face datasets by folder or name; several with --input A B.
        out: folder for the domains' folders, each with train.npy, validation.npy and meta.json.
        tokenizer: a fast tokenizer by Hugging Face name, a folder, a tokenizer.json or a BERT vocab.txt.
        length: tokens in a segment.
        domain: NAME=FIELD:PREFIX,... such as physics=categories:physics,hep: documents whose first word of the field
            begins so; several apart by blanks. Without it all documents are the domain `all`.
        exclusive: leave out documents any of whose words belongs to another domain (cross-listings).
        text: fields that make a document; by default title and abstract where there are such, else text.
        id: field that names a document and so decides its split; its place in the input where there is none.
        validation: share of the documents that are held out.
        seed: of the split.
        mask_token: a mask to add to a tokenizer that has none.
        separator: token after every document; the tokenizer's sep or eos by default.
        subset: of a Hugging Face dataset (its configuration).
        split: of a Hugging Face dataset.
        skip_bad: count and pass over malformed documents; otherwise the first one is an error.
        workers: processes; as many as there are cores by default.
    """
    if out is None or tokenizer is None:
        raise ValueError(f"prepare needs --{'out' if out is None else 'tokenizer'}")
    if length < 2:
        raise ValueError(f"length={length} must be at least 2")
    if not 0 < validation < 1:
        raise ValueError(f"validation={validation} must be a fraction between 0 and 1")
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = cores if workers is None else workers
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    rules = read_rules(domain or [])
    names = [input] if isinstance(input, str) else list(input)
    if not names:
        raise ValueError("prepare needs --input")
    sources = [open_source(name, subset, split) for name in names]
    target = Path(out).resolve()
    check_target(target)
    made_with = load_tokenizer(tokenizer)
    mask_id = add_mask(made_with, mask_token, tokenizer)
    separator_id = separator_of(made_with, separator, tokenizer)
    if separator_id == mask_id:
        raise ValueError(f"separator {separator!r} is the mask token; name another")
    vocabulary = num_ids(made_with)
    fields = choose_text(sources, text)
    config = {
        "input": describe(sources), "tokenizer": tokenizer, "length": length,
        "domain": {rule.name: str(rule) for rule in rules} if rules else {ALL: None},
        "exclusive": exclusive, "text": list(fields), "id": id, "validation": validation, "seed": seed,
        "mask_token": made_with.mask_token, "separator_id": separator_id, "subset": subset, "split": split,
        "skip_bad": skip_bad,
    }  # fmt: skip
    if is_done(target, config):
        print(f"{out}: already prepared, with the same input and settings")
        return
    task = Task(
        str(unfinished(target) / "tokenizer.json"), fields, tuple(rules), exclusive, id, validation, seed,
        separator_id, mask_id, token_type(vocabulary), skip_bad,
    )  # fmt: skip
    about = {"vocabulary": vocabulary, "mask_id": mask_id, "pad_id": made_with.pad_token_id}
    started = time.perf_counter()
    folder = unfinished(target)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        run = Run(folder, "prepare", config, torch.device("cpu"))
        made_with.save_pretrained(folder)
        console = Console(stderr=True, quiet=not sys.stderr.isatty())
        with Bar(1.0, console) as bar:
            bar.stage("tokenising", 1.0)
            made = pack_all(folder, sources, task, length, workers, bar)
        seconds = time.perf_counter() - started
        for name, parts in made.parts.items():
            made_with.save_pretrained(folder / name)
            write_json(folder / name / "meta.json", meta_of(name, config, task, about, made, folder))
            run.add("prepare", name, "documents", sum(part["documents"] for part in parts.values()), seed=seed)
            run.add("prepare", name, "tokens", sum(p["tokens"] for p in parts.values()), seed=seed, seconds=seconds)
        run.finish()
        os.replace(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    report(Path(out), made, seconds)


def unfinished(target: Path) -> Path:
    """Where everything is written until it is whole; what a killed run left there is removed by the next."""
    return target.with_name(f".{target.name}.unfinished")


def check_target(target: Path) -> None:
    """Refuses a file, and a folder with other things in it."""
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; choose another --out")
    if target.is_dir() and any(target.iterdir()) and not (target / "FINISHED").is_file():
        raise FileExistsError(f"{target} is not empty and holds no run; choose another --out")


def is_done(target: Path, config: dict[str, Any]) -> bool:
    """Whether the folder was prepared just so; one that was prepared in another way is refused."""
    if not (target / "FINISHED").is_file():
        return False
    known = target / "config.yaml"
    if not known.is_file() or known.read_text() != yaml.safe_dump(config, sort_keys=False):
        raise FileExistsError(f"{target} already holds a finished run of another config or input; choose another --out")
    return True


def meta_of(
    name: str, config: dict[str, Any], task: Task, about: dict[str, Any], made: Made, folder: Path
) -> dict[str, Any]:
    """The meta.json of one domain."""
    return {
        "domain": name,
        "rule": config["domain"][name],
        "exclusive": task.exclusive,
        "tokenizer": config["tokenizer"],
        "tokenizer_sha256": sha256_of(folder / "tokenizer.json"),
        **about,
        "separator_id": task.separator_id,
        "length": config["length"],
        "dtype": task.dtype,
        "text": config["text"],
        "validation": task.validation,
        "seed": task.seed,
        "split_by": f"blake2b of seed and {task.identity!r}, or of seed and place in the input",
        "splits": made.parts[name],
        "skipped": dict(made.skipped),
        "inputs": config["input"],
        "rules": [asdict(rule) for rule in task.rules],
        "gtl": versions()["gtl"],
    }


def report(target: Path, made: Made, seconds: float) -> None:
    """Prints a line a domain, and what was left out."""
    for name, parts in made.parts.items():
        words = ", ".join(f"{part['segments']} segments for {split}" for split, part in parts.items())
        count, tokens = (sum(part[key] for part in parts.values()) for key in ("documents", "tokens"))
        print(f"{target / name}: {count} documents, {tokens} tokens, {words}")
    if made.skipped:
        print("left out: " + ", ".join(f"{count} {why.replace('_', '-')}" for why, count in made.skipped.items()))
    total = sum(part["tokens"] for parts in made.parts.values() for part in parts.values())
    print(f"{seconds:.1f} s, {total / seconds:,.0f} tokens/s")
