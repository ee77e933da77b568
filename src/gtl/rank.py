"""Of several processes that train one network (torchrun, accelerate launch), the first writes and speaks."""

import os
import sys

import torch
from accelerate import PartialState

__all__ = ["is_first", "take_place"]

SHARED = ("train", "adapt")
"""Verbs that several processes may share."""


def is_first() -> bool:
    """Whether this process is the one that writes; one alone is."""
    return int(os.environ.get("WORLD_SIZE", "1")) < 2 or int(os.environ.get("RANK", "0")) == 0


def take_place(verb: str) -> None:
    """Gives each process a GPU of its own, if there are any, and makes all but the first quiet; errors are heard."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    if verb not in SHARED:
        raise ValueError(f"gtl {verb} runs in one process; several train one network in {' and '.join(SHARED)}")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    PartialState(cpu=not torch.cuda.is_available())
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
