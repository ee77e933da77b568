"""The likelihood bounds against full enumeration: of all maskings, of all sets of positions, of all true tokens."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from gtl.denoiser import Denoiser
from gtl.evaluate import likelihood as module
from gtl.evaluate.likelihood import Part, likelihood, scored_one_by_one, some_places, weigh
from gtl.exact import ExactDenoiser
from gtl.guidance import Guided
from gtl.process import Masked
from gtl.ratio import ConditionalRatio
from gtl.ratio.taylor import TaylorRatio
from gtl.schedule import Cosine
from known import PROCESSES, Conditional, laws


def enumerated(model: Denoiser, x: Tensor) -> tuple[float, float]:
    """NELBO per token and cross-entropy per mask of x (N, L), summed over all maskings.

    With 1 - alpha uniform, a set of k masks has probability k! (L - k)! / (L + 1)!, and given it 1 / (1 - alpha) has
    the mean (L + 1) / k.
    """
    length, mask = x.shape[1], model.process.mask_id
    bound = cross = masks = 0.0
    for k in range(1, length + 1):
        probability = math.factorial(k) * math.factorial(length - k) / math.factorial(length + 1)
        for places in itertools.combinations(range(length), k):
            z = x.clone()
            z[:, places] = mask
            log_x = model(z, torch.full((len(x),), 0.5)).log_probs.gather(-1, x.unsqueeze(-1)).squeeze(-1)
            surprise = -float(log_x[:, places].sum())
            bound += probability * (length + 1) / k * surprise
            cross += probability * surprise
            masks += probability * k * len(x)
    return bound / x.numel(), cross / masks


def target_rows(pair, count: int = 40) -> Tensor:
    """Sequences of the target law."""
    return pair.x[torch.multinomial(pair.q_x, count, True, generator=torch.Generator().manual_seed(3))]


@pytest.mark.parametrize("places", [None, 1, 2])
@pytest.mark.parametrize("n_ratio", [None, 2])
def test_against_enumeration(make_pair, places, n_ratio):
    """Source and guided model, all positions or a few of them: within a few standard errors of the exact bound."""
    pair = make_pair("table", vocabulary=4, mask_id=1)
    x = target_rows(pair)
    found = likelihood(pair.denoiser, x, pair.ratio, 1.3, n_ratio, places, draws=150)
    guided = Guided(pair.denoiser, pair.ratio, 1.3, n_ratio, keep_tail=True)
    for name, model in (("source", pair.denoiser), ("guided", guided)):
        bound, cross = enumerated(model, x)
        assert found[name]["nll"] == pytest.approx(bound, abs=0.025)
        assert found[name]["masked_nll"] == pytest.approx(cross, abs=0.025)
        assert found[name]["perplexity_bound"] == pytest.approx(math.exp(found[name]["nll"]))
    assert abs(enumerated(guided, x)[0] - enumerated(pair.denoiser, x)[0]) > 0.05  # the test can tell them apart


def test_the_exact_ratio_reaches_the_target(make_pair):
    """At gamma 1 with all candidates the guided model is the target's own denoiser, draw by draw."""
    pair = make_pair("table", vocabulary=4)
    x = target_rows(pair)
    guided = likelihood(pair.denoiser, x, pair.ratio, draws=2)["guided"]
    target = likelihood(pair.target_denoiser, x, draws=2)["source"]
    assert guided == pytest.approx(target, rel=1e-6)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_any_positions_stand_for_all(make_pair, most):
    """For every z, the mean over all sets of `most` masked positions is what all of them give, exactly."""
    pair = make_pair("chain")
    z = pair.z[(pair.z == pair.process.mask_id).any(-1)]
    x = torch.where(z == pair.process.mask_id, pair.x[5], z)
    t, log_p = torch.full((1,), 0.5), pair.denoiser(z).log_probs
    for row in range(len(z)):
        masked = [at for at in range(3) if z[row, at] == pair.process.mask_id]
        totals = []
        for places in itertools.combinations(masked, min(most, len(masked))):
            positions = torch.tensor([[*places, -1]])
            part = Part(x[row : row + 1], z[row : row + 1], t, positions, torch.tensor([1 / len(places)]))
            totals.append(part.totals(pair.process, log_p[row, positions], timeless=True))
        surprise = -log_p[row, masked, x[row, masked]].sum()
        expected = torch.stack([surprise * 4 / len(masked), surprise])
        torch.testing.assert_close(torch.stack(totals).mean(0), expected.double())


