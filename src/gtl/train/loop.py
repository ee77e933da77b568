"""The training loop, for every network of the project.

AdamW, linear warm-up and cosine decay, gradient clipping, an exponential moving average of the weights, bf16, early
stopping on held-out loss, on Accelerate (a CPU, a GPU, or many processes).

Randomness is a function of (seed, step, process): no state of a generator has to survive a stop, and a run that was
resumed is bit for bit the run that was not. The average's decay starts low, (1 + k) / (10 + k), so that what a
fine-tuned model started from is soon forgotten.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn

from gtl.speed import compiled
from gtl.train.objective import Objective
from gtl.train.state import State

__all__ = ["Diverged", "Fit", "FitSettings", "fit"]

RESIDENT = 2**28
"""Tokens of a dataset that are kept on the device; a larger one stays on the host."""
EVALUATED = 2**16
"""Tokens at least in one batch of an evaluation."""


class Diverged(ValueError):
    """A fit whose numbers are no longer finite."""

    steps = 0
    """Gradient steps taken until that was seen."""
    seconds = 0.0


@dataclass
class FitSettings:
    """How a network is trained."""

    steps: int = 1000
    """Gradient steps at most, over which the learning rate falls to zero."""
    stop: int | None = None
    """A step to stop at before that, the learning rate as it is there; for training again up to a chosen step."""
    batch_size: int = 128
    """Rows of every dataset in a step, over all processes."""
    learning_rate: float = 1e-3
    """The highest, reached after the warm-up."""
    warmup: int = 20
    """Steps that the learning rate rises. Not a fraction of all steps, which early stopping makes meaningless."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    ema: float = 0.99
    """Decay of the averaged weights, which are the ones kept; 0 keeps the last ones."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the matrix products; weights and losses stay in fp32."""
    evaluate_every: int = 25
    """Steps between two looks at the held-out loss."""
    evaluation_rows: int = 1024
    """Rows in one look: a small set is corrupted several times over, of a large one some rows are taken."""
    patience: int = 0
    """Looks without a better held-out loss before stopping; 0 never stops early. The best weights are kept either
    way."""
    save_every: int = 200
    """Steps between two saved states, where a folder is given."""
    compile: bool = False
    """Whether to run the network through torch.compile."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "evaluate_every", "evaluation_rows", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.stop is not None and not 1 <= self.stop <= self.steps:
            raise ValueError(f"stop={self.stop} must be between 1 and steps={self.steps}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate={self.learning_rate} must be positive")
        for name in ("weight_decay", "clip", "patience", "seed", "warmup"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema={self.ema} must be in [0, 1)")

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then half a cosine to zero."""
        warm = min(self.warmup, self.steps)
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))


@dataclass
class Fit:
    """How a fit went."""

    steps: int
    """Gradient steps taken."""
    best_step: int
    """The step whose weights were kept."""
    held_out: float | None
    """Their held-out loss."""
    seconds: float
    weights: int
    """Trainable numbers."""
    curve: dict[int, list[float]]
    """The objective's score at every step that was looked at, one number for each setting (gamma) to choose among."""


def mix(*parts: int) -> int:
    """A seed that depends on all of its parts."""
    return int(np.random.SeedSequence(list(parts)).generate_state(1, np.uint64)[0] >> 1)


