"""A fine-tuned model minus its source is a ratio."""

import pytest
import torch

from gtl.denoiser import NetworkDenoiser
from gtl.guidance import Guided
from gtl.nn.dit import DiT
from gtl.process import Masked, Process, Uniform
from gtl.ratio import DifferenceRatio
from gtl.train.checkpoint import load_ratio, save_model


def network(process: Process, seed: int) -> NetworkDenoiser:
    torch.manual_seed(seed)
    dit = DiT(process.num_ids, process.num_ids, 16, 1, 2, time_conditioned=process.mask_id is None)
    torch.nn.init.normal_(dit.head.weight, std=0.3)
    return NetworkDenoiser(process, dit).eval()


@pytest.mark.parametrize("process", [Masked(6), Uniform(5)])
@pytest.mark.parametrize("gamma", [0.0, 0.4, 1.0, 2.0])
def test_guidance_by_a_difference_is_a_geometric_mixture(process: Process, gamma: float) -> None:
    source, tuned = network(process, 0), network(process, 1)
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(0, 5, (16, 7), generator=generator)
    t = process.times(16, x.device, generator)
    z = process.corrupt(x, t, generator)
    with torch.no_grad():
        found = Guided(source, DifferenceRatio(tuned), gamma)(z, t).log_probs
        p, q = source(z, t).log_probs, tuned(z, t).log_probs
        both = torch.where(p == -torch.inf, p, (1 - gamma) * p + gamma * q)
        wanted = both.log_softmax(-1)
    assert torch.allclose(found.exp(), wanted.exp(), atol=1e-6)
    if gamma == 1:
        assert torch.allclose(found.exp(), q.exp(), atol=1e-6)  # the fine-tuned model itself


def test_only_some_positions() -> None:
    source, tuned = network(Masked(6), 0), network(Masked(6), 1)
    z = torch.tensor([[5, 1, 5, 2], [5, 5, 5, 0]])
    positions = torch.tensor([[2, 0], [1, 2]])
    with torch.no_grad():
        found = Guided(source, DifferenceRatio(tuned), 1.0)(z, None, positions).log_probs
        assert torch.allclose(found, tuned(z, None, positions).log_probs, atol=1e-5)


def test_without_context_it_says_what_is_missing() -> None:
    ratio = DifferenceRatio(network(Masked(6), 0))
    with pytest.raises(ValueError, match="pass context"):
        ratio.table(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long))


def test_a_denoiser_on_disk_is_a_ratio(tmp_path) -> None:
    tuned = network(Masked(6), 1)
    save_model(tmp_path / "tuned", tuned)
    ratio = load_ratio(tmp_path / "tuned")
    assert isinstance(ratio, DifferenceRatio)
    save_model(tmp_path / "again", ratio)
    again = load_ratio(tmp_path / "again")
    z = torch.tensor([[5, 1, 5, 2]])
    with torch.no_grad():
        assert torch.equal(again.tuned(z).log_probs, tuned(z).log_probs)  # type: ignore[operator,union-attr]
