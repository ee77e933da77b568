"""Prepared folders: opened without a copy, refused when they were changed; tokenizers of every kind."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from gtl.data.prepared import check_meta, read_meta, same_tokens
from gtl.data.tokenizer import load_tokenizer
from gtl.data.tokens import check_tokens, read_split, read_tokens, split, write_tokens
from texts import documents, lines_of, vocabulary, write, write_vocabulary
from typed import gtl


def prepare(folder: Path, name: str, tokenizer: Path, more: str = "") -> Path:
    """One domain of small texts."""
    write(folder / "x.jsonl", lines_of(documents(80)))
    gtl(f"prepare {folder / 'x.jsonl'} --tokenizer {tokenizer} --length 8 {more}", "--out", folder / name)
    return folder / name / "all"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path, "out", write_vocabulary(tmp_path / "vocab.txt"))


def test_what_is_read(folder: Path):
    meta = read_meta(folder)
    assert meta is not None
    assert (meta.domain, meta.vocabulary, meta.length, meta.dtype) == ("all", len(vocabulary()), 8, "uint16")
    assert (meta.pad_id, meta.separator_id, meta.mask_id) == (0, 3, 4)
    train, held_out = read_split(folder, 0.5)
    assert train.dtype == torch.uint16
    assert np.array_equal(train.numpy(), np.load(folder / "train.npy"))
    assert np.array_equal(held_out.numpy(), np.load(folder / "validation.npy"))
    assert torch.equal(read_tokens(folder, verify=True), train)
    rows = torch.tensor([3, 0, 3])
    assert torch.equal(train[rows].long(), train.long()[rows])
    check_tokens(train, meta.vocabulary, meta.mask_id)
    assert read_meta(folder.parent) is None
    with pytest.raises(ValueError, match="no split 'test'"):
        read_tokens(folder, "test")
    with pytest.raises(FileNotFoundError, match="choose one of its domains: all"):
        read_tokens(folder.parent)


def test_other_files_are_split_by_rows(tmp_path: Path):
    x = torch.arange(40).view(20, 2)
    write_tokens(tmp_path / "x.npy", x)
    assert all(torch.equal(a, b) for a, b in zip(read_split(tmp_path / "x.npy", 0.2, 3), split(x, 0.2, 3), strict=True))


def test_nothing_is_copied(tmp_path: Path, folder: Path):
    """Opening and checking a large array takes little memory."""
    meta = json.loads((folder / "meta.json").read_text())
    array = np.lib.format.open_memmap(folder / "train.npy", "w+", np.dtype("uint16"), (4_000_000, 8))
    array[:] = 7
    array.flush()
    meta["splits"]["train"] |= {"segments": 4_000_000, "bytes": (folder / "train.npy").stat().st_size}
    (folder / "meta.json").write_text(json.dumps(meta))
    tracemalloc.start()
    x = read_tokens(folder)
    assert x.shape == (4_000_000, 8)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    check_tokens(x, 20, 4)
    array[-1, -1] = 4
    array.flush()
    with pytest.raises(ValueError, match="holds the mask id 4"):
        check_tokens(x, 20, 4)


def test_changed_arrays(folder: Path):
    file = folder / "train.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=r"train\.npy: \d+ bytes where meta\.json says \d+; prepare"):
        read_tokens(folder)
    file.write_bytes(whole.replace(b"<u2", b"<i2"))
    with pytest.raises(ValueError, match=r"train\.npy: int16 of shape"):
        read_tokens(folder)
    file.write_bytes(whole[:-2] + b"\x07\x00" if whole[-2:] != b"\x07\x00" else whole[:-2] + b"\x08\x00")
    read_tokens(folder)
    with pytest.raises(ValueError, match=r"train\.npy: has changed since"):
        read_tokens(folder, verify=True)
    file.write_bytes(b"x" * len(whole))
    with pytest.raises(ValueError, match=r"train\.npy: not the array"):
        read_tokens(folder)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"train\.npy: no such file"):
        read_tokens(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"splits": {"train": 3}}'])
def test_a_damaged_meta(folder: Path, text: str):
    (folder / "meta.json").write_text(text)
    with pytest.raises(ValueError, match=r"meta\.json: not what gtl prepare wrote"):
        read_tokens(folder)


def test_models_and_domains_that_do_not_go_together(tmp_path: Path, folder: Path):
    meta = read_meta(folder)
    assert meta is not None
    size = meta.vocabulary
    for good in ((size, 4), (size + 1, size), (size, None), (size + 5, 4)):
        check_meta(meta, *good, "x")
    for bad in ((size - 1, 4), (size, 5), (3, None)):
        with pytest.raises(ValueError, match=r"x: prepared with .* the model has"):
            check_meta(meta, *bad, "x")
    longer = read_meta(prepare(tmp_path, "longer", tmp_path / "vocab.txt", "--length 9"))
    other = read_meta(prepare(tmp_path, "other", write_vocabulary(tmp_path / "fewer.txt", ["z"])))
    assert same_tokens({"a": None, "b": meta, "c": meta}) is meta
    with pytest.raises(ValueError, match=r"a and b were prepared with different lengths \(8 and 9\)"):
        same_tokens({"a": meta, "b": longer})
    with pytest.raises(ValueError, match="a and b were prepared with different tokenizers"):
        same_tokens({"a": meta, "b": other})


def test_the_saved_tokenizer_decodes(folder: Path):
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.mask_token_id, tokenizer.sep_token_id) == (4, 3)
    words = tokenizer.decode(read_tokens(folder)[0].tolist())
    assert documents(1)[0]["title"].lower()[:8] in tokenizer.decode(read_tokens(folder).long().flatten().tolist())
    assert "##" not in words
    for path in (folder / "tokenizer.json", folder.parent):
        again = load_tokenizer(str(path))
        assert again.get_vocab() == tokenizer.get_vocab()
        assert again.mask_token == "[MASK]"


def test_a_tokenizer_without_anything_beside_it(tmp_path: Path, folder: Path):
    alone = tmp_path / "alone.json"
    alone.write_bytes((folder / "tokenizer.json").read_bytes())
    assert load_tokenizer(str(alone)).mask_token_id == 4
    (tmp_path / "bert").mkdir()
    write_vocabulary(tmp_path / "bert" / "vocab.txt")
    assert load_tokenizer(str(tmp_path / "bert")).mask_token_id == 4


def test_cased_and_uncased(tmp_path: Path):
    text = "".join(f"{word}\n" for word in [*vocabulary(), "We"])
    (tmp_path / "cased.txt").write_text(text)
    assert load_tokenizer(str(tmp_path / "cased.txt")).tokenize("We we") == ["We", "we"]
    assert load_tokenizer(str(write_vocabulary(tmp_path / "vocab.txt"))).tokenize("We we") == ["we", "we"]


def test_a_mask_is_added(tmp_path: Path):
    vocab = write_vocabulary(tmp_path / "vocab.txt", ["[MASK]"])
    meta = read_meta(prepare(tmp_path, "out", vocab, "--mask_token '<mask>' --separator '[CLS]'"))
    assert meta is not None
    assert meta.mask_id == meta.vocabulary - 1 == len(vocabulary()) - 1
    assert meta.separator_id == 2
    assert load_tokenizer(str(tmp_path / "out" / "all")).mask_token_id == meta.mask_id


@pytest.mark.parametrize(("size", "dtype"), [(65_535, "uint16"), (65_536, "uint32"), (100_000, "uint32")])
def test_wide_vocabularies(tmp_path: Path, size: int, dtype: str):
    """Ids beyond 65,535 are kept as they are; the last one is in use."""
    words = [word for word in vocabulary() if word != "stars"]
    words += [f"filler{number}" for number in range(size - len(words) - 1)]
    (tmp_path / "wide.txt").write_text("".join(f"{word}\n" for word in [*words, "stars"]))
    folder = prepare(tmp_path, "out", tmp_path / "wide.txt")
    meta = read_meta(folder)
    assert meta is not None
    assert (meta.vocabulary, meta.dtype) == (size, dtype)
    x = read_tokens(folder)
    assert str(x.dtype) == f"torch.{dtype}"
    assert int(x.long().max()) == size - 1
    check_tokens(x, meta.vocabulary, meta.mask_id)
