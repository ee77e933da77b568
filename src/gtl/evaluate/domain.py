"""An independent judge of the domain: a small classifier of clean sequences, 0 = target and 1 = source.

    d(x) = sigmoid(-s(x)),        loss = -[ y log d + (1 - y) log(1 - d) ],        y = 1 for source, 0 for target

with label smoothing 0.05 in torch's convention: the labels are 0.025 and 0.975, so d stays between those. (Inside, s is
a log-ratio as everywhere in this library, positive for the target; only d is reported.) It must be independent of what
it judges: give it source and target data that neither the models, the ratio nor the choice of gamma has seen. What it
scores for held-out sequences of both domains, and how well it tells them apart, belongs beside what it says of samples.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from gtl.data.tokens import split
from gtl.process import Masked
from gtl.ratio import NetworkRatio
from gtl.train.classifier import ClassifierObjective
from gtl.train.loop import FitSettings, fit

__all__ = ["FEWEST", "SMOOTHING", "Domain", "DomainClassifier", "fit_domain"]

SMOOTHING = 0.05
FEWEST = 20
"""Sequences of each domain below which there is nothing to train on."""
STOPPING = 1024
"""Sequences of each domain, at most, that decide when training stops."""


class Domain(NamedTuple):
    """How well the classifier tells held-out sequences apart, and its mean score of those."""

    accuracy: float
    auc: float
    target: float
    source: float


class DomainClassifier:
    """d(x) by a small DiT on clean sequences."""

    def __init__(self, num_ids: int, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        self.process = Masked(num_ids + 1)  # one id more stands for no token
        self.network = NetworkRatio.build(self.process, "mean", width=width, depth=depth, heads=heads, dropout=0.1)

    def tokens(self, x: Tensor) -> Tensor:
        """x (N, L) with the id of no token where it is negative."""
        return x.long().masked_fill(x < 0, self.process.mask_id)

    @torch.no_grad()
    def scores(self, x: Tensor, batch: int = 256) -> Tensor:
        """d(x), near 0 for target-like and near 1 for source-like sequences: x (N, L) -> (N,), on the CPU."""
        device = next(self.network.parameters()).device
        parts = [torch.sigmoid(-self.network(self.tokens(part).to(device))) for part in x.split(batch)]
        return torch.cat(parts).cpu()


def fit_domain(
    source: Tensor,
    target: Tensor,
    num_ids: int,
    steps: int = 300,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> tuple[DomainClassifier, Domain]:
    """A classifier of source (N, L) against target (M, L): a quarter of each tests it, a fifth of the rest stops it."""
    for name, x in (("source", source), ("target", target)):
        if len(x) < FEWEST:
            raise ValueError(f"the domain classifier has {len(x)} {name} sequences; {FEWEST} are needed of each domain")
    torch.manual_seed(seed)  # of the first weights
    classifier = DomainClassifier(num_ids)
    train, stop, test = {}, {}, {}
    for name, x in (("source", source), ("target", target)):
        rest, test[name] = split(classifier.tokens(x), 0.25, seed)
        train[name], stop[name] = split(rest, min(0.2, STOPPING / len(rest)), seed + 1)
    objective = ClassifierObjective(classifier.process, train, stop, noisy=False, smoothing=SMOOTHING)
    settings = FitSettings(steps=steps, batch_size=64, evaluation_rows=256, patience=4, seed=seed)
    fit(classifier.network, objective, settings, on_step=on_step)
    d = {name: classifier.scores(x).double().numpy() for name, x in test.items()}
    label = np.repeat([1, 0], [len(d["source"]), len(d["target"])])
    auc = float(roc_auc_score(label, np.concatenate([d["source"], d["target"]])))
    accuracy = float((d["source"] > 0.5).mean() + (d["target"] <= 0.5).mean()) / 2  # both domains count the same
    return classifier, Domain(accuracy, auc, float(d["target"].mean()), float(d["source"].mean()))