def test_places_are_uniform():
    process = Masked(5)
    z = torch.tensor([[4, 0, 4, 4, 1]]).expand(6000, -1)
    places = some_places(process, z, 2, torch.Generator().manual_seed(0))
    assert places.shape == (6000, 2)
    assert bool((places[:, 0] != places[:, 1]).all())
    share = torch.bincount(places.flatten(), minlength=5) / 6000
    torch.testing.assert_close(share, torch.tensor([2 / 3, 0, 2 / 3, 2 / 3, 0]), rtol=0, atol=0.03)
    assert some_places(process, torch.tensor([[0, 1], [4, 0]]), 5).tolist() == [[-1], [0]]


def test_memory_does_not_matter(make_pair):
    """However few numbers may be held at once, the same value; no tensor of log-probabilities is larger."""
    pair = make_pair("chain", vocabulary=4, length=5)
    x, seen = target_rows(make_pair("chain", vocabulary=4, length=5)), []

    class Watched(ExactDenoiser):
        def forward(self, z, t=None, positions=None):
            prediction = super().forward(z, t, positions)
            seen.append(prediction.log_probs.numel())
            return prediction

    expected = likelihood(pair.denoiser, x, pair.ratio, draws=3)
    for cells in (15, 60):
        found = likelihood(Watched(pair.p), x, pair.ratio, draws=3, cells=cells)
        assert max(seen) <= cells
        for name in expected:
            assert found[name] == pytest.approx(expected[name], rel=1e-9)


# the true token among the candidates


def fully_masked(pair) -> tuple[Tensor, Tensor]:
    z = torch.full((1, pair.length), pair.process.mask_id)
    return z, torch.tensor([[0] + [-1] * (pair.length - 1)])


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.5])
def test_only_fixed_candidates_are_normalised(make_pair, gamma, monkeypatch):
    """Summed over all true tokens: 1 without the truth; with it the mass M, the mean of its estimate."""
    pair = make_pair("table", vocabulary=5, seed=4)
    z, positions = fully_masked(pair)
    fixed, with_truth, tokens = 0.0, 0.0, range(5)
    generator = torch.Generator().manual_seed(0)
    for token in tokens:
        x = torch.full_like(z, token)
        part = Part(x, z, torch.ones(1), positions, torch.ones(1))
        said = weigh(pair.denoiser, pair.ratio, part, gamma, 2, generator)
        assert said.guided is not None
        assert said.truth is not None
        fixed += float(said.guided[0, 0, token].exp())
        with_truth += float(said.truth[0, 0].exp())
    assert fixed == pytest.approx(1.0)

    p = pair.denoiser(z).log_probs[0, 0, :5].exp()
    w = torch.stack([pair.ratio.log_value(z.clone().index_fill_(1, torch.tensor([0]), v)) for v in tokens])[:, 0]
    w = (gamma * w).exp()
    top = p.argsort(descending=True)[:2]
    p_s, z_s = p[top].sum(), (p * w)[top].sum()
    rho = w * p_s / z_s
    terms = p * (rho - 1) / (1 + rho * p / p_s)
    terms[top] = 0
    mass = 1 + float(terms.sum())
    assert with_truth == pytest.approx(mass)
    assert abs(mass - 1) > 0.02 or gamma == 0
    mean, rest = 0.0, [v for v in tokens if v not in top.tolist()]
    for token in rest:  # the estimate for each tail token that may be drawn
        monkeypatch.setattr(module, "categorical", lambda log_p, _, token=token: torch.full(log_p.shape[:-1], token))
        estimate = weigh(pair.denoiser, pair.ratio, part, gamma, 2).mass
        mean += float(p[token] / p[rest].sum() * estimate[0, 0])
    assert mean == pytest.approx(mass)


