"""Late ratios with nothing but random weights, and questions to them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser
from gtl.nn.dit import DiT
from gtl.process import D3PM, Masked, Process, Uniform
from gtl.ratio.late import LateRatio

LENGTH, IDS, ROWS = 5, 5, 6
NOISE: dict[str, Callable[[], Process]] = {
    "masked": lambda: Masked(IDS, 2),
    "uniform": lambda: Uniform(IDS),
    "absorbing": lambda: D3PM(IDS, "absorbing"),
}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
every_noise = pytest.mark.parametrize("noise", NOISE)


def make(noise: str = "masked", timed: bool = False, blocks: int = 1, **changes: Any) -> LateRatio:
    """A ratio in float64 all of whose weights are random: fresh heads and modulations are zero and hide mistakes."""
    size = {"width": 8, "depth": 1, "heads": 2, "time_conditioned": timed, **changes}
    ratio = LateRatio.build(NOISE[noise](), blocks, **size)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in ratio.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
        ratio.network.dit.embedding.weight *= 4
        ratio.network.dit.head.weight *= 0.3
        ratio.network.head.weight *= 4
    return ratio.double().eval().requires_grad_(False)


def question(seed: int, places: int = 3, count: int = 4, padded: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z, half of it the id 2, positions with padding where there are several, candidates of any id, and times."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randint(IDS, (ROWS, LENGTH), generator=generator)
    z = z.masked_fill(torch.rand(z.shape, generator=generator) < 0.5, 2)
    positions = torch.randint(-1 if places > 1 and padded else 0, LENGTH, (ROWS, places), generator=generator)
    candidates = torch.randint(IDS, (ROWS, places, count), generator=generator)
    return z, positions, candidates, torch.rand(ROWS, generator=generator)


def denoiser(process: Process, timed: bool = False) -> NetworkDenoiser:
    torch.manual_seed(1)
    model = NetworkDenoiser(process, DiT(IDS, IDS, width=8, depth=1, heads=2, time_conditioned=timed))
    nn.init.normal_(model.network.head.weight, std=0.5)
    return model.eval().requires_grad_(False)
