"""The head at masked positions alone gives the NELBO, and the gradient, of the whole prediction."""

import copy

import pytest
import torch

from gtl.denoiser import NetworkDenoiser, nelbo
from gtl.nn.dit import DiT
from gtl.process import Masked, Uniform
from gtl.speed import compiled as make_fast
from gtl.train.denoiser import DenoiserObjective, TrueTokens, fixed_places


def denoiser(width: int = 16) -> NetworkDenoiser:
    torch.manual_seed(0)
    network = DiT(70, 70, width, 2, 2)
    torch.nn.init.normal_(network.head.weight, std=0.3)
    return NetworkDenoiser(Masked(70, 3), network, banned=(5,))


DATA = torch.randint(6, 70, (64, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("device", "compiled"), [("cpu", False), *(pytest.param("cuda", c, marks=pytest.mark.gpu) for c in (False, True))]
)
def test_it_is_the_nelbo(device: str, compiled: bool) -> None:
    model = denoiser().to(device)
    other = copy.deepcopy(model)
    x = DATA.to(device)
    objective = DenoiserObjective(model, x)
    wrapped = objective.wrap(model)
    assert isinstance(wrapped, TrueTokens)
    forward = make_fast(wrapped) if compiled else wrapped
    loss = objective.loss(forward, {"data": x}, torch.Generator(device).manual_seed(0))
    generator = torch.Generator(device).manual_seed(0)
    t = other.process.times(len(x), x.device, generator)
    z = other.process.corrupt(x, t, generator)
    whole = other.process.nelbo(x, z, t, other(z, t).log_probs, True).mean() / x.shape[1]
    torch.testing.assert_close(loss, whole, rtol=2e-4, atol=1e-5)
    loss.backward()
    whole.backward()
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=2e-3, atol=1e-5)
    with torch.no_grad():
        again = objective.loss(wrapped, {"data": x}, torch.Generator(device).manual_seed(0))
        bound = nelbo(model, x, torch.Generator(device).manual_seed(0)).mean() / x.shape[1]
    for value in (again, bound):
        torch.testing.assert_close(value, whole.detach(), rtol=2e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_many_tokens(tied: bool) -> None:
    """Compiled, in bf16, at a size where fusions of reductions set in, several times over."""
    torch.manual_seed(0)
    process = Masked(1000, 3)
    model = NetworkDenoiser(process, DiT(1000, 1000, 256, 4, 4, tied=tied)).cuda().train()
    x = torch.randint(4, 1000, (512, 128), device="cuda")
    wrapped = TrueTokens(model)
    forward, generator = make_fast(wrapped), torch.Generator("cuda").manual_seed(0)
    for _ in range(10):
        t = process.times(len(x), x.device, generator)
        z = process.corrupt(x, t, generator)
        found = []
        for function in (forward, wrapped):
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                process.weigh(function(x, z, t), z, t, True).mean().backward()
            found.append([p.grad for p in model.parameters()])
        for name, mine, its in zip(dict(model.named_parameters()), *found, strict=True):
            assert float((mine - its).norm()) <= 0.05 * float(its.norm()) + 1e-4, name


def test_nothing_masked_and_everything() -> None:
    model, x = denoiser(), DATA
    tokens = TrueTokens(model)
    t = torch.full((len(x),), 0.5)
    assert not tokens(x, x, t).any()
    z = torch.full_like(x, 3)
    whole = -model(z).log_probs.gather(-1, x.unsqueeze(-1)).squeeze(-1).sum(-1)
    torch.testing.assert_close(tokens(x, z, t), whole, rtol=1e-5, atol=1e-4)


def test_other_noise_takes_the_whole_prediction() -> None:
    model = NetworkDenoiser(Uniform(70), DiT(70, 70, 16, 1, 2, time_conditioned=True))
    assert DenoiserObjective(model, DATA).wrap(model) is model


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
def test_fixed_places_hold_every_mask_once(share: float) -> None:
    masked = torch.rand(5000, generator=torch.Generator().manual_seed(2)) < share
    where, counts = fixed_places(masked)
    assert len(where) == 2816  # whatever is masked
    assert sorted(where[counts == 1].tolist()) == masked.nonzero().flatten().tolist()
    assert set(counts.tolist()) <= {0.0, 1.0}


def test_too_many_masks_are_not_lost_in_silence() -> None:
    assert bool(fixed_places(torch.ones(5000, dtype=torch.bool))[1].isnan().all())
