"""Fitting a ratio by likelihood: what it is minimal at, what it leaves alone, what it is judged by."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_networks import SETTINGS, data, networks
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser, Prediction
from gtl.exact import ExactDenoiser, Table
from gtl.guidance import Guided
from gtl.nn.dit import DiT, gather_positions
from gtl.process import Masked
from gtl.ratio import SequenceRatio
from gtl.ratio.gamma import CELLS, GAMMAS, nll_by_gamma
from gtl.ratio.local import LocalRatio
from gtl.schedule import Cosine
from gtl.train.classifier import ClassifierObjective
from gtl.train.likelihood import Judged, LikelihoodObjective
from gtl.train.loop import fit

# Two laws over the nine sequences of V = 3, L = 2, in twentieths: twenty rows follow each exactly.
P, Q = (4, 3, 2, 1, 2, 3, 2, 2, 1), (1, 1, 3, 4, 1, 2, 5, 1, 2)
SEQUENCES = torch.cartesian_prod(torch.arange(3), torch.arange(3))
STATES = torch.cartesian_prod(torch.arange(4), torch.arange(4))
# With 1 - alpha uniform a pattern with k of 2 masks has the chance Beta(k + 1, 3 - k): 2, 1, 1 and 2 sixths.
PATTERNS = torch.tensor([[0, 0], [0, 0], [0, 1], [1, 0], [1, 1], [1, 1]]).bool()
PLACES = torch.tensor([0, 0, 1, 0, 0, 1])


class Enumerated(Masked):
    """Masked noise that goes through all maskings, and places of each, as often as they are likely."""

    def __init__(self) -> None:
        super().__init__(4)

    def corrupt(self, x: Tensor, t: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return x.masked_fill(PATTERNS.repeat(len(x) // len(PATTERNS), 1), self.mask_id)

    def some_place(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return PLACES.repeat(len(z) // len(PLACES))


PROCESS = Enumerated()


def state(z: Tensor) -> Tensor:
    return 4 * z[:, 0] + z[:, 1]


class FreeTable(nn.Module):
    """Stands in for the local network: free numbers for every noisy state, position and token."""

    def __init__(self) -> None:
        super().__init__()
        self.dit, self.states = SimpleNamespace(num_ids=4, outputs=4, time_conditioned=False, depth=0), 0
        self.borrowed = 0
        self.values = nn.Parameter(torch.zeros(16, 2, 4))

    def forward(self, z, hidden=(), t=None, positions=None, readout=None):
        values = self.values[state(z)]
        return values if positions is None else gather_positions(values, positions)


class FreeRatio(SequenceRatio):
    """One free number for every noisy state; counts the states that it is asked for."""

    process = PROCESS

    def __init__(self) -> None:
        super().__init__()
        self.values, self.asked = nn.Parameter(torch.zeros(16)), 0

    def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        self.asked += len(z)
        return self.values[state(z)]


def law(counts: tuple[int, ...]) -> Table:
    return Table(torch.tensor(counts).view(3, 3), PROCESS)


def rows(counts: tuple[int, ...]) -> Tensor:
    """Every sequence as often as it is likely, each followed by all its maskings."""
    return SEQUENCES.repeat_interleave(torch.tensor(counts) * len(PATTERNS), 0)


def free(kind: str) -> Guided:
    """The exact source with a ratio of free numbers."""
    ratio = LocalRatio(PROCESS, FreeTable()) if kind == "local" else FreeRatio()  # type: ignore[arg-type]
    return Guided(ExactDenoiser(law(P)), ratio, 1.0)


def minimise(guided: Guided, objective: LikelihoodObjective) -> float:
    """Minimises the loss over all rows, in place."""
    optimizer = torch.optim.LBFGS(guided.ratio.parameters(), max_iter=150, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective.loss(guided, {"target": rows(Q)}, None)
        value.backward()
        return value

    optimizer.step(closure)
    return float(closure().detach())


def masked_conditionals(model) -> Tensor:
    """p(x_l = v | z) at every masked position of every state: (M, 3)."""
    with torch.no_grad():
        return model(STATES).log_probs.exp()[STATES == 3][:, :3].double()


# the bound at one place


@pytest.mark.parametrize("timeless", [True, False])
@pytest.mark.parametrize("mask_id", [None, 1])
def test_one_place_averages_to_all(make_pair, generator, mask_id, timeless):
    """The mean of nelbo(place) over the masked places of a row is nelbo of all of them, exactly."""
    pair = make_pair("table", length=4, mask_id=mask_id, schedule=Cosine())
    process, x = pair.process, pair.x
    t = process.times(len(x), x.device, generator)
    z = process.corrupt(x, t, generator)
    log_x = pair.denoiser(z).log_probs
    whole = process.nelbo(x, z, t, log_x, timeless)
    masked = z == process.mask_id
    mean = torch.zeros_like(whole)
    for at in range(4):
        place = torch.full((len(x),), at)
        value = process.nelbo(x, z, t, log_x[:, at : at + 1], timeless, place)
        assert bool((value[~masked[:, at]] == 0).all())
        mean += value / masked.sum(-1).clamp(min=1)
    assert int(masked.sum(-1).min()) == 0
    assert int(masked.sum(-1).max()) == 4
    torch.testing.assert_close(mean, whole, rtol=1e-12, atol=1e-12)


def test_some_place_is_a_uniform_masked_one(generator):
    process = Masked(4)
    z = torch.tensor([[0, 3, 3, 1, 3], [3, 0, 0, 0, 0]]).repeat_interleave(3000, 0)
    places = process.some_place(z, generator)
    assert bool((z.gather(1, places.unsqueeze(1)) == 3).all())
    assert torch.allclose(places[:3000].bincount(minlength=5) / 3000, torch.tensor([0, 1, 1, 0, 1]) / 3, atol=0.03)


# the minimum


@pytest.mark.parametrize("kind", ["local", "sequence"])
def test_the_minimum_is_the_target(kind):
    """Guided conditionals are the target's, and the loss is the target's entropy per token."""
    guided = free(kind)
    objective = LikelihoodObjective(guided, rows(Q))
    goal = masked_conditionals(ExactDenoiser(law(Q)))
    assert float((masked_conditionals(guided) - goal).abs().max()) > 0.1
    least = minimise(guided, objective)
    torch.testing.assert_close(masked_conditionals(guided), goal, rtol=0, atol=1e-3)
    q = torch.tensor(Q).double() / 20
    assert least == pytest.approx(float(-(q * q.log()).sum()) / 2, abs=1e-5)


def test_a_sequence_ratio_learns_log_r_up_to_a_constant():
    """The conditional ratios of all states that differ in one token are those of r(z) = q(z) / p(z)."""
    guided = free("sequence")
    minimise(guided, LikelihoodObjective(guided, rows(Q)))
    log_r = law(Q).log_marginal(STATES) - law(P).log_marginal(STATES)
    gap = guided.ratio.values.detach().double() - log_r
    clean = (STATES != 3).all(-1)
    assert float(gap[clean].max() - gap[clean].min()) < 0.01


def test_pseudo_rows_pull_toward_the_source():
    """Every conditional moves from the target's on a straight line to the source's: both terms are cross-entropies."""
    p, q = (masked_conditionals(ExactDenoiser(law(each))) for each in (P, Q))
    x, shares = rows(Q), []
    for pseudo in (0.0, 0.5, 2.0, 50.0):
        guided = free("local")
        minimise(guided, LikelihoodObjective(guided, x, pseudo=pseudo * len(x)))
        found = masked_conditionals(guided)
        share = ((found - q) * (p - q)).sum(-1) / (p - q).square().sum(-1)
        torch.testing.assert_close(found, q + share.unsqueeze(-1) * (p - q), rtol=0, atol=2e-3)
        shares.append(share)
    assert float(shares[0].abs().max()) < 0.02
    assert bool((shares[1] > 0.05).all())
    assert bool((shares[2] > shares[1]).all())
    assert bool((shares[3] > 0.9).all())


def test_pseudo_rows_are_a_share_of_the_data():
    """c rows among n: the pull is c / n."""
    x = rows(Q)
    losses = []
    for each, pseudo in ((x, 0.0), (x, 6.0), (x.repeat(2, 1), 12.0)):
        guided = free("local")
        nn.init.normal_(guided.ratio.network.values, generator=torch.Generator().manual_seed(0))
        loss = LikelihoodObjective(guided, each, pseudo=pseudo).loss(guided, {"target": x}, None)
        losses.append(float(loss.detach()))
    assert losses[1] > losses[0] + 1e-4
    assert losses[2] == pytest.approx(losses[1], rel=1e-6)


def test_a_sequence_ratio_looks_at_one_place():
    """batch * V evaluations, however many tokens are masked; with source rows one more for every row of both."""
    guided, x = free("sequence"), rows(Q)
    LikelihoodObjective(guided, x).loss(guided, {"target": x}, None)
    assert guided.ratio.asked == len(x) * 3
    guided.ratio.asked = 0
    batch = {"target": x, "source": rows(P)}
    LikelihoodObjective(guided, x, source=rows(P)).loss(guided, batch, None)
    assert guided.ratio.asked == len(x) * 3 + 2 * len(x)


def test_the_logistic_loss_fixes_the_constant():
    """With it a sequence ratio learns log r itself."""
    guided = free("sequence")
    objective = LikelihoodObjective(guided, rows(Q), source=rows(P))
    optimizer = torch.optim.LBFGS(guided.ratio.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective.loss(guided, {"target": rows(Q), "source": rows(P)}, None)
        value.backward()
        return value

    optimizer.step(closure)
    log_r = law(Q).log_marginal(STATES) - law(P).log_marginal(STATES)
    torch.testing.assert_close(guided.ratio.values.detach().double(), log_r, rtol=0, atol=0.02)


# networks: what is trained and what is not


@pytest.mark.parametrize("kind", ["local", "sequence"])
@pytest.mark.parametrize("pseudo", [0.0, 3.0])
def test_gradients_reach_the_ratio_alone(generator, kind, pseudo):
    guided = networks(kind)
    objective = LikelihoodObjective(guided, data(), pseudo=pseudo)
    nn.init.normal_(guided.ratio.network.dit.head.weight)
    objective.loss(guided.train(), {"target": data()}, generator).backward()
    assert all(p.grad is None and not p.requires_grad for p in guided.denoiser.parameters())
    for name, p in guided.ratio.named_parameters():
        assert p.grad is not None, name
        assert bool(p.grad.isfinite().all()), name
    assert sum(float(p.grad.abs().sum()) > 0 for p in guided.ratio.parameters()) > 10


def test_the_denoiser_stays_in_evaluation_mode():
    """Its dropout is off while the ratio trains, and the ratio's own is not touched."""
    guided = networks()
    LikelihoodObjective(guided, data())
    guided.train()
    assert not any(module.training for module in guided.denoiser.modules())
    assert all(module.training for module in guided.ratio.modules())
    z = torch.full((3, 5), 3)
    assert torch.equal(guided.denoiser(z).log_probs, guided.denoiser(z).log_probs)
    assert torch.equal(guided(z).log_probs, guided(z).log_probs)
    guided.denoiser.train()  # the control: dropout would show
    assert not torch.equal(guided.denoiser(z).log_probs, guided.denoiser(z).log_probs)
    guided.eval()
    assert not any(module.training for module in guided.modules())


