"""Text to token arrays, streaming: read blocks, tokenise them in several processes, pack, write as they come."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gtl.data.documents import Block, Source, first_record, read_blocks, sha256_of
from gtl.data.encode import ALL, SPLITS, Encoded, Task
from gtl.data.pack import Packer
from gtl.data.workers import encode_all
from gtl.progress import Bar

__all__ = ["Made", "choose_text", "describe", "pack_all", "token_type"]

KEPT = 1000
"""Values of a field that are remembered for an error; more are forgotten, the rarest first."""
ARXIV = ("title", "abstract")


@dataclass(frozen=True)
class Made:
    """What came of all the input: documents by (domain, split), what was left out and why, and the files by name."""

    documents: Counter[tuple[str, str]]
    skipped: Counter[str]
    parts: dict[str, dict[str, dict[str, Any]]]


def choose_text(sources: Sequence[Source], text: Sequence[str] | None) -> tuple[str, ...]:
    """The fields that make a document: those named, else title and abstract where there are such, else `text`."""
    if text is not None:
        if not text or not all(text):
            raise ValueError("text must name at least one field")
        return tuple(text)
    known = first_record(sources[0])
    if all(name in known for name in ARXIV):
        return ARXIV
    if known and "text" not in known:
        fields = ", ".join(list(known)[:12])
        raise ValueError(
            f"{sources[0].name}: no field 'text', nor title and abstract; choose with --text among {fields}"
        )
    return ("text",)


def token_type(vocabulary: int) -> str:
    """The type of the arrays: uint16, or uint32 where the vocabulary exceeds 65,535."""
    if vocabulary > 2**32:
        raise ValueError(f"a vocabulary of {vocabulary} ids is too large")
    return "uint16" if vocabulary <= 65_535 else "uint32"


def describe(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Every input file with its size and hash; a dataset by name has neither."""
    found: list[dict[str, Any]] = []
    for source in sources:
        if not source.files:
            found.append({"name": source.name, "subset": source.subset, "split": source.split, "sha256": None})
        for file in source.files:
            name = source.name if len(source.files) == 1 else str(file)
            found.append({"name": name, "bytes": file.stat().st_size, "sha256": sha256_of(file)})
    return found


def pack_all(folder: Path, sources: Sequence[Source], task: Task, length: int, workers: int, bar: Bar) -> Made:
    """Writes `DOMAIN/train.npy` and `DOMAIN/validation.npy` for every domain; an empty one is an error."""
    domains = [rule.name for rule in task.rules] or [ALL]
    packers: dict[tuple[str, str], Packer] = {}
    total = Encoded()
    whole = False
    try:
        for domain in domains:
            (folder / domain).mkdir()
            for split in SPLITS:
                path = folder / domain / f"{split}.npy"
                packers[domain, split] = Packer(path, length, np.dtype(task.dtype))
        for made in encode_all(task, _all_blocks(sources, task), workers):
            for place, tokens in made.tokens.items():
                packers[place].write(tokens)
            total.documents += made.documents
            total.skipped += made.skipped
            total.seen += made.seen
            if len(total.seen) > 10 * KEPT:
                total.seen = Counter(dict(total.seen.most_common(KEPT)))
            bar.advance(made.done)
        _check(task, domains, packers, total, length)
        whole = True
    finally:
        for packer in packers.values():
            packer.close(keep=whole)
    parts: dict[str, dict[str, dict[str, Any]]] = {domain: {} for domain in domains}
    for (domain, split), packer in packers.items():
        file = folder / domain / f"{split}.npy"
        parts[domain][split] = {
            "documents": total.documents[domain, split],
            "tokens": packer.tokens,
            "segments": packer.segments,
            "left_over": len(packer.rest),
            "bytes": file.stat().st_size,
            "sha256": sha256_of(file),
        }
    return Made(total.documents, total.skipped, parts)


def _all_blocks(sources: Sequence[Source], task: Task) -> Iterator[Block]:
    """The blocks of all sources, one after another; `done` counts all, and `source` tells them apart."""
    fields = [*task.text, *(rule.field for rule in task.rules), task.identity]
    sizes = [sum(file.stat().st_size for file in source.files) or 1 for source in sources]
    before = 0
    for place, (source, size) in enumerate(zip(sources, sizes, strict=True)):
        for block in read_blocks(source, fields):
            yield replace(block, done=(before + size * block.done) / sum(sizes), source=place)
        before += size


def _check(
    task: Task, domains: Sequence[str], packers: dict[tuple[str, str], Packer], total: Encoded, length: int
) -> None:
    """Refuses a domain without documents, and a split without one whole segment."""
    for domain in domains:
        if not any(total.documents[domain, split] for split in SPLITS):
            raise ValueError(_empty(domain, task, total))
        for split in SPLITS:
            packer = packers[domain, split]
            if packer.segments == 0:
                raise ValueError(
                    f"domain {domain!r}: the {total.documents[domain, split]} documents for {split} have "
                    f"{packer.tokens} tokens, less than one segment of {length}; give more text, a smaller --length"
                    + (" or a larger --validation" if split == "validation" else "")
                )


def _empty(domain: str, task: Task, total: Encoded) -> str:
    """What to say of a domain without documents: what was looked for, what was there, what was left out."""
    rule = next((rule for rule in task.rules if rule.name == domain), None)
    about = f"domain {domain!r} is empty: " + ("no documents" if rule is None else f"no document with {rule}")
    field = None if rule is None else rule.field
    values = [(value, count) for (name, value), count in total.seen.most_common() if name == field][:8]
    if values:
        about += f"; values seen most: {', '.join(f'{value or repr(value)} ({count})' for value, count in values)}"
    left_out = [f"{count} {name.replace('_', '-')}" for name, count in total.skipped.items() if name != "outside"]
    return about + (f"; left out: {', '.join(left_out)}" if left_out else "") + "; check --input, --domain and --text"
