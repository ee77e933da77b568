"""The DiT: what its output depends on, and that chunks change nothing."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser
from gtl.nn import dit
from gtl.nn.dit import DiT, PooledDiT, in_chunks
from gtl.process import Masked
from gtl.train.checkpoint import load_denoiser, save_model

IDS = 6
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
EXACT = {"atol": 1e-10, "rtol": 1e-10}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny tensors are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def randomise(model: nn.Module) -> nn.Module:
    """Fills all weights: a fresh head and fresh modulations are zero and hide mistakes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.4)
    return model.eval()


def network(timed: bool = False, outputs: int = 4, **changes: Any) -> DiT:
    model = DiT(IDS, outputs, **{"width": 16, "depth": 2, "heads": 2, "time_conditioned": timed, **changes})
    randomise(model)
    return model


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(IDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def times(rows: int) -> Tensor:
    return torch.linspace(0.05, 0.95, rows)


@pytest.mark.parametrize("timed", [False, True])
def test_rows_do_not_see_each_other(timed: bool):
    """A permutation of the rows permutes the outputs, and a row alone gives what it gives in company."""
    model, z, t = network(timed).double(), tokens(7, 5), times(7)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    out = model(z, t)
    torch.testing.assert_close(model(z[order], t[order]), out[order], **EXACT)
    torch.testing.assert_close(model(z[2:3], t[2:3]), out[2:3], **EXACT)


@pytest.mark.parametrize("length", [1, 2, 5, 33])
@pytest.mark.parametrize("timed", [False, True])
def test_any_length(length: int, timed: bool):
    out = network(timed)(tokens(3, length), times(3))
    assert out.shape == (3, length, 4)
    assert out.isfinite().all()
    value = randomise(PooledDiT(network(timed, outputs=1)))(tokens(3, length), times(3))
    assert value.shape == (3,)
    assert value.dtype == torch.float32


def test_a_time_conditioned_network_needs_t():
    model, z = network(timed=True), tokens(2, 5)
    for call in (model, model.trunk, randomise(PooledDiT(network(timed=True, outputs=1)))):
        with pytest.raises(ValueError, match="conditioned on time"):
            call(z)
        with torch.no_grad(), pytest.raises(ValueError, match="conditioned on time"):
            call(z)


def test_a_time_conditioned_network_depends_on_t_row_by_row():
    model, z = network(timed=True), tokens(1, 5).expand(3, -1)
    out = model(z, torch.tensor([0.2, 0.7, 0.2]))
    assert not torch.allclose(out[0], out[1], atol=1e-3)
    torch.testing.assert_close(out[0], out[2])
    near = model(z[:2], torch.tensor([0.2, 0.21]))
    assert not torch.allclose(near[0], near[1], atol=1e-4)


def test_a_network_without_time_ignores_t():
    model, z = network(), tokens(3, 5)
    assert torch.equal(model(z), model(z, times(3)))
    assert torch.equal(model(z), model(z, torch.full((3,), float("nan"))))


@pytest.mark.parametrize("depth", [1, 2])
def test_order_matters(depth: int):
    """Two tokens swapped: the outputs are not the swapped outputs, and even a pooled value changes."""
    z = torch.tensor([[0, 1, 2, 3, 4]])
    swapped = torch.tensor([[0, 3, 2, 1, 4]])
    model = network(depth=depth)
    there, back = model(z), model(swapped)
    assert not torch.allclose(there, back, atol=1e-3)
    assert not torch.allclose(there[:, [0, 3, 2, 1, 4]], back, atol=1e-3)
    pooled = randomise(PooledDiT(network(outputs=1, depth=depth)))
    assert not torch.allclose(pooled(z), pooled(swapped), atol=1e-3)


def test_every_position_sees_every_other():
    """Attention goes both ways: a change at either end reaches all outputs."""
    model, z = network(), torch.tensor([[0, 1, 2, 3, 4]])
    for place in (0, 4):
        other = z.clone()
        other[0, place] = 5
        assert ((model(z) - model(other)).abs().amax(-1) > 1e-5).all()


def test_a_fresh_network_says_nothing():
    """The head starts at zero: uniform predictions, and log r = 0."""
    assert not DiT(IDS, 4, width=16, heads=2)(tokens(2, 5)).any()
    assert not PooledDiT(DiT(IDS, 1, width=16, heads=2))(tokens(2, 5)).any()


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 11])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, timed: bool, rows: int):
    """Without gradients a CPU runs a few rows at a time; in float64 that is the same to the last digits."""
    model, pooled = network(timed).double(), randomise(PooledDiT(network(timed, outputs=1))).double()
    z, t = tokens(rows, 5), times(rows)
    whole = model(z, t).detach(), model.trunk(z, t).detach(), pooled(z, t).detach()
    monkeypatch.setattr(dit, "CPU_TOKENS", 17)  # three rows of five tokens
    with torch.no_grad():
        parts = model(z, t), model.trunk(z, t), pooled(z, t)
    for one, other, close in zip(whole, parts, (EXACT, EXACT, CLOSE), strict=True):
        torch.testing.assert_close(other, one, **close)
    with torch.no_grad():
        monkeypatch.setattr(dit, "CPU_TOKENS", 1)  # less than one row: still a row at a time
        torch.testing.assert_close(pooled(z, t), whole[2], **CLOSE)


