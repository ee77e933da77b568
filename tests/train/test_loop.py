"""The training loop: exact resume, early stopping, schedule, averaging, and what it refuses."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.train.denoiser import DenoiserObjective
from gtl.train.loop import Fit, FitSettings, State, fit, rows_of_step
from gtl.train.objective import Objective

SETTINGS = FitSettings(
    steps=12, batch_size=4, learning_rate=0.02, evaluate_every=2, save_every=1000, patience=0, ema=0.9, seed=3
)


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny networks are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Number(nn.Module):
    """One weight, given back for every row."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x))


class Pull(Objective):
    """Pulls the number to the tokens: (w - x)^2. Held-out tokens may pull elsewhere."""

    def __init__(self, train: int, held_out: int | None = None) -> None:
        rows = {"data": torch.full((7, 1), train)}
        super().__init__(rows, None if held_out is None else {"data": torch.full((3, 1), held_out)})

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        return (forward(batch["data"]) - batch["data"][:, 0]).square().mean()


class Slope(Pull):
    """A constant gradient of 1, under which AdamW moves by the learning rate in every step."""

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        return forward(batch["data"]).mean()


def denoiser(dropout: float = 0.2) -> tuple[NetworkDenoiser, DenoiserObjective]:
    """A small network with dropout and 11 sequences, the same ones every time."""
    torch.manual_seed(0)
    model = NetworkDenoiser(Masked(4), DiT(4, 4, width=8, depth=1, heads=2, dropout=dropout))
    x = torch.randint(3, (11, 5), generator=torch.Generator().manual_seed(1))
    return model, DenoiserObjective(model, x[:7], x[7:])


def interrupt(at: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[int], None]:
    def on_step(step: int) -> None:
        if step == at:
            raise error

    return on_step


