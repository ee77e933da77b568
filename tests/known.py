"""Processes of every kind, two laws of each that are known exactly, and their clean ratio."""

import torch
from torch import Tensor

from gtl.denoiser import Prediction
from gtl.exact import Table
from gtl.process import D3PM, Masked, Process, Uniform
from gtl.ratio import Ratio
from gtl.schedule import Cosine, Geometric

LENGTH, SIZE = 2, 3
PROCESSES = {
    "masked": lambda: Masked(SIZE + 1),
    "uniform": lambda: Uniform(SIZE),
    "uniform-cosine": lambda: Uniform(SIZE, Cosine()),
    "gaussian": lambda: D3PM(SIZE, "gaussian:1"),
    "gaussian-geometric": lambda: D3PM(SIZE, "gaussian:1", Geometric()),
    "banded": lambda: D3PM(SIZE, "banded:1"),
    "cyclic": lambda: D3PM(SIZE, [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]),
    "absorbing": lambda: D3PM(SIZE + 1, "absorbing"),
}


def laws(process: Process, size: int = SIZE, length: int = LENGTH) -> tuple[Table, Table]:
    """Two random laws without structure."""
    generator = torch.Generator().manual_seed(1)
    tables = (torch.rand((size,) * length, generator=generator, dtype=torch.float64) ** 2 + 0.02 for _ in range(2))
    return tuple(Table(table, process) for table in tables)


class Conditional(Ratio):
    """The exact clean ratio q(x_l = v | z_t) / p(x_l = v | z_t)."""

    space = "clean"

    def __init__(self, p: Table, q: Table) -> None:
        super().__init__()
        self.p, self.q, self.process, self.timeless = p, q, p.process, isinstance(p.process, Masked)

    def log_ratio(self, z, positions, candidates, t=None, context: Prediction | None = None):
        gap = self.q.log_conditional(z, t) - self.p.log_conditional(z, t)
        gap = gap.nan_to_num(0.0, 0.0, 0.0)
        return gap.gather(1, positions.clamp(min=0).unsqueeze(-1).expand(-1, -1, gap.shape[-1])).gather(-1, candidates)


def total_variation(a: Tensor, b: Tensor) -> float:
    """Half the sum of absolute differences."""
    return float((a - b).abs().sum() / 2)
