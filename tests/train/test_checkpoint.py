"""Checkpoints: round trips, strict loading, atomic writes, and no pickle anywhere."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gtl
from gtl.denoiser import NetworkDenoiser
from gtl.nn.dit import DiT
from gtl.process import D3PM, Masked, Uniform
from gtl.ratio import DifferenceRatio, LocalRatio, NetworkRatio
from gtl.schedule import make_schedule
from gtl.score import ScoreDenoiser
from gtl.train.checkpoint import (
    atomic,
    load_denoiser,
    load_model,
    load_ratio,
    load_sequence_ratio,
    save_model,
    write_json,
)

PROCESS = Masked(5, 2, make_schedule("geometric", sigma_min=1e-3, sigma_max=10.0))
Z = torch.tensor([[0, 2, 4, 2], [2, 2, 2, 2], [1, 3, 0, 4]])
T = torch.tensor([0.1, 0.5, 0.9])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny tensors are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def randomise(model: nn.Module) -> None:
    """Fills all weights, for a fresh head is zero and hides mistakes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)


def denoiser(timed: bool = False, banned: tuple[int, ...] = ()) -> NetworkDenoiser:
    network = DiT(5, 5, width=8, depth=2, heads=2, dropout=0.1, time_conditioned=timed)
    model = NetworkDenoiser(PROCESS, network, banned)
    randomise(model)
    return model.eval()


def ratio(pooling: Any = "sum", timed: bool = False) -> NetworkRatio:
    model = NetworkRatio.build(PROCESS, pooling, width=8, depth=1, heads=2, time_conditioned=timed)
    randomise(model)
    return model.eval()


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("banned", [(), (0, 3)])
def test_denoiser_round_trip(tmp_path: Path, timed: bool, banned: tuple[int, ...]):
    model = denoiser(timed, banned)
    save_model(tmp_path, model)
    loaded = load_denoiser(tmp_path)
    assert not loaded.training
    assert loaded.process.config() == PROCESS.config()
    assert (loaded.banned, loaded.timeless) == (banned, not timed)
    assert torch.equal(loaded(Z, T).log_probs, model(Z, T).log_probs)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("timed", [False, True])
def test_ratio_round_trip(tmp_path: Path, pooling: str, timed: bool):
    model = ratio(pooling, timed)
    save_model(tmp_path, model)
    loaded = load_ratio(tmp_path)
    assert not loaded.training
    assert loaded.process.config() == PROCESS.config()
    assert torch.equal(loaded.log_value(Z, T), model.log_value(Z, T))


def test_the_config_lies_beside_the_weights(tmp_path: Path):
    save_model(tmp_path / "new" / "folder", denoiser())
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json",
        "weights.safetensors",
    ]
    config = json.loads((tmp_path / "new" / "folder" / "config.json").read_text())
    assert config["kind"] == "denoiser"
    assert config["process"] == PROCESS.config()
    assert config["network"] == denoiser().network.config()
    tensors = load_file(tmp_path / "new" / "folder" / "weights.safetensors")
    assert tensors.keys() == denoiser().state_dict().keys()


def test_kinds_are_told_apart(tmp_path: Path):
    save_model(tmp_path / "denoiser", denoiser())
    save_model(tmp_path / "ratio", ratio())
    assert isinstance(load_model(tmp_path / "denoiser"), NetworkDenoiser)
    assert isinstance(load_model(tmp_path / "ratio"), NetworkRatio)
    with pytest.raises(ValueError, match="holds a ratio"):
        load_denoiser(tmp_path / "ratio")
    assert isinstance(load_ratio(tmp_path / "denoiser"), DifferenceRatio)  # a tuned model is a ratio to its source


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "weights.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def cut(folder: Path) -> None:
    path = folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