def test_the_truth_flatters_by_the_mass(make_pair):
    """E log of the mass is the gap between the number with the truth and the bound of q~ / M, over all maskings."""
    pair = make_pair("chain", vocabulary=4, length=1, seed=2)  # one position: everything is masked, or nothing
    x = pair.x.repeat_interleave(torch.round(pair.q_x * 200).long(), 0)
    found = likelihood(pair.denoiser, x, pair.ratio, 2.0, n_ratio=1, draws=100)["guided"]
    z = torch.full((4, 1), pair.process.mask_id)
    part = Part(pair.x, z, torch.ones(4), torch.zeros(4, 1, dtype=torch.long), torch.ones(4))
    q = weigh(pair.denoiser, pair.ratio, part, 2.0, 1).truth[:, 0]
    mass = q.exp().sum()
    assert found["mass_with_truth"] == pytest.approx(float(mass), abs=0.05)
    proper = -(q - mass.log())[x[:, 0]].mean()
    assert found["masked_nll_with_truth"] + float(mass.log()) == pytest.approx(float(proper), abs=0.01)
    assert found["masked_nll_with_truth"] != pytest.approx(found["masked_nll"], abs=0.01)


def test_all_candidates_need_no_truth(make_pair):
    pair = make_pair("table")
    assert not any("truth" in name for name in likelihood(pair.denoiser, pair.x, pair.ratio, draws=1)["guided"])


# other noise, other schedules


@pytest.mark.parametrize("name", PROCESSES)
def test_other_noise(name):
    """Draw by draw: all positions together, and the mean over single ones, are the process's own NELBO."""
    process = PROCESSES[name]()
    p, q = laws(process)
    model = Guided(ExactDenoiser(p), Conditional(p, q))
    generator = torch.Generator().manual_seed(0)
    for x in (torch.tensor([[0, 1]]), torch.tensor([[2, 0]])):
        t = process.times(1, x.device, generator)
        z = process.corrupt(x, t, generator)
        log_q = model(z, t).log_probs
        expected = float(process.nelbo(x, z, t, log_q, model.timeless))
        places = some_places(process, z, 2, generator)
        n = int((places >= 0).sum())
        parts = [Part(x, z, t, places[:, :n], torch.tensor([1 / max(1, n)]))]
        parts += [Part(x, z, t, places[:, i : i + 1], torch.tensor([1.0])) for i in range(n)]
        totals = [part.totals(process, log_q[:, part.positions[0]], model.timeless)[0] for part in parts]
        assert float(totals[0]) == pytest.approx(expected, rel=1e-6)
        assert float(sum(totals[1:])) / max(1, n) == pytest.approx(expected, rel=1e-6)
    found = likelihood(model.denoiser, torch.tensor([[0, 1], [2, 0]]), model.ratio, draws=3, places=1)
    assert ("masked_nll" in found["guided"]) == (process.mask_id is not None)


def test_masked_nll_has_uniform_times(make_pair):
    """Under another schedule the two laws of t differ: `nll` is unchanged, `masked_nll` is not."""
    pairs = [make_pair("chain", vocabulary=4, length=4, schedule=schedule) for schedule in (None, Cosine())]
    found = [likelihood(pair.denoiser, target_rows(pairs[0]), draws=300)["source"] for pair in pairs]
    assert found[0]["nll"] == pytest.approx(found[1]["nll"], abs=0.015)
    assert abs(found[0]["masked_nll"] - found[1]["masked_nll"]) > 0.01


def test_which_ratios_are_dear(make_pair):
    pair = make_pair("chain")

    class Free(ConditionalRatio):
        def __init__(self):
            super().__init__()
            self.process = pair.process

        def table(self, z, positions, t=None, context=None):
            return torch.zeros(*positions.shape, 4)

    assert scored_one_by_one(pair.ratio)
    assert scored_one_by_one(0.5 * pair.ratio + Free())
    assert not scored_one_by_one(Free())
    assert not scored_one_by_one(2 * Free())
    assert TaylorRatio.log_ratio is not type(pair.ratio).log_ratio


def test_bad_numbers(make_pair):
    pair = make_pair("chain")
    with pytest.raises(ValueError, match="places=0"):
        likelihood(pair.denoiser, pair.x, places=0)
    with pytest.raises(ValueError, match="n_ratio=9"):
        likelihood(pair.denoiser, pair.x, pair.ratio, n_ratio=9)
