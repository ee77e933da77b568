"""The ratio contract by brute force, the vector space of log-ratios, and the choice of gamma."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gtl.data.markov import make_matrix, sample_chain
from gtl.denoiser import nll
from gtl.exact import ExactDenoiser, ExactRatio, MarkovChain
from gtl.guidance import Guided
from gtl.process import Masked
from gtl.ratio import Combination, NetworkRatio, Ratio, SequenceRatio
from gtl.ratio.gamma import choose_gamma, nll_by_gamma
from gtl.schedule import Cosine

PROCESS = Masked(5, 2)
LENGTH = 4
weights = st.floats(-3, 3)
seeds = st.integers(0, 1000)


class Toy(SequenceRatio):
    """log r(z) = sum_l w(l, z_l) + c t: any function of z and t would do."""

    def __init__(self, seed: int, process: Masked = PROCESS) -> None:
        super().__init__()
        self.process = process
        self.w = torch.randn(LENGTH, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        value = self.w[torch.arange(LENGTH), z].prod(-1) + self.w[torch.arange(LENGTH), z].sum(-1)
        return value if t is None else value * (1 + t)


class Local(Ratio):
    """A ratio that knows no absolute value."""

    process = PROCESS

    def log_ratio(self, z, positions, candidates, t=None, context=None):
        return candidates.double() * (positions.unsqueeze(-1) + 1)


def question(seed: int, places: int = 3, count: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """z (B, L), positions (B, P) and candidates (B, P, N), the mask and the current token among them."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randint(5, (6, LENGTH), generator=generator)
    positions = torch.randint(LENGTH, (6, places), generator=generator)
    return z, positions, torch.randint(5, (6, places, count), generator=generator)


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-9, atol=1e-9)


# log_ratio by intervention


def network_ratio(timed: bool) -> NetworkRatio:
    torch.manual_seed(0)
    ratio = NetworkRatio.build(PROCESS, width=16, depth=1, heads=2, time_conditioned=timed)
    torch.nn.init.normal_(ratio.network.dit.head.weight)
    return ratio.eval()


