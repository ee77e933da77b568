"""The source with a few entries of its weights changed, as a ratio.

    log r(x_l = v | z) = log p_{W + D}(v | z) - log p_W(v | z),        D is zero but for values at some places

A network beside the source sees what the source made of z; changed weights also change what it makes of z. Only D
belongs to the ratio, a file of twelve bytes a change, for one more pass of the source. At gamma 1 guidance by it is the
source with changed weights. Places count through all parameters of the denoiser, one after the other in their order.
"""

import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gtl.denoiser import Denoiser, NetworkDenoiser, Prediction, fingerprint
from gtl.process import Process
from gtl.ratio.base import ConditionalRatio
from gtl.ratio.difference import difference

__all__ = ["SparseRatio", "by_weight"]


def by_weight(weights: Iterable[Tensor], places: Tensor) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """Each weight, which of the places (K,), in rising order, are in it, and where they are in the flat weight."""
    first = 0
    for weight in weights:
        bounds = torch.tensor([first, first + weight.numel()], device=places.device)
        begin, end = torch.searchsorted(places, bounds).tolist()
        yield weight, slice(begin, end), places[begin:end] - first
        first += weight.numel()


class SparseRatio(ConditionalRatio):
    """Changes to single weights of the denoiser that it guides."""

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
        super().__init__()
        if places.shape != values.shape or places.ndim != 1:
            raise ValueError(f"{tuple(places.shape)} places and {tuple(values.shape)} values do not belong together")
        if not len(places):
            raise ValueError("there are no changes")
        self.process, self.source, self.timeless = process, source, timeless
        self.register_buffer("places", places.clone())
        self.values = nn.Parameter(values.detach().clone(), requires_grad=False)
        self._known: weakref.ref[Denoiser] | None = None
        self.copy: NetworkDenoiser | None = None
        self.register_state_dict_post_hook(_drop_copy)

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
        """A copy of the denoiser with the changes in its weights."""
        copied = copy.deepcopy(denoiser).requires_grad_(False)
        places = self.places.to(next(copied.parameters()).device)
        for weight, part, inside in by_weight(copied.parameters(), places):
            weight.view(-1)[inside] += self.values[part].to(weight)
        return copied.eval()

    def check(self, denoiser: Denoiser) -> None:
        """Refuses a denoiser that these changes were not fitted on; of the right one it keeps a changed copy."""
        super().check(denoiser)
        if self._known is not None and self._known() is denoiser:
            return
        if not isinstance(denoiser, NetworkDenoiser) or fingerprint(denoiser) != self.source:
            raise ValueError("these changes were fitted on another source model: fit them again on this one")
        self._known, self.copy = weakref.ref(denoiser), self.tuned(denoiser)

    def table(self, z: Tensor, positions: Tensor, t: Tensor | None = None, context: Prediction | None = None) -> Tensor:
        if context is None:
            raise ValueError("changes need their source's prediction: pass context=denoiser(z, t, positions)")
        return difference(self.changed(z, t, positions), context)

    @property
    def changed(self) -> NetworkDenoiser:
        """The denoiser that was checked last, with the changes in its weights."""
        if self.copy is None:
            raise ValueError("changes are those of a denoiser's weights: call check(denoiser) first")
        return self.copy

    def config(self) -> dict[str, Any]:
        return {"count": len(self.places), "source": self.source, "timeless": self.timeless}

    @classmethod
    def from_config(cls, process: Process, config: dict[str, Any]) -> "SparseRatio":
        places = torch.arange(config["count"])
        return cls(process, places, torch.zeros(len(places)), config["source"], config["timeless"])


def _drop_copy(ratio: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}copy.")]:
        del state[key]