@lru_cache(maxsize=8)
def permutation(count: int, seed: int, epoch: int) -> Tensor:
    """The order of `count` rows in an epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(mix(seed, epoch)))


def rows_of_step(count: int, batch: int, step: int, seed: int) -> Tensor:
    """The rows of a step: `batch` places of an endless stream of seeded permutations of `count` rows, in order."""
    first, last = step * batch, (step + 1) * batch
    epochs = range(first // count, (last - 1) // count + 1)
    stream = [permutation(count, seed, epoch) for epoch in epochs]
    offset = first - epochs[0] * count
    return torch.cat(stream)[offset : offset + batch]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Holds Ctrl-C and alarms back, for changes that are whole or not at all.

    By other handlers, which always run in the main thread, and not by a mask: what one thread masks another one hears.
    """
    if threading.current_thread() is not threading.main_thread():  # no handler runs in others
        yield
        return
    heard: list[int] = []
    before: dict[int, Any] = {}
    try:
        for name in ("SIGINT", "SIGALRM"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not None:
                before[number] = signal.signal(number, lambda number, _: heard.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in heard:
            signal.raise_signal(number)


def place(x: Tensor, device: torch.device) -> Tensor:
    """Data as int64 on the device where it is small; a large or memory-mapped set stays where it is, and its rows are
    sent as they are needed (`take`)."""
    return x.to(device, torch.long) if x.numel() <= RESIDENT else x


def take(x: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Rows of the data as int64 on the device."""
    if x.device.type == device.type:
        return x[rows.to(x.device)].long()
    part = x[rows].long()
    return (part.pin_memory() if device.type == "cuda" else part).to(device, non_blocking=True)


def fit(
    model: nn.Module,
    objective: Objective,
    settings: FitSettings,
    folder: Path | None = None,
    on_step: Callable[[int], None] | None = None,
    log: Callable[[dict[str, Any]], None] | None = None,
) -> Fit:
    """Trains a model in place and leaves the kept weights in it, in evaluation mode.

    Args:
        model: the network; parameters that need no gradient are left alone.
        objective: data and loss.
        settings: see `FitSettings`.
        folder: where the state is saved as `state.safetensors`; a state found there is resumed, and a fit that is over
            is not repeated.
        on_step: called after every step with the number of steps done.
        log: called with the metrics of every evaluation.
    """
    accelerator = Accelerator()
    device = accelerator.device
    model.to(device).train()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, settings.learning_rate, (0.9, 0.99), 1e-8, settings.weight_decay, fused=True)
    state = State(model, optimizer)
    path = None if folder is None else folder / "state.safetensors"
    if path is not None and path.is_file():
        state.load(path, asdict(settings))
    wrapped = objective.wrap(model)
    forward: Any = accelerator.prepare_model(compiled(wrapped) if settings.compile else wrapped)
    train = {name: place(x, device) for name, x in objective.train.items()}
    held_out = objective.held_out
    share = slice(accelerator.process_index, None, accelerator.num_processes)
    generator = torch.Generator(device)
    started = time.perf_counter() - state.seconds

    def save_state() -> None:
        if path is not None and accelerator.is_main_process:
            state.seconds, state.skipped = time.perf_counter() - started, int(skipped)
            state.save(path, asdict(settings))

    last = settings.stop or settings.steps
    skipped = torch.tensor(float(state.skipped), device=device)
    looked = state.step - state.step % settings.evaluate_every
    whole = True  # whether the state is that of a finished step, its evaluation included
    try:
        while state.step < last and not state.done:
            step = state.step
            batch = {}
            for number, (name, x) in enumerate(train.items()):
                rows = rows_of_step(len(x), settings.batch_size, step, mix(settings.seed, number))[share]
                batch[name] = take(x, rows, device)
            noise = mix(settings.seed, step, accelerator.process_index)
            generator.manual_seed(noise)
            torch.manual_seed(noise)  # dropout draws from the global generator
            for group in optimizer.param_groups:
                group["lr"] = settings.rate(step)
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
                loss = objective.loss(forward, batch, generator)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(weights, settings.clip)
            due = (step + 1) % settings.evaluate_every == 0 or step + 1 == last
            with undisturbed():
                whole = False
                optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]  # no update then
                skipped += optimizer.found_inf  # type: ignore[attr-defined]
                optimizer.step()
                optimizer.zero_grad()
                state.step += 1
                state.follow(settings.ema)
                whole = not due
            if due:
                mean = float(accelerator.reduce(loss.detach(), "mean"))  # processes stop together or not at all
                if not math.isfinite(mean):
                    raise Diverged(f"the loss became {mean} at step {state.step}: lower the learning rate")
            if due:
                lately, since, looked = int(skipped) - state.passed, state.step - looked, state.step
                state.passed += lately
                if 2 * lately > since:
                    raise Diverged(f"the gradient was not finite in {lately} of the last {since} steps, up to {looked}")
            if held_out is not None and due:
                found = torch.tensor(evaluate(model, objective, held_out, state, settings), dtype=torch.float64)
                state.curve[state.step] = broadcast(found.to(device)).tolist()
                value = min(state.curve[state.step])
                if not math.isfinite(value):
                    raise Diverged(f"the held-out loss became {value} at step {state.step}: lower the learning rate")
                state.stale = 0 if value < state.best_loss else state.stale + 1
                if value < state.best_loss:
                    state.best_loss, state.best_step = value, state.step
                    torch._foreach_copy_(state.best, state.average)
                if log is not None:
                    log(
                        {
                            "step": state.step,
                            "loss": mean,
                            "held_out": value,
                            "rate": settings.rate(step),
                            "skipped": state.passed,
                        }
                    )
                if settings.patience and state.stale >= settings.patience:
                    break
            whole = True
            if on_step is not None:
                on_step(state.step)
            if state.step % settings.save_every == 0:
                save_state()
    except Diverged as error:
        error.steps, error.seconds = state.step, time.perf_counter() - started
        raise
    except KeyboardInterrupt:
        if whole:  # otherwise the last saved state is the one to go on from
            save_state()
        raise
    with undisturbed():
        if not state.done:
            state.swap(state.average if held_out is None else state.best)
            state.done, state.seconds = True, time.perf_counter() - started
            save_state()
    model.eval()
    return Fit(
        steps=state.step,
        best_step=state.step if held_out is None else state.best_step,
        held_out=None if held_out is None else state.best_loss,
        seconds=state.seconds,
        weights=sum(p.numel() for p in weights),
        curve=state.curve,
    )


@torch.no_grad()
def evaluate(
    model: nn.Module, objective: Objective, held_out: dict[str, Tensor], state: State, settings: FitSettings
) -> list[float]:
    """The objective's score of the averaged weights, under the same corruptions every time, on `evaluation_rows` rows:
    spread over a larger set, repeated from a smaller one."""
    kept = state.swap(state.average)
    model.eval()
    device, total = state.weights[0].device, settings.evaluation_rows
    generator = torch.Generator(device).manual_seed(mix(settings.seed, 2**31))
    rows = {n: torch.arange(total) % len(x) if total >= len(x) else spread(len(x), total) for n, x in held_out.items()}
    length = next(iter(held_out.values())).shape[1]
    size, done, values = max(settings.batch_size, EVALUATED // length), 0, torch.zeros(())
    forward = objective.wrap(model)
    for first in range(0, total, size):
        batch = {name: take(x, rows[name][first : first + size], device) for name, x in held_out.items()}
        count = min(size, total - first)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            scores = objective.score(forward, batch, generator).double().cpu()
        values, done = values + scores * count, done + count
    state.swap(kept)
    model.train()
    return (values / done).tolist()


def spread(count: int, wanted: int) -> Tensor:
    """`wanted` of `count` rows, evenly apart."""
    return torch.arange(wanted) * count // wanted
