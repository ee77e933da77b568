"""The source with a few directions of its weights changed, as a ratio: D = s B A, A (rank, in), B (out, rank).

At gamma 1 guidance by one of them is LoRA.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser, fingerprint
from gtl.process import Process
from gtl.ratio.changed import ChangedRatio

__all__ = ["AdapterRatio"]

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""A linear map's name in the network -> its A (rank, in) and B (out, rank)."""


class AdapterRatio(ChangedRatio):
    """Low-rank changes."""

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
        super().__init__(process, source, timeless)
        if not factors:
            raise ValueError("there are no adapters")
        self.scale, self.layers = scale, tuple(factors)
        self.a = nn.ParameterList(nn.Parameter(a.detach().clone()) for a, _ in factors.values())
        self.b = nn.ParameterList(nn.Parameter(b.detach().clone()) for _, b in factors.values())
        self.requires_grad_(False)

    @classmethod
    def of(cls, denoiser: NetworkDenoiser, factors: Factors, scale: float) -> "AdapterRatio":
        """Adapters that were fitted on a denoiser."""
        ratio = cls(denoiser.process, factors, scale, fingerprint(denoiser), denoiser.timeless)
        ratio.check(denoiser)
        return ratio

    @torch.no_grad()
    def tuned(self, denoiser: NetworkDenoiser) -> NetworkDenoiser:
        copied = copy.deepcopy(denoiser).requires_grad_(False)
        if "head" in self.layers:
            copied.network = copied.network.untied()  # the embedding stays as it is
        for name, a, b in zip(self.layers, self.a, self.b, strict=True):
            layer = copied.network.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            layer.weight += self.scale * (b @ a).to(layer.weight)
        return copied.eval()

    def config(self) -> dict[str, Any]:
        shapes = [[*a.shape, len(b)] for a, b in zip(self.a, self.b, strict=True)]
        return {"layers": dict(zip(self.layers, shapes, strict=True)), "scale": self.scale, **super().config()}

    @classmethod
    def from_config(cls, process: Process, config: dict[str, Any]) -> "AdapterRatio":
        factors = {
            name: (torch.zeros(rank, wide), torch.zeros(high, rank))
            for name, (rank, wide, high) in config["layers"].items()
        }
        return cls(process, factors, config["scale"], config["source"], config["timeless"])