def test_chunks_are_of_the_size_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dit, "CPU_TOKENS", 17)
    seen: list[tuple[int, int | None]] = []

    def record(z: Tensor, t: Tensor | None) -> Tensor:
        seen.append((len(z), None if t is None else len(t)))
        return z.float()

    z = tokens(8, 5)
    with torch.no_grad():
        assert torch.equal(in_chunks(record, z, None), z.float())
        assert torch.equal(in_chunks(record, z, times(8)), z.float())
    assert seen == [(3, None), (3, None), (2, None), (3, 3), (3, 3), (2, 2)]
    seen.clear()
    in_chunks(record, z, None)
    assert seen == [(8, None)]


def test_gradients_reach_all_weights():
    for timed in (False, True):
        model = network(timed)
        model(tokens(6, 5), times(6)).square().sum().backward()
        assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())


def test_dropout_is_for_training_only():
    model, z = network(dropout=0.5), tokens(2, 5)
    assert torch.equal(model(z), model(z))
    model.train()
    torch.manual_seed(0)
    assert not torch.equal(model(z), model(z))


def test_pooling():
    trunk, z = network(outputs=1), tokens(3, 5)
    total, mean = PooledDiT(trunk, "sum").eval()(z), PooledDiT(trunk, "mean").eval()(z)
    torch.testing.assert_close(total, trunk(z).squeeze(-1).sum(-1), **CLOSE)
    torch.testing.assert_close(total, 5 * mean, **CLOSE)


def test_the_config_builds_the_same_network():
    model = network(timed=True, dropout=0.25)
    again = DiT(**model.config())
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(tokens(2, 5), times(2)), model(tokens(2, 5), times(2)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"width": 10, "heads": 2}, r"width=10.*heads"),
        ({"width": 6, "heads": 2}, r"width=6"),
        ({"heads": 0}, "heads=0"),
        ({"heads": -2}, "heads=-2"),
        ({"width": 0}, "width=0"),
        ({"width": -16}, "width=-16"),
        ({"depth": -1}, "depth=-1"),
        ({"dropout": 1.5}, r"dropout=1\.5"),
        ({"dropout": -0.1}, r"dropout=-0\.1"),
    ],
)
def test_sizes_that_are_refused(change: dict[str, Any], says: str):
    """When the network is built, not in its first pass."""
    with pytest.raises(ValueError, match=says):
        network(**change)


def test_pooled_networks_that_are_refused():
    with pytest.raises(ValueError, match="scalar head; this one has 4"):
        PooledDiT(network())
    with pytest.raises(ValueError, match="pooling='max'"):
        PooledDiT(network(outputs=1), "max")  # type: ignore[arg-type]


def test_gates_scale_weights_in_training_and_outputs_otherwise():
    """The same function either way, biases and gradients of the gates included."""
    torch.manual_seed(0)
    dit = DiT(7, 7, 16, 2, 2)
    for name, weight in dit.named_parameters():
        if "constant" in name or name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.5)
    torch.nn.init.normal_(dit.head.weight)
    z = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(1))
    gradients = []
    for mode in (True, False):
        dit.train(mode).zero_grad()
        out = dit(z)
        out.square().sum().backward()
        gradients.append([out.detach(), *(p.grad.clone() for p in dit.parameters())])
    for folded, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(folded, plain, rtol=1e-4, atol=1e-3)


def test_tied_weights_are_one(tmp_path: Path):
    """Through training, copies, another type and a checkpoint, which holds them once."""
    model = DiT(IDS, IDS, 16, 1, 2, tied=True)
    assert (
        sum(p.numel() for p in model.parameters())
        == sum(p.numel() for p in DiT(IDS, IDS, 16, 1, 2).parameters()) - IDS * 16
    )
    z = tokens(3, 5)
    model(z).square().mean().backward()
    both = model.embedding.weight.grad.clone()
    model.zero_grad()
    model.head(model.trunk(z).detach()).square().mean().backward()
    assert not torch.allclose(both, model.embedding.weight.grad)
    for copied in (copy.deepcopy(model), copy.deepcopy(model).to(torch.bfloat16)):
        assert copied.head.weight is copied.embedding.weight
    denoiser = NetworkDenoiser(Masked(IDS), randomise(model))
    save_model(tmp_path, denoiser)
    assert "network.head.weight" not in load_file(tmp_path / "weights.safetensors")
    loaded = load_denoiser(tmp_path)
    assert loaded.network.head.weight is loaded.network.embedding.weight
    torch.testing.assert_close(loaded(z).log_probs, denoiser(z).log_probs)


def test_untied_computes_the_same():
    for tied in (False, True):
        model = randomise(DiT(IDS, IDS, 16, 1, 2, tied=tied))
        copied = model.untied().eval()
        assert copied.head.weight is not copied.embedding.weight
        torch.testing.assert_close(copied(tokens(3, 5)), model(tokens(3, 5)), **CLOSE)


def test_tied_needs_an_output_for_every_id():
    with pytest.raises(ValueError, match="4 outputs, 6 ids"):
        DiT(IDS, 4, 16, 1, 2, tied=True)
