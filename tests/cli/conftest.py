"""A folder with data, good and bad, and with small checkpoints, in which commands run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from typed import COMMANDS, contents, gtl


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, good and bad, and with small checkpoints."""
    folder = tmp_path_factory.mktemp("shared")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    arrays = {
        "src": random.integers(0, 3, (20, 6)),
        "tgt": random.integers(0, 3, (10, 6)),
        "five": random.integers(0, 5, (20, 6)),
        "prompt": np.array([[0, 3, 3, 2, 3, 1], [3, 3, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1]]),
        "empty": np.zeros((0, 6), dtype=int),
        "one": np.zeros((1, 6), dtype=int),
        "zeros": np.zeros((10, 6), dtype=int),
        "short": np.zeros((4, 5), dtype=int),
        "masked": np.array([[0, 1, 2, 0, 1, 3], [0, 1, 2, 0, 1, 2]]),
        "large": np.full((4, 6), 9),
        "negative": np.array([[0, 1, 2, 0, 1, -1], [0, 1, 2, 0, 1, 2]]),
        "floats": np.zeros((4, 6)),
        "flat": np.zeros(6, dtype=int),
        "third": np.full((3, 3), 1 / 3),
        "sums": np.full((5, 5), 0.5),
        "oblong": np.full((2, 3), 1 / 3),
        "objects": np.array([[0.5, 0.5], [0.5, 0.5]], dtype=object),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=True)
    (folder / "nothing.npy").write_bytes(b"")
    (folder / "nothing.txt").write_text("")
    (folder / "uneven.txt").write_text("0 1 2 0 1 2\n0 1 2\n")
    (folder / "words.txt").write_text("to be or not to be\n")
    (folder / "unknown.yaml").write_text("length: 4\nbogus: 3\n")
    (folder / "nested.yaml").write_text("data: src.npy\nfit:\n  stepz: 3\n")
    (folder / "broken.yaml").write_text("length: [4\n")
    (folder / "few.yaml").write_text("experiment: markov\nn: [1]\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, command in COMMANDS.items():
            gtl(command, "--out", name)
    for name in ("missing", "extra", "shape", "cut", "unconfigured", "damaged"):
        (folder / name).mkdir()
        for file in ("config.json", "weights.safetensors"):
            shutil.copy(folder / "denoiser" / file, folder / name / file)
    shutil.copytree(folder / "denoiser", folder / "bans")
    config = json.loads((folder / "bans" / "config.json").read_text())
    (folder / "bans" / "config.json").write_text(json.dumps(config | {"banned": [1]}))
    weights = load_file(folder / "denoiser" / "weights.safetensors")
    first = min(weights)
    save_file({k: v for k, v in weights.items() if k != first}, folder / "missing" / "weights.safetensors")
    save_file({**weights, "more": torch.zeros(1)}, folder / "extra" / "weights.safetensors")
    save_file({**weights, first: torch.zeros(3)}, folder / "shape" / "weights.safetensors")
    (folder / "cut" / "weights.safetensors").write_bytes(b"cut short")
    (folder / "unconfigured" / "config.json").unlink()
    (folder / "damaged" / "config.json").write_text("{")
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(autouse=True)
def there(shared: Path, monkeypatch: pytest.MonkeyPatch):
    """Commands name files in the shared folder; tiny networks are fastest on one thread."""
    monkeypatch.chdir(shared)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end in one line on stderr, a non-zero exit, and --out left as it was."""

    def check(command: str, out: Path = tmp_path / "out") -> str:
        before = contents(out)
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            gtl(command, "--out", out)
        lines = capsys.readouterr().err.splitlines()
        assert caught.value.code not in (0, None)
        assert len(lines) == 1, lines
        assert lines[0].startswith("gtl: ")
        assert contents(out) == before
        return lines[0]

    return check
