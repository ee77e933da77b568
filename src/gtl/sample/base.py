"""The sampler's loop. A concrete sampler writes `times`, the grid of its steps, and `step`, one move from t to s.

Infilling is `sampler(z, frozen=mask)`: frozen tokens never change, the rest starts from the prior. For masked noise
with the one-position sampler that is exact conditional sampling.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, overload

import torch
from torch import Tensor

from gtl.denoiser import Denoiser
from gtl.guidance import Gamma, Guided, check_gamma, check_n_ratio
from gtl.process import Process
from gtl.ratio.base import Ratio

__all__ = ["Callback", "Sampler", "Trace", "uniform_grid"]

Callback = Callable[[int, int, Tensor], None]
"""Called after every step with its index, the number of steps, and the state z (B, L)."""


def uniform_grid(steps: int) -> list[tuple[float, float]]:
    """T equal steps from t = 1 to s = 0."""
    return list(pairwise([1 - i / steps for i in range(steps)] + [0.0]))


@dataclass
class Trace:
    """The states that a run went through: the start, then one after every step."""

    times: list[float] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)

    def add(self, t: float, z: Tensor) -> None:
        """Records a copy of the state z at time t."""
        self.times.append(t)
        self.states.append(z.clone())


class Sampler(ABC):
    """Draws sequences from a denoiser, guided by a ratio if one is given."""

    def __init__(
        self,
        denoiser: Denoiser,
        ratio: Ratio | None = None,
        *,
        gamma: Gamma | None = None,
        n_ratio: int | None = None,
    ) -> None:
        """Sets the models.

        Args:
            denoiser: the frozen source model.
            ratio: the target-to-source ratio; None samples from the source.
            gamma: guidance strength, or a schedule gamma(t); 0 is the source. By default the one that was chosen for
                the ratio.
            n_ratio: candidates weighed at each position, the likeliest first; all by default.
        """
        gamma = gamma if gamma is not None else 1.0 if ratio is None else ratio.gamma
        check_gamma(gamma)
        self.process: Process = denoiser.process
        check_n_ratio(n_ratio, self.process.vocabulary)
        if ratio is not None:
            ratio.check(denoiser)
        self.denoiser, self.ratio, self.gamma, self.n_ratio = denoiser, ratio, gamma, n_ratio
        self.frozen: Tensor | None = None

    def guided(self) -> Denoiser:
        """The denoiser with the ratio applied to its prediction of x."""
        if self.ratio is None:
            return self.denoiser
        return Guided(self.denoiser, self.ratio, self.gamma, self.n_ratio)

    def parts(self) -> tuple[Denoiser, Ratio | None]:
        """The (guided) model of x, and the ratio left to weigh z_s: a noisy one, under noise other than masked."""
        if self.ratio is not None and self.ratio.space == "noisy" and self.process.name != "masked":
            return self.denoiser, self.ratio
        return self.guided(), None

    def strength(self, t: Tensor) -> float | Tensor:
        """gamma, or gamma(t) of times (B,) as (B, 1, 1)."""
        return self.gamma(t).view(-1, 1, 1) if callable(self.gamma) else self.gamma

    @abstractmethod
    def times(self, z: Tensor) -> Iterable[tuple[float, float]]:
        """The (t, s) of every step, from t = 1 to s = 0."""

    @abstractmethod
    def step(self, z: Tensor, t: float, s: float, generator: torch.Generator | None) -> Tensor:
        """Moves the state z (B, L) from time t to time s."""

    def begin(self) -> None:  # noqa: B027
        """Called before the first step of every run; by default nothing is to be done."""

    @overload
    def __call__(
        self,
        z: Tensor | tuple[int, int],
        frozen: Tensor | None = None,
        generator: torch.Generator | None = None,
        callback: Callback | None = None,
        trace: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        z: Tensor | tuple[int, int],
        frozen: Tensor | None = None,
        generator: torch.Generator | None = None,
        callback: Callback | None = None,
        *,
        trace: Literal[True],
    ) -> tuple[Tensor, Trace]: ...

    @torch.no_grad()
    def __call__(
        self,
        z: Tensor | tuple[int, int],
        frozen: Tensor | None = None,
        generator: torch.Generator | None = None,
        callback: Callback | None = None,
        trace: bool = False,
    ) -> Tensor | tuple[Tensor, Trace]:
        """Draws sequences.

        Args:
            z: the shape (B, L) to draw from the prior, or a start (B, L) whose `frozen` tokens are a prompt.
            frozen: (B, L) or (L,), true where z must stay as it is; without it all of z is redrawn.
            generator: the source of randomness.
            callback: see `Callback`.
            trace: whether to return the states along the way too.

        Returns:
            (B, L), clean tokens; with `trace` a pair of that and the trace.
        """
        state = self._start(z, frozen, generator)
        held = state if frozen is None else state.clone()
        record = Trace()
        if trace:
            record.add(1.0, state)
        self.frozen = frozen
        self.begin()
        grid = list(self.times(state))
        for index, (t, s) in enumerate(grid):
            state = self.step(state, t, s, generator)
            if frozen is not None:
                state = torch.where(frozen, held, state)
            if callback is not None:
                callback(index, len(grid), state)
            if trace:
                record.add(s, state)
        return (state, record) if trace else state

    def _start(self, z: Tensor | tuple[int, int], frozen: Tensor | None, generator: torch.Generator | None) -> Tensor:
        if not isinstance(z, Tensor):
            if frozen is not None:
                raise ValueError("frozen positions need the tokens to keep: pass z as a tensor (B, L), not a shape")
            device = next((p.device for p in self.denoiser.parameters()), None)
            device = device or next((b.device for b in self.denoiser.buffers()), torch.device("cpu"))
            return self.process.prior(z, device, generator)
        if z.dim() != 2:
            raise ValueError(f"z has shape {tuple(z.shape)}; expected (B, L)")
        prior = self.process.prior((z.shape[0], z.shape[1]), z.device, generator)
        if frozen is None:
            return prior
        frozen = frozen.expand_as(z)
        prompt = z[frozen]
        if prompt.numel() and (int(prompt.min()) < 0 or int(prompt.max()) >= self.process.num_ids):
            raise ValueError(f"a frozen token is outside the {self.process.num_ids} ids of the process")
        if self.process.mask_id is not None and bool((prompt == self.process.mask_id).any()):
            raise ValueError(f"a frozen token is the mask ({self.process.mask_id}): freeze tokens that are known")
        return torch.where(frozen, z, prior)
