"""General D3PM noise: any row-stochastic matrix Q, or a named one.

    uniform        every id equally likely                         absorbing      the last id swallows every token
    gaussian:W     Q[i, j] ~ exp(-(i - j)^2 / (2 W^2)), j != i      banded:W       equal for 0 < |i - j| <= W

The last two are symmetric (what is left of a row stays on its diagonal), so their stationary law is uniform. The paper
writes columns that sum to one; our matrices, like our files, have rows that do. The transition kernel between two times
is a matrix exponential, by eigenvectors where Q is symmetric.
"""

from typing import Any

import torch
from torch import Tensor

from gtl.categorical import categorical
from gtl.data.markov import check_matrix
from gtl.process.mixing import Mixing, draw_rows
from gtl.schedule import Schedule

__all__ = ["D3PM", "named_matrix"]


def named_matrix(name: str, size: int) -> Tensor:
    """A row-stochastic matrix (K, K) by name, float64."""
    family, _, number = name.partition(":")
    if family == "uniform":
        return torch.full((size, size), 1 / size, dtype=torch.float64)
    if family == "absorbing":
        return torch.zeros(size, size, dtype=torch.float64).index_fill(1, torch.tensor([size - 1]), 1.0)
    if family not in ("gaussian", "banded"):
        raise ValueError(f"matrix {name!r}: choose uniform, absorbing, gaussian:WIDTH or banded:WIDTH")
    try:
        width = float(number)
    except ValueError:
        raise ValueError(f"matrix {name!r}: expected {family}:WIDTH, for example {family}:1") from None
    if not width > 0 or (family == "banded" and width < 1):
        raise ValueError(f"matrix {name!r}: the width must be positive, and at least 1 for a band")
    place = torch.arange(size, dtype=torch.float64)
    gap = (place[:, None] - place).abs()
    weight = torch.exp(-(gap**2) / (2 * width**2)) if family == "gaussian" else (gap <= width).double()
    weight.fill_diagonal_(0.0)
    matrix = weight / weight.sum(1).max()
    return matrix + torch.diag(1 - matrix.sum(1))


class D3PM(Mixing):
    """exp((tau_t - tau_s)(Q - I) / gap)."""

    name = "d3pm"

    def __init__(
        self, num_ids: int, matrix: str | list[list[float]] = "gaussian:1", schedule: Schedule | None = None
    ) -> None:
        """Sets Q, by name or as rows that sum to one."""
        super().__init__(num_ids, schedule)
        given = named_matrix(matrix, num_ids) if isinstance(matrix, str) else torch.tensor(matrix, dtype=torch.float64)
        q = check_matrix(given, "Q")
        if len(q) != num_ids:
            raise ValueError(f"Q is {tuple(q.shape)}; the process has {num_ids} ids")
        self.matrix = matrix
        if matrix == "absorbing":
            self.mask_id = num_ids - 1
        values = torch.linalg.eigvals(q)
        slow = (1 - values.real).sort().values[1]
        if not slow > 1e-9:
            raise ValueError("Q: has more than one stationary law, so the noise would not forget where it started")
        self.generator = (q - torch.eye(num_ids, dtype=torch.float64)) / slow
        self.symmetric = bool(torch.allclose(q, q.T, atol=1e-12))
        if self.symmetric:
            self.eigenvalues, self.vectors = torch.linalg.eigh(self.generator)
        far = torch.linalg.matrix_exp(self.generator * 64)
        self.stationary = far.mean(0) / far.mean(0).sum()

    def kernel(self, s: Tensor, t: Tensor) -> Tensor:
        """p(z_t = j | z_s = i): s and t (B,) -> (B, K, K)."""
        spans, which = (self.sigma(t) - self.sigma(s)).clamp(min=0.0).unique(return_inverse=True)
        span = spans[:, None]
        if self.symmetric:
            values, vectors = self.eigenvalues.to(t.device), self.vectors.to(t.device)
            matrix = (vectors * torch.exp(span * values).unsqueeze(1)) @ vectors.T
        else:
            matrix = torch.linalg.matrix_exp(span.unsqueeze(-1) * self.generator.to(t.device))
        matrix = matrix.clamp(min=0.0)
        return (matrix / matrix.sum(-1, keepdim=True))[which]

    def corrupt(self, x: Tensor, t: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return draw_rows(self.kernel(torch.zeros_like(t), t), x, generator)

    def prior(self, shape: tuple[int, int], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
        return categorical(self.stationary.log().to(device).expand(*shape, -1), generator)

    def prior_probability(self, z: Tensor) -> Tensor:
        return self.stationary.to(z.device)[z]

    def likelihood(self, z: Tensor, s: Tensor, t: Tensor) -> Tensor:
        columns = self.kernel(s, t).transpose(1, 2)
        return columns.gather(1, z.unsqueeze(-1).expand(-1, -1, self.num_ids))

    def spread(self, weight: Tensor, s: Tensor) -> Tensor:
        return weight @ self.kernel(torch.zeros_like(s), s)

    def gather(self, score: Tensor, t: Tensor) -> Tensor:
        return torch.linalg.solve(self.kernel(torch.zeros_like(t), t), score, left=False)

    def rates_into(self, z: Tensor) -> Tensor:
        return self.generator.T.to(z.device)[z]

    def rates_out(self, z: Tensor) -> Tensor:
        return self.generator.to(z.device)[z]

    def config(self) -> dict[str, Any]:
        return {**super().config(), "matrix": self.matrix}
