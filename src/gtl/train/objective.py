"""What the loop minimises: data by name, and a loss on one batch of each."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Objective"]


class Objective(ABC):
    """A loss over named datasets. Every batch holds the same number of rows of each."""

    def __init__(self, train: dict[str, Tensor], held_out: dict[str, Tensor] | None = None) -> None:
        """Sets the data: name -> (N, L) clean tokens; `held_out` (same names) is what early stopping looks at."""
        self.train, self.held_out = train, held_out

    def wrap(self, model: nn.Module) -> nn.Module:
        """What the loop compiles, spreads over processes and hands to `loss` and `score`: the model, unless the loss
        needs less than its whole output."""
        return model

    @abstractmethod
    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        """The mean loss of a batch, a scalar; `forward` is the wrapped model."""

    def score(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        """What early stopping looks at, lower is better: one number for each setting that may be chosen when training
        is over (gamma), (G,). By default there is nothing to choose, and it is the loss."""
        return self.loss(forward, batch, generator).view(1)