@pytest.mark.parametrize("places", [1, 3, 7])
@pytest.mark.parametrize("kind", ["toy", "exact", "network", "network of time"])
def test_log_ratio_by_brute_force(make_pair, kind, places):
    """log_ratio[b, p, n] = log r(z_b with positions[b, p] <- candidates[b, p, n]), -1 being padding."""
    pair = make_pair("table", vocabulary=4, length=LENGTH, mask_id=2)
    ratio = {
        "toy": Toy(0),
        "exact": pair.ratio,
        "network": network_ratio(False),
        "network of time": network_ratio(True),
    }[kind]
    z, positions, candidates = question(1, places)
    if places > 1:
        positions[torch.arange(6), torch.arange(6) % places] = -1
        positions[2] = -1
    t = torch.linspace(0.1, 0.9, 6) if kind in ("toy", "network of time") else None
    with torch.no_grad():
        values = ratio.log_ratio(z, positions, candidates, t)
        assert values.shape == candidates.shape
        for b, p, n in torch.cartesian_prod(torch.arange(6), torch.arange(places), torch.arange(4)):
            if positions[b, p] >= 0:
                changed = z[b].clone()
                changed[positions[b, p]] = candidates[b, p, n]
                value = ratio.log_value(changed.unsqueeze(0), None if t is None else t[b : b + 1])
                assert float(values[b, p, n]) == pytest.approx(float(value), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("budget", [1, 13, 16, 40, 10_000])
@pytest.mark.parametrize("places", [1, 3])
def test_memory_budget_changes_nothing(budget, places):
    """However few tokens the ratio may see at once, and never more rows than that allows."""
    z, positions, candidates = question(2, places)
    expected = Toy(0).log_ratio(z, positions, candidates)
    seen = []

    class Watched(Toy):
        def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
            seen.append(z.numel())
            return super().log_value(z, t)

    ratio = Watched(0)
    ratio.max_tokens = budget
    assert torch.equal(ratio.log_ratio(z, positions, candidates), expected)
    assert max(seen) <= max(budget, LENGTH * 4)  # the candidates of one position stay together


@pytest.mark.parametrize("ratio", [Toy(0), 2 * Toy(0), Toy(0) + Toy(1)], ids=["toy", "scaled", "sum"])
def test_nothing_but_padding(ratio):
    """All positions padded (every token is revealed): shape and dtype as usual."""
    z, positions, candidates = question(3)
    values = ratio.log_ratio(z, torch.full_like(positions, -1), candidates)
    assert values.shape == candidates.shape
    assert values.dtype == ratio.log_ratio(z, positions, candidates).dtype


def test_the_input_is_not_changed():
    z, positions, candidates = question(4)
    copies = [v.clone() for v in (z, positions, candidates)]
    Toy(0).log_ratio(z, positions, candidates)
    assert all(torch.equal(a, b) for a, b in zip((z, positions, candidates), copies, strict=True))


# the vector space


@given(a=weights, b=weights, seed=seeds)
def test_linear(a, b, seed):
    """(a R + b S).log_ratio = a R.log_ratio + b S.log_ratio with the time passed on; log_value too."""
    r, s = Toy(seed), Toy(seed + 1)
    z, positions, candidates = question(seed)
    t = torch.linspace(0, 1, 6, dtype=torch.float64)
    both = a * r + b * s
    expected = a * r.log_ratio(z, positions, candidates, t) + b * s.log_ratio(z, positions, candidates, t)
    same(both.log_ratio(z, positions, candidates, t), expected)
    same(both.log_value(z, t), a * r.log_value(z, t) + b * s.log_value(z, t))


@given(a=weights, b=weights, seed=seeds)
def test_laws_of_a_vector_space(a, b, seed):
    """Distributivity both ways, subtraction, negation, commutativity, association, nesting."""
    r, s, u = Toy(seed), Toy(seed + 1), Local()
    asked = question(seed)

    def value(ratio: Ratio) -> Tensor:
        return ratio.log_ratio(*asked)

    same(value(a * (r + s)), value(a * r + a * s))
    same(value((a + b) * r), value(a * r + b * r))
    same(value(r - s), value(r) - value(s))
    same(value(-r), -value(r))
    same(value(r * a), value(a * r))
    same(value(r + s), value(s + r))
    same(value((r + s) + u), value(r + (s + u)))
    same(value(a * (b * (r - u))), a * b * (value(r) - value(u)))
    same(value(r - r), torch.zeros_like(value(r)))
    same(value(-(a * r - (s + b * u))), -a * value(r) + value(s) + b * value(u))


def test_combinations_are_flat_and_leave_their_parts_alone():
    r, s = Toy(0), Toy(1)
    inner = r + s
    outer = 2 * inner - 0.5 * r
    assert isinstance(outer, Combination)
    assert outer.weights == pytest.approx((2.0, 2.0, -0.5))
    assert inner.weights == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("other", [(5, 3), (6, 2), (5, 2, Cosine())], ids=["mask", "ids", "schedule"])
def test_mixing_processes_is_an_error(other):
    other = Masked(*other)
    with pytest.raises(ValueError, match="process"):
        Toy(0) + Toy(1, other)
    with pytest.raises(ValueError, match="process"):
        2 * Toy(0) - 0.1 * (Toy(0) + 3 * Toy(1, other))


def test_absolute_values_need_sequence_ratios():
    with pytest.raises(ValueError, match="Local"):
        (Toy(0) + Local()).log_value(question(0)[0])


def test_a_sum_is_timeless_only_if_its_terms_are():
    assert (Toy(0) + Local()).timeless
    timed = Toy(1)
    timed.timeless = False
    assert not (Toy(0) + 0.5 * timed).timeless


def test_ratios_of_a_path_multiply(make_pair):
    """p -> q -> u: the two ratios add up to the ratio of p -> u, and back again to one."""
    first, second = make_pair("table"), make_pair("table", seed=7)
    there, onward = first.ratio, ExactRatio(first.q, second.q)
    same((there + onward).log_value(first.z), ExactRatio(first.p, second.q).log_value(first.z))
    guided = Guided(first.denoiser, there + onward)(first.z).log_probs.exp()
    same(guided, second.target_denoiser(first.z).log_probs.exp())
    back = Guided(first.target_denoiser, -there)(first.z).log_probs.exp()
    same(back, first.denoiser(first.z).log_probs.exp())


def test_gamma_is_a_scale(make_pair):
    """gamma * R at gamma = 1 is R at gamma."""
    pair = make_pair("table")
    scaled = Guided(pair.denoiser, 1.7 * pair.ratio)(pair.z).log_probs.exp()
    same(scaled, Guided(pair.denoiser, pair.ratio, 1.7)(pair.z).log_probs.exp())


def test_classifier_and_ratio():
    """d(z) = p / (p + q), so log r = log (1 - d) / d."""
    ratio = network_ratio(False)
    z = question(0)[0]
    with torch.no_grad():
        d = ratio.source_probability(z).double()
        torch.testing.assert_close(((1 - d) / d).log(), ratio.log_value(z).double(), rtol=1e-3, atol=1e-4)


# gamma by held-out likelihood


def benchmark(count: int, length: int = 8) -> tuple[ExactDenoiser, ExactRatio, Tensor, MarkovChain]:
    """The paper's chain 0.1 -> 0.8 with exact models, and sequences of the target."""
    process = Masked(6)
    source, target = (MarkovChain(make_matrix(f"diagonal:{d}", 5), process) for d in (0.1, 0.8))
    x = sample_chain(target.transition, count, length, torch.Generator().manual_seed(0))
    return ExactDenoiser(source), ExactRatio(source, target), x, target


def test_choose_gamma_finds_one():
    """Target data is likeliest at gamma = 1 if log r is exact, and at 1 / c if it is c times too large."""
    denoiser, ratio, x, _ = benchmark(400)
    assert 0.75 <= choose_gamma(denoiser, ratio, x) <= 1.25
    assert 1.5 <= choose_gamma(denoiser, 0.5 * ratio, x) <= 2.5
    assert 0.25 <= choose_gamma(denoiser, 2 * ratio, x, [0.0, 0.25, 0.5, 0.75, 1.0, 2.0]) <= 0.75


@pytest.mark.parametrize("n_ratio", [None, 4])
def test_nll_by_gamma_is_nll_of_the_guided_denoiser(n_ratio):
    """The same generator gives the same corruptions, so the numbers agree, not just their means."""
    denoiser, ratio, x, _ = benchmark(200)
    gammas = [0.0, 0.5, 1.0, 3.0] if n_ratio is None else [0.5, 1.0, 3.0]
    seeded = torch.Generator().manual_seed
    settings = {"rows": 200, "batch": 200, "n_ratio": n_ratio}
    values = nll_by_gamma(denoiser, ratio, x, gammas, generator=seeded(3), **settings)
    for gamma, value in zip(gammas, values, strict=True):
        guided = Guided(denoiser, ratio, gamma, n_ratio, keep_tail=True)
        assert float(value) == pytest.approx(nll(guided, x, draws=1, generator=seeded(3)), rel=1e-9)


def test_nll_by_gamma_is_the_log_likelihood():
    """At gamma = 1 the bound is that of the target, -log q(x) / L; at gamma = 0 it is that of the source."""
    denoiser, ratio, x, target = benchmark(300)
    generator = torch.Generator().manual_seed(0)
    values = nll_by_gamma(denoiser, ratio, x, [0.0, 1.0], rows=6000, generator=generator)
    assert float(values[0]) == pytest.approx(-float(denoiser.law.log_marginal(x).mean()) / 8, rel=0.03)
    assert float(values[1]) == pytest.approx(-float(target.log_marginal(x).mean()) / 8, rel=0.03)


def test_gamma_errors_name_the_value():
    denoiser, ratio, x, _ = benchmark(4)
    for gamma, message in ((-1.0, r"gamma=-1\.0"), (float("nan"), "gamma=nan"), (float("inf"), "gamma=inf")):
        with pytest.raises(ValueError, match=message):
            nll_by_gamma(denoiser, ratio, x, [1.0, gamma])
    for n_ratio, message in ((0, "n_ratio=0"), (6, r"n_ratio=6 exceeds the vocabulary \(5\)")):
        with pytest.raises(ValueError, match=message):
            nll_by_gamma(denoiser, ratio, x, [1.0], n_ratio=n_ratio)
