"""Prepared folders: what `gtl prepare` writes for one domain, and how it is opened.

    train.npy, validation.npy   segments (N, L), uint16, or uint32 where the vocabulary needs it
    meta.json                   tokenizer and its hash, special ids, length, rule, counts, sha256 of all files
    tokenizer.json, ...         the tokenizer

Arrays are memory-mapped: torch indexes unsigned tensors by rows on the CPU (`x[rows]`, `x[a:b]`), and what is needed as
int64 is made so a batch at a time (`x[rows].long()`). torch has no min or max for them: see `check_tokens`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gtl.data.documents import sha256_of

__all__ = ["Meta", "Part", "check_meta", "open_split", "read_meta", "same_tokens"]


@dataclass(frozen=True)
class Part:
    """One split: its documents, tokens and segments, and its file's size and hash."""

    documents: int
    tokens: int
    segments: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Meta:
    """What is known of a prepared domain; `vocabulary` counts all ids, the mask among them."""

    domain: str
    tokenizer: str
    tokenizer_sha256: str
    vocabulary: int
    mask_id: int
    pad_id: int | None
    separator_id: int
    length: int
    dtype: str
    splits: dict[str, Part]


def read_meta(path: str | Path) -> Meta | None:
    """The meta.json of a prepared folder; None where the path is not a folder that has one."""
    file = Path(path) / "meta.json"
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text())
        parts = {
            name: Part(*(part[key] for key in ("documents", "tokens", "segments", "bytes", "sha256")))
            for name, part in value["splits"].items()
        }
        names = (
            "domain", "tokenizer", "tokenizer_sha256", "vocabulary", "mask_id", "pad_id", "separator_id", "length",
            "dtype",
        )  # fmt: skip
        meta = Meta(**{name: value[name] for name in names}, splits=parts)
        if meta.dtype not in ("uint16", "uint32") or not 0 <= meta.mask_id < meta.vocabulary:
            raise ValueError(f"dtype {meta.dtype}, mask {meta.mask_id} of {meta.vocabulary} ids")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        about = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{file}: not what gtl prepare wrote ({about}); prepare the data again") from None
    return meta


def open_split(folder: str | Path, meta: Meta, split: str, verify: bool = False) -> Tensor:
    """One split (N, L) of a prepared folder, memory-mapped; its size and type are checked, its hash with `verify`."""
    if split not in meta.splits:
        raise ValueError(f"{folder}: has no split {split!r}; choose among {', '.join(meta.splits)}")
    file, part = Path(folder) / f"{split}.npy", meta.splits[split]
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; prepare the data again")
    size = file.stat().st_size
    if size != part.bytes:
        raise ValueError(f"{file}: {size} bytes where meta.json says {part.bytes}; prepare the data again")
    try:
        array = np.load(file, mmap_mode="c", allow_pickle=False)  # private: torch wants to be allowed to write
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file}: not the array that was prepared ({error}); prepare the data again") from None
    if array.dtype != np.dtype(meta.dtype) or array.shape != (part.segments, meta.length):
        raise ValueError(
            f"{file}: {array.dtype} of shape {array.shape} where meta.json says {meta.dtype} of shape "
            f"{(part.segments, meta.length)}; prepare the data again"
        )
    if verify and sha256_of(file) != part.sha256:
        raise ValueError(f"{file}: has changed since it was prepared (another sha256); prepare the data again")
    return torch.from_numpy(array)


def check_meta(meta: Meta | None, num_ids: int, mask_id: int | None, name: str) -> None:
    """Refuses data that were prepared for more token ids than a model has, or with another mask among them."""
    if meta is None:
        return
    last = meta.vocabulary - 1
    too_few = num_ids < (last if meta.mask_id == last and mask_id is None else meta.vocabulary)
    if too_few or (mask_id is not None and mask_id <= last and mask_id != meta.mask_id):
        mask = "no mask" if mask_id is None else f"mask {mask_id}"
        raise ValueError(
            f"{name}: prepared with {meta.tokenizer} for {meta.vocabulary} ids and mask {meta.mask_id}; the model has "
            f"{num_ids} ids and {mask}; prepare the data with the model's tokenizer"
        )


def same_tokens(metas: Mapping[str, Meta | None]) -> Meta | None:
    """The first of several metas; domains that were prepared with different tokenizers or lengths are refused."""
    found = [(name, meta) for name, meta in metas.items() if meta is not None]
    for name, meta in found[1:]:
        first, other = found[0]
        if meta.tokenizer_sha256 != other.tokenizer_sha256 or meta.mask_id != other.mask_id:
            raise ValueError(
                f"{first} and {name} were prepared with different tokenizers ({other.tokenizer} and {meta.tokenizer}); "
                "prepare both with one"
            )
        if meta.length != other.length:
            raise ValueError(
                f"{first} and {name} were prepared with different lengths ({other.length} and {meta.length}); "
                "prepare both with one --length"
            )
    return found[0][1] if found else None
