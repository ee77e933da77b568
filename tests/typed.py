"""Commands as if they had been typed, and the small ones that many tests share."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from gtl.cli import main

KEYS = [
    "experiment",
    "method",
    "n",
    "seed",
    "metric",
    "value",
    "seconds",
    "trainable_weights",
    "device",
    "command",
]
NETWORK = "--network.width 8 --network.depth 1 --network.heads 2"
SMALL = f"{NETWORK} --fit.steps 6 --fit.batch_size 8 --fit.evaluate_every 3"
DOMAINS = "--source src.npy --target tgt.npy"
TOY = "--m 32 --length 4 --samples 8 --source_steps 2 --budget 9 --folds 2 --batch_size 8"
PAPER = f"train ratio {DOMAINS} --like denoiser --estimator paper"
TO = "--like denoiser --target"
COMMANDS = {
    "denoiser": f"train denoiser --data src.npy {SMALL}",
    "clean": f"train classifier {DOMAINS} --like denoiser --noisy false --label_smoothing 0.1 {SMALL}",
    "noisy": f"train classifier {DOMAINS} --like denoiser {SMALL}",
    "ratio": f"{PAPER} --classifier clean --noisy_classifier noisy {SMALL}",
    "uniform": f"train denoiser --data src.npy --process uniform {SMALL}",
    "wide": f"train ratio --source five.npy --target five.npy {SMALL}",
}
"""Checkpoints that the tests share, each trained by its command."""


def gtl(command: str, *more: object) -> None:
    """Runs one command as if it had been typed."""
    arguments = [*shlex.split(command), *map(str, more)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GTL_TRACEBACK", raising=False)
        patch.setattr(sys, "argv", ["gtl", *arguments])
        main(arguments)


def contents(folder: Path) -> dict[str, bytes] | None:
    """All files below a folder, or None where there is no folder."""
    if not folder.exists():
        return None
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def rows(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "results.json").read_text())
