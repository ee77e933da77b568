"""Forward processes: how a clean sequence x becomes the noisy z_t, and the exact way back given x.

A process owns K token ids (0 .. K-1, the mask among them where there is one), a schedule, and

    corrupt     z_t ~ p(z_t | x)                                  position by position
    prior       z_1
    posterior   p(z_s | z_t) = sum_x p(z_s | z_t, x) p(x | z_t)   the token-factorised reverse kernel
    nelbo       the integrand of the negative evidence lower bound

Source and target share the process: that is the assumption of Theorem 1.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from gtl.categorical import uniform
from gtl.schedule import LogLinear, Schedule

__all__ = ["LEAST", "Process", "stratified"]


LEAST = 1e-18
"""alpha below which nothing is left of the clean token in float64."""


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
    def prior_probability(self, z: Tensor) -> Tensor:
        """The probability of each token of z (B, L) under the prior: (B, L), float64."""

    @abstractmethod
    def likelihood(self, z: Tensor, s: Tensor, t: Tensor) -> Tensor:
        """p(z_t = z | z_s = v) for every v: z (B, P), s and t (B,) -> (B, P, K), float64."""

    @abstractmethod
    def rates_into(self, z: Tensor) -> Tensor:
        """G[y, z], the forward rate from y into z per unit of sigma, for every y: z (B, P) -> (B, P, K), float64. Where
        y = z it is minus the rate at which z is left."""

    @abstractmethod
    def rates_out(self, z: Tensor) -> Tensor:
        """G[z, y], the forward rate from z into y per unit of sigma, for every y: z (B, P) -> (B, P, K), float64."""

    def sigma(self, t: Tensor) -> Tensor:
        """sigma(t) = -log alpha(t), finite at t = 1: (B,) -> (B,), float64."""
        return -torch.log(self.alpha(t).squeeze(-1).clamp(min=LEAST))

    @abstractmethod
    def score(self, z: Tensor, log_x: Tensor, t: Tensor) -> Tensor:
        """The concrete score p_t(z with l <- y) / p_t(z) for every y, (B, P, K), that a prediction log p(x | z)
        implies. Where no forward transition leads from y to z, it is not needed and need not be right."""

    @abstractmethod
    def mean(self, z: Tensor, score: Tensor, t: Tensor) -> Tensor:
        """log p(x | z), (B, P, K), of a concrete score (B, P, K): the inverse of `score`."""

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

    def some_places(self, z: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """`count` random positions of each row of z (B, L) among those that count in `nelbo`: (B, count). None comes
        twice before all have come once, so each is as likely as any other. One of them is `some_place`."""
        if count == 1:
            return self.some_place(z, generator).unsqueeze(1)
        keys = uniform((z.shape[0], z.shape[1]), z.device, generator)
        counts = torch.ones_like(z, dtype=torch.bool) if self.mask_id is None else z == self.mask_id
        order = keys.masked_fill(~counts, -1.0).argsort(-1, descending=True)
        turns = torch.arange(count, device=z.device) % counts.sum(-1, keepdim=True).clamp(min=1)
        return order.gather(1, turns)

    def nelbo_at(self, x: Tensor, z: Tensor, t: Tensor, log_x: Tensor, timeless: bool, places: Tensor) -> Tensor:
        """As `nelbo`, from several positions: log_x (B, P, K) at places (B, P) from `some_places`: (B,)."""
        count = places.shape[1]
        x, z, t = (values.repeat_interleave(count, 0) for values in (x, z, t))
        values = self.nelbo(x, z, t, log_x.flatten(0, 1).unsqueeze(1), timeless, places.flatten())
        return values.view(-1, count).mean(1)

    def times(self, count: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
        """Stratified times (count,) at which 1 - alpha is uniform, the law that training and `nelbo` use."""
        return self.schedule.inverse(1 - stratified(count, device, generator))

    def alpha(self, t: Tensor) -> Tensor:
        """alpha(t), with t = 0 exactly clean, in float64 and shape (B, 1)."""
        t = t.double()
        return torch.where(t <= 0, torch.ones_like(t), self.schedule.alpha(t)).unsqueeze(-1)

    def check_ids(self, denoisers: "Process", name: str) -> None:
        """Refuses a denoiser's process whose ids are not those of this one, which belongs to a `name`."""
        mine, its = (self.num_ids, self.mask_id), (denoisers.num_ids, denoisers.mask_id)
        if mine != its:
            raise ValueError(f"the {name} knows {mine[0]} ids (mask {mine[1]}), the denoiser {its[0]} (mask {its[1]})")

    def config(self) -> dict[str, Any]:
        """What `make_process` needs to build this process again."""
        return {"name": self.name, "num_ids": self.num_ids, "schedule": self.schedule.config()}
