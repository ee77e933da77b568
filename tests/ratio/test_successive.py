"""One ratio on top of another."""

import pytest
import torch

from gtl.denoiser import NetworkDenoiser
from gtl.guidance import Guided
from gtl.nn.dit import DiT
from gtl.process import Masked, Process, Uniform
from gtl.ratio import DifferenceRatio, KNNRatio, NetworkRatio
from gtl.ratio.successive import SuccessiveRatio
from gtl.sample import OnePosition
from gtl.train.checkpoint import load_ratio, save_model


def network(process: Process, seed: int) -> NetworkDenoiser:
    torch.manual_seed(seed)
    dit = DiT(process.num_ids, process.num_ids, 16, 1, 2, time_conditioned=process.mask_id is None)
    torch.nn.init.normal_(dit.head.weight, std=0.3)
    return NetworkDenoiser(process, dit).eval()


def store(denoiser: NetworkDenoiser) -> KNNRatio:
    x = torch.randint(0, 5, (9, 7), generator=torch.Generator().manual_seed(1))
    return KNNRatio.build(denoiser, x, 4, generator=torch.Generator().manual_seed(2), weight=0.4, neighbours=1000)


@pytest.mark.parametrize("process", [Masked(6), Uniform(5)])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_it_is_guidance_of_a_guided_model(process: Process, gamma: float) -> None:
    """Neighbours mixed into the tuned model, not into the source."""
    source, tuned = network(process, 0), network(process, 1)
    first, then = DifferenceRatio(tuned), store(source)
    first.gamma = gamma
    generator = torch.Generator().manual_seed(5)
    t = process.times(6, torch.device("cpu"), generator)
    z = process.corrupt(torch.randint(0, 5, (6, 7), generator=generator), t, generator)
    with torch.no_grad():
        found = Guided(source, SuccessiveRatio(first, then))(z, t).log_probs.exp()
        inner = Guided(source, first)(z, t)
        laws = then.neighbour_law(inner.hidden[-1].flatten(0, 1), (then.temperature,))[0].view_as(found)
        wanted = source.carry_over(z, (0.6 * inner.log_probs.exp() + 0.4 * laws).log()).exp()
    assert torch.allclose(found, wanted, atol=1e-5)


def test_what_cannot_follow_is_refused() -> None:
    uniform, masked = network(Uniform(5), 0), network(Masked(6), 0)
    noisy = NetworkRatio.build(Uniform(5), width=16, depth=1, heads=2, time_conditioned=True)
    with pytest.raises(ValueError, match="only a clean ratio"):
        SuccessiveRatio(noisy, store(uniform))
    with pytest.raises(ValueError, match="different processes"):
        SuccessiveRatio(DifferenceRatio(uniform), store(masked))
    both = SuccessiveRatio(DifferenceRatio(masked), store(masked))
    with pytest.raises(ValueError, match="another source model"):
        OnePosition(network(Masked(6), 3), both)
    with pytest.raises(ValueError, match="pass context"):
        both.table(torch.full((1, 7), 5), torch.zeros(1, 1, dtype=torch.long))


def test_round_trip(tmp_path) -> None:
    source = network(Masked(6), 0)
    first = 0.3 * DifferenceRatio(network(Masked(6), 1)) + 0.7 * DifferenceRatio(network(Masked(6), 2))
    ratio = SuccessiveRatio(first, store(source))
    save_model(tmp_path, ratio)
    again = load_ratio(tmp_path)
    z = torch.full((2, 7), 5)
    with torch.no_grad():
        assert torch.equal(Guided(source, again)(z).log_probs, Guided(source, ratio)(z).log_probs)
    (tmp_path / "1" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="1: not a checkpoint"):
        load_ratio(tmp_path)
