"""The fused kernels against the network in plain torch."""

import pytest
import torch

from gtl.nn.dit import DiT, PooledDiT
from gtl.nn.fused import fused_pool, fusible, pack, power
from gtl.process import Masked
from gtl.ratio import NetworkRatio


def network(width: int, depth: int, heads: int) -> PooledDiT:
    torch.manual_seed(0)
    dit = DiT(50, 1, width, depth, heads).eval()
    for name, weight in dit.named_parameters():
        if "constant" in name or name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.2)
    torch.nn.init.normal_(dit.head.weight, std=0.3)
    return PooledDiT(dit)


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "width", "depth", "heads"), [(128, 128, 4, 4), (100, 96, 3, 4), (7, 16, 1, 2)])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_as_close_to_float32_as_plain_bf16(length: int, width: int, depth: int, heads: int, pooling: str) -> None:
    model = network(width, depth, heads).cuda()
    model.pooling = pooling
    z = torch.randint(0, 50, (300, length), device="cuda")
    with torch.no_grad():
        exact = model(z)
        model.to(torch.bfloat16)
        assert fusible(model.dit, z)
        plain, fused = model._pool(z, None, None), model(z)
    spread = exact.std()
    assert float((fused - exact).std() / spread) < max(0.01, 1.2 * float((plain - exact).std() / spread))
    assert float((fused - exact).abs().max() / spread) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize(("length", "width", "depth", "heads"), [(128, 128, 4, 4), (50, 48, 1, 2)])
def test_interventions(length: int, width: int, depth: int, heads: int, pooling: str) -> None:
    """What is shared with the context changes no value beyond bf16, for every place, and whatever the chunk."""
    model = network(width, depth, heads).cuda()
    model.pooling = pooling
    ratio = NetworkRatio(Masked(50, 3), model)
    generator = torch.Generator("cuda").manual_seed(0)
    z = torch.randint(0, 50, (6, length), device="cuda", generator=generator)
    positions = torch.tensor([[0, 3, -1], [length - 1, 2, 1]], device="cuda").repeat(3, 1)
    candidates = torch.randint(0, 50, (6, 3, 7), device="cuda", generator=generator)
    with torch.no_grad():
        exact = ratio.log_ratio(z, positions, candidates)
        ratio.to(torch.bfloat16)
        whole = ratio.log_ratio(z, positions, candidates)
        ratio.max_tokens = 3 * length
        parts = ratio.log_ratio(z, positions, candidates)
    assert torch.equal(whole, parts)
    exact, whole = exact[positions >= 0], whole[positions >= 0]
    assert float((whole - exact).abs().max() / exact.std()) < 0.1


@pytest.mark.gpu
def test_changed_weights_are_packed_again() -> None:
    model = network(32, 1, 2).cuda().to(torch.bfloat16)
    z = torch.randint(0, 50, (4, 16), device="cuda")
    with torch.no_grad():
        before = fused_pool(model.dit, z)
        model.dit.blocks[0].out.weight.mul_(-3)
        after = fused_pool(model.dit, z)
        assert torch.allclose(after, model._pool(z, None, None), rtol=0.05, atol=0.3)
    assert not torch.allclose(before, after, atol=0.1)


def test_where_it_does_not_serve() -> None:
    model = network(32, 1, 2)
    z = torch.zeros(2, 8, dtype=torch.long)
    with torch.no_grad():
        assert not fusible(model.dit, z)  # a CPU


def test_packing_pads_with_zeros() -> None:
    """Padded columns of weights and vectors are 0, so that padding stays 0 through every block."""
    model = network(48, 1, 2)
    packed = pack(model.dit, 20)
    scale, shift, gate, both, value, out = packed["blocks"][0]["attend"]
    assert both.shape == (2, power(48), 4 * power(12))
    for weight in (both, value):
        assert not weight[:, 48:].any()
    assert not out[:, :, 48:].any()
    assert not shift[48:].any()
    assert packed["cos"].shape == (power(20), power(12))
    assert not packed["sin"][20:].any()
    assert scale[:48].any()
    assert gate[:48].any()
