"""Running out of memory: the chunk is halved, nothing is done twice, no draw is lost, one row too large is refused."""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gtl.commands import sample as sampling
from gtl.denoiser import Denoiser, NetworkDenoiser, Prediction, masked_nll, nll
from gtl.memory import by_chunks
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.ratio.base import SequenceRatio
from gtl.sample import Ancestral
from gtl.train.checkpoint import save_model
from typed import gtl

PROCESS = Masked(4)
TOO_LARGE = "does not fit in memory even for one sequence: use a smaller n_ratio, length or batch_size"


class Small:
    """A device on which so many rows fit."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.seen: list[int] = []

    def take(self, rows: int) -> None:
        self.seen.append(rows)
        if rows > self.room:
            raise torch.OutOfMemoryError(f"{rows} rows")


@pytest.mark.parametrize("room", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("chunk", [1, 4, 10, 64])
@pytest.mark.parametrize("rows", [0, 1, 9, 23])
def test_every_row_once_and_in_order(rows: int, chunk: int, room: int):
    device, done = Small(room), []

    def call(part: slice) -> list[int]:
        device.take(part.stop - part.start)
        done.extend(range(rows)[part])
        return list(range(rows)[part])

    results, fitted = by_chunks(call, rows, chunk)
    assert done == [row for result in results for row in result] == list(range(rows))
    assert 1 <= fitted <= chunk
    assert fitted == chunk or fitted <= room


def test_the_chunk_is_halved_and_stays_so():
    device = Small(3)
    results, fitted = by_chunks(lambda part: device.take(part.stop - part.start), 40, 16)
    assert device.seen == [16, 8, 4, *[2] * 20]
    assert (len(results), fitted) == (20, 2)


def test_results_may_be_anything():
    assert by_chunks(lambda part: None, 3, 2) == ([None, None], 2)


def test_memory_that_runs_out_later():
    """What was finished before stays finished."""
    seen: list[tuple[int, int]] = []

    def call(part: slice) -> int:
        seen.append((part.start, part.stop))
        if part.start >= 8 and part.stop - part.start > 2:
            raise torch.cuda.OutOfMemoryError("later")
        return part.start

    assert by_chunks(call, 13, 4) == ([0, 4, 8, 10, 12], 2)
    assert seen == [(0, 4), (4, 8), (8, 12), (8, 10), (10, 12), (12, 13)]


def draws(room: int, chunk: int, seed: int = 0) -> Tensor:
    generator, device = torch.Generator().manual_seed(seed), Small(room)

    def call(part: slice) -> Tensor:
        x = torch.rand(part.stop - part.start, generator=generator)
        device.take(len(x))
        torch.rand(3, generator=generator)
        return x

    return torch.cat(by_chunks(call, 12, chunk, generator)[0])


def test_no_draw_is_lost():
    """A chunk that failed after drawing leaves no trace in the generator."""
    assert torch.equal(draws(room=3, chunk=12), draws(room=100, chunk=3))
    assert torch.equal(draws(room=3, chunk=12), draws(room=3, chunk=6))
    assert not torch.equal(draws(room=3, chunk=12), draws(room=100, chunk=12))


def test_a_row_that_does_not_fit():
    device = Small(0)
    with pytest.raises(ValueError, match=f"^the model {TOO_LARGE}$") as caught:
        by_chunks(lambda part: device.take(part.stop - part.start), 6, 4, what="the model")
    assert device.seen == [4, 2, 1]
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("error", [RuntimeError("other"), ValueError("other"), KeyboardInterrupt()])
def test_other_errors_are_the_callers(error: BaseException):
    def call(part: slice) -> None:
        raise error

    with pytest.raises(type(error)):
        by_chunks(call, 6, 4)


def test_what_a_failed_call_had_allocated_is_free_before_the_next():
    held: list[weakref.ref[Tensor]] = []

    def call(part: slice) -> None:
        assert all(tensor() is None for tensor in held)
        mine = torch.zeros(part.stop - part.start)
        held.append(weakref.ref(mine))
        if len(mine) > 2:
            raise torch.OutOfMemoryError("full")

    gc.disable()
    try:
        by_chunks(call, 5, 8)
    finally:
        gc.enable()
    assert len(held) == 4


def test_chunks_within_chunks():
    """Where not one row of the inner work fits beside the outer chunk, the outer one is halved."""
    seen = []

    def outer(part: slice) -> int:
        beside = part.stop - part.start
        seen.append(beside)
        return len(by_chunks(lambda p: Small(4 - beside).take(p.stop - p.start), 4, 4, what="inner")[0])

    assert by_chunks(outer, 8, 8) == ([2, 2, 2, 2], 2)
    assert seen == [8, 4, 2, 2, 2, 2]
    with pytest.raises(ValueError, match=f"outer {TOO_LARGE}"):
        by_chunks(lambda part: by_chunks(lambda p: Small(0).take(1), 1, 1), 2, 2, what="outer")


# where it is used


class Crowded(SequenceRatio):
    """A ratio that looks at every token, on a device that holds `room` sequences."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.process, self.device = PROCESS, Small(room)

    def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        self.device.take(len(z))
        return (z.double() * torch.arange(1, 1 + z.shape[1])).sin().sum(-1) + (0 if t is None else t)


