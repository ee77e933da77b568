"""Nearest neighbours as a ratio."""

import pytest
import torch

from gtl.denoiser import NetworkDenoiser, fingerprint
from gtl.guidance import Guided
from gtl.nn.dit import DiT
from gtl.process import Masked, Process, Uniform
from gtl.ratio import KNNRatio
from gtl.ratio.gamma import nll_by_gamma
from gtl.ratio.knn import SETTINGS, by_law, by_truth, nelbo_by_setting
from gtl.sample import Ancestral, FirstHitting, OnePosition, TauLeaping
from gtl.speed import speed_up
from gtl.train.checkpoint import load_ratio, save_model


def network(process: Process, seed: int = 0, width: int = 16) -> NetworkDenoiser:
    torch.manual_seed(seed)
    dit = DiT(process.num_ids, process.num_ids, width, 1, 2, time_conditioned=process.mask_id is None)
    torch.nn.init.normal_(dit.head.weight, std=0.3)
    return NetworkDenoiser(process, dit).eval()


def store(denoiser: NetworkDenoiser, rows: int = 12, **settings: float) -> KNNRatio:
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 5, (rows, 7), generator=generator)
    return KNNRatio.build(denoiser, x, 4, generator=generator, **settings)


def by_hand(ratio: KNNRatio, h: torch.Tensor) -> torch.Tensor:
    """k(v) at one hidden state, key by key."""
    middle = ratio.keys.mean(0)
    spread = sum(float((key - middle).square().sum()) for key in ratio.keys) / len(ratio.keys)
    distance = torch.tensor([float((key - h).square().sum()) for key in ratio.keys], dtype=torch.float64)
    nearest = distance.argsort()[: ratio.neighbours]
    weight = torch.exp(-(distance[nearest] - distance.min()) / (ratio.temperature * spread))
    law = torch.zeros(ratio.process.num_ids, dtype=torch.float64)
    for index, w in zip(nearest.tolist(), weight, strict=True):
        law[int(ratio.values[index])] += w
    return law / law.sum()


@pytest.mark.parametrize("process", [Masked(6), Uniform(5)])
@pytest.mark.parametrize("neighbours", [3, 1000])
def test_the_model_is_the_mixture_of_source_and_neighbours(process: Process, neighbours: int) -> None:
    denoiser = network(process)
    keys = torch.randn(90, 16, generator=torch.Generator().manual_seed(0))  # no two alike: which are near is clear
    values = torch.randint(0, 5, (90,), generator=torch.Generator().manual_seed(1))
    ratio = KNNRatio(process, keys, values, fingerprint(denoiser), 0.3, 0.4, neighbours)
    generator = torch.Generator().manual_seed(5)
    t = process.times(4, torch.device("cpu"), generator)
    z = process.corrupt(torch.randint(0, 5, (4, 7), generator=generator), t, generator)
    with torch.no_grad():
        source = denoiser(z, t)
        found = Guided(denoiser, ratio)(z, t).log_probs.exp().double()
    for row in range(4):
        for place in range(7):
            if process.mask_id is not None and z[row, place] != process.mask_id:
                continue
            law = by_hand(ratio, source.hidden[-1][row, place])
            wanted = 0.6 * source.log_probs[row, place].exp().double() + 0.4 * law
            assert torch.allclose(found[row, place], wanted, atol=1e-4)


def test_without_weight_it_is_the_source() -> None:
    denoiser = network(Masked(6))
    z = torch.full((2, 7), 5)
    with torch.no_grad():
        guided = Guided(denoiser, store(denoiser, weight=0.0))(z)
        assert torch.equal(guided.log_probs.exp(), denoiser(z).log_probs.log_softmax(-1).exp())


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    denoiser = network(Masked(6))
    ratio, z = store(denoiser, neighbours=1000), torch.full((3, 7), 5)
    with torch.no_grad():
        whole = Guided(denoiser, ratio)(z).log_probs.exp()
        monkeypatch.setattr("gtl.ratio.knn.MOST_DISTANCES", 1)
        assert torch.allclose(Guided(denoiser, ratio)(z).log_probs.exp(), whole, atol=1e-4)