def same(a: nn.Module, b: nn.Module) -> bool:
    """Whether all weights are equal bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def outcome(result: Fit) -> tuple[Any, ...]:
    return result.steps, result.best_step, result.held_out, result.weights


@pytest.mark.parametrize(("patience", "at"), [(0, 1), (0, 5), (0, 6), (0, 12), (2, 1), (2, 4), (2, 5)])
def test_resume_is_exact(tmp_path: Path, patience: int, at: int):
    """Interrupted and taken up again, with dropout and early stopping: bit for bit the run that was not."""
    settings = replace(SETTINGS, patience=patience, learning_rate=0.3 if patience else 0.02)
    whole, goal = denoiser()
    logged: list[dict[str, Any]] = []
    expected = fit(whole, goal, settings, log=logged.append)

    stopped, goal = denoiser()
    again: list[dict[str, Any]] = []
    with pytest.raises(KeyboardInterrupt):
        fit(stopped, goal, settings, tmp_path, interrupt(at), again.append)
    resumed, goal = denoiser()
    with torch.no_grad():
        for p in resumed.parameters():
            p.fill_(7.0)  # nothing of the start may survive
    torch.manual_seed(999)
    result = fit(resumed, goal, settings, tmp_path, log=again.append)
    assert outcome(result) == outcome(expected)
    assert same(resumed, whole)
    assert again == logged


def test_early_stopping_is_on_in_the_test_above():
    model, goal = denoiser()
    result = fit(model, goal, replace(SETTINGS, patience=2, learning_rate=0.3))
    assert result.steps < SETTINGS.steps


def test_resume_from_a_periodic_state(tmp_path: Path):
    """After a crash that saved nothing more, the last periodic state gives the same end."""
    whole, goal = denoiser()
    expected = fit(whole, goal, SETTINGS)
    settings = replace(SETTINGS, save_every=4)
    crashed, goal = denoiser()
    with pytest.raises(MemoryError):
        fit(crashed, goal, settings, tmp_path, interrupt(7, MemoryError))
    seen: list[int] = []
    resumed, goal = denoiser()
    result = fit(resumed, goal, settings, tmp_path, seen.append)
    assert seen[0] == 5
    assert outcome(result) == outcome(expected)
    assert same(resumed, whole)


def test_resume_after_an_interruption_during_evaluation(tmp_path: Path):
    """The averaged weights are in the model just then; they must not be saved as the weights."""
    whole, goal = denoiser()
    expected = fit(whole, goal, SETTINGS)

    stopped, goal = denoiser()
    loss, evaluations = goal.loss, 0

    def interrupted(forward: Any, batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        nonlocal evaluations
        if not torch.is_grad_enabled():
            evaluations += 1
            if evaluations == 3:
                raise KeyboardInterrupt
        return loss(forward, batch, generator)

    goal.loss = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        fit(stopped, goal, SETTINGS, tmp_path)
    resumed, goal = denoiser()
    result = fit(resumed, goal, SETTINGS, tmp_path)
    assert outcome(result) == outcome(expected)
    assert same(resumed, whole)


def test_resume_after_an_interruption_within_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Between the optimizer's step and the average's: a state of half a step must not be gone on from."""
    settings = replace(SETTINGS, save_every=4)
    whole, goal = denoiser()
    expected = fit(whole, goal, settings)
    follow = State.follow

    def interrupted(state: State, decay: float) -> None:
        if state.step == 7:
            raise KeyboardInterrupt
        follow(state, decay)

    stopped, goal = denoiser()
    with monkeypatch.context() as patch:
        patch.setattr(State, "follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit(stopped, goal, settings, tmp_path)
    resumed, goal = denoiser()
    assert outcome(fit(resumed, goal, settings, tmp_path)) == outcome(expected)
    assert same(resumed, whole)


@pytest.mark.parametrize("at", [2, 3, 4])
def test_the_stale_counter_survives_a_resume(tmp_path: Path, at: int):
    """The held-out loss only gets worse, so training stops `patience` evaluations after the first."""
    settings = replace(SETTINGS, steps=50, evaluate_every=1, patience=4)
    whole = Number()
    expected = fit(whole, Pull(5, held_out=-5), settings)
    assert (expected.steps, expected.best_step) == (5, 1)
    with pytest.raises(KeyboardInterrupt):
        fit(Number(), Pull(5, held_out=-5), settings, tmp_path, interrupt(at))
    resumed = Number()
    assert outcome(fit(resumed, Pull(5, held_out=-5), settings, tmp_path)) == outcome(expected)
    assert same(resumed, whole)


def test_a_second_interruption_loses_nothing(tmp_path: Path):
    whole, goal = denoiser()
    fit(whole, goal, SETTINGS)
    for at in (3, 4, 9):
        model, goal = denoiser()
        with pytest.raises(KeyboardInterrupt):
            fit(model, goal, SETTINGS, tmp_path, interrupt(at))
    model, goal = denoiser()
    fit(model, goal, SETTINGS, tmp_path)
    assert same(model, whole)


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


@pytest.mark.parametrize("change", [{"learning_rate": 0.03}, {"seed": 4}, {"steps": 13}, {"batch_size": 5}])
def test_a_state_of_other_settings_is_refused(tmp_path: Path, change: dict[str, Any]):
    model, goal = denoiser()
    with pytest.raises(KeyboardInterrupt):
        fit(model, goal, SETTINGS, tmp_path, interrupt(3))
    before = (tmp_path / "state.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"state\.safetensors.*other settings"):
        fit(model, goal, replace(SETTINGS, **change), tmp_path)
    assert (tmp_path / "state.safetensors").read_bytes() == before


def test_a_state_of_another_network_is_refused(tmp_path: Path):
    model, goal = denoiser()
    with pytest.raises(KeyboardInterrupt):
        fit(model, goal, SETTINGS, tmp_path, interrupt(3))
    with pytest.raises(ValueError, match=r"state\.safetensors"):
        fit(Number(), Pull(1, 1), SETTINGS, tmp_path)


@pytest.mark.parametrize("content", [b"", b"no safetensors file", b"\xff" * 64], ids=["empty", "text", "binary"])
def test_a_broken_state_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "state.safetensors").write_bytes(content)
    model, goal = denoiser()
    with pytest.raises(ValueError, match=r"state\.safetensors"):
        fit(model, goal, SETTINGS, tmp_path)


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
