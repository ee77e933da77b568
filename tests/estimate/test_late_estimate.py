"""`gtl-late`: a small fit under either kind of noise, its two objectives, and the warm start of a trunk with a hole."""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gtl.data.markov import make_matrix, sample_chain
from gtl.denoiser import NetworkDenoiser
from gtl.estimate import NetworkSize, Problem, Training
from gtl.estimate.late import late, recipe, warm_start_trunk
from gtl.estimate.parts import Part
from gtl.guidance import Guided
from gtl.nn.dit import DiT
from gtl.process import D3PM, Masked, Process, Uniform
from gtl.ratio.gamma import nll_by_gamma
from gtl.ratio.late import LateRatio
from gtl.train.denoiser import DenoiserObjective
from gtl.train.likelihood import LikelihoodObjective
from gtl.train.loop import FitSettings, fit
from gtl.train.rates import RatesObjective

LENGTH, IDS = 5, 5
NOISE: dict[str, Callable[[], Process]] = {
    "masked": lambda: Masked(IDS, 2),
    "uniform": lambda: Uniform(IDS),
    "absorbing": lambda: D3PM(IDS, "absorbing"),
}


def denoiser(process: Process, timed: bool = False) -> NetworkDenoiser:
    torch.manual_seed(1)
    model = NetworkDenoiser(process, DiT(IDS, IDS, width=8, depth=1, heads=2, time_conditioned=timed))
    nn.init.normal_(model.network.head.weight, std=0.5)
    return model.eval().requires_grad_(False)


def make(noise: str, width: int = 8) -> LateRatio:
    """A ratio whose candidates differ."""
    torch.manual_seed(2)
    ratio = LateRatio.build(NOISE[noise](), width=width, depth=1, heads=2)
    nn.init.normal_(ratio.network.head.weight)
    return ratio.eval()


SIZE = NetworkSize(width=16, depth=1, heads=2)
STATES, STEPS = 4, 6


def chain(diagonal: float, count: int, seed: int) -> Tensor:
    return sample_chain(make_matrix(f"diagonal:{diagonal}", STATES), count, STEPS, torch.Generator().manual_seed(seed))


def markov_problem(process: Process, source_data: bool) -> Problem:
    """A source model of the chain 0.1, trained for a second, and 80 sequences of the chain 0.8."""
    torch.manual_seed(0)
    timed = not isinstance(process, Masked)
    network = DiT(process.num_ids, process.num_ids, time_conditioned=timed, **vars(SIZE))
    source = NetworkDenoiser(process, network)
    fit(source, DenoiserObjective(source, chain(0.1, 2000, 0)), FitSettings(150, batch_size=64, learning_rate=5e-3))
    rows = chain(0.1, 2000, 1) if source_data else torch.zeros(0, STEPS, dtype=torch.long)
    training = Training(ratio=SIZE, budget=300, folds=0, batch_size=32, learning_rate=5e-3, evaluation_rows=64)
    return Problem(training, source, (rows, rows[:100]), chain(0.8, 80, 2), seed=0)


@pytest.mark.parametrize("source_data", [False, True])
@pytest.mark.parametrize("noise", ["masked", "uniform"])
def test_a_small_fit(noise, source_data):
    """Unseen target sequences become much likelier; A stays silent without source data and tells domains with it."""
    process = Masked(STATES + 1) if noise == "masked" else Uniform(STATES)
    problem = markov_problem(process, source_data)
    before = {name: p.clone() for name, p in problem.source.state_dict().items()}
    made = late(problem, "gtl-late")
    assert all(torch.equal(p, before[name]) for name, p in problem.source.state_dict().items())
    assert isinstance(made.ratio, LateRatio)
    assert made.steps <= problem.training.budget
    x, clean = chain(0.8, 200, 3), torch.zeros(200)
    generator = torch.Generator().manual_seed(0)
    nlls = nll_by_gamma(problem.source, made.ratio, x, [0.0, made.gamma], 2000, generator=generator)
    assert float(nlls[0] - nlls[1]) > {"masked": 0.6, "uniform": 0.2}[noise]
    with torch.no_grad():
        gap = made.ratio.log_value(x, clean).mean() - made.ratio.log_value(chain(0.1, 200, 4), clean).mean()
    assert float(gap) > 0.15 if source_data else float(gap) == 0


