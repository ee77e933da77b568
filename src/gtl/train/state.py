"""The state of a fit in one safetensors file, the counters in its header: a run that was stopped goes on from it."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from gtl.train.checkpoint import atomic

__all__ = ["State"]

NUMBERS = ("step", "best_step", "stale", "seconds", "done", "skipped", "passed")


class State:
    """Everything that a resumed run needs: weights, their average, the best so far, the optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.weights: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer
        self.average = [p.detach().clone() for p in self.weights]
        self.best = [p.detach().clone() for p in self.weights]
        self.step, self.best_step, self.stale, self.best_loss, self.seconds = 0, 0, 0, math.inf, 0.0
        self.done = False
        """Whether the fit is over; then the weights are those that are kept, and nothing else is known."""
        self.curve: dict[int, list[float]] = {}
        self.skipped, self.passed = 0, 0
        """Steps whose gradient was not finite, and how many of them there were at the last look."""

    def follow(self, decay: float) -> None:
        """Moves the average toward the weights after a step."""
        decay = min(decay, self.step / (9 + self.step)) if decay else 0.0
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.weights, 1 - decay)

    def swap(self, values: list[Tensor]) -> list[Tensor]:
        """Puts values into the model and returns copies of what was there."""
        with torch.no_grad():
            kept = [p.detach().clone() for p in self.weights]
            torch._foreach_copy_(self.weights, values)
        return kept

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        """Writes the state as one safetensors file."""
        tensors = {f"weights.{name}": weight.detach() for name, weight in zip(self.names, self.weights, strict=True)}
        for index, name in enumerate(() if self.done else self.names):
            tensors |= {f"average.{name}": self.average[index], f"best.{name}": self.best[index]}
            for key, value in self.optimizer.state[self.weights[index]].items():
                tensors[f"optimizer.{key}.{name}"] = value
        numbers = {key: getattr(self, key) for key in NUMBERS}
        numbers["curve"] = list(self.curve.items())
        numbers["best_loss"] = None if math.isinf(self.best_loss) else self.best_loss
        metadata = {"numbers": json.dumps(numbers), "settings": json.dumps(settings)}
        with atomic(path) as handle:
            handle.write(save({key: value.cpu().contiguous() for key, value in tensors.items()}, metadata))

    def load(self, path: Path, settings: dict[str, Any]) -> None:
        """Reads a state that was saved under the same settings."""
        try:
            opened = safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a saved state ({error}); remove it to start over") from None
        with opened as file:
            metadata = file.metadata()
            if json.loads(metadata["settings"]) != settings:
                raise ValueError(f"{path}: was saved under other settings; use them, or remove the file to start over")
            numbers = {"done": False, "skipped": 0, "passed": 0} | json.loads(metadata["numbers"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        shapes = {key: value.shape for key, value in tensors.items() if key.startswith("weights.")}
        if shapes != {f"weights.{name}": p.shape for name, p in zip(self.names, self.weights, strict=True)}:
            raise ValueError(f"{path}: is the state of another network; remove it to start over")
        with torch.no_grad():
            for index, name in enumerate(self.names):
                weight = self.weights[index]
                for key, value in (("weights", weight), ("average", self.average[index]), ("best", self.best[index])):
                    value.copy_(tensors[f"{'weights' if numbers['done'] else key}.{name}"])
                prefix, suffix = "optimizer.", f".{name}"
                self.optimizer.state[weight] = {
                    key[len(prefix) : -len(suffix)]: v.to(weight.device)
                    for key, v in tensors.items()
                    if key.startswith(prefix) and key.endswith(suffix) and key.count(".") == name.count(".") + 2
                }
        numbers["curve"] = dict(numbers["curve"])
        numbers["best_loss"] = math.inf if numbers["best_loss"] is None else numbers["best_loss"]
        for key, value in numbers.items():
            setattr(self, key, value)
