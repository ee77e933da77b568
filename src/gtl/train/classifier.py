"""Domain classifiers: logistic loss on source (label 1) against target (label 0), clean or noisy.

    d(z) = sigmoid(-log r(z)),      loss = -[ y log d + (1 - y) log(1 - d) ]

On noisy sequences, with equal priors and one law of t for both domains, the optimum is exactly log r(z_t): this is the
*direct* ratio estimator. On clean sequences it is log r(x_0).

Label smoothing eps follows torch's convention: labels eps/2 and 1 - eps/2. Its optimum is a capped log-odds (2.9 for
eps = 0.1), which is not log r. `calibrated` puts the smoothing into the link instead, d = eps/2 + (1 - eps)
sigmoid(-log r): the optimum is log r again, and the loss of a wrong label stays bounded.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtl.process import Process
from gtl.train.objective import Objective

__all__ = ["ClassifierObjective", "logistic"]


def logistic(log_r: Tensor, source: bool, smoothing: float = 0.0, calibrated: bool = True) -> Tensor:
    """The loss of sequences of one domain given log r (B,): (B,)."""
    if smoothing == 0:
        return F.softplus(log_r if source else -log_r)
    label = torch.full_like(log_r, 1 - smoothing / 2 if source else smoothing / 2)
    if calibrated:
        d = smoothing / 2 + (1 - smoothing) * torch.sigmoid(-log_r)
        return F.binary_cross_entropy(d, label, reduction="none")
    return F.binary_cross_entropy_with_logits(-log_r, label, reduction="none")


class ClassifierObjective(Objective):
    """Separates `source` from `target`; with `noisy` at every noise level, else on clean sequences."""

    def __init__(
        self,
        process: Process,
        train: dict[str, Tensor],
        held_out: dict[str, Tensor] | None = None,
        noisy: bool = True,
        smoothing: float = 0.0,
        calibrated: bool = True,
    ) -> None:
        super().__init__(train, held_out)
        if not 0 <= smoothing < 1:
            raise ValueError(f"label_smoothing={smoothing} must be in [0, 1)")
        self.process, self.noisy, self.smoothing, self.calibrated = process, noisy, smoothing, calibrated

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        source, target = batch["source"], batch["target"]
        count, device = len(source), source.device
        if self.noisy:
            t = torch.cat([self.process.times(len(x), device, generator) for x in (source, target)])
            z = self.process.corrupt(torch.cat([source, target]), t, generator)
        else:
            t, z = torch.zeros(2 * count, device=device), torch.cat([source, target])
        log_r = forward(z, t)
        losses = [
            logistic(part, domain, self.smoothing, self.calibrated).mean()
            for part, domain in ((log_r[:count], True), (log_r[count:], False))
        ]
        return (losses[0] + losses[1]) / 2
