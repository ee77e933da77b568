"""Choosing gamma, or the weights of a sum, by held-out likelihood, with models that are known exactly."""

import pytest
import torch
from torch import Tensor

from gtl.exact import ExactDenoiser, ExactRatio
from gtl.process import D3PM, Uniform
from gtl.ratio import Combination, SequenceRatio
from gtl.ratio.gamma import GAMMAS, choose_gamma, nll_by_gamma
from gtl.ratio.weights import choose_weights
from known import laws


class Noise(SequenceRatio):
    """A random number for every state: a ratio that has nothing to do with the target."""

    def __init__(self, process, length: int, seed: int = 0) -> None:
        super().__init__()
        self.process = process
        self.place = process.num_ids ** torch.arange(length)
        generator = torch.Generator().manual_seed(seed)
        self.values = torch.randn(process.num_ids**length, generator=generator, dtype=torch.float64)

    def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        return self.values[z @ self.place]


def draw(pair, count: int, seed: int = 0) -> Tensor:
    """Sequences of the target's law."""
    rows = torch.multinomial(pair.q_x, count, True, generator=torch.Generator().manual_seed(seed))
    return pair.x[rows]


@pytest.mark.parametrize("kind", ["markov", "table"])
def test_one_place_stands_for_all(make_pair, kind):
    """Both are unbiased for the same number: their means differ by no more than the spread allows."""
    pair = make_pair(kind, mask_id=1)
    x, gammas = draw(pair, 600), [0.0, 1.0, 2.0]
    runs = {}
    for one_place in (False, True):
        values = [
            nll_by_gamma(
                pair.denoiser, pair.ratio, x, gammas, 600, None, torch.Generator().manual_seed(seed), 600, one_place
            )
            for seed in range(30)
        ]
        runs[one_place] = torch.stack(values)
    error = (sum(each.var(0) for each in runs.values()) / 30).sqrt()
    gap = (runs[True].mean(0) - runs[False].mean(0)).abs()
    assert bool((gap < 4 * error).all())
    assert bool((error < 0.02 * runs[False].mean(0)).all())


def test_one_place_asks_for_one_place(make_pair):
    """V interventions of each row, where all places would cost as many for each mask."""
    pair, seen = make_pair("table"), []

    class Watched(Noise):
        def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
            seen.append(len(z))
            return super().log_value(z, t)

    ratio = Watched(pair.process, 3)
    nll_by_gamma(pair.denoiser, ratio, draw(pair, 50), [1.0, 2.0], 50, one_place=True)
    assert sum(seen) == 50 * 3


