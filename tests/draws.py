"""What tests of draws share: how many, how unlikely a law may look, and seeds."""

import torch

SAMPLES = 20_000
LEAST_P_VALUE = 1e-3


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
