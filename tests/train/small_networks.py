"""Small guided models, a few rows, and a few steps, for tests of training."""

import torch
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser
from gtl.guidance import Guided
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.ratio import LocalRatio, NetworkRatio
from gtl.train.loop import FitSettings

SETTINGS = FitSettings(
    steps=11, batch_size=4, learning_rate=0.02, warmup=3, evaluate_every=3, evaluation_rows=8, save_every=1000, ema=0.0
)


def networks(kind: str = "local", dropout: float = 0.3) -> Guided:
    """A denoiser with random weights and dropout under a fresh ratio."""
    torch.manual_seed(0)
    process = Masked(4)
    denoiser = NetworkDenoiser(process, DiT(4, 4, width=8, depth=1, heads=2, dropout=dropout))
    nn.init.normal_(denoiser.network.head.weight)
    if kind == "local":
        return Guided(denoiser, LocalRatio.build(denoiser, width=8, depth=1, heads=2), 1.0)
    return Guided(denoiser, NetworkRatio.build(process, width=8, depth=1, heads=2), 1.0)


def data(count: int = 12) -> Tensor:
    return torch.randint(3, (count, 5), generator=torch.Generator().manual_seed(1))