@pytest.mark.parametrize(("scale", "expected"), [(0.5, 2.0), (1.0, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize("kind", ["markov", "table"])
def test_choose_gamma_undoes_a_scale(make_pair, kind, scale, expected):
    pair = make_pair(kind, length=4)
    assert choose_gamma(pair.denoiser, scale * pair.ratio, draw(pair, 3000)) == expected


def test_a_ratio_that_harms_gets_gamma_zero(make_pair):
    pair = make_pair("table")
    assert choose_gamma(pair.denoiser, -pair.ratio, draw(pair, 1000)) == 0.0


@pytest.mark.parametrize("kind", ["markov", "table"])
def test_choose_weights_finds_the_ratio_among_noise(make_pair, kind):
    """[half the log-ratio, noise] -> (2, 0)."""
    pair = make_pair(kind, length=4)
    half, noise = 0.5 * pair.ratio, Noise(pair.process, 4)
    found = choose_weights(pair.denoiser, [half, noise], draw(pair, 4096))
    assert isinstance(found, Combination)
    weights = dict(zip([type(r) for r in found.ratios], found.weights, strict=True))
    assert weights[type(pair.ratio)] == pytest.approx(2 * 0.5, abs=0.1)
    assert weights[Noise] == pytest.approx(0.0, abs=0.1)


def test_choose_weights_of_parts(make_pair):
    """Two ratios that add up to the exact one, each spoiled by a factor, are put right together."""
    pair = make_pair("table", length=4)
    noise = Noise(pair.process, 4)
    parts = [0.5 * (pair.ratio - noise), 4 * noise]
    found = choose_weights(pair.denoiser, parts, draw(pair, 4096))
    total = {ratio: 0.0 for ratio in found.ratios}
    for weight, ratio in found.weighted_terms():
        total[ratio] += weight
    assert total[noise] == pytest.approx(0.0, abs=0.15)
    assert sum(total.values()) - total[noise] == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_a_sum_is_as_likely_as_its_best_member(make_pair, seed):
    """Under the same corruptions (one generator, one order of draws) no member at any gamma is likelier."""
    pair = make_pair("chain", seed=seed)
    members = [pair.ratio + Noise(pair.process, 3, 1), 0.3 * pair.ratio, Noise(pair.process, 3, 2)]
    x = draw(pair, 500, seed)
    found = choose_weights(pair.denoiser, members, x, rows=500, seed=7)

    def value(ratio, gammas: tuple[float, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        return nll_by_gamma(pair.denoiser, ratio, x, gammas, 500, generator=generator, one_place=True)

    least = min(float(value(member, GAMMAS).min()) for member in members)
    assert float(value(found, (1.0,))) < least + 1e-6
    fresh = draw(pair, 4000, seed + 100)
    generators = [torch.Generator().manual_seed(1) for _ in range(4)]
    held_out = [
        float(nll_by_gamma(pair.denoiser, r, fresh, g, 4000, generator=u).min())
        for r, g, u in zip([found, *members], [(1.0,), GAMMAS, GAMMAS, GAMMAS], generators, strict=True)
    ]
    assert held_out[0] < min(held_out[1:]) + 0.01


def test_weights_are_never_negative(make_pair):
    pair = make_pair("table")
    x = draw(pair, 500)
    found = choose_weights(pair.denoiser, [-pair.ratio, Noise(pair.process, 3)], x, 500)
    assert -found.weights[0] == pytest.approx(0.0, abs=1e-9)
    assert found.weights[1] >= 0


def test_choose_weights_is_seeded(make_pair):
    pair = make_pair("table")
    x = draw(pair, 200)
    runs = [choose_weights(pair.denoiser, [pair.ratio], x, 200, seed).weights for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_no_ratios_are_refused(make_pair):
    pair = make_pair("table")
    with pytest.raises(ValueError, match="at least one ratio"):
        choose_weights(pair.denoiser, [], draw(pair, 4))


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_weights_where_the_target_has_zeros(make_pair, scale):
    """The exact ratio is -inf where the target forbids what the source allows; its weight is found all the same."""
    pair = make_pair("sparse")
    found = choose_weights(pair.denoiser, [scale * pair.ratio], draw(pair, 2000), 2000)
    assert found.weights[0] * 1.0 == pytest.approx(1.0, abs=0.15)


def test_weights_of_a_ratio_that_is_not_a_number(make_pair):
    pair = make_pair("markov")
    noise = Noise(pair.process, pair.length)
    noise.values[:] = torch.nan
    with pytest.raises(ValueError, match="not numbers"):
        choose_weights(pair.denoiser, [noise], draw(pair, 100), 100)


@pytest.mark.parametrize("process", [Uniform(3), D3PM(3, "gaussian:1")], ids=["uniform", "gaussian"])
@pytest.mark.parametrize("one_place", [False, True])
def test_a_noisy_ratio_under_other_noise(process, one_place):
    """It guides the rates (Theorem 2): at gamma 1 the exact ratio makes the target as likely as the target's own
    denoiser does, and halved it wants gamma 2."""
    p, q = laws(process)
    x = q.x[torch.multinomial(q.p, 3000, True, generator=torch.Generator().manual_seed(0))]
    ratio = ExactRatio(p, q)

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(1)

    found = nll_by_gamma(ExactDenoiser(p), ratio, x, [0.0, 1.0, 2.0], 3000, generator=seeded(), one_place=one_place)
    none = 0 * ratio
    best = nll_by_gamma(ExactDenoiser(q), none, x, [0.0], 3000, generator=seeded(), one_place=one_place)
    assert float(found[1]) == pytest.approx(float(best), rel=1e-6)
    assert int(found.argmin()) == 1
    if not one_place:
        assert choose_gamma(ExactDenoiser(p), 0.5 * ratio, x) == 2.0