@pytest.mark.parametrize("kind", ["local", "sequence"])
def test_fit_moves_the_ratio_alone(kind):
    guided = networks(kind)
    before = {name: p.clone() for name, p in guided.state_dict().items()}
    fit(guided, LikelihoodObjective(guided, data(), data(4)), replace(SETTINGS, steps=3))
    for name, p in guided.state_dict().items():
        if name.startswith("denoiser."):
            assert torch.equal(p, before[name]), name
    assert any(not torch.equal(p, before[n]) for n, p in guided.state_dict().items() if n.startswith("ratio."))


def test_what_is_refused():
    local, sequence = networks(), networks("sequence")
    with pytest.raises(ValueError, match=r"gamma=2\.0"):
        LikelihoodObjective(Guided(local.denoiser, local.ratio, 2.0), data())
    with pytest.raises(ValueError, match=r"pseudo=-0\.5"):
        LikelihoodObjective(local, data(), pseudo=-0.5)
    with pytest.raises(ValueError, match="sequence ratios"):
        LikelihoodObjective(local, data(), source=data())
    assert set(LikelihoodObjective(sequence, data(), source=data()).train) == {"target", "source"}


# judging


@pytest.mark.parametrize("kind", ["local", "sequence"])
def test_the_score_is_the_held_out_likelihood_by_gamma(kind):
    """One number for every gamma: at 1 the loss of the model as it is, at 0 that of its source."""
    guided, x = networks(kind), data(40)
    nn.init.normal_(guided.ratio.network.dit.head.weight)
    objective = LikelihoodObjective(guided.eval(), data(), x, pseudo=5.0, gammas=(0.0, 1.0, 2.0))
    score = objective.score(guided, {"target": x}, torch.Generator().manual_seed(0))
    assert score.shape == (3,)
    places = {"local": False, "sequence": True}[kind]
    expected = nll_by_gamma(
        guided.denoiser, guided.ratio, x, (0.0, 1.0, 2.0), 40, None, torch.Generator().manual_seed(0), 40, places
    )
    torch.testing.assert_close(score, expected)
    assert len(set(score.tolist())) == 3


