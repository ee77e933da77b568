"""The paper's ratio training: a guidance loss on source data, a cycle loss on target data.

    L = L_guidance + lambda L_cycle
    L_guidance = E_{x ~ p, z ~ p(.|x)} D( r(x), r_phi(z) )       r(x) = (1 - d(x)) / d(x), a frozen clean classifier
    L_cycle    = E_{x ~ q, z ~ p(.|x)} D( r(z), r_phi(z) )       r(z) from a frozen noisy classifier

The paper prints squared error on r. Its minimiser is right, E_p[r(x) | z] = r(z), but the tails of r make it hopeless
(log r of a typical target sequence of the Markov benchmark is about 26), and squared error on log r has another
minimiser, the smaller E[log r | z]. With s = log r_phi the network's output, the Bregman divergence of the logistic
loss,

    D(r, s) = r softplus(-s) + softplus(s),        dD/ds = sigmoid(s) - r sigmoid(-s),

is minimal in expectation at exp(s) = E[r | z], as squared error is, and grows linearly in s. In the cycle loss r
depends on z alone, so there D is divided by 1 + r, which makes it a cross-entropy and changes no minimiser.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtl.process import Process
from gtl.ratio.base import SequenceRatio
from gtl.train.objective import Objective

__all__ = ["RatioObjective", "bregman"]


def bregman(log_target: Tensor, s: Tensor) -> Tensor:
    """D(r, s) with log r = log_target, elementwise; in expectation minimal at s = log E[r]."""
    return log_target.exp() * F.softplus(-s) + F.softplus(s)


class RatioObjective(Objective):
    """The paper's training of r_phi from two frozen classifiers."""

    def __init__(
        self,
        process: Process,
        classifier: SequenceRatio,
        noisy_classifier: SequenceRatio,
        train: dict[str, Tensor],
        held_out: dict[str, Tensor] | None = None,
        cycle_weight: float = 0.1,
        most: float = 10.0,
    ) -> None:
        """Sets the frozen classifiers.

        Args:
            process: the shared forward process.
            classifier: log r(x) of clean sequences.
            noisy_classifier: log r(z_t).
            train: rows of `source` and `target`.
            held_out: the same, for early stopping.
            cycle_weight: lambda.
            most: cap on the classifier's log r(x) of source data, against a single row ruling a batch.
        """
        super().__init__(train, held_out)
        self.process, self.cycle_weight, self.most = process, cycle_weight, most
        self.classifier, self.noisy_classifier = classifier.eval(), noisy_classifier.eval()

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        source, target = batch["source"], batch["target"]
        t = torch.cat([self.process.times(len(x), x.device, generator) for x in (source, target)])
        z = self.process.corrupt(torch.cat([source, target]), t, generator)
        with torch.no_grad():
            log_clean = self.classifier.log_value(source, torch.zeros_like(t[: len(source)])).clamp(max=self.most)
            log_noisy = self.noisy_classifier.log_value(z[len(source) :], t[len(source) :])
        s = forward(z, t)
        guidance = bregman(log_clean, s[: len(source)]).mean()
        cycle = F.binary_cross_entropy_with_logits(s[len(source) :], torch.sigmoid(log_noisy))
        return guidance + self.cycle_weight * cycle
