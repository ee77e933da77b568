"""Diversity and memorisation by hand, and against plain Python sets."""

import math

import numpy as np
import pytest

from gtl.evaluate import memorisation as module
from gtl.evaluate.diversity import diversity, token_entropy
from gtl.evaluate.memorisation import copied_runs, memorisation
from gtl.evaluate.ngrams import Windows, member


def grams(row: np.ndarray, n: int) -> list[tuple[int, ...]]:
    """All n-grams of a row that hold no negative token."""
    found = [tuple(row[i : i + n].tolist()) for i in range(len(row) - n + 1)]
    return [gram for gram in found if min(gram) >= 0]


def random_rows(seed: int, *shape: int, tokens: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1, tokens, shape)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_hashes_are_the_windows(n: int):
    """Two windows have one hash exactly where they hold the same tokens, wherever they stand."""
    x = random_rows(0, 50, 9)
    windows = Windows(x)
    plain = [gram for row in x for gram in grams(row, n)]
    assert len(plain) == len(windows.hashes(n)) == len(windows.starts(n))
    assert len(set(zip(plain, windows.hashes(n).tolist(), strict=True))) == len(set(plain))
    assert len(np.unique(windows.hashes(n))) == len(set(plain))


def test_hashes_of_large_tokens():
    x = np.random.default_rng(0).integers(0, 30_522, (500, 64))
    assert len(np.unique(Windows(x).hashes(2))) == len({gram for row in x for gram in grams(row, 2)})


def test_member():
    random = np.random.default_rng(0)
    values = random.integers(0, 2**63, 1000, dtype=np.uint64)
    among = np.concatenate([values[:300], random.integers(0, 2**63, 50, dtype=np.uint64)])
    assert np.array_equal(member(values, among), np.isin(values, among))
    assert not member(values, among[:0]).any()


def test_diversity_by_hand():
    x = np.array([[1, 2, 1, 2, 1, 2], [3, 4, 5, 6, -1, -1]])
    found = diversity(x, most=2)
    assert found["distinct_1"] == 6 / 10
    assert found["distinct_2"] == 5 / 8  # 12, 21, 34, 45, 56 of five and three
    assert found["seq_rep_2"] == pytest.approx((3 / 5 + 0) / 2)
    assert found["repeated_2"] == 6 / 10  # all six of the first row
    assert found["token_entropy"] == pytest.approx((math.log(2) + math.log(4)) / 2)
    shares = np.array([0.3, 0.3, 0.1, 0.1, 0.1, 0.1])
    assert found["corpus_entropy"] == pytest.approx(float(-(shares * np.log(shares)).sum()))


def test_repetition_counts_covered_tokens():
    """4-grams: 1 2 3 4 stands twice, so eight of the nine tokens are inside one; the same in another row is none."""
    x = np.array([[1, 2, 3, 4, 9, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9]])
    found = diversity(x)
    assert found["repeated_4"] == 8 / 18
    assert found["seq_rep_4"] == pytest.approx((1 / 6) / 2)
    assert found["distinct_4"] == 10 / 12


def test_short_sequences_have_no_n_grams():
    found = diversity(np.array([[1, 2], [3, 4]]))
    assert found["distinct_4"] == found["seq_rep_4"] == found["repeated_4"] == 0
    assert token_entropy(np.full((2, 3), -1)) == 0


def test_memorisation_by_hand():
    """Runs from each place: 5 6 7 8 of the first sample stand in the training data, nothing of the second but 9."""
    train = np.array([[1, 5, 6, 7, 8, 2], [3, 3, 3, 9, 3, 3]])
    x = np.array([[5, 6, 7, 8, 3, 0], [9, 9, 0, 0, 0, 0]])
    expected = [[4, 3, 2, 1, 1, 0], [1, 1, 0, 0, 0, 0]]
    assert copied_runs(Windows(x), train).tolist() == expected
    found = memorisation(x, train, (1, 2, 4, 8))
    assert found == {
        "copied_1": 7 / 12, "copied_2": 3 / 10, "copied_4": 1 / 6, "longest_copy": 2.5, "longest_copy_max": 4.0,
    }  # fmt: skip


@pytest.mark.parametrize("chunk", [20, 2**21])
def test_memorisation_against_sets(monkeypatch: pytest.MonkeyPatch, chunk: int):
    """Also where the training data is looked at in many chunks."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    train, x = random_rows(1, 40, 9), random_rows(2, 30, 11)
    done: list[float] = []
    found = memorisation(x, train, (2, 4, 8), done.append)
    assert done[-1] == 1.0
    for n in (2, 4, 8):
        known = {gram for row in train for gram in grams(row, n)}
        mine = [gram for row in x for gram in grams(row, n)]
        assert found[f"copied_{n}"] == pytest.approx(sum(gram in known for gram in mine) / len(mine))
    longest = []
    for row in x:
        lengths = [n for n in range(1, 10) if set(grams(row, n)) & {g for r in train for g in grams(r, n)}]
        longest.append(max(lengths, default=0))
    assert found["longest_copy"] == pytest.approx(float(np.mean(longest)))
    assert found["longest_copy_max"] == max(longest)


def test_a_copy_is_seen_whole():
    train = np.random.default_rng(0).integers(0, 500, (200, 32))
    found = memorisation(train[:10], train)
    assert found == {f"copied_{n}": 1.0 for n in (4, 8, 12)} | {"longest_copy": 32.0, "longest_copy_max": 32.0}
