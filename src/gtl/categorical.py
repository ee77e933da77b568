"""The one categorical draw of this library.

    v = min { i : p_1 + ... + p_i > u (p_1 + ... + p_K) },   u ~ Uniform[0, 1)

The cumulative sum and u are float64. Adding float32 Gumbel noise instead loses rare tokens: a float32 uniform has
2^-24 as its smallest step, so probabilities below about 1e-5 are rounded away or tied. Here a token of probability
1e-12 is still drawn once in 1e12 draws, and a token of probability zero never is.
"""

import torch
from torch import Tensor

__all__ = ["bernoulli", "categorical", "random_true", "uniform"]


def uniform(shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Uniform float64 numbers on `device`, drawn where the generator lives.

    A CPU generator therefore gives the same numbers whatever device the model is on.
    """
    source = device if generator is None else generator.device
    return torch.rand(shape, dtype=torch.float64, device=source, generator=generator).to(device)


def bernoulli(p: Tensor, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
    """Booleans of the given shape that are true with probability p (broadcast against the shape)."""
    return uniform(shape, p.device, generator) < p


def categorical(log_p: Tensor, generator: torch.Generator | None = None, count: int | None = None) -> Tensor:
    """Draws token ids from log-probabilities, exact in the tails.

    Args:
        log_p: (..., K), normalised or not; -inf is never drawn.
        generator: the source of randomness.
        count: several independent draws from each.

    Returns:
        (...), int64; with `count`, (..., count).
    """
    top = log_p.amax(-1, keepdim=True)
    cdf = (log_p.double() - top.double()).exp_().cumsum(-1)
    total = cdf[..., -1:]
    u = uniform((*total.shape[:-1], 1 if count is None else count), log_p.device, generator) * total
    u = torch.minimum(u, torch.nextafter(total, torch.zeros_like(total)))  # u * total may round up to total
    drawn = torch.searchsorted(cdf, u, right=True)
    return drawn.squeeze(-1) if count is None else drawn


def random_true(mask: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The place of a uniformly random True of every row of mask (B, L): (B,); anything where a row has none."""
    keys = uniform(tuple(mask.shape), mask.device, generator)
    return keys.masked_fill(~mask, -1.0).argmax(-1)
