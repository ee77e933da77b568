"""Small texts, a small vocabulary for them, and the files that documents come in."""

import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORDS = [
    "we", "prove", "that", "the", "field", "of", "a", "group", "is", "finite", "and", "show", "how", "light", "bends",
    "near", "stars", "in", "deep", "networks",
]  # fmt: skip
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CATEGORIES = ["math.AG", "math.NT cs.LG", "hep-th", "astro-ph.GA", "cs.LG", "cs.CL math.AG", "stat.ML"]


def vocabulary() -> list[str]:
    """Special tokens, the words, and letters and digits as whole words and as endings."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    return [*SPECIAL, *".,[]-", *letters, *(f"##{letter}" for letter in letters), *sorted(set(WORDS) - set(letters))]


def write_vocabulary(path: Path, without: Iterable[str] = ()) -> Path:
    """A BERT vocab.txt, without some of the tokens."""
    path.write_text("".join(f"{word}\n" for word in vocabulary() if word not in set(without)))
    return path


def documents(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Records as Kaggle's snapshot has them."""
    draw = random.Random(seed)
    return [
        {
            "id": f"2401.{number:05d}",
            "submitter": "A. N. Author",
            "title": " ".join(draw.choices(WORDS, k=4)).capitalize(),
            "abstract": "  " + " ".join(draw.choices(WORDS, k=draw.randint(5, 30))) + ".\n",
            "categories": CATEGORIES[number % len(CATEGORIES)],
        }
        for number in range(count)
    ]


def lines_of(records: Iterable[dict[str, Any]]) -> bytes:
    """One JSON object a line."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write(path: Path, content: bytes) -> Path:
    """Writes a file, packed as its name says."""
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix)
    path.write_bytes(content if pack is None else pack(content))
    return path


def csv_of(records: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    """A CSV file with a header; texts with line breaks are quoted."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue().encode()
