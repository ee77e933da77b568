"""One ratio after another: the second sees the model that the first makes of the source.

    q_1 = p r_1 / Z,        log r = log q_1 - log p + log r_2( . ; q_1 )

A sum gives every ratio the source; a ratio that depends on what it reweights, such as a mixture of neighbours with the
model at hand, belongs on top of the others instead: (1 - lambda) q_1 + lambda k hedges the better model.
"""

import torch
from torch import Tensor, nn

from gtl.denoiser import Denoiser, Prediction
from gtl.guidance import guide
from gtl.ratio.base import ConditionalRatio, Ratio

__all__ = ["SuccessiveRatio"]


class SuccessiveRatio(ConditionalRatio):
    """r_2 on top of r_1, each at the gamma that was chosen for it. The first must tilt p(x | z): a clean ratio, or any
    under masked noise."""

    kind = "successive"

    def __init__(self, first: Ratio, then: ConditionalRatio) -> None:
        super().__init__()
        if first.process.config() != then.process.config():
            raise ValueError("ratios of different processes cannot follow each other")
        if first.space != "clean" and first.process.name != "masked":
            raise ValueError(f"under {first.process.name} noise only a clean ratio can come first")
        self.parts = nn.ModuleList([first, then])
        self.process, self.timeless = first.process, first.timeless and then.timeless

    def ratios(self) -> tuple[Ratio, ConditionalRatio]:
        """The first and the second."""
        first, then = self.parts
        return first, then  # type: ignore[return-value]

    def check(self, denoiser: Denoiser) -> None:
        for ratio in self.ratios():
            ratio.check(denoiser)

    def table(self, z: Tensor, positions: Tensor, t: Tensor | None = None, context: Prediction | None = None) -> Tensor:
        if context is None:
            raise ValueError("a ratio on top of another needs the source's prediction: pass context")
        first, then = self.ratios()
        p = context.log_probs
        q = guide(p, first.table(z, positions, t, context), first.gamma)
        after = then.table(z, positions, t, context._replace(log_probs=q))
        return torch.where(p == -torch.inf, 0.0, q - p + then.gamma * after)
