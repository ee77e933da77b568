"""Token files: what is read, what is refused, and how rows are split."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gtl.data.tokens import check_tokens, read_tokens, split, write_tokens


@pytest.mark.parametrize("top", [1, 255, 256, 70_000])
def test_round_trip(tmp_path: Path, top: int):
    x = torch.tensor([[0, 1, top], [top, 0, 1]])
    write_tokens(tmp_path / "x.npy", x)
    assert torch.equal(read_tokens(tmp_path / "x.npy"), x)
    assert read_tokens(str(tmp_path / "x.npy")).dtype == torch.int64
    stored = np.load(tmp_path / "x.npy", allow_pickle=False)
    assert stored.itemsize == (1 if top < 256 else 2 if top < 65_536 else 4)
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


def test_text(tmp_path: Path):
    path = tmp_path / "x.txt"
    path.write_text("0 1  2\n\n3\t4 5\n")
    assert read_tokens(path).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint64"])
def test_integer_types(tmp_path: Path, dtype: str):
    np.save(tmp_path / "x.npy", np.array([[1, 2], [3, 4]], dtype=dtype))
    assert read_tokens(tmp_path / "x.npy").tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_text_is_refused_for_its_rows(tmp_path: Path, text: str):
    (tmp_path / "x.txt").write_text(text)
    with pytest.raises(ValueError, match=r"x\.txt.*(0 sequences|no sequences|empty)"):
        check_tokens(read_tokens(tmp_path / "x.txt"), 4, 3, str(tmp_path / "x.txt"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0 1 2\n0 1\n", "line 2: 2 tokens where the first sequence has 3"),
        ("0 1\n\n0 1 2\n", "line 3: 3 tokens"),
        ("0 1\n0 x\n", "line 2: token ids must be integers"),
        ("0 1.5\n", "line 1: token ids must be integers"),
    ],
)
def test_text_that_is_refused(tmp_path: Path, text: str, says: str):
    (tmp_path / "x.txt").write_text(text)
    with pytest.raises(ValueError, match=rf"x\.txt, {says}"):
        read_tokens(tmp_path / "x.txt")


ARRAYS = {
    "floats": np.zeros((2, 3)),
    "one dimension": np.zeros(3, dtype=int),
    "three dimensions": np.zeros((2, 3, 4), dtype=int),
    "booleans": np.zeros((2, 3), dtype=bool),
    "words": np.array([["a", "b"]]),
    "ragged objects": np.array([[1, 2], [3]], dtype=object),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_that_are_refused(tmp_path: Path, kind: str):
    np.save(tmp_path / "x.npy", ARRAYS[kind], allow_pickle=True)
    with pytest.raises(ValueError, match=r"x\.npy"):
        read_tokens(tmp_path / "x.npy")


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 a zip file", b"\x93NUMPY\x01\x00"])
def test_files_that_are_no_arrays(tmp_path: Path, content: bytes):
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.npy"):
        read_tokens(tmp_path / "x.npy")


def test_a_cut_array(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.zeros((100, 3), dtype=int))
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:-50])
    with pytest.raises(ValueError, match=r"x\.npy"):
        read_tokens(tmp_path / "x.npy")


def test_missing_and_binary_files(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"x\.npy: no such file"):
        read_tokens(tmp_path / "x.npy")
    with pytest.raises(FileNotFoundError):
        read_tokens(tmp_path)
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"x\.txt: neither"):
        read_tokens(tmp_path / "x.txt")


def test_clean_data_passes():
    x = torch.tensor([[0, 2], [4, 0]])
    assert check_tokens(x, 5, 3, length=2) is x
    assert check_tokens(x[:1], 5, 3, least=1) is not None


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.zeros(0, 3, dtype=torch.long), "0 sequences; at least 2"),
        (torch.zeros(1, 3, dtype=torch.long), "1 sequence; at least 2"),
        (torch.tensor([[0, 5, 1], [0, 1, 2]]), r"token id 5 is outside 0 \.\. 4"),
        (torch.tensor([[0, -1, 1], [0, 1, 2]]), "token id -1 is outside"),
        (torch.tensor([[0, 3, 1], [0, 1, 2]]), "holds the mask id 3"),
        (torch.tensor([[0, 1], [1, 0]]), "sequences of 2 tokens; expected 3"),
    ],
)
def test_data_that_is_refused(x: torch.Tensor, says: str):
    with pytest.raises(ValueError, match=f"^here: {says}"):
        check_tokens(x, 5, 3, "here", length=3)


def test_sequences_without_tokens():
    """The error speaks of their length, for there are enough of them."""
    with pytest.raises(ValueError, match=r"here: .*(0 tokens|no tokens|length|empty)"):
        check_tokens(torch.zeros(4, 0, dtype=torch.long), 5, 3, "here")


@pytest.mark.parametrize("count", [2, 3, 10, 101])
@pytest.mark.parametrize("fraction", [1e-6, 0.1, 0.4, 0.9, 5.0])
def test_split(count: int, fraction: float):
    """Every row on one side only, at least one on either side, at most half held out."""
    x = torch.arange(2 * count).view(count, 2)
    train, held_out = split(x, fraction, seed=1)
    assert sorted(torch.cat([train, held_out])[:, 0].tolist()) == x[:, 0].tolist()
    assert len(held_out) == min(max(1, round(fraction * count)), count // 2)
    assert len(train) >= len(held_out) >= 1
    assert torch.equal(split(x, fraction, seed=1)[1], held_out)


def test_split_depends_on_the_seed():
    x = torch.arange(200).view(100, 2)
    assert not torch.equal(split(x, 0.5, seed=0)[0], split(x, 0.5, seed=1)[0])


def test_ids_that_a_model_never_gives(monkeypatch: pytest.MonkeyPatch):
    """Named wherever they stand."""
    monkeypatch.setattr("gtl.data.tokens.CHUNK", 6)
    x = torch.tensor([[0, 1, 2]] * 5 + [[0, 3, 1]])
    assert check_tokens(x, 6, 4, "x.npy", banned=(5,)) is x
    with pytest.raises(ValueError, match=r"x\.npy: holds the id 3, which the model never gives"):
        check_tokens(x, 6, 4, "x.npy", banned=(5, 3))
