"""Opening what `gtl sample` and `gtl evaluate` work with."""

from pathlib import Path
from typing import Literal

import torch

from gtl.denoiser import NetworkDenoiser
from gtl.guidance import check_gamma, check_n_ratio
from gtl.ratio import Ratio
from gtl.ratio.taylor import taylor
from gtl.run import check_folder
from gtl.train.checkpoint import load_denoiser, read_ratio

__all__ = ["Scoring", "open_models"]

Scoring = Literal["intervention", "taylor"]


def open_models(
    denoiser: str,
    ratio: str | None,
    gamma: float | Literal["auto"],
    n_ratio: int | None,
    out: str | None,
    scoring: Scoring,
) -> tuple[NetworkDenoiser, Ratio | None, float | None, torch.device]:
    """The models, the guidance strength (None for the ratio's own) and the device; bad input is refused."""
    if out is not None:
        check_folder(Path(out))
    strength = None if gamma == "auto" else float(gamma)
    if strength is not None:
        check_gamma(strength)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_denoiser(denoiser).to(device)
    weight = None if ratio is None else read_ratio(ratio, strength is None).to(device)
    if weight is not None and scoring == "taylor":
        weight = taylor(weight)
    check_n_ratio(n_ratio, model.process.vocabulary)
    return model, weight, strength, device
