"""Fits so small that every number of them can be known."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.train.denoiser import DenoiserObjective
from gtl.train.loop import Fit, FitSettings
from gtl.train.objective import Objective

SETTINGS = FitSettings(
    steps=12, batch_size=4, learning_rate=0.02, evaluate_every=2, save_every=1000, patience=0, ema=0.9, seed=3
)


class Number(nn.Module):
    """One weight, given back for every row."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x))


class Pull(Objective):
    """Pulls the number to the tokens: (w - x)^2. Held-out tokens may pull elsewhere."""

    def __init__(self, train: int, held_out: int | None = None) -> None:
        rows = {"data": torch.full((7, 1), train)}
        super().__init__(rows, None if held_out is None else {"data": torch.full((3, 1), held_out)})

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        return (forward(batch["data"]) - batch["data"][:, 0]).square().mean()


def denoiser(dropout: float = 0.2) -> tuple[NetworkDenoiser, DenoiserObjective]:
    """A small network with dropout and 11 sequences, the same ones every time."""
    torch.manual_seed(0)
    model = NetworkDenoiser(Masked(4), DiT(4, 4, width=8, depth=1, heads=2, dropout=dropout))
    x = torch.randint(3, (11, 5), generator=torch.Generator().manual_seed(1))
    return model, DenoiserObjective(model, x[:7], x[7:])


def interrupt(at: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[int], None]:
    def on_step(step: int) -> None:
        if step == at:
            raise error

    return on_step


def same(a: nn.Module, b: nn.Module) -> bool:
    """Whether all weights are equal bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def outcome(result: Fit) -> tuple[Any, ...]:
    return result.steps, result.best_step, result.held_out, result.weights
