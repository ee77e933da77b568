"""Taylor scoring: exact for a network that is linear in the embeddings, the tangent of any other, one pass each way."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser
from gtl.exact import one_position_law
from gtl.guidance import Guided
from gtl.nn.dit import DiT
from gtl.process import Masked, Process, Uniform
from gtl.ratio import Combination, LocalRatio, NetworkRatio, SequenceRatio
from gtl.ratio.gamma import choose_gamma
from gtl.ratio.late import LateRatio
from gtl.ratio.sequence import unsmooth
from gtl.ratio.taylor import TaylorRatio, taylor
from gtl.sample import Ancestral, OnePosition, TauLeaping

IDS, LENGTH, ROWS, WIDTH, MASK = 5, 4, 6, 8, 2
PROCESS = Masked(IDS, MASK)


class Linear(nn.Module):
    """sum_l w_l . (embedding + extra)_l (1 + t), in place of a pooled DiT; counts what it is asked."""

    def __init__(self, process: Process, timed: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        embedding = nn.Embedding(process.num_ids, WIDTH)
        self.dit = SimpleNamespace(num_ids=process.num_ids, time_conditioned=timed, embedding=embedding, width=WIDTH)
        self.weight = nn.Parameter(torch.randn(LENGTH, WIDTH) / 2)

    def forward(self, z: Tensor, t: Tensor | None = None, extra: Tensor | None = None) -> Tensor:
        h = self.dit.embedding(z) + (0 if extra is None else extra)
        value = (h * self.weight).sum((-1, -2)) + 0.7
        return value if t is None else value * (1 + t)


def linear(process: Process = PROCESS, timed: bool = False) -> NetworkRatio:
    return NetworkRatio(process, Linear(process, timed))  # type: ignore[arg-type]


def randomise(ratio: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in ratio.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.4)
    return ratio.double().eval()


SIZE = {"width": WIDTH, "depth": 2, "heads": 2}
RATIOS = {
    "sum": lambda: NetworkRatio.build(PROCESS, **SIZE),
    "mean": lambda: NetworkRatio.build(PROCESS, "mean", **SIZE),
    "smoothed": lambda: NetworkRatio.build(PROCESS, "mean", 0.1, **SIZE),
    "of time": lambda: NetworkRatio.build(PROCESS, time_conditioned=True, **SIZE),
    "late": lambda: LateRatio.build(PROCESS, **SIZE),
    "late, uniform": lambda: LateRatio.build(Uniform(IDS), time_conditioned=True, **SIZE),
}
every_ratio = pytest.mark.parametrize("name", RATIOS)


def question(places: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    z = torch.randint(IDS, (ROWS, LENGTH), generator=generator)
    positions = torch.randint(LENGTH, (ROWS, places), generator=generator)
    candidates = torch.randint(IDS, (ROWS, places, 6), generator=generator)
    return z, positions, candidates, torch.linspace(0.1, 0.9, ROWS)


def denoiser(process: Process = PROCESS) -> NetworkDenoiser:
    torch.manual_seed(1)
    timed = not isinstance(process, Masked)
    model = NetworkDenoiser(process, DiT(IDS, IDS, time_conditioned=timed, **SIZE))
    nn.init.normal_(model.network.head.weight, std=0.5)
    return model.eval()


def same(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


# what it computes


@pytest.mark.parametrize("process", [PROCESS, Uniform(IDS)], ids=["masked", "uniform"])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("places", [1, 3])
def test_exact_where_the_network_is_linear(process, timed, places):
    """log_ratio and table are those of intervention, the mask and the current token among the candidates."""
    ratio = linear(process, timed)
    z, positions, candidates, t = question(places)
    time = t if timed else None
    with torch.no_grad():
        plain = ratio.log_ratio(z, positions, candidates, time)
        table = ratio.log_ratio(z, positions, torch.arange(IDS).expand(ROWS, places, IDS), time)
    assert float(plain.std()) > 0.5
    same(taylor(ratio).log_ratio(z, positions, candidates, time), plain)
    same(taylor(ratio).table(z, positions, time), table)


def test_padding_is_harmless():
    ratio = linear()
    z, positions, candidates, _ = question()
    padded = positions.clone()
    padded[0, 1] = padded[3] = -1
    values = taylor(ratio).log_ratio(z, padded, candidates)
    assert values.isfinite().all()
    same(values[padded >= 0], taylor(ratio).log_ratio(z, positions, candidates)[padded >= 0])


def moved(ratio: Any, z: Tensor, t: Tensor | None, place: int, move: Tensor) -> Tensor:
    """log r(z), float64 all the way, with `move` added to the embedding at one place by a hook."""
    dit = ratio.network.dit

    def add(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + move * (torch.arange(LENGTH) == place).unsqueeze(-1)

    hook = dit.embedding.register_forward_hook(add)
    values = dit(z, t).squeeze(-1)
    hook.remove()
    pooled = values.mean(-1) if getattr(ratio.network, "pooling", "sum") == "mean" else values.sum(-1)
    return unsmooth(pooled, getattr(ratio, "smoothing", 0.0))


@every_ratio
@torch.no_grad()
def test_the_tangent_of_any_network(name):
    """Against central differences toward every token at every position; log r itself at the current token."""
    ratio = randomise(RATIOS[name]())
    z, _, _, t = question()
    time = None if ratio.timeless else t
    everywhere = torch.arange(LENGTH).expand_as(z)
    table = taylor(ratio).table(z, everywhere, time)
    value = moved(ratio, z, time, 0, torch.zeros(WIDTH))
    same(table.gather(-1, z.unsqueeze(-1)).squeeze(-1), value.unsqueeze(1).expand_as(z))
    embedding, step = ratio.network.dit.embedding.weight, 1e-5
    for place in range(LENGTH):
        for v in range(IDS):
            direction = (embedding[v] - embedding[z[:, place]]).unsqueeze(1)
            ends = [moved(ratio, z, time, place, sign * step * direction) for sign in (1, -1)]
            same(table[:, place, v], value + (ends[0] - ends[1]) / (2 * step))
    assert float(table.std(-1).mean()) > 0.05


def test_smoothing_is_undone():
    """The slope is that of log r, steeper than that of the output by 1 / ((1 - eps) sigmoid'(log r)) * sigmoid'(s)."""
    ratio = randomise(RATIOS["smoothed"]())
    z, _, _, _ = question()
    everywhere = torch.arange(LENGTH).expand_as(z)
    smooth = taylor(ratio).table(z, everywhere)
    ratio.smoothing = 0.0
    plain = taylor(ratio).table(z, everywhere)
    s = ratio(z).detach().double()
    log_r = unsmooth(s, 0.1)
    steeper = s.sigmoid() * (-s).sigmoid() / (0.9 * log_r.sigmoid() * (-log_r).sigmoid())
    assert float((steeper - 1).abs().min()) > 0.05
    same(smooth, log_r.view(-1, 1, 1) + steeper.view(-1, 1, 1) * (plain - s.view(-1, 1, 1)), 1e-4)


@every_ratio
@pytest.mark.parametrize("budget", [1, 9, 10_000])
def test_memory_budget_changes_nothing(name, budget):
    ratio = randomise(RATIOS[name]())
    z, positions, candidates, t = question()
    expected = taylor(ratio).log_ratio(z, positions, candidates, t)
    ratio.max_tokens = budget
    same(taylor(ratio).log_ratio(z, positions, candidates, t), expected)


def test_no_rows():
    values = taylor(RATIOS["sum"]()).log_ratio(*(x[:0] for x in question()[:3]))
    assert values.shape == (0, 3, 6)


# what it costs


class Watch:
    """Counts passes forward through a ratio's trunk and back."""

    def __init__(self, ratio: Any, patch: pytest.MonkeyPatch) -> None:
        self.forward = self.backward = 0
        trunk, grad = ratio.network.dit.trunk, torch.autograd.grad

        def watched(*inputs: Any) -> Any:
            self.forward += 1
            return trunk(*inputs)

        def graded(*inputs: Any, **settings: Any) -> Any:
            self.backward += 1
            return grad(*inputs, **settings)

        patch.setattr(ratio.network.dit, "trunk", watched)
        patch.setattr(torch.autograd, "grad", graded)


@pytest.mark.parametrize("name", ["sum", "late"])
@pytest.mark.parametrize("places", [1, 3])
def test_one_pass_forward_and_one_back(monkeypatch, name, places):
    """Whatever the number of positions and candidates."""
    ratio = RATIOS[name]()
    watch = Watch(ratio, monkeypatch)
    z, positions, candidates, _ = question(places)
    taylor(ratio).log_ratio(z, positions, candidates)
    assert (watch.forward, watch.backward) == (1, 1)
    taylor(ratio).table(z, positions)
    assert (watch.forward, watch.backward) == (2, 2)


@pytest.mark.parametrize("n_ratio", [None, 2])
def test_sampling_takes_one_of_each_a_step(monkeypatch, generator, n_ratio):
    ratio = RATIOS["sum"]()
    watch = Watch(ratio, monkeypatch)
    OnePosition(denoiser(), taylor(ratio), n_ratio=n_ratio)((3, LENGTH), generator=generator)
    assert (watch.forward, watch.backward) == (LENGTH, LENGTH)


def test_it_leaves_no_gradients_behind():
    """Under no_grad or not, frozen weights or not: the same values, without a graph, and nothing in the weights."""
    ratio = randomise(RATIOS["sum"]())
    z, positions, candidates, _ = question()
    scoring = taylor(ratio)
    values = scoring.log_ratio(z, positions, candidates)
    with torch.no_grad():
        again = scoring.log_ratio(z, positions, candidates)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert torch.equal(values, again)
    assert not values.requires_grad
    assert all(p.grad is None for p in ratio.parameters())
    ratio.requires_grad_(False)
    assert torch.equal(scoring.log_ratio(z, positions, candidates), values)


# samplers


@pytest.mark.parametrize("name", ["sum", "late"])
@pytest.mark.parametrize("n_ratio", [None, 3])
def test_one_position_samples_follow_their_law(chi_square, generator, name, n_ratio):
    ratio, source = taylor(randomise(RATIOS[name]())), denoiser()
    law = one_position_law(Guided(source, ratio, 2.0, n_ratio), 3)
    x = OnePosition(source, ratio, gamma=2.0, n_ratio=n_ratio)((4000, 3), generator=generator)
    assert chi_square(x, law / law.sum(), MASK) > 1e-3
    unguided = one_position_law(source, 3)
    assert chi_square(x, unguided / unguided.sum(), MASK) < 1e-6


def test_a_linear_ratio_samples_as_by_intervention():
    """Every sampler and gamma's choice take it; where Taylor is exact nothing changes."""
    ratio, source = linear(), denoiser()

    def draw(kind: Any, guide: Any, process: Process, **settings: Any) -> Tensor:
        model = source if process is PROCESS else denoiser(process)
        return kind(model, guide, **settings)((200, LENGTH), generator=torch.Generator().manual_seed(0))

    for kind, settings in (
        (OnePosition, {}),
        (Ancestral, {"steps": 5}),
        (Ancestral, {"steps": 5, "stabilised": False}),
    ):
        assert torch.equal(draw(kind, ratio, PROCESS, **settings), draw(kind, taylor(ratio), PROCESS, **settings))
    uniform, mixing = Uniform(IDS), linear(Uniform(IDS), timed=True)
    for kind in (Ancestral, TauLeaping):
        assert torch.equal(draw(kind, mixing, uniform, steps=5), draw(kind, taylor(mixing), uniform, steps=5))
    x = torch.randint(IDS - 1, (40, LENGTH), generator=torch.Generator().manual_seed(2))
    x = x + (x >= MASK)
    assert choose_gamma(source, ratio, x) == choose_gamma(source, taylor(ratio), x)


# what it wraps


@every_ratio
def test_it_takes_over_what_the_ratio_says_of_itself(name):
    ratio = RATIOS[name]()
    ratio.gamma = 2.5
    scoring = taylor(ratio)
    assert isinstance(scoring, TaylorRatio)
    assert not isinstance(scoring, SequenceRatio)
    assert (scoring.gamma, scoring.timeless, scoring.space) == (2.5, ratio.timeless, "noisy")
    assert scoring.process is ratio.process
    assert Guided(denoiser(), scoring).gamma == 2.5 if ratio.process is PROCESS else True


def test_time_is_passed_on():
    ratio = randomise(RATIOS["of time"]())
    z, positions, candidates, t = question()
    with pytest.raises(ValueError, match="conditioned on time"):
        taylor(ratio).log_ratio(z, positions, candidates)
    later = taylor(ratio).log_ratio(z, positions, candidates, t.where(torch.arange(ROWS) != 2, 0.3))
    changed = (later - taylor(ratio).log_ratio(z, positions, candidates, t)).abs().amax((-1, -2)) > 1e-4
    assert changed.tolist() == [row == 2 for row in range(ROWS)]


class NoNetwork(SequenceRatio):
    """A sequence ratio without embeddings."""

    process = PROCESS

    def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        return z.sum(-1).double()


def test_a_sum_is_scored_term_by_term():
    """Weights and gamma stay; a local term stays as it is."""
    source = denoiser()
    local = LocalRatio.build(source, width=WIDTH, depth=1, heads=2)
    first, second = (randomise(RATIOS[name]()) for name in ("sum", "late"))
    ratio = 2 * first - 0.5 * second + 3 * local
    ratio.gamma = 1.5
    scoring = taylor(ratio)
    assert isinstance(scoring, Combination)
    assert scoring.weights == ratio.weights == (2.0, -0.5, 3.0)
    assert [type(r) for r in scoring.ratios] == [TaylorRatio, TaylorRatio, LocalRatio]
    assert scoring.ratios[2] is local
    assert scoring.gamma == 1.5
    z, positions, candidates, _ = question()
    with torch.no_grad():
        asked = z, positions, candidates, None, source(z, None, positions)
        parts = [r.log_ratio(*asked) for r in (taylor(first), taylor(second), local)]
        same(scoring.log_ratio(*asked), 2 * parts[0] - 0.5 * parts[1] + 3 * parts[2])


def test_what_has_no_network_is_refused():
    local = LocalRatio.build(denoiser(), width=WIDTH, depth=0, heads=2)
    for ratio, name in ((local, "LocalRatio"), (NoNetwork(), "NoNetwork"), (local + NoNetwork(), "NoNetwork")):
        with pytest.raises(ValueError, match=f"Taylor scoring needs a sequence ratio network; {name}"):
            taylor(ratio)
    with pytest.raises(ValueError, match="sequence ratio network"):
        TaylorRatio(taylor(linear()))
