"""A small problem whose fits may borrow rows."""

from typing import Any

import pytest
import torch

from gtl.denoiser import NetworkDenoiser
from gtl.estimate import Problem, Training
from gtl.nn.dit import DiT
from gtl.process import Masked


def chain(stay: float, size: int = 3) -> torch.Tensor:
    matrix = torch.full((size, size), (1 - stay) / (size - 1))
    return matrix.fill_diagonal_(stay)


def sequences(matrix: torch.Tensor, count: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, len(matrix), (count, 1), generator=generator)
    while x.shape[1] < length:
        x = torch.cat([x, torch.multinomial(matrix[x[:, -1]], 1, generator=generator)], 1)
    return x


def tiny_problem(source_rows: torch.Tensor, target: torch.Tensor, budget: int = 120, **changes: Any) -> Problem:
    torch.manual_seed(0)
    source = NetworkDenoiser(Masked(4), DiT(4, 4, 16, 1, 2)).eval()
    training = Training(
        budget=budget, folds=2, batch_size=16, evaluate_every=10, evaluation_rows=32, knn_keys=128, **changes
    )
    return Problem(training, source, (source_rows, source_rows[:0]), target, 0)


def keep_what_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out rows are likelier with borrowed rows, from here on."""
    attempt = Problem.attempt

    def scored(self: Problem, name: str, *rest: Any, **more: Any) -> Any:
        made = attempt(self, name, *rest, **more)
        made.score -= 9 * ("borrowed rows" in name)
        return made

    monkeypatch.setattr(Problem, "attempt", scored)


def noted_fits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, float]]:
    """Name, steps and rate of every fit from here on."""
    begun, fit = [], Problem.fit

    def noted(self: Problem, name: str, *rest: Any, **changes: Any) -> Any:
        begun.append((name, rest[2], self.rate))
        return fit(self, name, *rest, **changes)

    monkeypatch.setattr(Problem, "fit", noted)
    return begun