HEAD = "network.head.weight"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "no weights": (lambda f: (f / "weights.safetensors").unlink(), "weights.safetensors is missing"),
    "a missing tensor": (lambda f: change_tensors(f, lambda t: t.pop(HEAD)), f"missing, '{HEAD}'"),
    "an extra tensor": (
        lambda f: change_tensors(f, lambda t: t.update(more=torch.zeros(1))),
        "unknown.*'more'",
    ),
    "another shape": (
        lambda f: change_tensors(f, lambda t: t.update({HEAD: torch.zeros(5, 9)})),
        rf"'{HEAD}' has shape \(5, 9\); expected \(5, 8\)",
    ),
    "a broadcastable shape": (
        lambda f: change_tensors(f, lambda t: t.update({HEAD: torch.zeros(1, 8)})),
        r"shape \(1, 8\); expected \(5, 8\)",
    ),
    "weights that are not numbers": (
        lambda f: change_tensors(f, lambda t: t[HEAD].fill_(math.nan)),
        f"'{HEAD}'.*finite|'{HEAD}'.*nan",
    ),
    "another width": (lambda f: change_config(f, lambda c: c["network"].update(width=16)), "expected"),
    "another depth": (lambda f: change_config(f, lambda c: c["network"].update(depth=3)), "missing"),
    "fewer blocks": (lambda f: change_config(f, lambda c: c["network"].update(depth=1)), "unknown tensors"),
    "no heads": (lambda f: change_config(f, lambda c: c["network"].update(heads=0)), "heads=0"),
    "other ids": (lambda f: change_config(f, lambda c: c["process"].update(num_ids=9)), "9 ids"),
    "a mask outside": (lambda f: change_config(f, lambda c: c["process"].update(mask_id=7)), "mask_id=7"),
    "a banned id outside": (lambda f: change_config(f, lambda c: c.update(banned=[99])), "99"),
    "unknown process": (lambda f: change_config(f, lambda c: c["process"].update(name="blur")), "'blur'"),
    "unknown schedule": (
        lambda f: change_config(f, lambda c: c["process"].update(schedule={"name": "s"})),
        "'s'",
    ),
    "unknown kind": (
        lambda f: change_config(f, lambda c: c.update(kind="oracle")),
        "unknown kind 'oracle'",
    ),
    "no kind": (lambda f: change_config(f, lambda c: c.pop("kind")), "config.json.*kind"),
    "unknown key": (lambda f: change_config(f, lambda c: c["network"].update(bogus=1)), "bogus"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{width: 8"), "config.json"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "config.json"),
    "config not text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "config.json"),
    "cut weights": (cut, "not a safetensors file"),
    "empty weights": (lambda f: (f / "weights.safetensors").write_bytes(b""), "not a safetensors file"),
    "other weights": (lambda f: (f / "weights.safetensors").write_bytes(b"x" * 99), "not a safetensors file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused(tmp_path: Path, kind: str):
    """An error that names the folder and what is wrong, never random weights."""
    save_model(tmp_path, denoiser())
    damage, says = DAMAGE[kind]
    damage(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){re.escape(str(tmp_path))}.*({says})"):
        load_model(tmp_path)


def test_a_folder_that_is_not_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere: not a checkpoint"):
        load_model(tmp_path / "nowhere")


def test_an_unknown_pooling(tmp_path: Path):
    save_model(tmp_path, ratio())
    change_config(tmp_path, lambda c: c.update(pooling="max"))
    with pytest.raises(ValueError, match="pooling='max'"):
        load_model(tmp_path)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), ValueError("bad")])
def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, error: BaseException):
    path = tmp_path / "file"
    with atomic(path) as handle:
        handle.write(b"old")

    def half() -> None:
        with atomic(path) as handle:
            handle.write(b"half of the ne")
            raise error

    with pytest.raises(type(error)):
        half()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_first_write_leaves_nothing(tmp_path: Path):
    with pytest.raises(RuntimeError), atomic(tmp_path / "file"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic(path) as handle:
        handle.write(b"new")
        handle.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("value", [math.nan, math.inf, {"a": [-math.inf]}, object()])
def test_json_that_no_reader_knows_is_refused(tmp_path: Path, value: Any):
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})
    with pytest.raises((ValueError, TypeError)):
        write_json(path, value)
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_save_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = denoiser()
    save_model(tmp_path, model)
    other = denoiser()
    with torch.no_grad():
        other.network.head.bias.add_(1)

    def fails(*args: Any) -> bytes:
        raise OSError("disk full")

    monkeypatch.setattr("gtl.train.checkpoint.save", fails)
    with pytest.raises(OSError, match="disk full"):
        save_model(tmp_path, other)
    assert torch.equal(load_denoiser(tmp_path)(Z).log_probs, model(Z).log_probs)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "weights.safetensors"]


def test_no_pickle_in_the_sources():
    """Not even by way of torch.save or an array of objects; `allow_pickle=False` says so to numpy."""
    folder = Path(gtl.__path__[0])
    sources = list(folder.rglob("*.py"))
    assert len(sources) > 20
    for path in sources:
        text = path.read_text().replace("allow_pickle=False", "")
        for word in ("pickle", "torch.load(", "torch.save(", "joblib", "shelve"):
            assert word not in text, f"{path}: {word}"
        for call in ("np.load(", "np.save("):
            for line in path.read_text().splitlines():
                assert call not in line or "allow_pickle=False" in line, f"{path}: {line.strip()}"


@pytest.mark.parametrize("process", [Uniform(4), D3PM(4, "gaussian:1"), D3PM(4, "absorbing")], ids=lambda p: p.name)
def test_score_models_and_other_noise_come_back(tmp_path: Path, process):
    """The kind of model and the process with its matrix."""
    torch.manual_seed(0)
    model = ScoreDenoiser(process, DiT(4, 4, width=8, depth=1, heads=2, time_conditioned=True)).eval()
    torch.nn.init.normal_(model.network.head.weight)
    save_model(tmp_path / "score", model)
    again = load_denoiser(tmp_path / "score")
    assert isinstance(again, ScoreDenoiser)
    assert again.process.config() == process.config()
    z, t = torch.randint(3, (2, 5)), torch.tensor([0.3, 0.8])
    assert torch.equal(again(z, t).log_probs, model(z, t).log_probs)


def test_local_ratios_come_back_with_their_gamma(tmp_path: Path):
    torch.manual_seed(0)
    denoiser = NetworkDenoiser(Masked(5), DiT(5, 5, width=8, depth=1, heads=2)).eval()
    ratio = LocalRatio.build(denoiser, width=8, depth=1, heads=2).eval()
    torch.nn.init.normal_(ratio.network.dit.head.weight)
    ratio.gamma = 1.5
    save_model(tmp_path / "local", ratio)
    again = load_ratio(tmp_path / "local")
    assert again.gamma == 1.5
    z = torch.randint(5, (2, 5))
    context = denoiser(z)
    positions = torch.arange(5).expand(2, -1)
    assert torch.equal(again.table(z, positions, None, context), ratio.table(z, positions, None, context))
    with pytest.raises(ValueError, match="sequence ratio or classifier"):
        load_sequence_ratio(tmp_path / "local")
