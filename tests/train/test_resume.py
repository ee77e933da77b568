"""A run that was stopped and taken up again: bit for bit the unbroken one on a CPU, close to it on a GPU."""

import json
import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from small_fits import SETTINGS, Number, Pull, denoiser, interrupt, outcome, same
from torch import Tensor

from gtl.denoiser import NetworkDenoiser
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.train.denoiser import DenoiserObjective
from gtl.train.loop import Diverged, FitSettings, fit
from gtl.train.state import State


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny networks are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


class Broken(Pull):
    """A loss whose gradient is not finite at some steps."""

    step = 0

    def __init__(self, steps: Callable[[int], bool]) -> None:
        super().__init__(10, held_out=10)
        self.broken = steps

    def loss(self, forward: Callable[..., Any], batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        value = super().loss(forward, batch, generator)
        if value.requires_grad:
            self.step += 1
            broken = self.broken(self.step)
            value.register_hook(lambda grad: grad * (math.nan if broken else 1.0))
        return value


@pytest.mark.parametrize("at", [3, 8, 14])
def test_steps_passed_over_are_counted_across_a_stop(tmp_path: Path, at: int):
    """Most gradients of the second window are not finite: stopped in it or before, the fit diverges all the same."""
    settings = replace(SETTINGS, steps=30, evaluate_every=10)
    broken = (2, 3, *range(11, 18))
    with pytest.raises(Diverged, match="not finite in 7 of the last 10 steps, up to 20"):
        fit(Number(), Broken(broken.__contains__), settings)
    goal = Broken(broken.__contains__)
    logged: list[dict[str, Any]] = []
    with pytest.raises(KeyboardInterrupt):
        fit(Number(), goal, settings, tmp_path, interrupt(at), logged.append)
    with pytest.raises(Diverged, match="not finite in 7 of the last 10 steps, up to 20"):
        fit(Number(), goal, settings, tmp_path, log=logged.append)
    assert [line["skipped"] for line in logged] == [2]


def test_steps_passed_over_long_ago_do_not_count():
    """Four in each of three windows of ten are no divergence."""
    logged: list[dict[str, Any]] = []
    settings = replace(SETTINGS, steps=30, evaluate_every=10)
    fit(Number(), Broken(lambda step: step % 10 in (2, 3, 4, 5)), settings, log=logged.append)
    assert [line["skipped"] for line in logged] == [4, 8, 12]


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


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_signal_within_a_step_waits_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool):
    """Ctrl-C between the optimizer's step and the average's loses nothing: the state is that of the whole step. It may
    be another thread that the system tells."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    listener = thread if elsewhere else threading.main_thread()
    settings = replace(SETTINGS, save_every=1000)
    whole, goal = denoiser()
    expected = fit(whole, goal, settings)
    follow = State.follow

    def interrupted(state: State, decay: float) -> None:
        if state.step == 7:
            signal.pthread_kill(listener.ident or 0, signal.SIGINT)
            time.sleep(0.1)
        follow(state, decay)

    stopped, goal = denoiser()
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(State, "follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit(stopped, goal, settings, tmp_path)
    over.set()
    assert signal.getsignal(signal.SIGINT) is handler
    with safe_open(tmp_path / "state.safetensors", "pt") as file:
        assert json.loads(file.metadata()["numbers"])["step"] == 7
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


def test_a_gradient_that_is_not_finite_counts_in_the_same_interval(tmp_path: Path):
    """One of the six steps between two looks is no divergence, also where five of them came before a stop."""

    class Spiked(Pull):
        def loss(self, forward: Any, batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
            nonlocal calls
            calls += 1
            steep = (forward(batch["data"]) * 0).abs().sqrt().mean() if calls == 6 else 0.0
            return super().loss(forward, batch, generator) + steep

    settings, calls = replace(SETTINGS, evaluate_every=6), 0
    expected = fit(Number(), Spiked(5, held_out=5), settings)
    calls = 0
    with pytest.raises(KeyboardInterrupt):
        fit(Number(), Spiked(5, held_out=5), settings, tmp_path, interrupt(5))
    assert outcome(fit(Number(), Spiked(5, held_out=5), settings, tmp_path)) == outcome(expected)


@pytest.mark.parametrize("patience", [0, 2])
def test_a_fit_that_is_over_is_not_repeated(tmp_path: Path, patience: int):
    """Its state is the weights that were kept, and no more."""
    settings = replace(SETTINGS, patience=patience, learning_rate=0.3 if patience else 0.02)
    whole, goal = denoiser()
    expected = fit(whole, goal, settings, tmp_path)
    with safe_open(tmp_path / "state.safetensors", "pt") as file:
        assert set(file.keys()) == {f"weights.{name}" for name, _ in whole.named_parameters()}
    again, goal = denoiser()
    logged: list[dict[str, Any]] = []
    result = fit(again, goal, settings, tmp_path, lambda step: pytest.fail(f"step {step}"), logged.append)
    assert (outcome(result), result.curve, result.seconds) == (outcome(expected), expected.curve, expected.seconds)
    assert same(again, whole)
    assert not again.training
    assert not logged


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


# on a GPU: sums of atomics come out in another order in every run, so that two unbroken runs differ as well; a resumed
# one must not differ more than they do, up to a factor, or than TOLERANCE of the change that training made

TOLERANCE = 1e-3
DATA = torch.randint(0, 199, (256, 32), generator=torch.Generator().manual_seed(0))


def run(precision: str, folder: Path | None = None, stop_at: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    model = NetworkDenoiser(Masked(200), DiT(200, 200, 64, 2, 4))
    settings = FitSettings(
        steps=40, batch_size=32, learning_rate=2e-3, evaluate_every=10, save_every=10, precision=precision
    )

    def on_step(step: int) -> None:
        if step == stop_at:
            raise KeyboardInterrupt

    fit(model, DenoiserObjective(model, DATA[:224], DATA[224:]), settings, folder, on_step)
    return [p.detach().cpu() for p in model.parameters()]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return float(torch.cat([(x - y).flatten() for x, y in zip(a, b, strict=True)]).norm())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stop_at", [10, 23])
def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path: Path, precision: str, stop_at: int) -> None:
    torch.manual_seed(0)
    start = [p.detach() for p in NetworkDenoiser(Masked(200), DiT(200, 200, 64, 2, 4)).parameters()]
    unbroken, again = run(precision), run(precision)
    with pytest.raises(KeyboardInterrupt):
        run(precision, tmp_path, stop_at)
    resumed = run(precision, tmp_path)
    change = distance(unbroken, start)
    assert distance(resumed, unbroken) <= max(3 * distance(again, unbroken), TOLERANCE * change)
