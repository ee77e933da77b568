"""Log-ratios of networks form a vector space, local and sequence ratios mixed, and gamma is a scale of it."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser, Prediction
from gtl.guidance import Guided, guide
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.ratio import NetworkRatio, Ratio
from gtl.ratio.local import LocalRatio

IDS, LENGTH, ROWS = 5, 4, 6
FEW = settings(max_examples=15)
weights = st.floats(-3, 3)
masks = st.sampled_from([0, 2, 4])
members = st.sampled_from(["local", "alone", "sequence", "mean"])


@cache
def models(mask_id: int) -> tuple[NetworkDenoiser, dict[str, Ratio]]:
    """A denoiser with random weights, and local and sequence ratios with random heads."""
    torch.manual_seed(mask_id)
    process = Masked(IDS, mask_id)
    denoiser = NetworkDenoiser(process, DiT(IDS, IDS, width=8, depth=1, heads=2))
    ratios = {
        "local": LocalRatio.build(denoiser, width=8, depth=1, heads=2),
        "alone": LocalRatio.build(denoiser, features=False, width=8, depth=0, heads=2),
        "sequence": NetworkRatio.build(process, width=8, depth=1, heads=2),
        "mean": NetworkRatio.build(process, "mean", width=8, depth=1, heads=2),
    }
    for dit in (denoiser.network, *(ratio.network.dit for ratio in ratios.values())):
        nn.init.normal_(dit.head.weight, std=0.5)
        nn.init.normal_(dit.head.bias)
    for model in (denoiser, *ratios.values()):
        model.eval().requires_grad_(False)
    return denoiser, ratios


def question(mask_id: int) -> tuple[Tensor, Tensor, Tensor, Prediction]:
    """z, positions, candidates with the mask among them, and the denoiser's context."""
    generator = torch.Generator().manual_seed(5)
    z = torch.randint(IDS, (ROWS, LENGTH), generator=generator)
    z[:, ::2] = mask_id
    positions = torch.randint(LENGTH, (ROWS, 3), generator=generator)
    candidates = torch.randint(IDS, (ROWS, 3, 6), generator=generator)
    candidates[..., 2] = mask_id
    return z, positions, candidates, models(mask_id)[0](z, None, positions)


def both(ratio: Ratio, mask_id: int) -> list[Tensor]:
    """log_ratio, and the table but for the mask's column, which means nothing."""
    z, positions, candidates, context = question(mask_id)
    tokens = [v for v in range(IDS) if v != mask_id]
    table = ratio.table(z, positions, None, context)
    return [ratio.log_ratio(z, positions, candidates, None, context), table[..., tokens]]


def same(left: list[Tensor], right: list[Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_members_differ():
    """Otherwise the laws below would say little."""
    values = [both(ratio, 2)[1] for ratio in models(2)[1].values()]
    for i, a in enumerate(values):
        assert float((a - a.mean(-1, keepdim=True)).abs().max()) > 0.1
        assert all(float((a - b).abs().max()) > 0.1 for b in values[:i])


@FEW
@given(a=weights, b=weights, first=members, second=members, mask_id=masks)
def test_linear(a, b, first, second, mask_id):
    """log_ratio and table of a R + b S are a times the one plus b times the other."""
    r, s = (models(mask_id)[1][name] for name in (first, second))
    expected = [a * x + b * y for x, y in zip(both(r, mask_id), both(s, mask_id), strict=True)]
    same(both(a * r + b * s, mask_id), expected)
    same(both(a * r - b * s, mask_id), [2 * a * x - e for x, e in zip(both(r, mask_id), expected, strict=True)])


@FEW
@given(a=weights, b=weights, names=st.permutations(["local", "alone", "sequence", "mean"]), mask_id=masks)
def test_laws_of_a_vector_space(a, b, names, mask_id):
    """Association, commutation, distribution both ways, negation, zero."""
    r, s, u = (models(mask_id)[1][name] for name in names[:3])

    def value(ratio: Ratio) -> list[Tensor]:
        return both(ratio, mask_id)

    same(value((r + s) + u), value(r + (s + u)))
    same(value(r + s), value(s + r))
    same(value(a * (r + s)), value(a * r + a * s))
    same(value((a + b) * r), value(a * r + b * r))
    same(value(a * (b * u)), value((a * b) * u))
    same(value(-r), [-x for x in value(r)])
    same(value(r - s), value(r + -s))
    same(value(r - r), [torch.zeros_like(x) for x in value(r)])
    same(value(0 * r), [torch.zeros_like(x) for x in value(r)])
    same(value(s + 0 * r), value(s))
    same(value(1 * r), value(r))


@FEW
@given(gamma=st.floats(0, 4), a=weights, first=members, second=members, mask_id=masks)
@pytest.mark.parametrize("n_ratio", [None, 3])
def test_gamma_is_a_scale(gamma, a, first, second, mask_id, n_ratio):
    """Guidance by R at gamma is guidance by gamma R at 1."""
    denoiser, ratios = models(mask_id)
    ratio = ratios[first] + a * ratios[second]
    z = question(mask_id)[0]
    scaled, plain = Guided(denoiser, gamma * ratio, 1.0, n_ratio), Guided(denoiser, ratio, gamma, n_ratio)
    torch.testing.assert_close(scaled(z).log_probs.exp(), plain(z).log_probs.exp(), rtol=0, atol=1e-5)


@FEW
@given(gamma=st.floats(0, 4), name=members, mask_id=masks)
def test_guide_at_gamma_is_guide_by_gamma_r(gamma, name, mask_id):
    z, positions, _, context = question(mask_id)
    ratio = models(mask_id)[1][name]
    tables = [each.table(z, positions, None, context) for each in (ratio, gamma * ratio)]
    guided = [guide(context.log_probs, table, g).exp() for table, g in zip(tables, (gamma, 1.0), strict=True)]
    torch.testing.assert_close(*guided, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mask_id", [0, 2, 4])
@pytest.mark.parametrize("name", ["sequence", "mean", "sum of both"])
def test_the_table_of_a_sequence_ratio(name, mask_id):
    """Column v of the table is log r(z with l <- v) for every v but the mask, wherever the mask's id lies."""
    ratios = models(mask_id)[1]
    ratio = ratios["sequence"] + ratios["mean"] if name == "sum of both" else ratios[name]
    z, positions, _, _ = question(mask_id)
    table = ratio.table(z, positions)
    assert table.shape == (ROWS, 3, IDS)
    candidates = torch.arange(IDS).expand(ROWS, 3, IDS)
    log_ratio = ratio.log_ratio(z, positions, candidates)
    for v in range(IDS):
        if v != mask_id:
            torch.testing.assert_close(table[..., v], log_ratio[..., v], rtol=1e-5, atol=1e-5)
            changed = z.scatter(1, positions[:, 1:2], v)
            torch.testing.assert_close(table[:, 1, v], ratio.log_value(changed), rtol=1e-5, atol=1e-5)