@pytest.mark.parametrize("room", [1, 2, 5, 17])
@pytest.mark.parametrize("timed", [False, True])
def test_interventions(room: int, timed: bool):
    """The same values; what did not fit is not tried again, in this call or the next."""
    generator = torch.Generator().manual_seed(0)
    z, t = torch.randint(4, (3, 6), generator=generator), torch.rand(3, generator=generator) if timed else None
    positions, candidates = torch.tensor([[0, 5], [2, -1], [4, 1]]), torch.arange(4).expand(3, 2, 4)
    wanted = Crowded(1000).log_ratio(z, positions, candidates, t)
    ratio = Crowded(room)
    assert torch.equal(ratio.log_ratio(z, positions, candidates, t), wanted)
    assert ratio.max_tokens is not None
    assert ratio.max_tokens <= 6 * room
    ratio.device.seen.clear()
    assert torch.equal(ratio.log_ratio(z, positions, candidates, t), wanted)
    assert max(ratio.device.seen) <= room


def test_interventions_that_fit_leave_the_budget_alone():
    ratio = Crowded(1000)
    ratio.log_ratio(
        torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long), torch.arange(4).expand(2, 1, 4)
    )
    assert ratio.max_tokens is None


def test_an_intervention_that_does_not_fit():
    ratio = Crowded(0)
    with pytest.raises(ValueError, match=f"the ratio of a candidate {TOO_LARGE}"):
        ratio.log_ratio(
            torch.zeros(1, 6, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, 4).long()
        )


class CrowdedDenoiser(Denoiser):
    """Every token equally likely, on a device that holds `room` sequences."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.process, self.device = PROCESS, Small(room)

    def forward(self, z: Tensor, t: Tensor | None = None, positions: Tensor | None = None) -> Prediction:
        self.device.take(len(z))
        logits = torch.sin(torch.arange(4.0)).expand(*z.shape, 4) + z.sum(-1).view(-1, 1, 1).cos() * torch.arange(4.0)
        return Prediction(self.carry_over(z, logits.index_fill(-1, torch.tensor([3]), -torch.inf).log_softmax(-1)))


@pytest.mark.parametrize("metric", [nll, masked_nll])
def test_likelihoods(metric: Any):
    """As with batches that fit from the start; one that never fits is refused in one line."""
    x = torch.randint(3, (11, 6), generator=torch.Generator().manual_seed(1))

    def measured(room: int, batch: int) -> float:
        return metric(CrowdedDenoiser(room), x, 3, torch.Generator().manual_seed(2), batch)

    assert measured(room=4, batch=32) == measured(room=100, batch=4)
    assert measured(room=4, batch=32) != measured(room=100, batch=32)
    assert measured(room=1, batch=32) == pytest.approx(measured(room=100, batch=32), rel=0.3)
    with pytest.raises(ValueError, match=TOO_LARGE):
        measured(room=0, batch=32)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    network = DiT(4, 4, width=8, depth=1, heads=2)
    torch.nn.init.normal_(network.head.weight)
    save_model(tmp_path / "model", NetworkDenoiser(PROCESS, network))
    return tmp_path / "model"


def sampled(checkpoint: Path, out: Path, batch_size: int) -> np.ndarray:
    command = f"sample {checkpoint} --length 5 --count 20 --sampler ancestral --steps 4 --seed 3"
    gtl(command, "--batch_size", batch_size, "--out", out)
    return np.load(out / "samples.npy")


def test_samples(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Memory that runs out in the middle of a batch: the samples are those of a smaller batch_size."""
    wanted = sampled(checkpoint, tmp_path / "small", 5)
    device, step = Small(7), Ancestral.step

    def crowded(self: Ancestral, z: Tensor, t: float, s: float, generator: torch.Generator | None) -> Tensor:
        moved = step(self, z, t, s, generator)
        if t < 0.6:
            device.take(len(z))
        return moved

    monkeypatch.setattr(sampling.Ancestral, "step", crowded)
    assert (sampled(checkpoint, tmp_path / "large", 20) == wanted).all()
    assert device.seen[:3] == [20, 10, 5]
    assert max(device.seen[2:]) == 5
    device.room = 0
    with pytest.raises(SystemExit):
        sampled(checkpoint, tmp_path / "none", 20)
    assert capsys.readouterr().err.splitlines()[-1] == f"gtl: the sampler {TOO_LARGE}"
