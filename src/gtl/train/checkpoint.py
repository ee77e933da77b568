"""Checkpoints: `weights.safetensors` with `config.json` beside it, written atomically and loaded strictly."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser
from gtl.guidance import check_gamma
from gtl.nn.dit import DiT
from gtl.process import make_process
from gtl.ratio import RATIOS, LocalRatio, NetworkRatio
from gtl.score import ScoreDenoiser

__all__ = [
    "Model",
    "atomic",
    "load_denoiser",
    "load_model",
    "load_ratio",
    "load_sequence_ratio",
    "load_strictly",
    "save_model",
    "write_json",
]

Model = NetworkDenoiser | NetworkRatio | LocalRatio


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of `path` only once it is whole and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False)  # noqa: SIM115
    try:
        yield cast(BinaryIO, handle)
        handle.flush()
        os.fsync(handle.fileno())
        handle.close()
        os.chmod(handle.name, 0o644)
        os.replace(handle.name, path)
    except BaseException:
        handle.close()
        os.unlink(handle.name)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically; NaN and infinities are refused, for no JSON reader need know them."""
    with atomic(path) as handle:
        handle.write((json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def load_strictly(module: nn.Module, tensors: dict[str, Tensor], name: str) -> None:
    """Loads tensors into a module; a missing, unknown or wrongly shaped one is an error that says which."""
    expected = module.state_dict()
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing:
        raise ValueError(f"{name}: {len(missing)} tensors are missing, {missing[0]!r} among them")
    if unknown:
        raise ValueError(f"{name}: {len(unknown)} unknown tensors, {unknown[0]!r} among them")
    for key, value in expected.items():
        if tensors[key].shape != value.shape:
            raise ValueError(f"{name}: {key!r} has shape {tuple(tensors[key].shape)}; expected {tuple(value.shape)}")
        if not bool(tensors[key].isfinite().all()):
            raise ValueError(f"{name}: {key!r} holds values that are not finite")
    module.load_state_dict(tensors)


def save_model(folder: Path, model: Model) -> None:
    """Writes a checkpoint into a folder."""
    config: dict[str, Any] = {"process": model.process.config()}
    if isinstance(model, NetworkDenoiser):
        kind = "score" if isinstance(model, ScoreDenoiser) else "denoiser"
        config |= {"kind": kind, "network": model.network.config(), "banned": list(model.banned)}
    else:
        config |= {"kind": model.kind, "gamma": model.gamma, **model.config()}
    write_json(folder / "config.json", config)
    with atomic(folder / "weights.safetensors") as handle:
        handle.write(save({key: value.contiguous().cpu() for key, value in model.state_dict().items()}))


def load_model(folder: str | Path) -> Model:
    """Reads a checkpoint; anything amiss is a ValueError or FileNotFoundError that names it."""
    folder = Path(folder)
    for file in ("config.json", "weights.safetensors"):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder}: not a checkpoint, {file} is missing")
    try:
        config = json.loads((folder / "config.json").read_text())
        process = make_process(config["process"])
        model: Model
        if config["kind"] in ("denoiser", "score"):
            kind = ScoreDenoiser if config["kind"] == "score" else NetworkDenoiser
            model = kind(process, DiT(**config["network"]), tuple(config["banned"]))
        elif config["kind"] in RATIOS:
            model = RATIOS[config["kind"]].from_config(process, config)
            model.gamma = float(config["gamma"])
            check_gamma(model.gamma)
        else:
            raise ValueError(f"unknown kind {config['kind']!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'}: not a config of this project ({error})") from None
    try:
        tensors = load_file(folder / "weights.safetensors")
    except SafetensorError as error:
        raise ValueError(f"{folder / 'weights.safetensors'}: not a safetensors file ({error})") from None
    load_strictly(model, tensors, str(folder))
    return model.eval()


def load_denoiser(folder: str | Path) -> NetworkDenoiser:
    """Reads a checkpoint that must be a denoiser."""
    model = load_model(folder)
    if not isinstance(model, NetworkDenoiser):
        raise ValueError(f"{folder}: holds a ratio, not a denoiser")
    return model


def load_ratio(folder: str | Path) -> NetworkRatio | LocalRatio:
    """Reads a checkpoint that must be a ratio."""
    model = load_model(folder)
    if isinstance(model, NetworkDenoiser):
        raise ValueError(f"{folder}: holds a denoiser, not a ratio")
    return model


def load_sequence_ratio(folder: str | Path) -> NetworkRatio:
    """Reads a checkpoint that must be a sequence ratio or classifier."""
    ratio = load_ratio(folder)
    if not isinstance(ratio, NetworkRatio):
        raise ValueError(f"{folder}: holds a {ratio.kind} ratio; a sequence ratio or classifier is needed here")
    return ratio
