"""What late injection costs: one pass of the trunk a context, within a budget, without waiting for the device."""

from typing import Any

import pytest
import torch
from late_ratios import LENGTH, ROWS, denoiser, every_noise, make, question
from torch import Tensor, nn

from gtl.ratio.late import LateRatio
from gtl.sample import OnePosition


class Watch:
    """Counts what goes through the trunk, and the contexts whose keys are computed."""

    def __init__(self, ratio: LateRatio, patch: pytest.MonkeyPatch) -> None:
        self.sizes: list[tuple[int, int]] = []
        self.keys = 0
        trunk = ratio.network.dit.trunk

        def watched(z: Tensor, *more: Any) -> Tensor:
            self.sizes.append((z.shape[0], z.shape[1]))
            return trunk(z, *more)

        patch.setattr(ratio.network.dit, "trunk", watched)
        ratio.network.keys_values.register_forward_hook(self._count)

    def _count(self, module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        self.keys += len(output)


@pytest.mark.parametrize("count", [1, 5, 40])
def test_one_context_serves_all_masked_positions(monkeypatch, count):
    """Rows without a masked position that is asked for are not encoded at all, whatever the number of candidates."""
    ratio = make()
    watch = Watch(ratio, monkeypatch)
    z = torch.full((4, LENGTH), 2)
    z[0, 1], z[3] = 3, 1
    positions = torch.arange(LENGTH).expand(4, -1).masked_fill(z != 2, -1)
    ratio.log_ratio(z, positions, torch.zeros(4, LENGTH, count, dtype=torch.long))
    assert watch.sizes == [(3, LENGTH)]
    assert watch.keys == 3


@pytest.mark.parametrize("count", [1, 40])
def test_a_revealed_position_has_a_context_of_its_own(monkeypatch, count):
    ratio = make()
    watch = Watch(ratio, monkeypatch)
    z = torch.tensor([[2, 2, 0, 1, 2], [0, 1, 3, 4, 0]])
    positions = torch.tensor([[0, 1, 2, 3, -1], [0, 1, 1, -1, -1]])
    ratio.log_ratio(z, positions, torch.zeros(2, 5, count, dtype=torch.long))
    assert watch.sizes == [((1 + 2) + 2, LENGTH)]
    assert watch.keys == 5


def test_without_masks_every_position_has_its_context(monkeypatch):
    ratio = make("uniform")
    watch = Watch(ratio, monkeypatch)
    z, _, _, _ = question(8)
    ratio.table(z, torch.arange(LENGTH).expand(ROWS, -1))
    assert watch.sizes == [(ROWS * LENGTH, LENGTH)]


@pytest.mark.parametrize("budget", [1, 12, 40])
def test_contexts_and_queries_stay_within_the_budget(monkeypatch, budget):
    """The contexts of a chunk, and the queries with the keys that they read; one of each is the least."""
    ratio = make("uniform")
    ratio.max_tokens = budget
    watch = Watch(ratio, monkeypatch)
    seen = []
    ratio.network.blocks[0].register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[:2]))
    z, positions, candidates, _ = question(9, 4, 3, padded=False)
    ratio.log_ratio(z, positions, candidates)
    assert all(rows * LENGTH <= max(budget, LENGTH) for rows, _ in watch.sizes)
    assert all(sets * (LENGTH + count) <= max(budget, LENGTH + count) for sets, count in seen)
    assert sum(rows for rows, _ in watch.sizes) == watch.keys <= ROWS * 4


@pytest.mark.parametrize("n_ratio", [None, 1, 3])
def test_sampling_runs_the_trunk_once_a_step(monkeypatch, generator, n_ratio):
    ratio = make()
    watch = Watch(ratio, monkeypatch)
    OnePosition(denoiser(ratio.process), ratio, n_ratio=n_ratio)((3, LENGTH), generator=generator)
    assert watch.sizes == [(3, LENGTH)] * LENGTH


@every_noise
def test_one_position_waits_for_nothing(noise):
    """Nothing there depends on values before they are returned: it runs on tensors that have none."""
    ratio = make(noise, timed=True).to("meta")
    asked = [x.to("meta") for x in question(16, 1)]
    assert ratio.log_ratio(*asked).shape == (ROWS, 1, 4)


@every_noise
def test_autocast(noise):
    """bf16 products move the values by what bf16 can, and they come back in float32."""
    ratio = make(noise, timed=True).float()
    asked = question(17)
    with torch.autocast("cpu", torch.bfloat16):
        values = ratio.log_ratio(*asked)
    assert values.dtype == torch.float32
    exact = ratio.log_ratio(*asked)
    assert 0 < float((values - exact).abs().mean()) < 0.1 * float(exact.std())
