"""The Markov metric: mean over states of KL(true row || estimated row), rows unweighted (the paper's Table 1)."""

import torch
from torch import Tensor

__all__ = ["count_transitions", "estimate_transitions", "transition_kl", "transition_nll"]


def count_transitions(x: Tensor, vocabulary: int) -> Tensor:
    """Counts of (x_l, x_{l+1}) over all sequences x (N, L): (V, V), float64."""
    pairs = x[:, :-1].flatten().cpu() * vocabulary + x[:, 1:].flatten().cpu()
    return torch.bincount(pairs, minlength=vocabulary**2).view(vocabulary, vocabulary).double()


def estimate_transitions(x: Tensor, vocabulary: int, pseudo: float = 0.0) -> Tensor:
    """Row-normalised transition counts of x (N, L), `pseudo` added to each: (V, V). An unseen state gets a uniform
    row."""
    counts = count_transitions(x, vocabulary) + pseudo
    total = counts.sum(1, keepdim=True)
    return torch.where(total > 0, counts / total.clamp(min=1e-300), torch.full_like(counts, 1 / vocabulary))


def transition_kl(true: Tensor, x: Tensor, pseudo: float = 0.0) -> float:
    """The metric `kl`, in nats, of samples x (N, L) against the true matrix (V, V).

    A pair that occurs in the truth and never in the samples counts as half a transition, so that the value is finite.
    """
    counts = count_transitions(x, len(true)) + pseudo
    counts = torch.where((counts == 0) & (true.cpu() > 0), torch.full_like(counts, 0.5), counts)
    estimate = counts / counts.sum(1, keepdim=True)
    true = true.double().cpu()
    return float(torch.where(true > 0, true * (true / estimate).log(), 0.0).sum(1).mean())


def transition_nll(x: Tensor, samples: Tensor, vocabulary: int) -> float:
    """-log of the transitions of x (N, L), in nats each, under the matrix counted in samples (M, L), half a count
    added.

    Up to a constant this is the metric `kl` with x in place of the truth: what validation on held-out x can see of it.
    """
    log_t = estimate_transitions(samples, vocabulary, pseudo=0.5).log()
    counts = count_transitions(x, vocabulary)
    return float(-(counts * log_t).sum() / counts.sum())
