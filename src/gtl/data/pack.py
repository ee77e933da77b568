"""Packing: a stream of tokens becomes segments of one length in a .npy file, written as they come.

The header of a .npy file leaves room for its first dimension to grow, so it is written twice: with no rows first, and
with as many as there are at the end. Only a segment that is not yet full is held in memory.
"""

import os
from io import BytesIO
from pathlib import Path

import numpy as np

__all__ = ["Packer"]


class Packer:
    """Writes tokens to a .npy file of shape (N, L); what does not fill the last segment is left out."""

    def __init__(self, path: Path, length: int, dtype: np.dtype) -> None:
        self.length, self.dtype = length, dtype
        self.tokens = self.segments = 0
        self.rest = np.empty(0, dtype)
        self.file = path.open("wb")
        self.file.write(self._header())

    def _header(self) -> bytes:
        """The header for as many rows as there are now."""
        shape = (self.segments, self.length)
        buffer = BytesIO()
        about = {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(buffer, about)
        return buffer.getvalue()

    def write(self, tokens: np.ndarray) -> None:
        """Appends tokens (n,) of the file's type; whole segments go to disk."""
        if tokens.dtype != self.dtype:
            raise TypeError(f"tokens of type {tokens.dtype} for a file of {self.dtype}")
        self.tokens += len(tokens)
        if len(self.rest) + len(tokens) < self.length:
            self.rest = np.concatenate([self.rest, tokens])
            return
        whole = (len(self.rest) + len(tokens)) // self.length * self.length - len(self.rest)
        self.file.write(self.rest.tobytes())
        self.file.write(tokens[:whole].tobytes())
        self.segments += (len(self.rest) + whole) // self.length
        self.rest = tokens[whole:].copy()

    def close(self, keep: bool = True) -> None:
        """Writes the header once more, with the number of rows, and sees the file to disk."""
        if keep:
            start = self._header()
            self.file.seek(0)
            self.file.write(start)
            self.file.flush()
            os.fsync(self.file.fileno())
        self.file.close()
