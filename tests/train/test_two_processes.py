"""Two processes that train one network: they agree on when to stop, and the first one alone writes and speaks."""

import json
import math
import multiprocessing
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from small_fits import SETTINGS, Number, Pull, denoiser, outcome
from torch import Tensor

from gtl.rank import take_place
from typed import SMALL, gtl


class Apart(Pull):
    """The second process sees held-out losses that get worse from the start."""

    def score(self, forward: Any, batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        rank = int(os.environ["RANK"])
        self.looks = getattr(self, "looks", 0) + 1
        return super().score(forward, batch, generator) * (1 - rank) + rank * self.looks


class Broken(Pull):
    """In the second process the loss is not a number."""

    def loss(self, forward: Any, batch: dict[str, Tensor], generator: torch.Generator | None) -> Tensor:
        return super().loss(forward, batch, generator) * (math.nan if int(os.environ["RANK"]) else 1)


def work(rank: int, port: int, folder: Path) -> None:
    """What each process does; it says what it saw in a file of its own."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    os.chdir(folder)
    from gtl.train.loop import Diverged, fit

    seen: dict[str, Any] = {}
    take_place("adapt")
    seen["processes"] = PartialState().num_processes
    tiny = "--training.budget 12 --training.folds 2 --training.evaluate_every 2"
    gtl(f"train denoiser --data src.npy {SMALL} --fit.steps 4 --fit.evaluate_every 2 --out source")
    try:
        gtl("mix --source src.npy --target tgt.npy --share 0.5 --out mixed")
    except SystemExit as error:
        seen["refused"] = error.code
    settings = replace(SETTINGS, steps=12, evaluate_every=2, patience=2)
    seen["fit"] = outcome(fit(Number(), Apart(5, held_out=5), settings))
    try:
        fit(Number(), Broken(5, held_out=5), settings)
    except Diverged as error:
        seen["error"] = str(error)
    model, goal = denoiser()
    fit(model, goal, settings)
    seen["weights"] = [float(p.double().sum()) for p in model.parameters()]
    gtl(f"adapt source tgt.npy --method gtl-sparse finetuned gtl-blend {tiny} --out adapted")
    (folder / f"seen-{rank}.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import numpy as np

    path = tmp_path_factory.mktemp("two")
    for seed, name in enumerate(("src", "tgt")):
        np.save(path / f"{name}.npy", np.random.default_rng(seed).integers(0, 4, (24, 6)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=work, args=(rank, port, path)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    alive = [process.kill() for process in both if process.is_alive()]
    assert not alive, "a process waits for the other"
    assert [process.exitcode for process in both] == [0, 0]
    return path


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]


def test_they_stop_together(seen: list[dict[str, Any]]):
    """By what the first one sees; alone, the second one would have stopped after three looks."""
    assert seen[0]["fit"] == seen[1]["fit"]
    assert seen[0]["fit"][0] == 12
    assert "the loss became nan" in seen[0]["error"]
    assert seen[0]["error"] == seen[1]["error"]


def test_other_verbs_are_refused(seen: list[dict[str, Any]]):
    assert [each["refused"] for each in seen] == [2, 2]


def test_they_have_one_network(seen: list[dict[str, Any]]):
    assert [each["processes"] for each in seen] == [2, 2]
    assert seen[0]["weights"] == seen[1]["weights"]


def test_one_of_them_writes(folder: Path):
    steps = [json.loads(line)["step"] for line in (folder / "source" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [2, 4]
    for name in ("source", "adapted"):
        assert (folder / name / "FINISHED").is_file()
        rows = [(r["method"], r["metric"]) for r in json.loads((folder / name / "results.json").read_text())]
        assert len({*rows}) == len(rows)
    lines = [json.loads(line) for line in (folder / "adapted" / "metrics.jsonl").read_text().splitlines()]
    looked = [(line["network"], line.get("step")) for line in lines]
    assert len({*looked}) == len(looked)
    assert not [path for path in folder.rglob("*") if path.name.startswith(".") or path.name == "fits"]
