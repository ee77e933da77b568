"""From a block of documents to tokens: fields to text, text to ids, each document to its domain and split.

A document's split depends on (seed, id) alone, or on (seed, input, number) where it has no id: whatever the number of
processes, every document is in one split, and the same one.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from gtl.data.documents import Block, records
from gtl.data.domains import Rule, domain_of, words_of

__all__ = ["ALL", "SPLITS", "Encoded", "Encoder", "Task", "in_validation"]

ALL = "all"
SPLITS = ("train", "validation")
BATCH = 64
"""Texts that the tokenizer library is given at a time."""


@dataclass(frozen=True)
class Task:
    """What is done to every document."""

    tokenizer: str
    """Path of a tokenizer.json."""
    text: tuple[str, ...]
    rules: tuple[Rule, ...]
    exclusive: bool
    identity: str
    validation: float
    seed: int
    separator_id: int
    mask_id: int
    dtype: str
    skip_bad: bool


@dataclass
class Encoded:
    """What became of one block, or of many: tokens by (domain, split), and counts."""

    tokens: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    documents: Counter[tuple[str, str]] = field(default_factory=Counter)
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    done: float = 0.0


class Bad(ValueError):
    """A document that cannot be used."""


def in_validation(seed: int, identity: str, fraction: float) -> bool:
    """Whether a document is held out: a hash of (seed, identity), as a number in [0, 1), is under the fraction."""
    digest = blake2b(f"{seed}:{identity}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


class Encoder:
    """Turns blocks into tokens."""

    def __init__(self, task: Task) -> None:
        from tokenizers import Tokenizer

        self.task = task
        self.tokenizer = Tokenizer.from_file(task.tokenizer)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # a document that says [MASK] says so in ordinary tokens

    def __call__(self, block: Block) -> Encoded:
        """The tokens of a block, in the order of its documents; a malformed one is an error unless told to skip it."""
        made, places, texts = Encoded(done=block.done), [], []
        for number, record in records(block):
            try:
                text, place = self._place(block, number, record, made)
            except Bad as error:
                self._refuse(block, number, str(error), made)
                continue
            if place is not None:
                places.append((number, place))
                texts.append(text)
        flat: dict[tuple[str, str], list[int]] = {}
        for (number, place), ids in zip(places, self._ids(texts), strict=True):
            if self.task.mask_id in ids:
                self._refuse(block, number, "the text holds the mask token itself", made)
                continue
            tokens = flat.setdefault(place, [])
            tokens += ids
            tokens.append(self.task.separator_id)
            made.documents[place] += 1
        made.tokens = {place: np.array(ids, dtype=self.task.dtype) for place, ids in flat.items()}
        return made

    def _place(
        self, block: Block, number: int, record: dict[str, Any] | str, made: Encoded
    ) -> tuple[str, tuple[str, str] | None]:
        """The text of a record, and its domain and split if it has any."""
        task = self.task
        if isinstance(record, str):
            raise Bad(record)
        try:
            text = "\n".join(checked(record[name], name) for name in task.text).strip()
            domain, cross_listed = domain_of(task.rules, record, task.exclusive) if task.rules else (ALL, False)
        except KeyError as error:
            known = ", ".join(list(record)[:12])
            raise Bad(f"no field {error.args[0]!r}; it has {known}") from None
        except ValueError as error:
            raise Bad(str(error)) from None
        for name in {rule.field for rule in task.rules}:
            made.seen[name, (words_of(record[name]) or [""])[0]] += 1
        for why, true in (("empty", not text), ("outside", domain is None), ("cross_listed", cross_listed)):
            if true:
                made.skipped[why] += 1
                return text, None
        identity = record.get(task.identity)
        key = f"{block.source}:{number}" if identity is None else str(identity)
        return text, (str(domain), SPLITS[in_validation(task.seed, key, task.validation)])

    def _ids(self, texts: list[str]) -> Iterator[list[int]]:
        """The ids of texts, without anything before or after them; a few at a time, which caches reward."""
        for first in range(0, len(texts), BATCH):
            batch = texts[first : first + BATCH]
            for encoding in self.tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield encoding.ids

    def _refuse(self, block: Block, number: int, why: str, made: Encoded) -> None:
        """Counts a document that cannot be used, or stops at it."""
        if not self.task.skip_bad:
            raise ValueError(f"{block.where(number)}: {why}; mend it, or pass over such documents with --skip_bad")
        made.skipped["bad"] += 1


def checked(value: Any, name: str) -> str:
    """A field that must be text."""
    if not isinstance(value, str):
        raise ValueError(f"field {name!r} is {'null' if value is None else type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"field {name!r} is not UTF-8 text") from None
    return value


def one_thread() -> None:
    """Keeps the tokenizer library to the thread that calls it, for there is a process a core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