@pytest.mark.parametrize(("queries", "one_place"), [(32 * STEPS * STATES, False), (32 * STEPS * STATES - 1, True)])
def test_all_positions_count_where_that_is_affordable(monkeypatch, queries, one_place):
    problem, seen = markov_problem(Masked(STATES + 1), False), []
    monkeypatch.setattr(sys.modules[late.__module__], "QUERIES", queries)
    monkeypatch.setattr(Problem, "fit", lambda self, name, model, objective, steps, stop: seen.append(objective))
    recipe(problem, Part(problem.target, None, 2))
    assert seen[0].one_place is one_place


@pytest.mark.parametrize("one_place", [False, True])
def test_all_positions_or_one(one_place):
    """The loss and the score at all masked positions, or at one of each row, under the same corruptions."""
    ratio, source = make("masked"), denoiser(Masked(IDS, 2))
    x = torch.randint(2, (40, LENGTH), generator=torch.Generator().manual_seed(0))
    guided = Guided(source, ratio, 1.0)
    objective = LikelihoodObjective(guided, x, one_place=one_place)
    loss = objective.loss(guided, {"target": x}, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    t = ratio.process.times(40, x.device, generator)
    z = ratio.process.corrupt(x, t, generator)
    place = ratio.process.some_place(z, generator) if one_place else None
    log_x = guided(z).log_probs
    if place is not None:
        log_x = log_x[torch.arange(40), place].unsqueeze(1)
    torch.testing.assert_close(loss, ratio.process.nelbo(x, z, t, log_x, True, place).mean() / LENGTH)
    score = objective.score(guided, {"target": x}, torch.Generator().manual_seed(4))
    expected = nll_by_gamma(source, ratio, x, rows=40, generator=torch.Generator().manual_seed(4), one_place=one_place)
    torch.testing.assert_close(score, expected)


def test_the_rates_objective_starts_at_the_source():
    """With r = 1 its loss is the source's NELBO per token at one place, under the same corruptions."""
    process = Uniform(IDS)
    source = denoiser(process, timed=True)
    ratio = LateRatio.build(process, width=8, depth=1, heads=2, time_conditioned=True)
    x = torch.randint(IDS, (40, LENGTH), generator=torch.Generator().manual_seed(0))
    loss = RatesObjective(source, ratio, x).loss(ratio, {"target": x}, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    t = process.times(40, x.device, generator)
    z = process.corrupt(x, t, generator)
    place = process.some_place(z, generator)
    log_x = source(z, t, place.unsqueeze(1)).log_probs
    expected = process.nelbo(x, z, t, log_x, False, place).mean() / LENGTH
    torch.testing.assert_close(loss.float(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("noise", NOISE)
def test_warm_start_copies_the_trunk_and_leaves_the_hole(noise):
    process = NOISE[noise]()
    source = denoiser(process).network
    ratio = make(noise)
    before = {name: value.clone() for name, value in ratio.state_dict().items()}
    warm_start_trunk(ratio.network.dit, source)
    dit = ratio.network.dit
    assert torch.equal(dit.embedding.weight[:IDS], source.embedding.weight)
    assert torch.equal(dit.embedding.weight[IDS:], before["network.dit.embedding.weight"][IDS:])
    assert len(source.embedding.weight) == IDS
    for name, value in source.state_dict().items():
        if not name.startswith(("head.", "embedding.")):
            assert torch.equal(dit.state_dict()[name], value)
    for name, value in ratio.state_dict().items():
        if not name.startswith("network.dit.") or "dit.head" in name:
            assert torch.equal(value, before[name])
    other = make(noise, width=16)
    unchanged = {name: value.clone() for name, value in other.state_dict().items()}
    warm_start_trunk(other.network.dit, source)
    assert all(torch.equal(value, unchanged[name]) for name, value in other.state_dict().items())
