"""The source with some of its weights changed, as a ratio.

    log r(x_l = v | z) = log p_{W + D}(v | z) - log p_W(v | z)

A network beside the source sees what the source made of z; changed weights also change what it makes of z. Only D
belongs to the ratio, a file of a few megabytes, for one more pass of the source. At gamma 1 guidance by it is the
source with changed weights; the mean of several is `(a + b) * 0.5`, as with all ratios.
"""

import weakref
from abc import abstractmethod
from typing import Any

from torch import Tensor, nn

from gtl.denoiser import Denoiser, NetworkDenoiser, Prediction, fingerprint
from gtl.process import Process
from gtl.ratio.base import ConditionalRatio
from gtl.ratio.difference import difference

__all__ = ["ChangedRatio"]


class ChangedRatio(ConditionalRatio):
    """Changes to the weights of the denoiser that it guides."""

    def __init__(self, process: Process, source: str, timeless: bool = True) -> None:
        """Sets what the changes belong to.

        Args:
            process: the forward process.
            source: the `fingerprint` of the denoiser that they were fitted on.
            timeless: whether that denoiser's prediction depends on z alone.
        """
        super().__init__()
        self.process, self.source, self.timeless = process, source, timeless
        self._known: weakref.ref[Denoiser] | None = None
        self.copy: NetworkDenoiser | None = None
        self.register_state_dict_post_hook(_drop_copy)

    @abstractmethod
    def tuned(self, denoiser: NetworkDenoiser) -> NetworkDenoiser:
        """A copy of the denoiser with the changes in its weights."""

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
        return {"source": self.source, "timeless": self.timeless}


def _drop_copy(ratio: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}copy.")]:
        del state[key]
