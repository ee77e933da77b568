"""The source with a few entries of its weights changed, as a ratio: D is zero but for values at some places.

Places count through all parameters of the denoiser, one after the other in their own order.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser, fingerprint
from gtl.process import Process
from gtl.ratio.changed import ChangedRatio

__all__ = ["SparseRatio", "by_weight"]


def by_weight(weights: Iterable[Tensor], places: Tensor) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """Each weight, which of the places (K,), in rising order, are in it, and where they are in the flat weight."""
    first = 0
    for weight in weights:
        bounds = torch.tensor([first, first + weight.numel()], device=places.device)
        begin, end = torch.searchsorted(places, bounds).tolist()
        yield weight, slice(begin, end), places[begin:end] - first
        first += weight.numel()


class SparseRatio(ChangedRatio):
    """Changes to single entries."""

    kind = "sparse"
    places: Tensor

    def __init__(self, process: Process, places: Tensor, values: Tensor, source: str, timeless: bool = True) -> None:
        """Sets the changes.

        Args:
            process: the forward process.
            places: (K,), int64, in rising order.
            values: (K,), what is added there.
            source: the `fingerprint` of the denoiser that they were fitted on.
            timeless: whether that denoiser's prediction depends on z alone.
        """
        super().__init__(process, source, timeless)
        if places.shape != values.shape or places.ndim != 1:
            raise ValueError(f"{tuple(places.shape)} places and {tuple(values.shape)} values do not belong together")
        if not len(places):
            raise ValueError("there are no changes")
        self.register_buffer("places", places.clone())
        self.values = nn.Parameter(values.detach().clone(), requires_grad=False)

    @classmethod
    @torch.no_grad()
    def of(cls, denoiser: NetworkDenoiser, changed: NetworkDenoiser, places: Tensor) -> "SparseRatio":
        """What a copy of a denoiser has at some places, over the denoiser."""
        pairs = zip(by_weight(denoiser.parameters(), places), changed.parameters(), strict=True)
        values = [new.flatten()[inside] - old.flatten()[inside] for (old, _, inside), new in pairs]
        ratio = cls(denoiser.process, places, torch.cat(values), fingerprint(denoiser), denoiser.timeless)
        ratio.check(denoiser)
        return ratio

    @torch.no_grad()
    def tuned(self, denoiser: NetworkDenoiser) -> NetworkDenoiser:
        copied = copy.deepcopy(denoiser).requires_grad_(False)
        places = self.places.to(next(copied.parameters()).device)
        for weight, part, inside in by_weight(copied.parameters(), places):
            weight.view(-1)[inside] += self.values[part].to(weight)
        return copied.eval()

    def config(self) -> dict[str, Any]:
        return {"count": len(self.places), **super().config()}

    @classmethod
    def from_config(cls, process: Process, config: dict[str, Any]) -> "SparseRatio":
        count = config["count"]
        places = torch.arange(count)
        return cls(process, places, torch.zeros(count), config["source"], config["timeless"])
