"""Domain classifiers: logistic loss on source (label 1) against target (label 0), clean or noisy.

    d(z) = sigmoid(-log r(z)),      loss = -[ y log d + (1 - y) log(1 - d) ]

On noisy sequences, with equal priors and one law of t for both domains, the optimum is exactly log r(z_t): this is the
*direct* ratio estimator. On clean sequences it is log r(x_0).

Label smoothing eps follows torch's convention: labels eps/2 and 1 - eps/2. The optimum of the output s is then a capped
log-odds, sigmoid(s) = eps/2 + (1 - eps) sigmoid(log r), at most 2.9 for eps = 0.1. `NetworkRatio` undoes that when it
is asked for log r (its `smoothing`), so that smoothing steadies the training and does not bend the ratio.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtl.process import Process
from gtl.train.objective import Objective

__all__ = ["ClassifierObjective", "logistic"]


def logistic(s: Tensor, source: bool, smoothing: float = 0.0) -> Tensor:
    """The loss of sequences of one domain given the network's output s (B,), whose sigmoid is the chance of target:
    (B,)."""
    label = torch.full_like(s, smoothing / 2 if source else 1 - smoothing / 2)
    return F.binary_cross_entropy_with_logits(s, label, reduction="none")


class ClassifierObjective(Objective):
    """Separates `source` from `target`; with `noisy` at every noise level, else on clean sequences."""

    def __init__(
        self,
        process: Process,
        train: dict[str, Tensor],
        held_out: dict[str, Tensor] | None = None,
        noisy: bool = True,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__(train, held_out)
        if not 0 <= smoothing < 1:
            raise ValueError(f"label_smoothing={smoothing} must be in [0, 1)")
        self.process, self.noisy, self.smoothing = process, noisy, smoothing

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        source, target = batch["source"], batch["target"]
        count, device = len(source), source.device
        if self.noisy:
            t = torch.cat([self.process.times(len(x), device, generator) for x in (source, target)])
            z = self.process.corrupt(torch.cat([source, target]), t, generator)
        else:
            t, z = torch.zeros(2 * count, device=device), torch.cat([source, target])
        s = forward(z, t)
        losses = [logistic(s[:count], True, self.smoothing), logistic(s[count:], False, self.smoothing)]
        return torch.cat(losses).mean()
