"""gtl prepare: every kind of input gives the same arrays, packing loses nothing, splits are disjoint and seeded."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtl.data import streams, workers
from gtl.data.encode import in_validation
from gtl.data.tokenizer import load_tokenizer
from texts import csv_of, documents, lines_of, write, write_vocabulary
from typed import contents, gtl

RECORDS = documents(120)
DOMAINS = "--domain math=categories:math. physics=categories:hep,astro-ph cs=categories:cs"


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    return write_vocabulary(tmp_path / "vocab.txt")


def prepared(tmp_path: Path, command: str, name: str = "out") -> Path:
    """Runs gtl prepare with the small vocabulary."""
    gtl(f"prepare {command} --tokenizer {tmp_path / 'vocab.txt'} --length 16", "--out", tmp_path / name)
    return tmp_path / name


def encoded(vocab: Path, records: list[dict[str, Any]], fields: tuple[str, ...] = ("title", "abstract")) -> list[int]:
    """The documents as they should be packed: ids, then a separator after each."""
    tokenizer = load_tokenizer(str(vocab))
    ids: list[int] = []
    for record in records:
        ids += tokenizer.encode("\n".join(record[name] for name in fields), add_special_tokens=False)
        ids.append(tokenizer.sep_token_id)
    return ids


def check_packing(folder: Path, vocab: Path, records: list[dict[str, Any]], **options: Any) -> None:
    """Segments one after another are the encoded documents of the split, but for the last incomplete segment."""
    meta = json.loads((folder / "meta.json").read_text())
    for split in ("train", "validation"):
        held = [r for r in records if in_validation(0, r["id"], 0.1) == (split == "validation")]
        expected = encoded(vocab, held, **options)
        array = np.load(folder / f"{split}.npy")
        assert array.dtype == np.uint16
        assert array.shape == (len(expected) // 16, 16)
        assert array.ravel().tolist() == expected[: array.size]
        part = meta["splits"][split]
        assert (part["documents"], part["tokens"], part["segments"]) == (len(held), len(expected), len(array))
        assert part["left_over"] == len(expected) - array.size < 16
        assert part["sha256"] == sha256((folder / f"{split}.npy").read_bytes()).hexdigest()


KINDS = {
    "arxiv-metadata-oai-snapshot.json": lines_of(RECORDS),
    "x.jsonl.gz": lines_of(RECORDS),
    "x.jsonl.xz": lines_of(RECORDS),
    "marked.jsonl": b"\xef\xbb\xbf" + lines_of(RECORDS).replace(b"\n", b"\r\n\r\n"),
    "cut.jsonl": lines_of(RECORDS).rstrip(b"\n"),
    "x.csv": csv_of(RECORDS),
    "x.csv.gz": csv_of(RECORDS),
    "x.csv.xz": csv_of(RECORDS),
    "x.tsv": csv_of(RECORDS, "\t"),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_file(tmp_path: Path, vocab: Path, name: str):
    out = prepared(tmp_path, str(write(tmp_path / name, KINDS[name])))
    check_packing(out / "all", vocab, RECORDS)


def test_parquet(tmp_path: Path, vocab: Path):
    import pyarrow as pa
    from pyarrow.parquet import write_table

    write_table(pa.Table.from_pylist(RECORDS), tmp_path / "x.parquet", row_group_size=50)
    check_packing(prepared(tmp_path, f"{tmp_path / 'x.parquet'}") / "all", vocab, RECORDS)


def test_datasets(tmp_path: Path, vocab: Path):
    """A dataset that was saved, one with splits, and a folder of files."""
    from datasets import Dataset, DatasetDict, disable_progress_bars

    disable_progress_bars()
    rows = Dataset.from_list(RECORDS)
    rows.save_to_disk(tmp_path / "saved")
    DatasetDict({"train": rows.select(range(3)), "test": rows}).save_to_disk(tmp_path / "parted")
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "train.jsonl", lines_of(RECORDS))
    for number, command in enumerate(("saved", "parted --split test", "files")):
        out = prepared(tmp_path, f"{tmp_path / command}", f"out{number}")
        check_packing(out / "all", vocab, RECORDS)
    assert json.loads((out / "all" / "meta.json").read_text())["inputs"][0]["sha256"]


def test_text_a_document_a_line(tmp_path: Path, vocab: Path):
    """Documents without an id are split by their place in the input."""
    lines = [record["abstract"].strip() for record in RECORDS]
    path = write(tmp_path / "x.txt.xz", "\n\n".join(lines).encode())
    out = prepared(tmp_path, str(path))
    for split in ("train", "validation"):
        chosen = [
            {"text": line}
            for number, line in enumerate(lines)
            if in_validation(0, f"0:{2 * number + 1}", 0.1) == (split == "validation")
        ]
        array = np.load(out / "all" / f"{split}.npy")
        assert array.ravel().tolist() == encoded(vocab, chosen, ("text",))[: array.size]


def test_several_files_and_chosen_fields(tmp_path: Path, vocab: Path):
    a, b = write(tmp_path / "a.jsonl", lines_of(RECORDS[:70])), write(tmp_path / "b.csv.gz", csv_of(RECORDS[70:]))
    out = prepared(tmp_path, f"--input {a} {b} --text abstract,categories")
    check_packing(out / "all", vocab, RECORDS, fields=("abstract", "categories"))
    inputs = json.loads((out / "all" / "meta.json").read_text())["inputs"]
    assert [i["sha256"] for i in inputs] == [sha256(p.read_bytes()).hexdigest() for p in (a, b)]


@pytest.mark.parametrize("exclusive", ["", "--exclusive false", "--exclusive"])
def test_domains_by_primary_category(tmp_path: Path, vocab: Path, exclusive: str):
    path = write(tmp_path / "x.jsonl", lines_of(RECORDS))
    out = prepared(tmp_path, f"{path} {DOMAINS} {exclusive}")
    wanted = {
        "math": ["math.AG", "math.NT cs.LG"],
        "physics": ["hep-th", "astro-ph.GA"],
        "cs": ["cs.LG", "cs.CL math.AG"],
    }
    for name, values in wanted.items():
        values = [value for value in values if exclusive != "--exclusive" or " " not in value]
        check_packing(out / name, vocab, [record for record in RECORDS if record["categories"] in values])
    meta = json.loads((out / "physics" / "meta.json").read_text())
    assert meta["rule"] == "categories:hep,astro-ph"
    assert meta["skipped"] == {"outside": 17} | ({"cross_listed": 34} if exclusive == "--exclusive" else {})


def test_a_domain_may_be_given_in_several_ways(tmp_path: Path, vocab: Path):
    path = write(tmp_path / "x.jsonl", lines_of(RECORDS))
    first = prepared(tmp_path, f"{path} --domain math=categories:math. p=categories:hep,astro-ph", "a")
    then = prepared(
        tmp_path, f"--input={path} --domain math=categories:math. --domain 'p=categories:hep, astro-ph'", "b"
    )
    assert {k: v for k, v in contents(first).items() if k.endswith("npy")} == {
        k: v for k, v in contents(then).items() if k.endswith("npy")
    }


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    """Blocks so small that this text has many."""
    monkeypatch.setattr(streams.line_blocks, "__defaults__", (500,))
    monkeypatch.setattr(streams, "CHUNK", 200)


@pytest.mark.usefixtures("small_blocks")
def test_processes_do_not_change_anything(tmp_path: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "x.jsonl.gz", lines_of(RECORDS))
    made = [contents(prepared(tmp_path, f"{path} {DOMAINS} --workers {n}", f"w{n}")) for n in (1, 3)]
    monkeypatch.setattr(workers, "FEW", 10**6)  # none at all
    made.append(contents(prepared(tmp_path, f"{path} {DOMAINS}", "w0")))
    for files in made:
        assert files is not None
        for name in ("run.json", "results.json", "FINISHED"):  # times and commands
            del files[name]
    assert made[0] == made[1] == made[2]
    check_packing(tmp_path / "w3" / "cs", vocab, [r for r in RECORDS if r["categories"].startswith("cs")])


def test_the_split_is_seeded_and_by_document(tmp_path: Path, vocab: Path):
    """Twice the same document, in whatever order, is on the same side; another seed holds out others."""
    sides = [[in_validation(seed, r["id"], 0.1) for r in documents(3000)] for seed in (0, 0, 1)]
    assert sides[0] == sides[1] != sides[2]
    assert abs(np.mean(sides[0]) - 0.1) < 0.02
    path = write(tmp_path / "x.jsonl", lines_of(RECORDS))
    reverse = write(tmp_path / "y.jsonl", lines_of(RECORDS[::-1]))
    counts = []
    for number, command in enumerate((f"{path}", f"{reverse}", f"{path} --seed 1", f"{path} --validation 0.4")):
        meta = json.loads((prepared(tmp_path, command, f"o{number}") / "all" / "meta.json").read_text())
        counts.append((meta["splits"]["validation"]["documents"], meta["splits"]["validation"]["tokens"]))
    assert counts[0] == counts[1] != counts[2]
    assert counts[3][0] > 2 * counts[0][0]


def test_special_tokens_in_a_text_are_text(tmp_path: Path, vocab: Path):
    records = [{**r, "abstract": f"[MASK] of [SEP] {r['abstract']}"} for r in RECORDS]
    out = prepared(tmp_path, str(write(tmp_path / "x.jsonl", lines_of(records))))
    meta = json.loads((out / "all" / "meta.json").read_text())
    array = np.load(out / "all" / "train.npy")
    assert not (array == meta["mask_id"]).any()
    assert (array == meta["separator_id"]).sum() <= meta["splits"]["train"]["documents"]


def test_malformed_lines_are_counted(tmp_path: Path, vocab: Path):
    bad = b'{"id": 1\n[1]\n\xff\n{"title": "a"}\n{"title": null, "abstract": "a"}\n'
    bad += b'{"title": "\\ud800", "abstract": "a"}\n'
    blank = b'{"title": " ", "abstract": "\\n"}\n'
    path = write(tmp_path / "x.jsonl", lines_of(RECORDS[:60]) + bad + blank + lines_of(RECORDS[60:]))
    out = prepared(tmp_path, f"--skip_bad {path}")
    check_packing(out / "all", vocab, RECORDS)
    assert json.loads((out / "all" / "meta.json").read_text())["skipped"] == {"bad": 6, "empty": 1}
