"""Compiled models."""

import copy

import pytest
import torch

from gtl.nn.dit import DiT
from gtl.speed import speed_up


@torch.no_grad()
def test_a_copy_of_a_compiled_model_has_weights_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """It once ran with the first one's: a ratio that changes some weights of a copy would have changed nothing."""
    monkeypatch.setattr("gtl.speed.compiled", lambda method, dynamic: lambda *args: method(*args))
    z = torch.arange(6).view(2, 3)
    first = DiT(6, 6, 8, 1, 2).eval()
    speed_up(first, "fp32")
    second = copy.deepcopy(first)
    for weight in second.parameters():
        weight.mul_(1.5)
    plain = DiT(**second.config()).eval()
    plain.load_state_dict(second.state_dict())
    assert torch.equal(second(z), plain(z))
    assert not torch.equal(second.trunk(z), first.trunk(z))
