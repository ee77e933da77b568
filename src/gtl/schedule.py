"""Noise schedules: alpha(t), the chance that a token is still clean at time t in [0, 1], and sigma(t) = -log alpha(t).

    log-linear   alpha = 1 - t                              (sigma = -log(1 - t))
    cosine       alpha = 1 - cos(pi (1 - t) / 2)
    geometric    sigma = sigma_min^(1 - t) sigma_max^t      (the paper's sigma_min = 1e-4, sigma_max = 20)

alpha falls from 1 to 0 (geometric: from exp(-sigma_min) to exp(-sigma_max), which is why every process treats s = 0 as
clean and t = 1 as its prior).
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

__all__ = ["SCHEDULES", "Cosine", "Geometric", "LogLinear", "Schedule", "make_schedule"]


class Schedule(ABC):
    """alpha(t) with its inverse; both work elementwise on tensors of any shape."""

    name: str

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor:
        """The chance that a token is still clean at time t."""

    @abstractmethod
    def inverse(self, alpha: Tensor) -> Tensor:
        """The t in [0, 1] at which alpha(t) is the one given (clamped to the schedule's range)."""

    def sigma(self, t: Tensor) -> Tensor:
        """The total noise -log alpha(t)."""
        return -torch.log(self.alpha(t))

    @abstractmethod
    def rate(self, t: Tensor) -> Tensor:
        """sigma'(t), the speed of the noise."""

    def config(self) -> dict[str, Any]:
        """What `make_schedule` needs to build this schedule again."""
        return {"name": self.name}


class LogLinear(Schedule):
    """alpha = 1 - t: every token is masked at a uniform time."""

    name = "log-linear"

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def inverse(self, alpha: Tensor) -> Tensor:
        return 1 - alpha

    def rate(self, t: Tensor) -> Tensor:
        return 1 / (1 - t)


class Cosine(Schedule):
    """alpha = 1 - cos(pi (1 - t) / 2): more time at low noise than log-linear gives."""

    name = "cosine"

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - torch.cos(math.pi / 2 * (1 - t))

    def inverse(self, alpha: Tensor) -> Tensor:
        return 1 - 2 / math.pi * torch.acos((1 - alpha).clamp(0, 1))

    def rate(self, t: Tensor) -> Tensor:
        return math.pi / 2 * torch.sin(math.pi / 2 * (1 - t)) / self.alpha(t)


class Geometric(Schedule):
    """sigma = sigma_min^(1 - t) sigma_max^t."""

    name = "geometric"

    def __init__(self, sigma_min: float = 1e-4, sigma_max: float = 20.0) -> None:
        if not 0 < sigma_min < sigma_max:
            raise ValueError(f"sigma_min={sigma_min} and sigma_max={sigma_max}: need 0 < sigma_min < sigma_max")
        self.sigma_min, self.sigma_max = sigma_min, sigma_max

    def sigma(self, t: Tensor) -> Tensor:
        return self.sigma_min * (self.sigma_max / self.sigma_min) ** t

    def alpha(self, t: Tensor) -> Tensor:
        return torch.exp(-self.sigma(t))

    def rate(self, t: Tensor) -> Tensor:
        return self.sigma(t) * math.log(self.sigma_max / self.sigma_min)

    def inverse(self, alpha: Tensor) -> Tensor:
        sigma = -torch.log(alpha.clamp(math.exp(-self.sigma_max), math.exp(-self.sigma_min)))
        return torch.log(sigma / self.sigma_min) / math.log(self.sigma_max / self.sigma_min)

    def config(self) -> dict[str, Any]:
        return {"name": self.name, "sigma_min": self.sigma_min, "sigma_max": self.sigma_max}


SCHEDULES: dict[str, type[Schedule]] = {c.name: c for c in (LogLinear, Cosine, Geometric)}


def make_schedule(name: str, **settings: float) -> Schedule:
    """Builds a schedule by name: log-linear, cosine or geometric."""
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name](**settings)
