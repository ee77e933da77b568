"""Bytes of plain, .gz and .xz files as a stream, whole lines at a time; a file that was cut short says where.

Memory is one chunk, whatever the file's size. A .gz or .xz may hold several streams one after another.
"""

import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["Lines", "line_blocks"]

CHUNK = 1 << 18
BLOCK = 1 << 20
"""Bytes read at a time, and bytes of text that travel together."""


class Decompressor(Protocol):
    """What lzma's and zlib's decompressors have in common."""

    @property
    def eof(self) -> bool:
        """Whether the stream's end was seen."""
        ...

    @property
    def unused_data(self) -> bytes:
        """What came after it."""
        ...

    def decompress(self, data: bytes, /) -> bytes:
        """The next bytes of text."""
        ...


@dataclass(frozen=True)
class Lines:
    """Whole lines of a file, the number of the first (from 1), and the share of the file that was read with them."""

    text: bytes
    first: int
    done: float


def line_blocks(path: Path, size: int = BLOCK) -> Iterator[Lines]:
    """Whole lines of a file, about `size` bytes at a time."""
    line, held, length = 1, [], 0
    done = 0.0
    try:
        for piece, done in _chunks(path):
            held.append(piece)
            length += len(piece)
            if length < size or b"\n" not in piece:
                continue
            text = b"".join(held)
            cut = text.rfind(b"\n") + 1
            yield Lines(_unmarked(text[:cut], line), line, done)
            line += text.count(b"\n")
            held, length = [text[cut:]], len(text) - cut
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        line += sum(piece.count(b"\n") for piece in held)
        what = "ends too early" if isinstance(error, EOFError) else f"is damaged ({error})"
        raise ValueError(
            f"{path}, line {line}: the compressed file {what}; fetch it again, or unpack what there is and prepare that"
        ) from None
    if text := b"".join(held):
        yield Lines(_unmarked(text, line), line, 1.0)


def _unmarked(text: bytes, line: int) -> bytes:
    """The text without the byte order mark that some programs write first."""
    return text.removeprefix(b"\xef\xbb\xbf") if line == 1 else text


def _chunks(path: Path) -> Iterator[tuple[bytes, float]]:
    """Pieces of a file, unpacked, each with the share of the file that has been read."""
    size = max(1, path.stat().st_size)
    with path.open("rb") as file:
        unpack = _decompressor(path)
        while data := file.read(CHUNK):
            done = file.tell() / size
            while data and unpack is not None:
                if unpack.eof:
                    data = data.lstrip(b"\0")  # padding between streams
                    if not data:
                        break
                    unpack = _decompressor(path)
                    assert unpack is not None
                if piece := unpack.decompress(data):
                    yield piece, done
                data = unpack.unused_data if unpack.eof else b""
            if unpack is None:
                yield data, done
        if unpack is not None and not unpack.eof:
            raise EOFError


def _decompressor(path: Path) -> Decompressor | None:
    """What unpacks a file of this name, if anything has to."""
    if path.suffix == ".gz":
        return zlib.decompressobj(wbits=31)
    return lzma.LZMADecompressor() if path.suffix == ".xz" else None