def test_keys_come_from_noisy_places_with_their_true_tokens() -> None:
    denoiser, x = network(Masked(6)), torch.randint(0, 5, (9, 7), generator=torch.Generator().manual_seed(1))
    ratio = KNNRatio.build(denoiser, x, 3, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(2)
    rows = x.repeat(3, 1)
    t = denoiser.process.times(27, x.device, generator)
    z = denoiser.process.corrupt(rows, t, generator)
    assert len(ratio.keys) == int((z == 5).sum())
    assert torch.equal(ratio.values, rows[z == 5])
    assert len(KNNRatio.build(denoiser, x, 3, most=5).keys) == 5


@pytest.mark.parametrize("process", [Masked(6), Uniform(5)])
def test_the_setting_is_judged_by_the_nelbo_of_the_guided_model(process: Process) -> None:
    denoiser, index = network(process), SETTINGS.index((1 / 16, 0.3))
    ratio = store(denoiser, temperature=1 / 16, weight=0.3)
    x = torch.randint(0, 5, (64, 7), generator=torch.Generator().manual_seed(8))
    found = nelbo_by_setting(denoiser, ratio, x, 64, torch.Generator().manual_seed(4)).mean(1).tolist()
    wanted = nll_by_gamma(denoiser, ratio, x, [1.0], 64, generator=torch.Generator().manual_seed(4))
    assert found[index] == pytest.approx(float(wanted), abs=1e-4)
    alone = [value for value, (_, weight) in zip(found, SETTINGS, strict=True) if weight == 0]
    assert max(alone) - min(alone) < 1e-9  # lambda = 0 is the source at any temperature


def test_true_tokens_are_enough() -> None:
    """All settings from the probabilities of true tokens alone, as from the whole laws."""
    denoiser = network(Masked(6))
    ratio = store(denoiser)
    x = torch.randint(0, 5, (64, 7), generator=torch.Generator().manual_seed(8))
    t = denoiser.process.times(64, x.device, torch.Generator().manual_seed(4))
    z = denoiser.process.corrupt(x, t, torch.Generator().manual_seed(5))
    with torch.no_grad():
        found = [of(denoiser, ratio, x, z, t) for of in (by_truth, by_law)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert len({round(float(value), 3) for value in found[0].mean(1)}) > 50


def test_what_does_not_fit_is_refused() -> None:
    denoiser = network(Masked(6))
    ratio = store(denoiser)
    with pytest.raises(ValueError, match="another source model"):
        Guided(network(Masked(6), seed=1), ratio)
    with pytest.raises(ValueError, match="16 wide"):
        OnePosition(network(Masked(6), width=32), ratio)
    with pytest.raises(ValueError, match="ids"):
        Guided(network(Masked(7)), ratio)
    with pytest.raises(ValueError, match="empty"):
        KNNRatio.build(denoiser, torch.zeros(0, 7, dtype=torch.long))
    with pytest.raises(ValueError, match="empty"):
        KNNRatio(Masked(6), torch.zeros(0, 16), torch.zeros(0), "")
    for settings, message in (
        (({"weight": 1.0}), "lambda"),
        ({"temperature": 0.0}, "positive"),
        ({"neighbours": 0}, "1"),
    ):
        with pytest.raises(ValueError, match=message):
            store(denoiser, **settings)
    with pytest.raises(ValueError, match="pass context"):
        ratio.table(torch.full((1, 7), 5), torch.zeros(1, 1, dtype=torch.long))


def test_a_change_of_the_source_is_noticed() -> None:
    denoiser = network(Masked(6))
    before = fingerprint(denoiser)
    assert fingerprint(network(Masked(6))) == before
    with torch.no_grad():
        denoiser.network.head.bias[0] += 1e-3
    assert fingerprint(denoiser) != before


@pytest.mark.parametrize("process", [Masked(6), Uniform(5)])
def test_every_sampler_takes_it(process: Process) -> None:
    denoiser = network(process)
    ratio = store(denoiser, weight=0.9)
    samplers = [Ancestral(denoiser, ratio, steps=4), TauLeaping(denoiser, ratio, steps=4)]
    if process.mask_id is not None:
        samplers += [OnePosition(denoiser, ratio), FirstHitting(denoiser, ratio)]
    for sampler in samplers:
        assert int(sampler((3, 7), generator=torch.Generator().manual_seed(0)).max()) < 5


def test_round_trip(tmp_path) -> None:
    denoiser = network(Masked(6))
    ratio = store(denoiser, weight=0.25, temperature=0.2, neighbours=9)
    save_model(tmp_path, ratio)
    again = load_ratio(tmp_path)
    z = torch.full((2, 7), 5)
    with torch.no_grad():
        assert torch.equal(Guided(denoiser, again)(z).log_probs, Guided(denoiser, ratio)(z).log_probs)


@torch.no_grad()
def test_bf16_leaves_the_store_as_it_is() -> None:
    """The networks become coarser; keys, whose distances are differences of large numbers, do not."""
    denoiser = network(Masked(6))
    ratio = store(denoiser, weight=0.5)
    z = torch.tensor([[5, 1, 5, 2, 5, 5, 0], [5, 5, 5, 0, 1, 2, 5]])
    exact = Guided(denoiser, ratio)(z).log_probs.exp()
    keys = ratio.keys.clone()
    for module in (denoiser, ratio):
        speed_up(module, "bf16", compile=False)
    assert torch.equal(ratio.keys, keys)
    assert {buffer.dtype for buffer in ratio.buffers()} == {torch.float32, torch.int64}
    assert float((Guided(denoiser, ratio)(z).log_probs.exp() - exact).abs().max()) < 0.1
    assert ratio.to("meta").keys.device.type == "meta"
