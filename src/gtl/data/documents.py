"""Documents from files and datasets, as a stream of blocks.

    .jsonl .json .ndjson    one object a line, as in Kaggle's arXiv snapshot
    .csv .tsv               with a header
    .txt                    a document a line, field `text`
    .parquet                any columns
    a folder or a name      a Hugging Face dataset, through `datasets`, streaming

All but parquet may end in .gz or .xz. Lines travel as bytes and are parsed where they are tokenised; nothing here holds
more than one block.
"""

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from gtl.data.streams import line_blocks

__all__ = ["Block", "Source", "first_record", "open_source", "read_blocks", "records", "sha256_of"]

Kind = Literal["jsonl", "csv", "text", "parquet", "dataset"]
KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv",
    ".txt": "text", ".text": "text", ".parquet": "parquet",
}  # fmt: skip
ROWS = 512
"""Records that travel together where they do not travel as lines."""


@dataclass(frozen=True)
class Source:
    """One input: what it is called, what it is, and the files it is made of (none for a dataset by name)."""

    name: str
    kind: Kind
    files: tuple[Path, ...]
    subset: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class Block:
    """Lines as bytes, or records with their numbers.

    `done` is the share of the source that was read with it, `source` the source's place among several.
    """

    name: str
    kind: Kind
    first: int
    content: bytes | list[tuple[int, dict[str, Any] | str]]
    done: float
    source: int = 0

    def where(self, number: int) -> str:
        """What to call a record in an error."""
        return f"{self.name}, {'row' if self.kind in ('parquet', 'dataset') else 'line'} {number}"


def open_source(name: str, subset: str | None = None, split: str = "train") -> Source:
    """What an input is, by its name; a file that is not there or of an unknown kind is refused."""
    path = Path(name).expanduser()
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] in ([".gz"], [".xz"])
    kind = KINDS.get("".join(suffixes[-2:-1] if packed else suffixes[-1:]))
    if path.is_dir():
        files = tuple(sorted(file for file in path.rglob("*") if file.is_file()))
        if not files:
            raise ValueError(f"{name}: an empty folder")
        return Source(name, "dataset", files, subset, split)
    if path.is_file():
        if kind is None or (kind == "parquet" and packed):
            raise ValueError(f"{name}: unknown kind of file; expected {', '.join(KINDS)}, all but parquet also .gz/.xz")
        return Source(name, kind, (path,))
    if kind is not None or packed or path.is_absolute() or name.startswith(".") or name.count("/") > 1 or not name:
        raise FileNotFoundError(f"{name}: no such file or folder")
    return Source(name, "dataset", (), subset, split)


def read_blocks(source: Source, fields: Sequence[str] | None = None) -> Iterator[Block]:
    """The blocks of a source; `fields` are those needed of it, where others need not be read."""
    if source.kind in ("jsonl", "text"):
        for lines in line_blocks(source.files[0]):
            yield Block(source.name, source.kind, lines.first, lines.text, lines.done)
    elif source.kind == "csv":
        yield from _csv(source)
    elif source.kind == "parquet":
        yield from _parquet(source, fields)
    else:
        yield from _dataset(source, fields)


def records(block: Block) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """The records of a block with their numbers; in the place of one that is malformed, what is wrong with it."""
    if not isinstance(block.content, bytes):
        yield from block.content
        return
    lines = block.content.split(b"\n")
    for number, line in enumerate(lines, block.first):
        if not line.strip():
            continue
        try:
            if block.kind == "text":
                yield number, {"text": line.decode().strip()}
                continue
            value = json.loads(line)
        except UnicodeDecodeError:
            yield number, "not UTF-8 text"
        except (ValueError, RecursionError) as error:
            about = getattr(error, "msg", type(error).__name__)
            yield number, f"not JSON ({about}); expected one object a line"
        else:
            yield number, value if isinstance(value, dict) else "not a JSON object; expected one object a line"


def first_record(source: Source) -> dict[str, Any]:
    """The first record of a source that is well formed, of its first block; empty if there is none."""
    for block in read_blocks(source):
        return next((record for _, record in records(block) if isinstance(record, dict)), {})
    return {}


