"""Resuming on a GPU: the same weights within TOLERANCE of the change that training made.

Sums of atomics come out in another order in every run there, so that two unbroken runs differ as well; a resumed one
must not differ more than they do, up to a factor.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gtl.denoiser import NetworkDenoiser
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.train.denoiser import DenoiserObjective
from gtl.train.loop import FitSettings, fit

TOLERANCE = 1e-3
DATA = torch.randint(0, 199, (256, 32), generator=torch.Generator().manual_seed(0))


def run(precision: str, folder: Path | None = None, stop_at: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    model = NetworkDenoiser(Masked(200), DiT(200, 200, 64, 2, 4))
    settings = FitSettings(
        steps=40, batch_size=32, learning_rate=2e-3, evaluate_every=10, save_every=10, precision=precision
    )

    def on_step(step: int) -> None:
        if step == stop_at:
            raise KeyboardInterrupt

    fit(model, DenoiserObjective(model, DATA[:224], DATA[224:]), settings, folder, on_step)
    return [p.detach().cpu() for p in model.parameters()]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return float(torch.cat([(x - y).flatten() for x, y in zip(a, b, strict=True)]).norm())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stop_at", [10, 23])
def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path: Path, precision: str, stop_at: int) -> None:
    torch.manual_seed(0)
    start = [p.detach() for p in NetworkDenoiser(Masked(200), DiT(200, 200, 64, 2, 4)).parameters()]
    unbroken, again = run(precision), run(precision)
    with pytest.raises(KeyboardInterrupt):
        run(precision, tmp_path, stop_at)
    resumed = run(precision, tmp_path)
    change = distance(unbroken, start)
    assert distance(resumed, unbroken) <= max(3 * distance(again, unbroken), TOLERANCE * change)
