"""Nearest neighbours as a ratio: no training at all.

Keys are the frozen denoiser's last hidden states at noisy positions of target data, under many corruptions; values are
the true tokens there. At a new position with hidden state h

    k(v) = sum_{i: value_i = v} w_i,     w = softmax over the nearest keys of -|h - key_i|^2 / (temperature s^2)

(s^2 the mean squared distance of a key from the middle of all), and the mixture (1 - lambda) p + lambda k of source and
neighbours, divided by p, is the ratio

    r(v) = (1 - lambda) + lambda k(v) / p(v).

Temperature and lambda are chosen by held-out likelihood (`nelbo_by_setting`); lambda = 0 is the source.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gtl.denoiser import Denoiser, NetworkDenoiser, Prediction, fingerprint
from gtl.nn.dit import gather_positions
from gtl.process import Masked, Process
from gtl.ratio.base import ConditionalRatio

__all__ = ["SETTINGS", "KNNRatio", "fingerprint", "nelbo_by_setting"]

TEMPERATURES = (1 / 128, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
WEIGHTS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
SETTINGS = tuple(itertools.product(TEMPERATURES, WEIGHTS))
"""The (temperature, lambda) among which held-out likelihood chooses."""
MOST_DISTANCES = 2**26
"""Distances held at once."""


class KNNRatio(ConditionalRatio):
    """A store of (hidden state, token) pairs as a ratio."""

    kind = "knn"
    keys: Tensor
    values: Tensor
    norms: Tensor
    spread: Tensor

    def __init__(
        self,
        process: Process,
        keys: Tensor,
        values: Tensor,
        source: str,
        temperature: float = 1 / 16,
        weight: float = 0.3,
        neighbours: int = 64,
    ) -> None:
        """Sets the store.

        Args:
            process: the forward process.
            keys: (M, D), hidden states.
            values: (M,), the true tokens.
            source: the `fingerprint` of the denoiser that the keys come from.
            temperature: of the weights, in units of the keys' spread.
            weight: lambda.
            neighbours: how many keys count.
        """
        super().__init__()
        if keys.dim() != 2 or values.shape != keys.shape[:1]:
            raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not belong together")
        if not len(keys):
            raise ValueError("the store is empty: build it from at least one target sequence")
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature={temperature} must be positive")
        if not 0 <= weight < 1:
            raise ValueError(f"weight={weight}: lambda must be at least 0 and less than 1")
        if neighbours < 1:
            raise ValueError(f"neighbours={neighbours} must be at least 1")
        self.process, self.source, self.neighbours = process, source, neighbours
        self.temperature, self.weight = temperature, weight
        self.register_buffer("keys", keys.float())
        self.register_buffer("values", values.long())
        norms = self.keys.square().sum(-1)
        self.register_buffer("norms", norms)
        self.register_buffer("spread", norms.mean() - self.keys.mean(0).square().sum() + 1e-12)
        self._checked: weakref.ref[Denoiser] | None = None

    @classmethod
    @torch.no_grad()
    def build(
        cls,
        denoiser: NetworkDenoiser,
        x: Tensor,
        passes: int = 16,
        most: int = 1_000_000,
        generator: torch.Generator | None = None,
        batch: int = 256,
        **settings: Any,
    ) -> "KNNRatio":
        """A store from target sequences x (N, L), each corrupted `passes` times; at most `most` keys."""
        if not len(x):
            raise ValueError("the store is empty: build it from at least one target sequence")
        process = denoiser.process
        denoiser.eval()
        keys, values, count = [], [], 0
        x = x.repeat(passes, 1)
        times = process.times(len(x), x.device, generator)
        for part, t in zip(x.split(batch), times.split(batch), strict=True):
            z = process.corrupt(part, t, generator)
            noisy = torch.ones_like(z, dtype=torch.bool) if process.mask_id is None else z == process.mask_id
            keys.append(denoiser.network.trunk(z, t)[noisy].float())
            values.append(part[noisy])
            count += len(values[-1])
            if count >= most:
                break
        return cls(process, torch.cat(keys)[:most], torch.cat(values)[:most], fingerprint(denoiser), **settings)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KNNRatio":
        """Goes to other devices, never to another precision: distances are small differences of large numbers."""

        def moved(x: Tensor) -> Tensor:
            found = fn(x)
            return found if found.dtype == x.dtype else x.to(found.device)

        return super()._apply(moved, recurse)

    def check(self, denoiser: Denoiser) -> None:
        super().check(denoiser)
        if self._checked is not None and self._checked() is denoiser:
            return
        if not isinstance(denoiser, NetworkDenoiser) or denoiser.network.width != self.keys.shape[1]:
            width = denoiser.network.width if isinstance(denoiser, NetworkDenoiser) else "none"
            raise ValueError(f"the store's keys are {self.keys.shape[1]} wide; the denoiser's hidden states: {width}")
        if fingerprint(denoiser) != self.source:
            raise ValueError("the store was built with another source model: build it again with this one")
        self._checked = weakref.ref(denoiser)

    def near(self, h: Tensor, temperatures: tuple[float, ...]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """For hidden states h (M, D), some at a time: which, their neighbours' tokens (m, n), and the weights of those
        at each temperature (T, m, n)."""
        count, size = min(self.neighbours, len(self.keys)), max(1, MOST_DISTANCES // len(self.keys))
        for first in range(0, len(h), size):
            part = slice(first, min(first + size, len(h)))
            with torch.autocast(h.device.type, enabled=False):  # small differences of large numbers
                distance = torch.addmm(self.norms, h[part].float(), self.keys.T, alpha=-2)  # |h|^2: the same for all
            distance, index = distance.topk(count, -1, largest=False, sorted=False)
            weights = [(-distance / (temperature * self.spread)).softmax(-1) for temperature in temperatures]
            yield part, self.values[index], torch.stack(weights)

    def neighbour_law(self, h: Tensor, temperatures: tuple[float, ...]) -> Tensor:
        """k(v) at hidden states h (M, D), for each temperature: (T, M, K)."""
        law = self.norms.new_zeros(len(temperatures), len(h), self.process.num_ids)
        for part, token, weight in self.near(h, temperatures):
            law[:, part].scatter_add_(-1, token.expand_as(weight), weight)
        return law

    def chance(self, h: Tensor, token: Tensor, temperatures: tuple[float, ...]) -> Tensor:
        """k(v) of one token (M,) at each hidden state h (M, D), for each temperature: (T, M)."""
        found = self.norms.new_zeros(len(temperatures), len(h))
        for part, near, weight in self.near(h, temperatures):
            found[:, part] = (weight * (near == token[part].unsqueeze(-1))).sum(-1)
        return found

    def table(self, z: Tensor, positions: Tensor, t: Tensor | None = None, context: Prediction | None = None) -> Tensor:
        if context is None or not context.hidden:
            raise ValueError("neighbours are found by hidden states: pass context=denoiser(z, t, positions)")
        if not self.weight:
            return torch.zeros_like(context.log_probs)
        h = gather_positions(context.hidden[-1], positions).float()
        if h.shape[-1] != self.keys.shape[1]:
            raise ValueError(f"the store's keys are {self.keys.shape[1]} wide; the hidden states {h.shape[-1]}")
        law = self.neighbour_law(h.flatten(0, 1), (self.temperature,)).view_as(context.log_probs)
        return mixture(context.log_probs, law, self.weight)

    def config(self) -> dict[str, Any]:
        shape = {"size": len(self.keys), "width": self.keys.shape[1]}
        names = ("source", "temperature", "weight", "neighbours")
        return shape | {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, process: Process, config: dict[str, Any]) -> "KNNRatio":
        keys, values = torch.zeros(config["size"], config["width"]), torch.zeros(config["size"], dtype=torch.long)
        names = ("source", "temperature", "weight", "neighbours")
        return cls(process, keys, values, **{name: config[name] for name in names})


def mixture(log_p: Tensor, law: Tensor, weight: float) -> Tensor:
    """log((1 - lambda) + lambda k / p) for every token, 0 where p is 0: (..., K)."""
    if not weight:
        return torch.zeros_like(log_p)
    ratio = math.log(weight) + law.clamp(min=1e-30).log() - log_p
    value = torch.logaddexp(torch.full_like(log_p, math.log1p(-weight)), ratio)
    return torch.where(log_p == -torch.inf, 0.0, value)


@torch.no_grad()
def nelbo_by_setting(
    denoiser: Denoiser,
    store: KNNRatio,
    x: Tensor,
    rows: int = 512,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The NELBO per token of each held-out sequence of x (N, L) under each of SETTINGS: (S, N), in nats, float64.

    Every sequence is corrupted as often as it takes for `rows` in all.

    The denoiser may be a guided one, for neighbours on top of other ratios.
    """
    process = denoiser.process
    count, repeats = len(x), -(-rows // len(x))
    x = x.repeat(repeats, 1)
    most = 2**24 if x.device.type == "cpu" else 2**28  # log-probabilities at once
    batch = max(1, min(64, most // (x.shape[1] * process.num_ids)))
    times = process.times(len(x), x.device, generator)
    values: list[Tensor] = []
    of = by_truth if isinstance(process, Masked) else by_law
    for part, t in zip(x.split(batch), times.split(batch), strict=True):
        values.append(of(denoiser, store, part, process.corrupt(part, t, generator), t))
    return torch.cat(values, 1).view(-1, repeats, count).mean(1) / x.shape[1]


def by_truth(denoiser: Denoiser, store: KNNRatio, x: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """The NELBO of x (B, L) under each of SETTINGS: (S, B), float64. A mixture of normalised laws is normalised, so
    only the true tokens' probabilities are needed."""
    process, source = denoiser.process, denoiser(z, t)
    assert isinstance(process, Masked)
    row, column = (z == process.mask_id).nonzero(as_tuple=True)
    truth = x[row, column]
    log_p = source.log_probs[row, column, truth].double()
    chances = store.chance(source.hidden[-1][row, column].float(), truth, TEMPERATURES).double()
    found = []
    for chance in chances.clamp(min=1e-30).log():
        for weight in WEIGHTS:
            mixed = torch.logaddexp(log_p + math.log1p(-weight), chance + math.log(weight)) if weight else log_p
            total = mixed.new_zeros(len(x)).index_add(0, row, -mixed)
            found.append(process.weigh(total, z, t, denoiser.timeless))
    return torch.stack(found)


def by_law(denoiser: Denoiser, store: KNNRatio, x: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """The same under any process, from the whole mixtures."""
    source = denoiser(z, t)
    laws = store.neighbour_law(source.hidden[-1].flatten(0, 1).float(), TEMPERATURES)
    found = []
    for law in laws:
        for weight in WEIGHTS:
            log_r = mixture(source.log_probs, law.view_as(source.log_probs), weight)
            log_q = denoiser.carry_over(z, (source.log_probs + log_r).log_softmax(-1))
            found.append(denoiser.process.nelbo(x, z, t, log_q, denoiser.timeless).double())
    return torch.stack(found)
