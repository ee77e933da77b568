"""The density ratio r(z) = q(z) / p(z) between target and source, and its algebra.

Guidance needs log r only at single-token interventions of z and only up to a constant for each (sequence, position), so
the contract is

    log_ratio(z, positions, candidates)[b, p, n] = log r(z_b with positions[b, p] <- candidates[b, p, n]) + const(b, p).

Log-ratios form a vector space: `0.7 * a + b` is a Ratio whose log_ratio is that combination.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gtl.denoiser import Denoiser, Prediction
from gtl.memory import by_chunks
from gtl.process import Process

__all__ = ["Combination", "ConditionalRatio", "Ratio", "SequenceRatio", "Space"]

Space = Literal["noisy", "clean"]


class Ratio(nn.Module, ABC):
    """A density ratio that can weigh candidate tokens."""

    kind: str = ""
    """What a checkpoint calls it."""
    process: Process
    space: Space = "noisy"
    """"noisy" weighs z_s (t is the level after the step); "clean" tilts p(x_0 | z_t) (t is the current level). Under
    masked noise the two are the same."""
    timeless: bool = True
    """Whether the value depends on z alone."""
    gamma: float = 1.0
    """The guidance strength that was chosen for this ratio on held-out target data; 1 where nothing was chosen."""

    @property
    def absolute(self) -> bool:
        """Whether log r(z) itself is known (`SequenceRatio.log_value`), not only up to constants."""
        return False

    @abstractmethod
    def log_ratio(
        self,
        z: Tensor,
        positions: Tensor,
        candidates: Tensor,
        t: Tensor | None = None,
        context: Prediction | None = None,
    ) -> Tensor:
        """Weighs candidates.

        Args:
            z: (B, L), noisy tokens.
            positions: (B, P); where P > 1 a position of -1 is padding, whose output means nothing.
            candidates: (B, P, N), token ids; the current token and the mask are allowed.
            t: (B,), the noise level that `space` asks for.
            context: the denoiser's prediction for z at these positions, so that nothing runs its trunk twice.

        Returns:
            (B, P, N), log r of each intervention up to a constant for each (b, p).
        """

    def table(self, z: Tensor, positions: Tensor, t: Tensor | None = None, context: Prediction | None = None) -> Tensor:
        """log_ratio of every token id in order, (B, P, K); what it says of the mask means nothing."""
        ids = torch.arange(self.process.num_ids, device=z.device)
        tokens = ids if self.process.mask_id is None else ids[ids != self.process.mask_id]
        values = self.log_ratio(z, positions, tokens.expand(*positions.shape, -1), t, context)
        return values.new_zeros(*positions.shape, len(ids)).index_copy_(-1, tokens, values)

    def check(self, denoiser: Denoiser) -> None:
        """Refuses a denoiser that this ratio cannot guide."""
        self.process.check_ids(denoiser.process, "ratio")

    def config(self) -> dict[str, Any]:
        """What `from_config` needs, for ratios that a checkpoint can hold."""
        raise ValueError(f"a {type(self).__name__} cannot be saved")

    @classmethod
    def from_config(cls, process: Process, config: dict[str, Any]) -> "Ratio":
        """A ratio of the same shape, its weights still to be loaded."""
        raise ValueError(f"a {cls.__name__} cannot be loaded")

    def __add__(self, other: "Ratio") -> "Combination":
        return Combination([(1.0, self), (1.0, other)])

    def __sub__(self, other: "Ratio") -> "Combination":
        return Combination([(1.0, self), (-1.0, other)])

    def __mul__(self, weight: float) -> "Combination":
        return Combination([(float(weight), self)])

    __rmul__ = __mul__

    def __neg__(self) -> "Combination":
        return Combination([(-1.0, self)])


class SequenceRatio(Ratio):
    """A ratio that knows the absolute log r(z) of whole sequences; candidates are scored by intervention."""

    max_tokens: int | None = None
    """Most tokens in one network call, the memory budget; by default 16,384 on a CPU and 2^20 elsewhere. It
    shrinks for good where the device runs out of memory."""

    @property
    def absolute(self) -> bool:
        return True

    @abstractmethod
    def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        """log r(z), absolute: z (B, L), t (B,) -> (B,)."""

    def log_ratio(
        self,
        z: Tensor,
        positions: Tensor,
        candidates: Tensor,
        t: Tensor | None = None,
        context: Prediction | None = None,
    ) -> Tensor:
        batch, places, count = candidates.shape
        row = torch.arange(batch, device=z.device).repeat_interleave(places)
        place, tokens = positions.flatten(), candidates.flatten(0, 1)
        kept = None
        if places > 1:
            kept = (place >= 0).nonzero().squeeze(-1)
            row, place, tokens = row[kept], place[kept], tokens[kept]
        values = self._interventions(z, row, place.clamp(min=0), tokens, t)
        if kept is not None:
            values = values.new_zeros(batch * places, count).index_copy_(0, kept, values)
        return values.view(batch, places, count)

    def budget(self, device: torch.device) -> int:
        """`max_tokens`, or its default on a device."""
        return self.max_tokens or (16_384 if device.type == "cpu" else 2**20)

    def _interventions(self, z: Tensor, row: Tensor, place: Tensor, tokens: Tensor, t: Tensor | None) -> Tensor:
        """log r(z[row] with place <- token): row (M,), place (M,), tokens (M, N) -> (M, N), within the budget."""
        length, count, flat = z.shape[1], tokens.shape[1], tokens.flatten()
        if not len(flat):
            return self.log_value(z[:1], None if t is None else t[:1]).new_zeros((len(row), count))
        chunk = max(1, self.budget(z.device) // length)
        chunk -= chunk % count if chunk > count else 0  # a position's candidates together, where there is room
        scorer = self._scorer(z, row, place, tokens, t)
        parts, fitted = by_chunks(scorer, len(flat), chunk, what="the ratio of a candidate")
        if fitted < chunk:
            self.max_tokens = fitted * length
        return torch.cat(parts).view(-1, count)

    def _scorer(
        self, z: Tensor, row: Tensor, place: Tensor, tokens: Tensor, t: Tensor | None
    ) -> Callable[[slice], Tensor]:
        """From a part of all M N interventions in order to their log r; as `_interventions` otherwise."""
        count, flat = tokens.shape[1], tokens.flatten()

        def values(part: slice) -> Tensor:
            which = torch.arange(part.start, part.stop, device=z.device) // count
            changed = z[row[which]].scatter_(1, place[which].unsqueeze(1), flat[part].unsqueeze(1))
            return self.log_value(changed, None if t is None else t[row[which]])

        return values


class ConditionalRatio(Ratio):
    """A ratio of conditionals, log q(x_l = v | z) / p(x_l = v | z) + const(z, l), known for all tokens at once.

    A subclass writes `table`. It tilts p(x | z), so it is clean, and it has no absolute value.
    """

    space = "clean"

    @abstractmethod
    def table(self, z: Tensor, positions: Tensor, t: Tensor | None = None, context: Prediction | None = None) -> Tensor:
        """The log-ratio of every token id in order, (B, P, K); what it says of the mask means nothing."""

    def log_ratio(
        self,
        z: Tensor,
        positions: Tensor,
        candidates: Tensor,
        t: Tensor | None = None,
        context: Prediction | None = None,
    ) -> Tensor:
        """As the contract says. The mask as a candidate stands for r(z) itself, which by the martingale identity is
        the mean of its continuations under p; without `context` what is said of it means nothing."""
        values = self.table(z, positions, t, context)
        mask = self.process.mask_id
        if mask is not None and context is not None:
            mean = torch.logsumexp(context.log_probs.to(values.dtype) + values, -1, keepdim=True)
            values = torch.cat([values[..., :mask], mean, values[..., mask + 1 :]], -1)
        return values.gather(-1, candidates)


class Combination(SequenceRatio):
    """sum_i w_i log r_i. Nested combinations are flattened; `log_value` needs every term to be a sequence ratio."""

    def __init__(self, terms: list[tuple[float, Ratio]]) -> None:
        super().__init__()
        flat: list[tuple[float, Ratio]] = []
        for weight, ratio in terms:
            inner = ratio.weighted_terms() if isinstance(ratio, Combination) else [(1.0, ratio)]
            flat += [(weight * w, r) for w, r in inner]
        self.weights = tuple(weight for weight, _ in flat)
        self.ratios = nn.ModuleList(ratio for _, ratio in flat)
        first = flat[0][1]
        for _, ratio in flat:
            if ratio.process.config() != first.process.config():
                raise ValueError("ratios of different processes cannot be added")
            if ratio.space != first.space and first.process.name != "masked":
                raise ValueError(f"under {first.process.name} noise a noisy and a clean ratio cannot be added")
        self.process, self.space = first.process, first.space
        self.timeless = all(ratio.timeless for _, ratio in flat)

    def check(self, denoiser: Denoiser) -> None:
        for _, ratio in self.weighted_terms():
            ratio.check(denoiser)

    @property
    def absolute(self) -> bool:
        return all(ratio.absolute for _, ratio in self.weighted_terms())

    def weighted_terms(self) -> list[tuple[float, Ratio]]:
        """The (weight, ratio) pairs of the sum."""
        return [(weight, ratio) for weight, ratio in zip(self.weights, self.ratios, strict=True)]  # type: ignore[misc]

    def log_ratio(
        self,
        z: Tensor,
        positions: Tensor,
        candidates: Tensor,
        t: Tensor | None = None,
        context: Prediction | None = None,
    ) -> Tensor:
        total = torch.zeros(candidates.shape, device=z.device)
        for weight, ratio in self.weighted_terms():
            total = total + weight * ratio.log_ratio(z, positions, candidates, t, context)
        return total

    def table(self, z: Tensor, positions: Tensor, t: Tensor | None = None, context: Prediction | None = None) -> Tensor:
        total = torch.zeros(*positions.shape, self.process.num_ids, device=z.device)
        for weight, ratio in self.weighted_terms():
            total = total + weight * ratio.table(z, positions, t, context)
        return total

    def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        total = torch.zeros(len(z), device=z.device)
        for weight, ratio in self.weighted_terms():
            if not isinstance(ratio, SequenceRatio):
                raise ValueError(f"{type(ratio).__name__} has no absolute value; only sequence ratios do")
            total = total + weight * ratio.log_value(z, t)
        return total
