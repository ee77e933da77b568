"""How good a planner is, by noise level: accuracy, and calibration of sigmoid(logit) as the chance of being right.

    accuracy            how often 1[logit > 0] says whether the denoiser's first choice is right
    calibration error   mean over ten bins of | mean predicted chance - share that is right |, weighted by their sizes

Both over masked positions with t uniform. Beside them stands how often the first choice is right at all, for always
saying the commoner of the two is right that often.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gtl.denoiser import Denoiser
from gtl.planner import Planner
from gtl.train.planner import corrupted, first_choice_is_right

__all__ = ["Level", "planner_levels"]


@dataclass
class Level:
    """What is seen at the noise levels from `low` to `high`."""

    low: float
    high: float
    places: int
    accuracy: float
    right: float
    """Share of masked positions where the denoiser's first choice is right."""
    predicted: float
    """Mean chance that the planner gives to that."""
    calibration_error: float


@torch.no_grad()
def planner_levels(
    denoiser: Denoiser,
    planner: Planner,
    x: Tensor,
    rows: int = 1024,
    generator: torch.Generator | None = None,
    levels: int = 10,
    batch: int = 64,
) -> list[Level]:
    """Accuracy and calibration on clean rows x (N, L), at least `rows` corruptions of them: all levels together, then
    each of `levels` equal parts of [0, 1]."""
    device = next(planner.parameters()).device
    planner.check(denoiser)
    parts = []
    total = max(rows, len(x))
    for index in torch.arange(total).split(batch):
        part = x[index % len(x)].to(device).long()
        z, t = corrupted(denoiser.process, part, generator)
        seen = torch.sigmoid(planner(z)), first_choice_is_right(denoiser, part, z), t.unsqueeze(1).expand_as(z)
        masked = z.eq(denoiser.process.mask_id)  # type: ignore[arg-type]
        parts.append([values[masked].double().cpu().numpy() for values in seen])
    chance, right, time = (np.concatenate(values) for values in zip(*parts, strict=True))
    edges = np.linspace(0, 1, levels + 1)
    bounds = [(0.0, 1.0), *zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    found = []
    for low, high in bounds:
        inside = (time >= low) & ((time < high) | (high == 1.0))
        if inside.any():
            found.append(level(low, high, chance[inside], right[inside]))
    return found


def level(low: float, high: float, chance: np.ndarray, right: np.ndarray) -> Level:
    """The numbers of one noise level, from predicted chances (M,) and what was right (M,)."""
    where = np.minimum((chance * 10).astype(int), 9)
    size = np.bincount(where, minlength=10)
    gap = np.bincount(where, chance, 10) - np.bincount(where, right, 10)
    accuracy = float(((chance > 0.5) == (right > 0.5)).mean())
    error = float(np.abs(gap).sum() / size.sum())
    return Level(low, high, len(right), accuracy, float(right.mean()), float(chance.mean()), error)
