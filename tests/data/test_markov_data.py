"""Markov chains: the named matrices, matrix files, and sequences that follow them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gtl.data.markov import check_matrix, make_matrix, read_matrix, sample_chain


@pytest.mark.parametrize("vocabulary", [2, 3, 5])
@pytest.mark.parametrize("spec", ["diagonal:0.1", "diagonal:1", "anti-diagonal:0.6", "dirichlet:4", "dirichlet:0.3"])
def test_named_matrices_are_row_stochastic(spec: str, vocabulary: int):
    matrix = make_matrix(spec, vocabulary)
    assert matrix.shape == (vocabulary, vocabulary)
    assert matrix.dtype == torch.float64
    assert (matrix >= 0).all()
    assert torch.allclose(matrix.sum(1), torch.ones(vocabulary).double(), atol=1e-12)


def test_diagonal_and_anti_diagonal():
    matrix = make_matrix("diagonal:0.8", 5)
    assert torch.allclose(matrix.diagonal(), torch.tensor(0.8).double())
    assert torch.allclose(matrix[~torch.eye(5).bool()], torch.tensor(0.05).double())
    assert torch.equal(make_matrix("anti-diagonal:0.8", 5), matrix.flip(1))


def test_dirichlet_is_seeded():
    first = make_matrix("dirichlet:2", 4, seed=0)
    assert torch.equal(first, make_matrix("dirichlet:2", 4, seed=0))
    assert not torch.equal(first, make_matrix("dirichlet:2", 4, seed=1))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("diagonal", "expected NAME:NUMBER"),
        ("diagonal:", "expected NAME:NUMBER"),
        ("diagonal:high", "expected NAME:NUMBER"),
        ("diagonal:1.2", "probability"),
        ("diagonal:-0.1", "probability"),
        ("diagonal:nan", "probability"),
        ("anti-diagonal:7", "probability"),
        ("dirichlet:0", "positive"),
        ("dirichlet:-1", "positive"),
        ("dirichlet:nan", "positive"),
        ("dirichlet:inf", "dirichlet:inf"),
        ("circulant:0.5", "unknown family"),
        ("0.8", "expected NAME:NUMBER"),
    ],
)
def test_names_that_are_refused(spec: str, says: str):
    with pytest.raises(ValueError, match=says):
        read_matrix(spec, 3)


@pytest.mark.parametrize("family", ["diagonal", "anti-diagonal", "dirichlet"])
@pytest.mark.parametrize("vocabulary", [1, 0, -2])
def test_too_few_states(family: str, vocabulary: int):
    with pytest.raises(ValueError, match=f"V={vocabulary}|at least two states"):
        read_matrix(f"{family}:0.5", vocabulary)


def test_a_matrix_file(tmp_path: Path):
    values = np.array([[0.25, 0.75], [1.0, 0.0]])
    np.save(tmp_path / "m.npy", values.astype(np.float32))
    matrix = read_matrix(str(tmp_path / "m.npy"), vocabulary=5)  # the file knows its own size
    assert matrix.dtype == torch.float64
    assert matrix.tolist() == values.tolist()


def test_rounded_rows_are_made_exact(tmp_path: Path):
    third = np.full((3, 3), 0.3333333)
    np.save(tmp_path / "m.npy", third)
    assert torch.allclose(read_matrix(str(tmp_path / "m.npy"), 3).sum(1), torch.ones(3).double(), atol=1e-15)


ARRAYS = {
    "not row-stochastic": (np.array([[0.5, 0.5], [0.5, 0.6]]), "rows must sum to 1, row 1"),
    "column-stochastic": (np.array([[0.9, 0.5], [0.1, 0.5]]), "rows must sum to 1"),
    "not square": (np.full((2, 3), 1 / 3), "not square"),
    "one state": (np.ones((1, 1)), "at least two states"),
    "a vector": (np.array([0.5, 0.5]), "not square"),
    "a number": (np.array(1.0), "not square"),
    "negative": (np.array([[1.5, -0.5], [0.5, 0.5]]), "not negative"),
    "not a number": (np.array([[np.nan, 1.0], [0.5, 0.5]]), "finite"),
    "infinite": (np.array([[np.inf, 0.0], [0.5, 0.5]]), "finite"),
    "objects": (np.array([[0.5, 0.5], [0.5, 0.5]], dtype=object), "not an array of numbers"),
    "words": (np.array([["a", "b"], ["c", "d"]]), "not an array of numbers"),
    "empty": (np.zeros((0, 0)), "not square"),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_matrix_files_that_are_refused(tmp_path: Path, kind: str):
    values, says = ARRAYS[kind]
    np.save(tmp_path / "m.npy", values, allow_pickle=True)
    with pytest.raises(ValueError, match=rf"m\.npy.*{says}"):
        read_matrix(str(tmp_path / "m.npy"), 2)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 a zip file"])
def test_files_that_are_no_arrays(tmp_path: Path, content: bytes):
    (tmp_path / "m.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"m\.npy"):
        read_matrix(str(tmp_path / "m.npy"), 2)


def test_a_missing_matrix_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"m\.npy: no such file"):
        read_matrix(str(tmp_path / "m.npy"), 2)


def test_check_matrix_keeps_what_is_right():
    matrix = make_matrix("dirichlet:1", 4)
    assert torch.equal(check_matrix(matrix, "m"), matrix / matrix.sum(1, keepdim=True))


def test_sequences_follow_the_chain():
    """First states uniform, transitions as in the matrix, each within four standard errors."""
    matrix = torch.tensor([[0.2, 0.8, 0.0], [0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).double()
    x = sample_chain(matrix, 20_000, 4, torch.Generator().manual_seed(0))
    assert x.shape == (20_000, 4)
    assert x.dtype == torch.int64
    assert torch.allclose(x[:, 0].bincount() / len(x), torch.tensor(1 / 3), atol=0.014)
    counts = torch.zeros(3, 3).index_put_((x[:, :-1].flatten(), x[:, 1:].flatten()), torch.tensor(1.0), True)
    error = (matrix * (1 - matrix) / counts.sum(1, keepdim=True)).sqrt()
    assert ((counts / counts.sum(1, keepdim=True) - matrix).abs() <= 4 * error + 1e-12).all()
    assert not counts[matrix == 0].any()  # a forbidden transition never happens


def test_sequences_are_seeded():
    matrix = make_matrix("diagonal:0.5", 5)
    draws = [sample_chain(matrix, 50, 6, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
