"""MAUVE (Pillutla et al., 2021): one number for how close samples are to real text.

    MAUVE = area under { ( exp(-c KL(q | m)), exp(-c KL(p | m)) ) : m = a p + (1 - a) q, 0 < a < 1 },      c = 5

p and q are histograms of both sides over the buckets of one k-means on features. Feature = mean of the featurizer's
last hidden states over the text. 1 is as close as can be, 0 is far. The value depends on the featurizer, on the number
of sequences, on their length and on the buckets (a tenth of the sequences by default): only numbers that agree in all
four can be compared, so both sides get equal numbers and equal lengths, and k-means runs from several seeds. Where
several methods are compared, give the length (`words`): by default it follows the samples.
"""

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gtl.evaluate.pretrained import load, longest
from gtl.evaluate.quiet import hushed

__all__ = ["FEWEST", "Mauve", "cut", "embed", "enough", "mauve_of_features", "mauve_of_texts"]

FEWEST, FEW = 100, 1000
"""Sequences on each side below which MAUVE means nothing, and below which it is uncertain."""


class Mauve(NamedTuple):
    """The values of the k-means seeds, and what they hang on."""

    values: list[float]
    buckets: int
    words: int
    """That both sides were cut to."""

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return float(np.mean(self.values))

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds; 0 for one."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else 0.0


def package() -> Any:
    """mauve-text, which is an extra."""
    try:
        import mauve
    except ImportError:
        raise ValueError("MAUVE needs the package mauve-text: pip install 'gtl[eval]'") from None
    return mauve


def enough(samples: int, held_out: int) -> int:
    """How many sequences both sides get; refuses few and warns of not many."""
    count = min(samples, held_out)
    if count < FEWEST:
        raise ValueError(
            f"MAUVE of {count} sequences means nothing: {FEWEST} are needed on each side, {FEW} are better"
        )
    if count < FEW:
        print(f"gtl: warning: MAUVE of {count} sequences is uncertain; {FEW} or more are better", file=sys.stderr)
    return count


def cut(samples: list[str], held_out: list[str], words: int | None = None) -> tuple[list[str], list[str], int]:
    """Both sides cut to the same number of words, by default the smaller of the median lengths, and that number."""
    sides = [[text.split() for text in side] for side in (samples, held_out)]
    words = words or max(1, min(int(np.median([len(text) for text in side])) for side in sides))
    first, second = ([" ".join(text[:words]) for text in side] for side in sides)
    return first, second, words


@torch.no_grad()
def embed(
    texts: list[str], tokenizer: Any, network: Any, batch: int = 32, on_progress: Callable[[float], None] | None = None
) -> NDArray[np.float32]:
    """The mean over each text of the network's last hidden states: (N, D). Padding does not count."""
    device, most = next(network.parameters()).device, longest(tokenizer, network)
    order = np.argsort([len(text) for text in texts], kind="stable")  # texts of one length together: less padding
    parts: list[NDArray[np.float32]] = []
    for at in range(0, len(texts), batch):
        rows = [texts[i] for i in order[at : at + batch]]
        inputs = tokenizer(rows, return_tensors="pt", padding=True, truncation=True, max_length=most).to(device)
        if not inputs["input_ids"].shape[1]:
            raise ValueError("the featurizer sees no token in the texts; are they empty?")
        inputs.pop("token_type_ids", None)
        hidden = network(**inputs).last_hidden_state.float()
        weight = inputs["attention_mask"].unsqueeze(-1).float()
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
        parts.append(mean.cpu().numpy())
        if on_progress is not None:
            on_progress(min(1.0, (at + batch) / len(texts)))
    features = np.empty((len(texts), parts[0].shape[1]), np.float32)
    features[order] = np.concatenate(parts)
    return features


@lru_cache(maxsize=2)
def embed_once(texts: tuple[str, ...], tokenizer: Any, network: Any) -> NDArray[np.float32]:
    """`embed` of real text, which many samples are compared with in one process."""
    return embed(list(texts), tokenizer, network)


def mauve_of_features(
    p: NDArray[np.float32],
    q: NDArray[np.float32],
    seeds: int = 5,
    buckets: int | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> tuple[list[float], int]:
    """MAUVE of features p and q (N, D) at each k-means seed, and the number of buckets, N / 10 by default."""
    mauve, values = package(), []
    buckets = buckets or max(2, round(min(len(p), len(q)) / 10))
    for seed in range(seeds):
        with hushed():  # k-means complains of few points a bucket, which is MAUVE's own recommendation
            found = mauve.compute_mauve(p_features=p, q_features=q, num_buckets=buckets, seed=seed, verbose=False)
        values.append(float(found.mauve))
        if on_progress is not None:
            on_progress((seed + 1) / seeds)
    return values, buckets


def mauve_of_texts(
    samples: list[str],
    held_out: list[str],
    featurizer: tuple[Any, Any],
    seeds: int = 5,
    buckets: int | None = None,
    seed: int = 0,
    on_progress: Callable[[float], None] | None = None,
    words: int | None = None,
) -> Mauve:
    """MAUVE of samples against held-out text.

    Args:
        samples: what was generated.
        held_out: real text.
        featurizer: tokenizer and network.
        seeds: of k-means, 0 .. seeds - 1.
        buckets: of k-means, a tenth of the sequences on each side by default.
        seed: of the choice of sequences on the side that has more.
        on_progress: called with the share that is done.
        words: that both sides are cut to; by default the smaller of their median lengths.
    """
    count, random = min(len(samples), len(held_out)), np.random.default_rng(seed)
    sides = [[side[i] for i in sorted(random.permutation(len(side))[:count])] for side in (samples, held_out)]
    first, second, words = cut(sides[0], sides[1], words)

    def share(start: float, size: float) -> Callable[[float], None]:
        return lambda done: on_progress(start + size * done) if on_progress is not None else None

    p = embed(first, *featurizer, on_progress=share(0.0, 0.35))
    q = embed_once(tuple(second), *featurizer)
    share(0.35, 0.35)(1.0)
    values, used = mauve_of_features(p, q, seeds, buckets, share(0.7, 0.3))
    return Mauve(values, used, words)


load_once = lru_cache(maxsize=1)(load)


def open_featurizer(name: str, device: str | torch.device) -> tuple[Any, Any]:
    """Tokenizer and network of a featurizer; MAUVE's own package must be there as well."""
    package()
    tokenizer, network = load_once(name, "featurizer", "AutoModel")
    return tokenizer, network.to(device)
