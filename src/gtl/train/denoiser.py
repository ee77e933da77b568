"""The denoiser's objective: the NELBO per token on one dataset. Vanilla and fine-tuned baselines are this too.

Under masked noise only the true token's log-probability at masked positions counts. So the head, half of the work at
30,000 tokens, runs there alone (`TrueTokens`), and nothing of shape (B, L, K) is made.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtl.denoiser import Denoiser, NetworkDenoiser, nelbo
from gtl.process import Masked
from gtl.score import ScoreDenoiser
from gtl.train.objective import Objective

__all__ = ["DenoiserObjective", "TrueTokens", "fixed_places"]

ALIGNED = 64
"""The number of logits is padded to a multiple of this."""


class TrueTokens(nn.Module):
    """A network denoiser's `surprise` as a module of its own, which the loop can compile and spread."""

    def __init__(self, denoiser: NetworkDenoiser) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(self, x: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """Clean tokens x (B, L) and what noise made of them at times t (B,): (B,)."""
        if not (torch.is_grad_enabled() and z.is_cuda):
            return self.denoiser.surprise(x, z, t)
        hidden = self.denoiser.network.trunk(z, t).flatten(0, 1)
        where, counts = fixed_places(z.flatten().eq(self.denoiser.process.mask_id))  # type: ignore[arg-type]
        values = self.cross_entropy(hidden[where], x.flatten()[where]) * counts
        return values.new_zeros(len(x)).index_add(0, where.div(x.shape[1], rounding_mode="floor"), values)

    def cross_entropy(self, hidden: Tensor, x: Tensor) -> Tensor:
        """-log p of tokens x (M,) given normalised hidden states (M, width): (M,)."""
        head, pad = self.denoiser.network.head, -self.denoiser.process.num_ids % ALIGNED
        weight, bias = F.pad(head.weight, (0, 0, 0, pad)), F.pad(head.bias, (0, pad))  # a GPU is slow on odd widths
        logits = F.linear(hidden, weight, bias).float() + F.pad(self.denoiser.ban, (0, pad), value=-torch.inf)
        return F.cross_entropy(logits, x, reduction="none")


def fixed_places(masked: Tensor) -> tuple[Tensor, Tensor]:
    """The places of the masked positions (N,) in an array whose size depends on N alone, and 1 or 0 for whether an
    entry counts: no read of the device, and shapes that a compiler can rely on.

    Half of the positions are masked on average, with a standard deviation of sqrt(N / 6); there is room for eight more
    of those. Should that ever not do, the result is not a number, which the loop reports.
    """
    count = len(masked)
    size = min(count, -(-int(count / 2 + 8 * (count / 6) ** 0.5) // 256) * 256)
    first, where = masked.byte().sort(descending=True)
    return where[:size], torch.where(masked.sum() > size, torch.nan, first[:size].float())


class DenoiserObjective(Objective):
    """Minimises E[NELBO(x)] / L over the rows named `data`."""

    def __init__(self, denoiser: Denoiser, x: Tensor, held_out: Tensor | None = None) -> None:
        super().__init__({"data": x}, None if held_out is None else {"data": held_out})
        self.denoiser = denoiser

    def wrap(self, model: nn.Module) -> nn.Module:
        if not isinstance(model, NetworkDenoiser) or isinstance(model, ScoreDenoiser):
            return model
        return TrueTokens(model) if isinstance(model.process, Masked) else model

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        x = batch["data"]
        process = self.denoiser.process
        if not isinstance(self.wrap(self.denoiser), TrueTokens):
            return nelbo(self.denoiser, x, generator, forward).mean() / x.shape[1]
        assert isinstance(process, Masked)
        t = process.times(len(x), x.device, generator)
        z = process.corrupt(x, t, generator)
        return process.weigh(forward(x, z, t), z, t, self.denoiser.timeless).mean() / x.shape[1]