def test_judged_trains_by_one_loss_and_stops_by_another():
    guided, x = networks("sequence").eval(), data(8)
    process = guided.process
    inner = ClassifierObjective(process, {"source": data(), "target": data()})
    judged = Judged(inner, guided.denoiser, guided.ratio, x)
    assert judged.train is inner.train
    assert judged.held_out is not None
    assert torch.equal(judged.held_out["target"], x)
    values = [each.loss(guided.ratio, inner.train, torch.Generator().manual_seed(0)) for each in (inner, judged)]
    assert torch.equal(*values)
    score = judged.score(guided.ratio, {"target": x}, torch.Generator().manual_seed(0))
    assert score.shape == (len(GAMMAS),)
    generator = torch.Generator().manual_seed(0)
    likelihood = LikelihoodObjective(guided, data()).score(guided, {"target": x}, generator)
    torch.testing.assert_close(score, likelihood)


@pytest.mark.parametrize("n_ratio", [1, 2, 3])
def test_a_sequence_ratio_is_judged_over_some_candidates(n_ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as asked for, the other tokens keeping the source's probability; the same by either objective."""
    guided, x = networks("sequence").eval(), data(8)
    nn.init.normal_(guided.ratio.network.dit.head.weight)
    seen: list[int] = []
    whole = type(guided.ratio).log_ratio

    def counted(self, z, positions, candidates, *more):  # type: ignore[no-untyped-def]
        seen.append(candidates.shape[-1])
        return whole(self, z, positions, candidates, *more)

    monkeypatch.setattr(type(guided.ratio), "log_ratio", counted)
    inner = ClassifierObjective(guided.process, {"source": data(), "target": data()})
    judged = Judged(inner, guided.denoiser, guided.ratio, x, n_ratio=n_ratio)
    score = judged.score(guided.ratio, {"target": x}, torch.Generator().manual_seed(0))
    pruned = Guided(guided.denoiser, guided.ratio, 1.0, n_ratio, keep_tail=True)
    other = LikelihoodObjective(pruned, data()).score(pruned, {"target": x}, torch.Generator().manual_seed(0))
    torch.testing.assert_close(score, other)
    if n_ratio < 3:
        assert set(seen) == {n_ratio}
    if n_ratio == 1:
        torch.testing.assert_close(score, score[:1].expand_as(score))  # one candidate keeps its own mass


def test_a_large_vocabulary_is_fitted_and_judged_at_some_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two positions of a row, loss and score keep their means, and no more is predicted."""
    process = Masked(6)
    torch.manual_seed(0)
    source = NetworkDenoiser(process, DiT(6, 6, 16, 1, 2))
    torch.nn.init.normal_(source.network.head.weight, std=0.3)
    ratio = LocalRatio.build(source, width=16, depth=1, heads=2)
    torch.nn.init.normal_(ratio.network.dit.head.weight, std=0.3)
    guided = Guided(source, ratio, 1.0).eval()
    x = torch.randint(0, 5, (64, 9), generator=torch.Generator().manual_seed(2))
    objective = LikelihoodObjective(guided, x, x, gammas=(0.0, 1.0))
    seen: list[int] = []

    def forward(z: Tensor, t: Tensor, places: Tensor | None) -> Prediction:
        seen.append(z.shape[1] if places is None else places.shape[1])
        return guided(z, t, places)

    def means(count: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            losses = [objective.loss(forward, {"target": x}, torch.Generator().manual_seed(i)) for i in range(count)]
            scores = [objective.score(forward, {"target": x}, torch.Generator().manual_seed(i)) for i in range(count)]
        return torch.stack(losses), torch.stack(scores)

    whole, judged = means(40)
    assert set(seen) == {9}
    monkeypatch.setitem(CELLS, "cpu", 2 * 64 * 6)
    some, fewer = means(120)
    assert set(seen[40:]) == {2}
    for full, part in ((whole, some), (judged[:, 1].float(), fewer[:, 1].float())):
        error = (full.var() / len(full) + part.var() / len(part)) ** 0.5
        assert abs(float(full.mean() - part.mean())) < 4 * float(error)