def _csv(source: Source) -> Iterator[Block]:
    """Rows of a CSV or TSV file; a field may hold line breaks."""
    path, done = source.files[0], 0.0
    csv.field_size_limit(1 << 26)

    def lines() -> Iterator[str]:
        nonlocal done
        for part in line_blocks(path):
            done = part.done
            # what is not UTF-8 is kept as it is and found where the text is used
            yield from StringIO(part.text.decode(errors="surrogateescape"), newline="\n")

    tabs = ".tsv" in path.suffixes
    reader = csv.reader(lines(), delimiter="\t" if tabs else ",", strict=not tabs)
    header: list[str] | None = None
    rows: list[tuple[int, dict[str, Any] | str]] = []
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            rows.append((number, f"not CSV ({error})"))
            continue
        if not row:
            continue
        if header is None:
            header = row
            continue
        about = f"{len(row)} fields where the header has {len(header)}"
        rows.append((number, dict(zip(header, row, strict=True)) if len(row) == len(header) else about))
        if len(rows) == ROWS:
            yield Block(source.name, source.kind, rows[0][0], rows, done)
            rows = []
    if rows:
        yield Block(source.name, source.kind, rows[0][0], rows, 1.0)


def _numbered(source: Source, rows: list[dict[str, Any]], first: int, done: float) -> Block:
    """Rows as a block, numbered from `first`."""
    return Block(source.name, source.kind, first, list(enumerate(rows, first)), done)


def _parquet(source: Source, fields: Sequence[str] | None) -> Iterator[Block]:
    """Rows of a parquet file, only the columns that are needed."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(source.files[0]) as file:
            known, total = file.schema_arrow.names, max(1, file.metadata.num_rows)
            _check_columns(source.name, known, fields)
            wanted = [name for name in known if fields is None or name in fields]
            count = 0
            for batch in file.iter_batches(ROWS, columns=wanted, use_threads=False):
                yield _numbered(source, batch.to_pylist(), count + 1, (count + len(batch)) / total)
                count += len(batch)
    except ArrowException as error:
        raise ValueError(f"{source.name}: not a whole parquet file ({error}); fetch it again") from None


def _dataset(source: Source, fields: Sequence[str] | None) -> Iterator[Block]:
    """Rows of a Hugging Face dataset, streamed."""
    rows, total = _open_dataset(source)
    if rows.column_names is not None:
        _check_columns(source.name, rows.column_names, fields)
        if fields is not None:
            rows = rows.select_columns([name for name in rows.column_names if name in fields])
    held: list[dict[str, Any]] = []
    count = 0
    try:
        for row in rows:
            held.append(row)
            if len(held) == ROWS:
                yield _numbered(source, held, count + 1, min(1.0, (count + ROWS) / total) if total else 0.0)
                count, held = count + ROWS, []
    except Exception as error:  # datasets raises whatever its readers do
        raise ValueError(f"{source.name}, after row {count + len(held)}: {_line(error)}") from None
    if held:
        yield _numbered(source, held, count + 1, 1.0)


def _open_dataset(source: Source) -> tuple[Any, int | None]:
    """The rows of a dataset as an iterable, and their number where it is known."""
    from datasets import DatasetDict, disable_progress_bars, load_dataset, load_from_disk

    from gtl.data.tokenizer import hub_reachable

    disable_progress_bars()
    path = Path(source.name).expanduser()
    if not path.is_dir() and not hub_reachable():
        raise FileNotFoundError(
            f"{source.name}: no such file or folder, and the Hugging Face hub cannot be reached to look for a dataset "
            "of that name; give the path of a file or of a saved dataset"
        )
    try:
        if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            return load_dataset(str(path), source.subset, split=source.split, streaming=True), None
        rows = load_from_disk(str(path))
    except Exception as error:  # datasets raises whatever its builders do
        raise ValueError(f"{source.name}: datasets cannot open it ({_line(error)})") from None
    if isinstance(rows, DatasetDict):
        if source.split not in rows:
            raise ValueError(f"{source.name}: has no split {source.split!r}; choose --split among {', '.join(rows)}")
        rows = rows[source.split]
    return rows, len(rows)


def _check_columns(name: str, known: Sequence[str], fields: Sequence[str] | None) -> None:
    """Refuses a table that lacks a field, before any of it is read; an `id` is welcome, not needed."""
    for field in fields or ():
        if field not in known and field != "id":
            raise ValueError(f"{name}: no field {field!r}; it has {', '.join(known)}")


def _line(error: Exception) -> str:
    """What an exception says, on one line of moderate length."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
