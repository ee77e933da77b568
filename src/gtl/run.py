"""Run folders: what was asked, what was measured, and a marker that says it is all there.

    config.yaml   the resolved settings             run.json       seed, git commit, versions, device, command
    metrics.jsonl what training logged              results.json   one row a measurement
    inputs.json   hashes of what it was made of (adapt)
    FINISHED      written last of all

A folder without the marker is a run that was stopped or killed; the same command takes it up again. What was only half
written then is removed, and metrics that are logged again take the place of the old ones.
"""

import json
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from gtl.rank import is_first
from gtl.train.checkpoint import atomic, write_json

__all__ = ["Row", "Run", "check_folder", "command_line", "device_name", "git_commit", "read_rows"]

STARTED = time.time()
"""When this process began, about."""
LEFTOVER = re.compile(r"\..+\.[a-z0-9_]{8}")
"""What `atomic` calls a file that is not whole yet."""
PACKAGES = ("gtl", "torch", "accelerate", "safetensors", "numpy", "jsonargparse")


@dataclass(frozen=True)
class Row:
    """One measurement. The schema of every results.json, in runs and in `results/` alike."""

    experiment: str
    method: str
    n: int | None
    seed: int | None
    metric: str
    value: float
    seconds: float | None
    trainable_weights: int | None
    device: str
    command: str


def read_rows(path: Path) -> list[Row]:
    """Reads a list of rows; an unknown or missing field is an error."""
    try:
        return [Row(**row) for row in json.loads(path.read_text())]
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a list of result rows ({error})") from None


def device_name(device: torch.device) -> str:
    """What the device is called in a row."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def command_line() -> str:
    """The command that started this process, as one would type it."""
    program = Path(sys.argv[0]).name
    return shlex.join(["gtl" if program in ("gtl", "cli.py") else program, *sys.argv[1:]])


def git_commit(folder: Path = Path(__file__).parent) -> str | None:
    """The commit of the source tree that this package runs from, if it is one, and whether its files were changed."""
    call = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that matter."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def check_folder(folder: Path) -> None:
    """Refuses a folder that holds a finished run."""
    if (folder / "FINISHED").exists():
        raise FileExistsError(f"{folder} already holds a finished run; choose another --out")
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; choose another --out")


def clear_leftovers(folder: Path, pattern: str) -> None:
    """Removes files that a killed process left half written; another process may still be at work on newer ones."""
    for path in folder.rglob(pattern):
        if LEFTOVER.fullmatch(path.name) and path.is_file() and path.stat().st_mtime < STARTED:
            path.unlink(missing_ok=True)


class Run:
    """One run's folder."""

    def __init__(self, folder: str | Path | None, verb: str, config: dict[str, Any], device: torch.device) -> None:
        """Opens the folder (by default a new one under runs/), or one that was left unfinished by the same config."""
        self.folder = Path(folder) if folder is not None else _new_folder(verb)
        self.device, self.command = device_name(device), command_line()
        self.rows: list[Row] = []
        self.networks: set[str | None] = set()
        if not is_first():  # another process opens the folder, at this very moment
            if (self.folder / "results.json").exists():
                self.rows = read_rows(self.folder / "results.json")
            return
        check_folder(self.folder)
        text = yaml.safe_dump(config, sort_keys=False)
        known = self.folder / "config.yaml"
        self.resumed = known.exists()
        if self.resumed:
            if known.read_text() != text:
                raise FileExistsError(f"{self.folder} holds an unfinished run of another config; choose another --out")
            if (self.folder / "results.json").exists():
                self.rows = read_rows(self.folder / "results.json")
            clear_leftovers(self.folder, ".*")
            self._drop_metrics(lambda line: False)
        elif self.folder.exists():
            clear_leftovers(self.folder, ".config.yaml.*")  # the first file of all, if it was killed that early
        if not self.resumed and self.folder.exists() and any(self.folder.iterdir()):
            raise FileExistsError(f"{self.folder} is not empty and holds no run; choose another --out")
        self.write("config.yaml", text)
        seed = config.get("seed", config.get("fit", {}).get("seed", config.get("seeds", 0)))
        about = {"seed": seed, "git_commit": git_commit(), "versions": versions()}
        write_json(self.folder / "run.json", about | {"device": self.device, "command": self.command})

    def made_of(self, inputs: dict[str, str]) -> None:
        """Keeps hashes of what the run is made of; one that was begun with something else is not gone on with."""
        path, text = self.folder / "inputs.json", json.dumps(inputs, indent=1)
        if is_first() and path.exists() and path.read_text() != text:
            before = json.loads(path.read_text())
            changed = next((name for name in inputs if before.get(name) != inputs[name]), "something")
            raise FileExistsError(f"{self.folder} was begun with another {changed}; choose another --out")
        self.write(path.name, text)

    def write(self, name: str, text: str) -> None:
        """Writes a text file of the run atomically."""
        with atomic(self.folder / name) as handle:
            handle.write(text.encode())

    def log(self, metrics: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl.

        A run that is taken up again goes back to its last saved state: what it said of a network after that is dropped.
        """
        if not is_first():
            return
        network, step = metrics.get("network"), metrics.get("step", 0)
        if self.resumed and network not in self.networks:
            self._drop_metrics(lambda line: line.get("network") == network and line.get("step", 0) >= step)
        self.networks.add(network)
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def _drop_metrics(self, drop: Callable[[dict[str, Any]], bool]) -> None:
        """Removes lines of metrics.jsonl, and a last one that was cut short."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines(keepends=True)
        kept = "".join(line for line in whole if not drop(json.loads(line)))
        if kept != text:
            self.write("metrics.jsonl", kept)

    def add(
        self,
        experiment: str,
        method: str,
        metric: str,
        value: float,
        *,
        n: int | None = None,
        seed: int | None = None,
        seconds: float | None = None,
        trainable_weights: int | None = None,
        device: str | None = None,
        command: str | None = None,
    ) -> None:
        """Adds a measurement to results.json."""
        seconds = None if seconds is None else round(seconds, 2)
        row = Row(
            experiment, method, n, seed, metric, value, seconds, trainable_weights,
            device or self.device, command or self.command,
        )  # fmt: skip
        rows = [*self.rows, row]
        write_json(self.folder / "results.json", [asdict(row) for row in rows])
        self.rows = rows

    def has(self, method: str, n: int | None, seed: int | None, metric: str) -> bool:
        """Whether a measurement is there already."""
        return any((r.method, r.n, r.seed, r.metric) == (method, n, seed, metric) for r in self.rows)

    def finish(self) -> None:
        """Says that everything is there."""
        if not (self.folder / "results.json").exists():
            write_json(self.folder / "results.json", [])
        self.write("FINISHED", time.strftime("%Y-%m-%dT%H:%M:%S%z\n"))


def _new_folder(verb: str) -> Path:
    stem = Path("runs") / f"{verb}-{time.strftime('%Y%m%d-%H%M%S')}"
    number, folder = 1, stem
    while folder.exists():
        number, folder = number + 1, Path(f"{stem}-{number}")
    return folder
