"""Token arrays: (N, L) integers from .npy, from text with one sequence of ids a line, or from a prepared folder.

What is read from files is int64. A prepared folder (`gtl prepare`) is memory-mapped as it is, uint16 or uint32: rows
are taken from it on the CPU (`x[rows]`) and made int64 a batch at a time, so that nothing holds all of it.
"""

from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from gtl.data.prepared import Meta, open_split, read_meta

__all__ = ["FEW", "Meta", "check_tokens", "folds", "read_meta", "read_split", "read_tokens", "split", "write_tokens"]

CHUNK = 2**22
"""Tokens that are checked at a time."""

FEW = 100
"""Held-out rows below which one split is too noisy to choose by."""


def read_tokens(path: str | Path, split: str = "train", verify: bool = False) -> Tensor:
    """Reads token ids (N, L) from a .npy file or from a text file with one sequence a line, ids apart by blanks.

    Of a prepared folder it gives one split, memory-mapped and of an unsigned type; `verify` checks its hash too.
    """
    path = Path(path)
    if (meta := read_meta(path)) is not None:
        return open_split(path, meta, split, verify)
    if path.is_dir():
        inside = sorted(file.parent.name for file in path.glob("*/meta.json"))
        hint = f"choose one of its domains: {', '.join(inside)}" if inside else "it has no meta.json of gtl prepare"
        raise FileNotFoundError(f"{path}: a folder, and no prepared domain; {hint}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if path.suffix == ".npy":
        try:
            array = np.load(path, allow_pickle=False)
        except (ValueError, EOFError, BadZipFile) as error:
            raise ValueError(f"{path}: not an array of token ids of one length ({error})") from None
        if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{path}: expected integers of shape (N, L), got {array.dtype} of shape {array.shape}")
        return torch.from_numpy(array.astype(np.int64))
    rows: list[list[int]] = []
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: neither a .npy file nor text") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append([int(word) for word in line.split()])
        except ValueError:
            raise ValueError(f"{path}, line {number}: token ids must be integers") from None
        if len(rows[-1]) != len(rows[0]):
            raise ValueError(
                f"{path}, line {number}: {len(rows[-1])} tokens where the first sequence has {len(rows[0])}; "
                "all sequences must have one length"
            )
    return torch.tensor(rows, dtype=torch.long).view(len(rows), len(rows[0]) if rows else 0)


def check_tokens(
    x: Tensor,
    num_ids: int,
    mask_id: int | None = None,
    name: str = "data",
    least: int = 2,
    length: int | None = None,
    banned: Sequence[int] = (),
) -> Tensor:
    """Refuses clean data (N, L) that is too small, of another length, or holds ids that clean data cannot hold, or
    `banned` ones, that a model never gives."""
    if x.dim() != 2 or x.shape[0] < least:
        rows = x.shape[0] if x.dim() == 2 else 0
        raise ValueError(f"{name}: {rows} sequence{'' if rows == 1 else 's'}; at least {least} are needed")
    if x.shape[1] < 1:
        raise ValueError(f"{name}: sequences of 0 tokens")
    if length is not None and x.shape[1] != length:
        raise ValueError(f"{name}: sequences of {x.shape[1]} tokens; expected {length}")
    for rows in x.split(max(1, CHUNK // x.shape[1])):  # a memory-mapped array is never in memory as a whole
        part = rows.long()
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= num_ids:
            raise ValueError(f"{name}: token id {low if low < 0 else high} is outside 0 .. {num_ids - 1}")
        if mask_id is not None and bool((part == mask_id).any()):
            raise ValueError(f"{name}: holds the mask id {mask_id}; clean data must not")
        for token in banned:
            if bool((part == token).any()):
                raise ValueError(f"{name}: holds the id {token}, which the model never gives; its likelihood is zero")
    return x


def split(x: Tensor, fraction: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A seeded split of x (N, L) into training and held-out rows: at least one, and at most half, is held out."""
    count = min(max(1, round(fraction * len(x))), len(x) // 2)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return x[order[count:]], x[order[:count]]


def read_split(path: str | Path, fraction: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Training and held-out rows: a prepared folder's own train and validation, else a seeded split of the rows."""
    if read_meta(path) is not None:
        return read_tokens(path, "train"), read_tokens(path, "validation")
    return split(read_tokens(path), fraction, seed)


def folds(x: Tensor, count: int, fraction: float, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Training and held-out rows of x (N, L): one seeded split where `fraction` of the rows is not few, else `count`
    parts of which each is held out once (as many as there are rows, if those are fewer)."""
    if fraction * len(x) >= FEW:
        return [split(x, fraction, seed)]
    if len(x) < 2:
        raise ValueError(f"{len(x)} sequence: at least 2 are needed, one to train on and one held out")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    count = min(count, len(x))
    parts = [order[which::count] for which in range(count)]
    return [(x[torch.cat(parts[:i] + parts[i + 1 :])], x[part]) for i, part in enumerate(parts)]


def write_tokens(path: Path, x: Tensor) -> None:
    """Writes token ids as a .npy file of the smallest integer type that holds them."""
    from gtl.train.checkpoint import atomic

    array = x.cpu().numpy()
    with atomic(path) as handle:
        np.save(handle, array.astype(np.min_scalar_type(int(array.max(initial=0)))), allow_pickle=False)
