"""Run folders: their files, the rows' schema, the marker that comes last, and taking a run up again."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gtl.run import Row, Run, check_folder, device_name, git_commit, read_rows
from typed import KEYS

CONFIG = {"seed": 5, "n": [20, 10], "nested": {"a": 1.5, "b": None}}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/gtl", "train", "denoiser", "--data", "my file.npy"])


def open_run(folder: Path, config: dict[str, Any] = CONFIG) -> Run:
    return Run(folder, "train", config, CPU)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_files_of_a_run(tmp_path: Path):
    run = open_run(tmp_path / "a" / "b")
    run.log({"step": 1, "loss": 0.5})
    run.log({"step": 2, "loss": 0.4})
    run.add("markov", "vanilla", "kl", 0.25, n=20, seed=0, seconds=1.23456, trainable_weights=10)
    run.finish()
    names = {"config.yaml", "run.json", "metrics.jsonl", "results.json", "FINISHED"}
    assert contents(run.folder).keys() == names
    assert yaml.safe_load((run.folder / "config.yaml").read_text()) == CONFIG
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_about_the_run(tmp_path: Path):
    run = open_run(tmp_path / "run")
    about = json.loads((run.folder / "run.json").read_text())
    assert about.keys() == {"seed", "git_commit", "versions", "device", "command"}
    assert about["seed"] == 5
    assert about["command"] == "gtl train denoiser --data 'my file.npy'"
    assert about["device"] == device_name(CPU) == f"cpu, {torch.get_num_threads()} threads"
    assert about["versions"]["torch"] == torch.__version__
    assert about["versions"]["python"].count(".") == 2
    assert about["git_commit"] == git_commit()


def test_the_commit_says_whether_files_were_changed_since(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None

    def git(*words: str) -> str:
        call = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.com", *words]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    git("tag", "-a", "v1", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert git_commit(tmp_path) == commit
    (tmp_path / "file").write_text("two")
    assert git_commit(tmp_path) == f"{commit}+changes"


def test_the_schema_of_rows(tmp_path: Path):
    run = open_run(tmp_path / "run")
    run.add("markov", "vanilla", "kl", 0.25, n=20, seed=0, seconds=1.23456, trainable_weights=10)
    run.add("markov", "published-gtl", "kl", 0.3, n=20, device="as published", command="as published")
    stored = json.loads((run.folder / "results.json").read_text())
    assert [list(row) for row in stored] == [KEYS, KEYS]
    assert stored[0] == {
        "experiment": "markov", "method": "vanilla", "n": 20, "seed": 0, "metric": "kl", "value": 0.25,
        "seconds": 1.23, "trainable_weights": 10, "device": run.device, "command": run.command,
    }  # fmt: skip
    assert (stored[1]["seed"], stored[1]["seconds"], stored[1]["command"]) == (None, None, "as published")
    assert read_rows(run.folder / "results.json") == run.rows


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_a_number_is_refused(tmp_path: Path, value: float):
    run = open_run(tmp_path / "run")
    run.add("e", "a", "kl", 1.0)
    before = contents(run.folder)
    with pytest.raises(ValueError, match="JSON"):
        run.add("e", "b", "kl", value)
    assert contents(run.folder) == before
    assert read_rows(run.folder / "results.json") == run.rows


def test_the_marker_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    replace = os.replace

    def record(source: str, target: Path) -> None:
        order.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", record)
    run = open_run(tmp_path / "run")
    run.add("e", "a", "kl", 1.0)
    assert "FINISHED" not in order
    run.finish()
    assert order[-1] == "FINISHED"
    assert order.count("FINISHED") == 1


def test_a_run_without_measurements_has_an_empty_list(tmp_path: Path):
    run = open_run(tmp_path / "run")
    run.finish()
    assert read_rows(run.folder / "results.json") == []


def test_an_unfinished_run_is_taken_up_again(tmp_path: Path):
    first = open_run(tmp_path / "run")
    first.add("e", "a", "kl", 1.0, n=20, seed=0)
    first.log({"step": 1})
    again = open_run(tmp_path / "run")
    assert again.rows == first.rows
    assert again.has("a", 20, 0, "kl")
    for other in (("b", 20, 0, "kl"), ("a", 10, 0, "kl"), ("a", 20, 1, "kl"), ("a", 20, 0, "nll")):
        assert not again.has(*other)
    again.add("e", "b", "kl", 2.0, n=20, seed=0)
    again.log({"step": 2})
    assert [row.method for row in read_rows(tmp_path / "run" / "results.json")] == ["a", "b"]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("change", [{"seed": 6}, {"n": [20]}, {"more": 1}])
def test_another_config_is_refused(tmp_path: Path, change: dict[str, Any]):
    open_run(tmp_path / "run").add("e", "a", "kl", 1.0)
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="unfinished run of another config"):
        open_run(tmp_path / "run", CONFIG | change)
    assert contents(tmp_path) == before


def test_a_finished_run_is_refused(tmp_path: Path):
    open_run(tmp_path / "run").finish()
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="already holds a finished run; choose another --out"):
        open_run(tmp_path / "run")
    with pytest.raises(FileExistsError, match="finished run"):
        check_folder(tmp_path / "run")
    assert contents(tmp_path) == before


def test_folders_that_hold_something_else(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("x")
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="is a file"):
        open_run(tmp_path / "file")
    with pytest.raises(FileExistsError, match="not empty and holds no run"):
        open_run(tmp_path / "folder")
    assert contents(tmp_path) == before
    (tmp_path / "empty").mkdir()
    open_run(tmp_path / "empty")


def test_a_new_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    runs = [Run(None, "sample", CONFIG, CPU) for _ in range(3)]
    assert len({run.folder for run in runs}) == 3
    assert all(run.folder.parent == Path("runs") and run.folder.name.startswith("sample-") for run in runs)


@pytest.mark.parametrize(
    "text",
    ["", "{}}", "{", '{"a": 1}', "[1]", '[{"method": "a"}]', "null"],
    ids=["empty", "too much", "too little", "an object", "numbers", "keys missing", "null"],
)
def test_files_that_are_no_rows(tmp_path: Path, text: str):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=r"results\.json: not a list of result rows"):
        read_rows(tmp_path / "results.json")


def test_an_unknown_key_in_a_row(tmp_path: Path):
    row = dict.fromkeys(KEYS, None) | {"value": 1.0}
    (tmp_path / "results.json").write_text(json.dumps([row]))
    assert read_rows(tmp_path / "results.json") == [Row(**row)]
    (tmp_path / "results.json").write_text(json.dumps([row | {"extra": 1}]))
    with pytest.raises(ValueError, match="extra"):
        read_rows(tmp_path / "results.json")


def test_a_damaged_unfinished_run_is_refused(tmp_path: Path):
    open_run(tmp_path / "run").add("e", "a", "kl", 1.0)
    (tmp_path / "run" / "results.json").write_text("[")
    with pytest.raises(ValueError, match=r"results\.json"):
        open_run(tmp_path / "run")
