"""The training loop: early stopping, schedule, averaging, and what it refuses."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from small_fits import SETTINGS, Number, Pull, denoiser, same
from torch import Tensor

from gtl.train.loop import FitSettings, fit, rows_of_step
from gtl.train.state import State


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny networks are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Slope(Pull):
    """A constant gradient of 1, under which AdamW moves by the learning rate in every step."""

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        return forward(batch["data"]).mean()


def test_seeds():
    """The same seed gives the same weights whatever the global generator holds; another seed does not."""
    models = []
    for seed, noise in ((3, 0), (3, 1), (4, 0)):
        model, goal = denoiser()
        torch.manual_seed(noise)
        fit(model, goal, replace(SETTINGS, seed=seed))
        models.append(model)
    assert same(models[0], models[1])
    assert not same(models[0], models[2])


def test_the_best_held_out_weights_are_kept():
    """On the way from 0 to 10 the held-out loss is least at 2."""
    logged: list[dict[str, Any]] = []
    settings = replace(SETTINGS, steps=60, learning_rate=0.5, ema=0.0, evaluate_every=1)
    model = Number()
    goal = Pull(10, held_out=2)
    result = fit(model, goal, settings, log=logged.append)
    assert result.steps == 60
    best = min(logged, key=lambda line: line["held_out"])
    assert (result.best_step, result.held_out) == (best["step"], best["held_out"])
    assert result.best_step < 20
    assert float(model.w.detach()) == pytest.approx(2, abs=0.5)
    assert goal.held_out is not None
    assert float(goal.loss(model, goal.held_out, None).detach()) == pytest.approx(result.held_out)
    assert not model.training


def test_patience_stops_but_keeps_the_best():
    settings = replace(SETTINGS, steps=60, learning_rate=0.5, ema=0.0, evaluate_every=1)
    patient, hasty = Number(), Number()
    whole = fit(patient, Pull(10, held_out=2), settings)
    result = fit(hasty, Pull(10, held_out=2), replace(settings, patience=3, steps=60))
    assert result.steps == result.best_step + 3 < whole.steps
    assert result.best_step == whole.best_step
    assert same(patient, hasty)


def test_a_gradient_that_is_not_finite_changes_nothing():
    """The step is passed over, counted, and training goes on."""

    seen: list[float] = []

    class Spike(Pull):
        def loss(
            self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None
        ) -> Tensor:
            value = super().loss(forward, batch, generator)
            if not torch.is_grad_enabled():
                return value
            seen.append(float(model.w.detach()))
            return value * (math.nan if len(seen) in (5, 6) else 1.0)

    logged: list[dict[str, Any]] = []
    model, goal = Number(), Spike(10, held_out=10)
    fit(model, goal, replace(SETTINGS, steps=20, learning_rate=0.5, ema=0.0, evaluate_every=20), log=logged.append)
    assert seen[4] == seen[5] == seen[6]
    assert seen[7] > seen[6] > seen[3]
    assert logged[-1]["skipped"] == 2


def test_gradients_that_are_mostly_not_finite_are_reported():
    class Broken(Pull):
        def loss(
            self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None
        ) -> Tensor:
            value = super().loss(forward, batch, generator)
            value.requires_grad and value.register_hook(lambda grad: grad * math.nan)
            return value

    with pytest.raises(ValueError, match="not finite in 10 of the last 10 steps, up to 10"):
        fit(Number(), Broken(10, held_out=10), replace(SETTINGS, steps=20, evaluate_every=10))


def test_without_held_out_data_the_average_is_kept():
    model = Number()
    result = fit(model, Pull(1), replace(SETTINGS, ema=0.0))
    assert (result.steps, result.best_step, result.held_out) == (12, 12, None)


def test_parameters_without_gradient_are_left_alone():
    model, goal = denoiser()
    model.network.embedding.weight.requires_grad_(False)
    before = model.network.embedding.weight.clone()
    head = model.network.head.bias.detach().clone()
    result = fit(model, goal, SETTINGS)
    assert torch.equal(model.network.embedding.weight, before)
    assert not torch.equal(model.network.head.bias, head)
    assert result.weights == sum(p.numel() for p in model.parameters()) - before.numel()


def test_learning_rate_schedule():
    settings = FitSettings(steps=100, warmup=10, learning_rate=2.0)
    rates = [settings.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * k for k in range(1, 11)])
    assert rates[9] == max(rates) == pytest.approx(2.0)
    assert rates[10] == pytest.approx(2.0)
    assert rates[55] == pytest.approx(1.0)  # half of the cosine
    assert rates[10 + 30] == pytest.approx(1 + math.cos(math.pi / 3))
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.01
    assert FitSettings(steps=5, warmup=0).rate(0) > 0
    assert all(FitSettings(steps=3, warmup=5).rate(step) > 0 for step in range(3))


def test_the_optimizer_follows_the_schedule():
    """AdamW under a constant gradient moves by the learning rate: the way is the sum of the schedule."""
    settings = replace(SETTINGS, ema=0.0, weight_decay=0.0, warmup=6)
    model = Number()
    fit(model, Slope(0), settings)
    assert float(model.w.detach()) == pytest.approx(-sum(settings.rate(k) for k in range(12)), rel=1e-4)


def test_the_average_forgets_its_start():
    """With constant weights the average is start * prod_k min(ema, k / (9 + k)) away from them."""
    model = Number(1.0)
    state = State(model, torch.optim.AdamW(model.parameters()))
    with torch.no_grad():
        model.w.zero_()
    left = 1.0
    for step in range(1, 101):
        state.step = step
        state.follow(0.99)
        left *= min(0.99, step / (9 + step))
        assert float(state.average[0]) == pytest.approx(left, rel=1e-4)
    assert left < 1e-9 < 0.99**100
    with torch.no_grad():
        state.average[0].fill_(1.0)
    for step in range(10_000, 10_100):  # later on it is the plain moving average
        state.step = step
        state.follow(0.99)
    assert float(state.average[0]) == pytest.approx(0.99**100, rel=1e-3)


def test_a_fine_tuned_model_is_not_a_third_source():
    """From 100 to near 0 in a hundred steps; a plain average with decay 0.99 would still be at 37 or more."""
    model = Number(100.0)
    fit(model, Pull(0), replace(SETTINGS, steps=100, learning_rate=5.0, ema=0.99, warmup=5))
    assert abs(float(model.w.detach())) < 10


@pytest.mark.parametrize(("count", "batch"), [(7, 3), (8, 4), (5, 12), (1, 6), (6, 1), (4, 4)])
def test_every_row_is_seen_equally_often(count: int, batch: int):
    """Over `batch` epochs, which are `count` steps, and in every single epoch of the stream."""
    steps = [rows_of_step(count, batch, step, seed=5) for step in range(count)]
    assert all(len(rows) == batch for rows in steps)
    stream = torch.cat(steps)
    for epoch in stream.view(batch, count):
        assert sorted(epoch.tolist()) == list(range(count))
    assert set(Counter(stream.tolist()).values()) == {batch}


def test_rows_depend_on_seed_and_epoch():
    first = [rows_of_step(50, 50, step, seed) for step, seed in ((0, 0), (1, 0), (0, 1), (0, 0))]
    assert torch.equal(first[0], first[3])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_a_batch_larger_than_the_data():
    model, goal = denoiser()
    assert fit(model, goal, replace(SETTINGS, batch_size=64, steps=2)).steps == 2


class Undefined(Pull):
    """A loss that is NaN from some step on; the held-out loss stays finite where `held_out` is."""

    calls = 0

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        self.calls += torch.is_grad_enabled()
        value = super().loss(forward, batch, generator)
        return value * math.nan if self.calls >= 3 else value


@pytest.mark.parametrize("held_out", [1, None])
def test_a_loss_that_is_not_a_number_is_reported(held_out: int | None):
    """Never weights of NaN handed back as a result, with early stopping or without."""
    with pytest.raises(ValueError, match="nan"):
        fit(Number(), Undefined(1, held_out), SETTINGS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"steps": 0}, "steps=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"evaluate_every": 0}, "evaluate_every=0"),
        ({"save_every": -1}, "save_every=-1"),
        ({"learning_rate": 0.0}, "learning_rate=0"),
        ({"learning_rate": -1e-3}, "learning_rate=-0.001"),
        ({"learning_rate": math.nan}, "learning_rate=nan"),
        ({"learning_rate": math.inf}, "learning_rate=inf"),
        ({"ema": 1.0}, "ema=1"),
        ({"ema": -0.1}, "ema=-0.1"),
        ({"warmup": -1}, "warmup=-1"),
        ({"weight_decay": -1.0}, "weight_decay=-1"),
        ({"clip": -1.0}, "clip=-1"),
        ({"patience": -1}, "patience=-1"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_settings_out_of_range(change: dict[str, Any], says: str):
    """Refused before anything is built, and the setting is named."""
    with pytest.raises(ValueError, match=says):
        FitSettings(**change)
