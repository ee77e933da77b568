"""Changed weights as a ratio: the changed model over the source, in a file of its own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gtl.denoiser import NetworkDenoiser
from gtl.guidance import Guided
from gtl.nn.dit import DiT
from gtl.process import Masked, Process, Uniform
from gtl.ratio import SparseRatio
from gtl.ratio.gamma import nll_by_gamma
from gtl.speed import speed_up
from gtl.train.checkpoint import load_ratio, save_model


def network(process: Process, seed: int = 0, tied: bool = False) -> NetworkDenoiser:
    torch.manual_seed(seed)
    dit = DiT(process.num_ids, process.num_ids, 16, 1, 2, time_conditioned=process.mask_id is None, tied=tied)
    for weight in dit.parameters():
        nn.init.normal_(weight, std=0.2)
    return NetworkDenoiser(process, dit).eval()


def entries(source: NetworkDenoiser, seed: int = 1, share: float = 0.2) -> SparseRatio:
    generator = torch.Generator().manual_seed(seed)
    count = sum(weight.numel() for weight in source.parameters())
    places = torch.randperm(count, generator=generator)[: int(share * count)].sort().values
    changed = NetworkDenoiser(source.process, DiT(**source.network.config())).eval()
    changed.load_state_dict(source.state_dict())
    with torch.no_grad():
        flat = parameters_to_vector(changed.parameters())
        flat[places] += torch.randn(len(places), generator=generator) / 4
        vector_to_parameters(flat, changed.parameters())
    return SparseRatio.of(source, changed, places)


def noisy(process: Process, count: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(0, 5, (count, 7), generator=generator)
    t = process.times(count, x.device, generator)
    return process.corrupt(x, t, generator), t


@pytest.mark.parametrize(("process", "tied"), [(Masked(6), False), (Masked(6), True), (Uniform(5), False)])
@pytest.mark.parametrize("gamma", [0.0, 0.4, 1.0, 2.0])
@torch.no_grad()
def test_guidance_is_a_geometric_mixture_with_the_changed_model(process: Process, tied: bool, gamma: float) -> None:
    """The changed model is computed here from one vector of all weights, of which a tied embedding is one."""
    source = network(process, tied=tied)
    ratio = entries(source)
    flat = parameters_to_vector(source.parameters())
    flat = flat.index_add(0, ratio.places, ratio.values)
    changed = NetworkDenoiser(process, DiT(**source.network.config())).eval()
    changed.load_state_dict(source.state_dict())
    vector_to_parameters(flat, changed.parameters())
    z, t = noisy(process)
    p, q = source(z, t).log_probs, changed(z, t).log_probs
    wanted = torch.where(p == -torch.inf, p, (1 - gamma) * p + gamma * q).log_softmax(-1)
    assert torch.allclose(Guided(source, ratio, gamma)(z, t).log_probs.exp(), wanted.exp(), atol=1e-5)
    assert float((p.exp() - q.exp()).abs().max()) > 0.1
    assert not parameters_to_vector(source.parameters()).equal(flat)


@torch.no_grad()
def test_the_mean_of_two() -> None:
    source = network(Masked(6))
    one, two = entries(source, 1), entries(source, 2)
    z, t = noisy(source.process)
    p, a, b = source(z, t).log_probs, one.tuned(source)(z, t).log_probs, two.tuned(source)(z, t).log_probs
    wanted = torch.where(p == -torch.inf, p, (a + b) / 2).log_softmax(-1)
    assert torch.allclose(Guided(source, 0.5 * one + 0.5 * two, 1.0)(z, t).log_probs.exp(), wanted.exp(), atol=1e-5)


@torch.no_grad()
def test_a_file_of_its_own(tmp_path: Path) -> None:
    """It holds the changes alone, and guides the source that is loaded beside it as before."""
    source = network(Masked(6), tied=True)
    ratio = entries(source)
    ratio.gamma = 1.5
    save_model(tmp_path / "source", source)
    save_model(tmp_path / "ratio", ratio)
    held = load_file(tmp_path / "ratio" / "weights.safetensors")
    every = sum(weight.numel() for weight in source.parameters())
    assert sum(value.numel() for value in held.values()) == 2 * int(0.2 * every)
    again = load_ratio(tmp_path / "ratio")
    assert isinstance(again, SparseRatio)
    z, t = noisy(source.process)
    with pytest.raises(ValueError, match="call check"):
        again.table(z, torch.zeros(len(z), 1, dtype=torch.long), None, source(z, t))
    twin = network(Masked(6), tied=True)
    wanted = Guided(source, ratio)(z, t).log_probs
    assert torch.equal(Guided(twin, again)(z, t).log_probs, wanted)
    x = torch.randint(0, 5, (8, 7), generator=torch.Generator().manual_seed(0))
    fresh, generator = load_ratio(tmp_path / "ratio"), torch.Generator().manual_seed(0)
    found = nll_by_gamma(twin, fresh, x, (0.0, 1.0), generator=generator)  # which looks at it without being asked to
    assert float(found[0]) != float(found[1])


def test_another_source_is_refused() -> None:
    ratio = entries(network(Masked(6)))
    with pytest.raises(ValueError, match="another source model"):
        Guided(network(Masked(6), seed=3), ratio)
    with pytest.raises(ValueError, match="pass context"):
        ratio.table(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long))


@torch.no_grad()
def test_the_changed_copy_is_made_fast_too() -> None:
    """After the check nothing asks for the weights again, so bf16 is no other model."""
    source = network(Masked(6))
    ratio = entries(source)
    z, t = noisy(source.process)
    exact = Guided(source, ratio, 1.0)(z, t).log_probs.exp()
    for module in (source, ratio):
        speed_up(module, "bf16", compile=False)
    assert ratio.copy is not None
    assert {weight.dtype for weight in ratio.copy.parameters()} == {torch.bfloat16}
    found = Guided(source, ratio, 1.0)(z, t).log_probs.exp()
    assert 0 < float((found - exact).abs().max()) < 0.05


@pytest.mark.parametrize(
    ("places", "values", "said"), [([0, 1], [1.0], "do not belong together"), ([], [], "there are no changes")]
)
def test_entries_that_make_no_sense(places: list[int], values: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SparseRatio(Masked(6), torch.tensor(places, dtype=torch.long), torch.tensor(values), "")
