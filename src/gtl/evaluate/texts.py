"""Sequences to evaluate, as tokens and as text, from whatever they are in.

Token ids: a .npy file, a text file of ids, or a folder of `gtl prepare`. Text: any other text file, one document a
line, which needs a tokenizer. Special tokens (separators, padding; not the unknown token) belong to no n-gram and to no
text: they become -1 among the tokens, and decoding leaves them out.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtl.data.tokens import check_tokens, read_meta, read_tokens

__all__ = ["Reader", "equal"]


class Reader:
    """Reads sequences with one tokenizer, or with none where only token ids are needed."""

    def __init__(self, tokenizer: Any | None = None, mask_id: int | None = None) -> None:
        """Sets the tokenizer, and the mask, which finished sequences may not hold."""
        from gtl.data.tokenizer import num_ids

        self.tokenizer, self.mask_id = tokenizer, mask_id
        self.num_ids = 2**31 if tokenizer is None else num_ids(tokenizer)
        special = [] if tokenizer is None else [i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id]
        self.special = torch.tensor(special, dtype=torch.long)

    def read(self, path: str, split: str = "validation") -> Tensor:
        """Tokens (N, L) as they are; documents of different lengths are filled up with -1."""
        if is_text(Path(path)):
            return self._documents(Path(path))
        return check_tokens(read_tokens(path, split), self.num_ids, self.mask_id, path)

    def _documents(self, path: Path) -> Tensor:
        if self.tokenizer is None:
            raise ValueError(f"{path}: text needs a --tokenizer")
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if len(lines) < 2:
            raise ValueError(f"{path}: {len(lines)} documents; at least 2 are needed")
        rows = [torch.tensor(row) for row in self.tokenizer(lines, add_special_tokens=False)["input_ids"]]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).long()

    def content(self, x: Tensor) -> Tensor:
        """x (N, L) as int64 with -1 in place of special tokens."""
        x = x.long()
        return x.masked_fill(torch.isin(x, self.special), -1)

    def texts(self, x: Tensor) -> list[str]:
        """What tokens x (N, L) say; negative ones say nothing."""
        if self.tokenizer is None:
            raise ValueError("tokens are read as text with a --tokenizer")
        return self.tokenizer.batch_decode([row[row >= 0].tolist() for row in x.long()], skip_special_tokens=True)


def is_text(path: Path) -> bool:
    """Whether a file holds documents: neither .npy nor token ids on its first line that says anything."""
    if not path.is_file() or path.suffix == ".npy":
        return False
    try:
        with path.open(encoding="utf-8") as file:
            words = next((line.split() for line in file if line.strip()), [])
    except UnicodeDecodeError:
        return False
    return not all(word.removeprefix("-").isdigit() for word in words)


def open_reader(tokenizer: str | None, *paths: str | None) -> Reader:
    """A reader with the tokenizer that is named, or with that of the first prepared folder among the paths."""
    metas = [(path, read_meta(path)) for path in paths if path is not None]
    prepared = next(((path, meta) for path, meta in metas if meta is not None), None)
    mask_id = None if prepared is None else prepared[1].mask_id
    name = tokenizer or (None if prepared is None else prepared[0])
    if name is None:
        return Reader()
    from gtl.data.tokenizer import load_tokenizer

    return Reader(load_tokenizer(name), mask_id)


def equal(samples: Tensor, held_out: Tensor, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """As many sequences on both sides, cut to the same number of tokens; drawn at random where one side has more."""
    count, length = min(len(samples), len(held_out)), min(samples.shape[1], held_out.shape[1])
    sides = []
    for x in (samples, held_out):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:count].sort().values
        sides.append((x if len(x) == count else x[rows])[:, :length].long().numpy())
    return sides[0], sides[1]
