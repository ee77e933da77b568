"""Forward processes: how a clean sequence x becomes the noisy z_t, and the exact way back given x.

A process owns K token ids (0 .. K-1, the mask among them where there is one), a schedule, and

    corrupt     z_t ~ p(z_t | x)                                  position by position
    prior       z_1
    posterior   p(z_s | z_t) = sum_x p(z_s | z_t, x) p(x | z_t)   the token-factorised reverse kernel
    nelbo       the integrand of the negative evidence lower bound

Source and target share the process: that is the assumption of Theorem 1.

Masked noise (absorbing state m): p(z_t | x) = alpha_t x + (1 - alpha_t) m, and for z_t = m

    p(z_s = m | z_t) = (1 - alpha_s) / (1 - alpha_t),
    p(z_s = v | z_t) = (alpha_s - alpha_t) / (1 - alpha_t) p(x = v | z_t);      a revealed token never changes.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from gtl.categorical import bernoulli, random_true, uniform
from gtl.schedule import LogLinear, Schedule, make_schedule

__all__ = ["Masked", "Process", "make_process", "stratified"]


def stratified(count: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """`count` numbers in (0, 1), one in each of `count` equal cells, in random order: low variance, right marginals."""
    u = uniform((count,), device, generator)
    cell = uniform((count,), device, generator).argsort()
    return ((cell + u) / count).clamp(min=1e-9)


class Process(ABC):
    """The forward process that source and target share."""

    name: str
    mask_id: int | None = None

    def __init__(self, num_ids: int, schedule: Schedule | None = None) -> None:
        if num_ids < 2:
            raise ValueError(f"num_ids={num_ids}: a process needs at least two token ids")
        self.num_ids = num_ids
        self.schedule = schedule or LogLinear()

    @property
    def vocabulary(self) -> int:
        """How many ids clean data may hold (V): all but the mask."""
        return self.num_ids - (self.mask_id is not None)

    @abstractmethod
    def corrupt(self, x: Tensor, t: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """z_t given x (B, L) and t (B,)."""

    @abstractmethod
    def prior(self, shape: tuple[int, int], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
        """z_1 of the given shape (B, L)."""

    @abstractmethod
    def posterior(self, z: Tensor, log_x: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """Log-probabilities of z_s at each position.

        Args:
            z: (B, P), the current tokens.
            log_x: (B, P, K), log p(x | z_t) as a denoiser gives it.
            t: (B,), the current time.
            s: (B,), the time after the step; s = 0 is clean data.

        Returns:
            (B, P, K), normalised.
        """

    @abstractmethod
    def nelbo(
        self, x: Tensor, z: Tensor, t: Tensor, log_x: Tensor, timeless: bool, place: Tensor | None = None
    ) -> Tensor:
        """An unbiased draw of the negative evidence lower bound of each sequence, in nats.

        Args:
            x: (B, L), clean tokens.
            z: (B, L), from `corrupt(x, t)` with t from `times`.
            t: (B,)
            log_x: (B, L, K), log p(x | z_t); (B, 1, K) where `place` is given.
            timeless: whether log_x does not depend on t given z (then t may be averaged out).
            place: (B,), one position of each row from `some_place`, which stands for all of them.

        Returns:
            (B,)
        """

    @abstractmethod
    def some_place(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A uniformly random position (B,) among those of z (B, L) that count in `nelbo`."""

    def times(self, count: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
        """Stratified times (count,) at which 1 - alpha is uniform, the law that training and `nelbo` use."""
        return self.schedule.inverse(1 - stratified(count, device, generator))

    def alpha(self, t: Tensor) -> Tensor:
        """alpha(t), with t = 0 exactly clean, in float64 and shape (B, 1)."""
        t = t.double()
        return torch.where(t <= 0, torch.ones_like(t), self.schedule.alpha(t)).unsqueeze(-1)

    def config(self) -> dict[str, Any]:
        """What `make_process` needs to build this process again."""
        return {"name": self.name, "num_ids": self.num_ids, "schedule": self.schedule.config()}


class Masked(Process):
    """Absorbing-state diffusion: a token is kept with probability alpha_t and becomes the mask otherwise."""

    name = "masked"

    def __init__(self, num_ids: int, mask_id: int | None = None, schedule: Schedule | None = None) -> None:
        super().__init__(num_ids, schedule)
        mask_id = num_ids - 1 if mask_id is None else mask_id
        if not 0 <= mask_id < num_ids:
            raise ValueError(f"mask_id={mask_id} is not one of the {num_ids} token ids")
        self.mask_id: int = mask_id

    def corrupt(self, x: Tensor, t: Tensor, generator: torch.Generator | None = None) -> Tensor:
        masked = bernoulli(1 - self.alpha(t), tuple(x.shape), generator)
        return x.masked_fill(masked, self.mask_id)

    def prior(self, shape: tuple[int, int], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
        return torch.full(shape, self.mask_id, device=device)

    def reveal(self, t: Tensor, s: Tensor) -> Tensor:
        """The chance that a masked position is revealed between t and s: (B, 1), float64."""
        alpha_t, alpha_s = self.alpha(t), self.alpha(s)
        return (alpha_s - alpha_t) / (1 - alpha_t)

    def posterior(self, z: Tensor, log_x: Tensor, t: Tensor, s: Tensor) -> Tensor:
        reveal = self.reveal(t, s).to(log_x.dtype).unsqueeze(-1)
        log_z = log_x + torch.log(reveal)
        log_z[..., self.mask_id] = torch.log1p(-reveal).squeeze(-1)
        return torch.where((z == self.mask_id).unsqueeze(-1), log_z, log_x)

    def nelbo(
        self, x: Tensor, z: Tensor, t: Tensor, log_x: Tensor, timeless: bool, place: Tensor | None = None
    ) -> Tensor:
        masked, length = z == self.mask_id, x.shape[1]
        count = masked.sum(-1)
        if place is not None:
            x, masked = x.gather(1, place.unsqueeze(1)), masked.gather(1, place.unsqueeze(1))
        cross_entropy = -torch.where(masked, log_x.gather(-1, x.unsqueeze(-1)).squeeze(-1), 0.0).sum(-1)
        if place is not None:
            cross_entropy = cross_entropy * count
        if timeless:
            # With 1 - alpha uniform, t given k masks of L is Beta(k + 1, L - k + 1), so 1 / (1 - alpha) averages to
            # (L + 1) / k: the same mean as the weight below, with less variance.
            return cross_entropy * (length + 1) / count.clamp(min=1)
        return cross_entropy / (1 - self.alpha(t).squeeze(-1)).to(cross_entropy.dtype)

    def some_place(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return random_true(z == self.mask_id, generator)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "mask_id": self.mask_id}


PROCESSES: dict[str, type[Process]] = {"masked": Masked}


def make_process(config: dict[str, Any]) -> Process:
    """Builds a process from what `Process.config` gave."""
    settings = dict(config)
    name = settings.pop("name")
    if name not in PROCESSES:
        raise ValueError(f"unknown process {name!r}; choose one of {', '.join(PROCESSES)}")
    settings["schedule"] = make_schedule(**settings.pop("schedule"))
    return PROCESSES[name](**settings)
