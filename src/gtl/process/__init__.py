"""Forward processes, one kind per file, all under the contract of `base`."""

from typing import Any

from gtl.process.base import Process, stratified
from gtl.process.d3pm import D3PM
from gtl.process.masked import Masked
from gtl.process.mixing import Mixing, Uniform
from gtl.schedule import make_schedule

__all__ = ["D3PM", "Masked", "Mixing", "Process", "Uniform", "make_process", "stratified"]

PROCESSES: dict[str, type[Process]] = {"masked": Masked, "uniform": Uniform, "d3pm": D3PM}


def make_process(config: dict[str, Any]) -> Process:
    """Builds a process from what `Process.config` gave."""
    settings = dict(config)
    name = settings.pop("name")
    if name not in PROCESSES:
        raise ValueError(f"unknown process {name!r}; choose one of {', '.join(PROCESSES)}")
    settings["schedule"] = make_schedule(**settings.pop("schedule"))
    return PROCESSES[name](**settings)
