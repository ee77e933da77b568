"""The local ratio: Theorem 1 with exact conditional ratios, the contract, and the network behind it."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser
from gtl.exact import ancestral_law, one_position_law
from gtl.guidance import Guided
from gtl.nn.dit import DiT, gather_positions
from gtl.nn.local import LocalDiT
from gtl.process import Masked
from gtl.ratio import Ratio
from gtl.ratio.local import LocalRatio
from gtl.sample import Ancestral, OnePosition

KINDS = ["markov", "chain", "table"]
LENGTH, IDS, MASK = 5, 5, 2


def total_variation(a: Tensor, b: Tensor) -> float:
    return 0.5 * float((a - b).abs().sum())


class Oracle(nn.Module):
    """log q(x_l = v | z) - log p(x_l = v | z) + any constant for each (z, l); noise where no value has a meaning."""

    def __init__(self, pair) -> None:
        super().__init__()
        ids = pair.process.num_ids
        self.pair, self.states, self.borrowed = pair, 0, 0
        self.dit = SimpleNamespace(num_ids=ids, outputs=ids, time_conditioned=False, depth=0)
        noise = torch.Generator().manual_seed(11)
        self.constant = 3 * torch.randn(ids**pair.length, pair.length, 1, generator=noise, dtype=torch.float64)
        self.noise = 3 * torch.randn(ids**pair.length, pair.length, ids, generator=noise, dtype=torch.float64)

    def forward(self, z, hidden=(), t=None, positions=None, readout=None):
        state = z @ self.pair.process.num_ids ** torch.arange(z.shape[1] - 1, -1, -1)
        log_r = self.pair.q.log_conditional(z) - self.pair.p.log_conditional(z)
        log_r = torch.where(log_r.isfinite(), log_r + self.constant[state], self.noise[state])
        return log_r if positions is None else gather_positions(log_r, positions)


class Double(Ratio):
    """The same numbers without the local ratio's rounding to float32."""

    space = "clean"

    def __init__(self, pair) -> None:
        super().__init__()
        self.process, self.network = pair.process, Oracle(pair)

    def table(self, z, positions, t=None, context=None):
        return self.network(z, positions=positions)

    def log_ratio(self, z, positions, candidates, t=None, context=None):
        return self.table(z, positions).gather(-1, candidates)


def oracle(pair) -> LocalRatio:
    return LocalRatio(pair.process, Oracle(pair))  # type: ignore[arg-type]


# exactness


