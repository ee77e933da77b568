"""The source with a few directions of its weights changed, as a ratio.

    log r(x_l = v | z) = log p_{W + s B A}(v | z) - log p_W(v | z),      A (rank, in), B (out, rank)

A network beside the source sees what the source made of z; adapters also change what it makes of z. Only A and B belong
to the ratio: a file of a few megabytes, for one more pass of the source. At gamma 1 guidance by one of them is LoRA;
the mean of several is `(a + b) * 0.5`, as with all ratios.
"""

import copy
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gtl.denoiser import Denoiser, NetworkDenoiser, Prediction, fingerprint
from gtl.process import Process
from gtl.ratio.base import ConditionalRatio
from gtl.ratio.difference import difference

__all__ = ["AdapterRatio"]

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""A linear map's name in the network -> its A (rank, in) and B (out, rank)."""


class AdapterRatio(ConditionalRatio):
    """Low-rank changes to the weights of the denoiser that it guides."""

    kind = "adapters"

    def __init__(self, process: Process, factors: Factors, scale: float, source: str, timeless: bool = True) -> None:
        """Sets the changes.

        Args:
            process: the forward process.
            factors: what is added to each linear map, up to the scale.
            scale: s, LoRA's alpha / rank.
            source: the `fingerprint` of the denoiser that they were fitted on.
            timeless: whether that denoiser's prediction depends on z alone.
        """
        super().__init__()
        if not factors:
            raise ValueError("there are no adapters")
        self.process, self.scale, self.source, self.timeless = process, scale, source, timeless
        self.layers = tuple(factors)
        self.a = nn.ParameterList(nn.Parameter(a.detach().clone()) for a, _ in factors.values())
        self.b = nn.ParameterList(nn.Parameter(b.detach().clone()) for _, b in factors.values())
        self._known: weakref.ref[Denoiser] | None = None
        self.copy: NetworkDenoiser | None = None
        self.register_state_dict_post_hook(_drop_copy)
        self.requires_grad_(False)

    @classmethod
    def of(cls, denoiser: NetworkDenoiser, factors: Factors, scale: float) -> "AdapterRatio":
        """Adapters that were fitted on a denoiser."""
        ratio = cls(denoiser.process, factors, scale, fingerprint(denoiser), denoiser.timeless)
        ratio.check(denoiser)
        return ratio

    @torch.no_grad()
    def tuned(self, denoiser: NetworkDenoiser) -> NetworkDenoiser:
        """A copy of the denoiser with the changes in its weights."""
        copied = copy.deepcopy(denoiser).requires_grad_(False)
        if "head" in self.layers:
            copied.network = copied.network.untied()  # the embedding stays as it is
        for name, a, b in zip(self.layers, self.a, self.b, strict=True):
            layer = copied.network.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            layer.weight += self.scale * (b @ a).to(layer.weight)
        return copied.eval()

    def check(self, denoiser: Denoiser) -> None:
        """Refuses a denoiser that these adapters were not fitted on; of the right one it keeps a changed copy."""
        super().check(denoiser)
        if self._known is not None and self._known() is denoiser:
            return
        if not isinstance(denoiser, NetworkDenoiser) or fingerprint(denoiser) != self.source:
            raise ValueError("these adapters were fitted on another source model: fit them again on this one")
        self._known, self.copy = weakref.ref(denoiser), self.tuned(denoiser)

    def table(self, z: Tensor, positions: Tensor, t: Tensor | None = None, context: Prediction | None = None) -> Tensor:
        if context is None:
            raise ValueError("adapters need their source's prediction: pass context=denoiser(z, t, positions)")
        return difference(self.changed(z, t, positions), context)

    @property
    def changed(self) -> NetworkDenoiser:
        """The denoiser that was checked last, with the changes in its weights."""
        if self.copy is None:
            raise ValueError("adapters change a denoiser's weights: call check(denoiser) first")
        return self.copy

    def config(self) -> dict[str, Any]:
        shapes = [[*a.shape, len(b)] for a, b in zip(self.a, self.b, strict=True)]
        layers = dict(zip(self.layers, shapes, strict=True))
        return {"layers": layers, "scale": self.scale, "source": self.source, "timeless": self.timeless}

    @classmethod
    def from_config(cls, process: Process, config: dict[str, Any]) -> "AdapterRatio":
        factors = {
            name: (torch.zeros(rank, wide), torch.zeros(high, rank))
            for name, (rank, wide, high) in config["layers"].items()
        }
        return cls(process, factors, config["scale"], config["source"], config["timeless"])


def _drop_copy(ratio: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}copy.")]:
        del state[key]
