"""Markov chains: x_1 ~ uniform, P(x_{l+1} = j | x_l = i) = T[i, j].

Named families of transition matrices over V states:

    diagonal        T[i, i] = d, the rest of each row equal                       (the paper's benchmark: 0.1 and 0.8)
    anti-diagonal   T[i, V-1-i] = d, the rest of each row equal
    dirichlet       each row drawn from Dirichlet(alpha, ..., alpha)
"""

from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from gtl.categorical import categorical

__all__ = ["check_matrix", "make_matrix", "read_matrix", "sample_chain"]


def make_matrix(spec: str, vocabulary: int, seed: int = 0) -> Tensor:
    """A transition matrix (V, V) by name: `diagonal:0.8`, `anti-diagonal:0.6` or `dirichlet:4` (drawn with `seed`)."""
    family, _, number = spec.partition(":")
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"matrix {spec!r}: expected NAME:NUMBER, for example diagonal:0.8") from None
    if vocabulary < 2:
        raise ValueError(f"matrix {spec!r}: needs at least two states, got V={vocabulary}")
    if family == "dirichlet":
        if not value > 0:
            raise ValueError(f"matrix {spec!r}: the Dirichlet parameter must be positive")
        rows = np.random.default_rng(seed).dirichlet([value] * vocabulary, size=vocabulary)
        return check_matrix(torch.from_numpy(rows), spec)
    if family not in ("diagonal", "anti-diagonal"):
        raise ValueError(f"matrix {spec!r}: unknown family; choose diagonal, anti-diagonal, dirichlet, or a .npy file")
    if not 0 <= value <= 1:
        raise ValueError(f"matrix {spec!r}: needs a probability")
    matrix = torch.full((vocabulary, vocabulary), (1 - value) / (vocabulary - 1), dtype=torch.float64)
    index = torch.arange(vocabulary)
    matrix[index, index if family == "diagonal" else vocabulary - 1 - index] = value
    return matrix


def check_matrix(matrix: Tensor, name: str) -> Tensor:
    """Refuses a matrix that is not square and row-stochastic; returns it as float64."""
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) < 2:
        raise ValueError(f"matrix {name}: shape {tuple(matrix.shape)} is not square with at least two states")
    if not torch.isfinite(matrix).all() or bool((matrix < 0).any()):
        raise ValueError(f"matrix {name}: entries must be finite and not negative")
    sums = matrix.double().sum(1)
    if bool(((sums - 1).abs() > 1e-6).any()):
        raise ValueError(f"matrix {name}: rows must sum to 1, row {int((sums - 1).abs().argmax())} does not")
    return matrix.double() / sums[:, None]


def read_matrix(spec: str, vocabulary: int, seed: int = 0) -> Tensor:
    """A transition matrix from a .npy file or by name (`make_matrix`)."""
    if not spec.endswith(".npy"):
        return make_matrix(spec, vocabulary, seed)
    if not Path(spec).is_file():
        raise FileNotFoundError(f"matrix {spec}: no such file")
    try:
        values = np.load(spec, allow_pickle=False).astype(np.float64)
    except (ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"matrix {spec}: not an array of numbers ({error})") from None
    return check_matrix(torch.from_numpy(values), spec)


def sample_chain(transition: Tensor, count: int, length: int, generator: torch.Generator | None = None) -> Tensor:
    """`count` sequences of `length` states, the first one uniform: (count, length), int64."""
    log_t = transition.double().log()
    size = len(log_t)
    x = torch.empty(count, length, dtype=torch.long)
    x[:, 0] = categorical(torch.zeros(count, size), generator)
    for at in range(1, length):
        x[:, at] = categorical(log_t[x[:, at - 1]], generator)
    return x