@pytest.mark.parametrize("mask_id", [None, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_one_position_law_is_the_target(make_pair, kind, mask_id):
    """gamma = 1: q; gamma = 0: p; the inverse ratio: neither."""
    pair = make_pair(kind, mask_id=mask_id)
    for ratio, tolerance in ((Double(pair), 1e-10), (oracle(pair), 1e-6)):
        for gamma, expected in ((1.0, pair.q_x), (0.0, pair.p_x)):
            law = one_position_law(Guided(pair.denoiser, ratio, gamma), pair.length)
            torch.testing.assert_close(law, expected, rtol=0, atol=tolerance)
        inverse = one_position_law(Guided(pair.denoiser, -ratio, 1.0), pair.length)
        assert min(total_variation(inverse, law) for law in (pair.p_x, pair.q_x)) > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_pruned_candidates_are_weighed_by_log_ratio(make_pair, kind):
    """n_ratio = V goes by the table, n_ratio = V - 1 by log_ratio: it prunes as the exact sequence ratio does."""
    pair = make_pair(kind, mask_id=1)
    pruned = [Guided(pair.denoiser, ratio, 1.0, 2)(pair.z).log_probs.exp() for ratio in (oracle(pair), pair.ratio)]
    torch.testing.assert_close(pruned[0], pruned[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_one_position_samples(make_pair, chi_square, generator, kind):
    pair = make_pair(kind, mask_id=1)
    x = OnePosition(pair.denoiser, oracle(pair))((3000, 3), generator=generator)
    assert chi_square(x, pair.q_x, 1) > 1e-3
    assert chi_square(x, pair.p_x, 1) < 1e-6


@pytest.mark.parametrize("stabilised", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_ancestral_law_converges_to_the_target(make_pair, kind, stabilised):
    """The error falls by 1.6 or more when T doubles, as with the exact sequence ratio."""
    pair = make_pair(kind, mask_id=1)
    errors = []
    for steps in (12, 24, 48, 96):
        sampler = Ancestral(pair.denoiser, oracle(pair), steps=steps, stabilised=stabilised)
        errors.append(total_variation(ancestral_law(sampler, pair.length), pair.q_x))
    assert all(before / after >= 1.6 for before, after in itertools.pairwise(errors))
    assert errors[-1] < 1e-2


@pytest.mark.parametrize("stabilised", [True, False])
def test_ancestral_samples_follow_their_law(make_pair, chi_square, generator, stabilised):
    """With few steps that law is not q, and the test is sharp enough to see it."""
    pair = make_pair("markov", mask_id=1)
    sampler = Ancestral(pair.denoiser, oracle(pair), steps=4, stabilised=stabilised)
    x = sampler((3000, 3), generator=generator)
    assert chi_square(x, ancestral_law(sampler, 3), 1) > 1e-3
    assert chi_square(x, pair.q_x, 1) < 1e-6


@pytest.mark.parametrize("mask_id", [None, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_naive_and_stabilised_kernels(make_pair, kind, mask_id):
    """The mask is weighed by log sum_v p(v | z) exp(g_v): by the martingale identity both kernels are the target's."""
    pair = make_pair(kind, mask_id=mask_id)

    def kernel(gamma: float, stabilised: bool) -> Tensor:
        sampler = Ancestral(pair.denoiser, oracle(pair), gamma=gamma, stabilised=stabilised)
        return sampler.kernel(pair.z, 0.8, 0.5).exp()

    target = Ancestral(pair.target_denoiser).kernel(pair.z, 0.8, 0.5).exp()
    torch.testing.assert_close(kernel(1.0, True), target, rtol=0, atol=1e-6)
    torch.testing.assert_close(kernel(1.0, False), target, rtol=0, atol=1e-6)
    assert float((kernel(2.0, True) - kernel(2.0, False)).abs().max()) > 0.02


# the contract


def models(
    depth: int = 1, features: bool = True, timed: bool = False, trained: bool = True
) -> tuple[NetworkDenoiser, LocalRatio]:
    """A denoiser with random weights and a local ratio on it, with random weights too if it is `trained`."""
    torch.manual_seed(0)
    process = Masked(IDS, MASK)
    denoiser = NetworkDenoiser(process, DiT(IDS, IDS, width=16, depth=2, heads=2, time_conditioned=timed))
    ratio = LocalRatio.build(denoiser, features, width=8, depth=depth, heads=2)
    for model in (denoiser, ratio) if trained else (denoiser,):
        for p in model.parameters():
            nn.init.normal_(p, std=0.5)
    return denoiser.eval().requires_grad_(False), ratio.eval().requires_grad_(False)


def states(rows: int = 7) -> Tensor:
    z = torch.randint(IDS, (rows, LENGTH), generator=torch.Generator().manual_seed(3))
    return z.masked_fill(torch.rand(z.shape, generator=torch.Generator().manual_seed(4)) < 0.5, MASK)


def everywhere(z: Tensor) -> Tensor:
    return torch.arange(z.shape[1]).expand_as(z)


@pytest.mark.parametrize("places", [[4, 0, 2], [3], [1, -1, 0, -1], [4, 3, 2, 1, 0], [2, 2]])
@pytest.mark.parametrize(("depth", "features"), [(0, True), (1, True), (1, False), (0, False)])
def test_some_positions_are_those_of_all(depth, features, places):
    """table and log_ratio at any positions in any order, with padding, are the rows of the whole table."""
    denoiser, ratio = models(depth, features)
    z, positions = states(), torch.tensor(places).repeat(7, 1)
    whole = ratio.table(z, everywhere(z), None, denoiser(z))
    assert float(whole.std()) > 0.1
    context = denoiser(z, None, positions)
    candidates = torch.tensor([4, 0, 3, 0]).expand(7, len(places), 4)
    table = ratio.table(z, positions, None, context)
    log_ratio = ratio.log_ratio(z, positions, candidates, None, context)
    assert table.shape == (7, len(places), IDS)
    assert log_ratio.shape == candidates.shape
    for index, place in enumerate(places):
        if place >= 0:
            torch.testing.assert_close(table[:, index], whole[:, place], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(log_ratio[:, index], table[:, index, [4, 0, 3, 0]], rtol=0, atol=0)


def test_the_mask_is_the_mean_of_its_continuations():
    """log_ratio of the mask is log sum_v p(v | z) exp(g_v), wherever it stands among the candidates."""
    denoiser, ratio = models()
    z = states()
    context = denoiser(z)
    table = ratio.table(z, everywhere(z), None, context)
    values = ratio.log_ratio(z, everywhere(z), torch.tensor([3, MASK, 1]).expand(7, LENGTH, 3), None, context)
    expected = (context.log_probs.exp() * table.exp()).sum(-1).log()
    torch.testing.assert_close(values[..., 1], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values[..., [0, 2]], table[..., [3, 1]], rtol=0, atol=0)


def test_a_local_ratio_has_no_absolute_value():
    _, ratio = models()
    with pytest.raises(ValueError, match="LocalRatio"):
        (2 * ratio).log_value(states())


@pytest.mark.parametrize("n_ratio", [None, 1, 3, 4])
@pytest.mark.parametrize("depth", [0, 1])
def test_one_pass_for_each_step(generator, depth, n_ratio):
    """However many candidates are weighed, the local network runs as often as the denoiser: once a step."""
    denoiser, ratio = models(depth)
    calls = {"denoiser": 0, "ratio": 0}

    def count(name: str) -> None:
        calls[name] += 1

    denoiser.register_forward_hook(lambda *_: count("denoiser"))
    ratio.network.register_forward_hook(lambda *_: count("ratio"))
    OnePosition(denoiser, ratio, n_ratio=n_ratio)((3, LENGTH), generator=generator)
    assert calls == {"denoiser": LENGTH, "ratio": LENGTH}


# the network


@pytest.mark.parametrize(("depth", "features"), [(0, True), (1, True), (1, False)])
@pytest.mark.parametrize("n_ratio", [None, 4])
def test_a_fresh_ratio_changes_nothing(depth, features, n_ratio):
    denoiser, ratio = models(depth, features, trained=False)
    z = states()
    guided = Guided(denoiser, ratio, 3.0, n_ratio)(z)
    torch.testing.assert_close(guided.log_probs, denoiser(z).log_probs, rtol=0, atol=1e-6)
    nn.init.normal_(ratio.network.dit.head.weight)
    assert float((Guided(denoiser, ratio, 3.0, n_ratio)(z).log_probs.exp() - guided.log_probs.exp()).abs().max()) > 0.01


def test_features_are_read():
    """With them the answer depends on the denoiser's hidden states, without them it does not."""
    for features in (True, False):
        denoiser, ratio = models(features=features)
        z = states()
        context = denoiser(z)
        other = context._replace(hidden=tuple(h.flip(1) for h in context.hidden))
        values = [ratio.table(z, everywhere(z), None, c) for c in (context, other)]
        assert torch.equal(*values) != features


def test_every_hidden_state_is_mixed():
    denoiser, ratio = models()
    z = states()
    context = denoiser(z)
    assert ratio.network.states == len(context.hidden) == 4
    before = ratio.table(z, everywhere(z), None, context)
    for index in range(4):
        hidden = tuple(h.flip(1) if i == index else h for i, h in enumerate(context.hidden))
        after = ratio.table(z, everywhere(z), None, context._replace(hidden=hidden))
        assert float((after - before).abs().max()) > 1e-3


def test_missing_context_says_what_to_pass():
    _, ratio = models()
    z = states()
    with pytest.raises(ValueError, match=r"context=denoiser\(z, t, positions\)"):
        ratio.table(z, everywhere(z))
    with pytest.raises(ValueError, match="context="):
        ratio.log_ratio(z, everywhere(z), z.unsqueeze(-1))


def test_without_features_no_context_is_needed():
    denoiser, ratio = models(features=False)
    z = states()
    alone = ratio.table(z, everywhere(z))
    torch.testing.assert_close(alone, ratio.table(z, everywhere(z), None, denoiser(z)), rtol=0, atol=0)
    assert ratio.network.states == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_wrong_hidden_states_are_refused(depth):
    """Too few, too many, none, another width: never a broadcast."""
    _, ratio = models(depth)
    z, width = states(), 16
    good = [torch.randn(7, LENGTH, width) for _ in range(4)]
    assert ratio(z, good).shape == (7, LENGTH, IDS)
    for hidden in (good[:3], [*good, good[0]], [], [torch.randn(7, LENGTH, 8)] * 4, [*good[:3], good[0][..., :1]]):
        with pytest.raises(ValueError, match="4 hidden states of width 16"):
            ratio(z, hidden)


@pytest.mark.parametrize(("states_", "features"), [(2, 0), (0, 8), (-1, -1)])
def test_states_without_width_are_refused(states_, features):
    with pytest.raises(ValueError, match="states="):
        LocalDiT(DiT(IDS, IDS, width=8, depth=0, heads=2), states_, features)


def test_a_network_of_other_ids_is_refused():
    for ids, outputs in ((IDS + 1, IDS + 1), (IDS, 1)):
        with pytest.raises(ValueError, match=f"process has {IDS} ids"):
            LocalRatio(Masked(IDS, MASK), LocalDiT(DiT(ids, outputs, width=8, depth=0, heads=2)))


@pytest.mark.parametrize(("depth", "features", "timed"), [(0, True, False), (1, True, True), (2, False, False)])
def test_config_round_trip(depth, features, timed):
    """The same shapes, and with the same weights the same answers."""
    denoiser, ratio = models(depth, features, timed)
    again = LocalRatio.from_config(ratio.process, ratio.config())
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in ratio.state_dict().items()}
    assert again.config() == ratio.config()
    again.load_state_dict(ratio.state_dict())
    z, t = states(), torch.linspace(0.1, 0.9, 7)
    context = denoiser(z, t)
    values = [r.eval().table(z, everywhere(z), t, context) for r in (ratio, again)]
    assert torch.equal(*values)


def test_time_is_the_denoisers():
    """A time-conditioned denoiser gives a time-conditioned ratio, which needs t and answers to it."""
    denoiser, ratio = models(timed=True)
    assert not ratio.timeless
    assert not Guided(denoiser, ratio).timeless
    assert models()[1].timeless
    z, t = states(), torch.full((7,), 0.3)
    context = denoiser(z, t)
    early, late = (ratio.table(z, everywhere(z), time, context) for time in (t, 2 * t))
    assert float((early - late).abs().max()) > 1e-3
    with pytest.raises(ValueError, match="time"):
        ratio.table(z, everywhere(z), None, context)
