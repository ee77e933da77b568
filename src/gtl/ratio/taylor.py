"""Taylor scoring: all positions and tokens by one forward and one backward pass of a sequence ratio's network.

    log r(z with l <- v)  ~  log r(z) + g_l . (E_v - E_{z_l}),        g_l = d log r(z) / d embedding at l

E is the table of token embeddings. Exact where log r is linear in the embeddings, and to first order otherwise: the
gradient at one token says what any other in its place would do. It costs a small multiple of one pass, whatever
n_ratio, and needs no training of its own. What it gives carries no gradient: it is for sampling and for choosing gamma,
not for fitting.
"""

import torch
from torch import Tensor

from gtl.denoiser import Prediction
from gtl.nn.dit import gather_positions
from gtl.ratio.base import Combination, Ratio, SequenceRatio
from gtl.ratio.late import LateRatio
from gtl.ratio.sequence import NetworkRatio

__all__ = ["TaylorRatio", "taylor"]


class TaylorRatio(Ratio):
    """The first-order expansion of a sequence ratio's network around z."""

    def __init__(self, ratio: Ratio) -> None:
        """Wraps a ratio network, whose process, space, time and gamma it takes over."""
        super().__init__()
        if not isinstance(ratio, NetworkRatio | LateRatio):
            raise ValueError(f"Taylor scoring needs a sequence ratio network; {type(ratio).__name__} is none")
        self.ratio, self.process, self.space = ratio, ratio.process, ratio.space
        self.timeless, self.gamma = ratio.timeless, ratio.gamma

    def gradient(self, z: Tensor, t: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """log r(z) (B,) and its gradient by the embedding of every position (B, L, width), both detached, whether or
        not gradients are switched on around it."""
        rows = max(1, self.ratio.budget(z.device) // z.shape[1])
        weight = self.ratio.network.dit.embedding.weight
        values: list[Tensor] = []
        slopes: list[Tensor] = []
        for at in range(0, max(1, len(z)), rows):
            part, time = z[at : at + rows], None if t is None else t[at : at + rows]
            with torch.enable_grad():
                extra = weight.new_zeros(*part.shape, weight.shape[1]).requires_grad_()
                value = self.ratio.log_value(part, time, extra)
                slopes += torch.autograd.grad(value.sum(), extra)  # rows do not see each other
            values.append(value.detach())
        return torch.cat(values), torch.cat(slopes)

    @torch.no_grad()
    def table(self, z: Tensor, positions: Tensor, t: Tensor | None = None, context: Prediction | None = None) -> Tensor:
        value, slope = self.gradient(z, t)
        embedding = self.ratio.network.dit.embedding.weight[: self.process.num_ids]
        linear = gather_positions(slope, positions) @ embedding.T  # (B, P, K)
        here = linear.gather(-1, gather_positions(z, positions).unsqueeze(-1))
        return value[:, None, None] + linear - here

    def log_ratio(
        self,
        z: Tensor,
        positions: Tensor,
        candidates: Tensor,
        t: Tensor | None = None,
        context: Prediction | None = None,
    ) -> Tensor:
        return self.table(z, positions, t, context).gather(-1, candidates)


def taylor(ratio: Ratio) -> Ratio:
    """The Taylor scoring of a ratio; of a sum, that of each term that is a sequence ratio, the others as they are."""
    if not isinstance(ratio, Combination):
        return TaylorRatio(ratio)
    terms = [(w, TaylorRatio(r) if isinstance(r, SequenceRatio) else r) for w, r in ratio.weighted_terms()]
    made = Combination(terms)
    made.gamma = ratio.gamma
    return made
