"""Checkpoints: `weights.safetensors` with `config.json` beside it, written atomically and loaded strictly.

A sum of ratios is a folder whose config.json has the weights, with a folder `0`, `1`, ... for each term; so is one
ratio on top of another.
"""

import json
import os
import re
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
from gtl.planner import Planner
from gtl.process import make_process
from gtl.rank import is_first
from gtl.ratio import RATIOS, Combination, ConditionalRatio, DifferenceRatio, NetworkRatio, Ratio
from gtl.ratio.successive import SuccessiveRatio
from gtl.score import ScoreDenoiser

__all__ = [
    "Model",
    "atomic",
    "load_denoiser",
    "load_model",
    "load_planner",
    "load_ratio",
    "load_sequence_ratio",
    "load_strictly",
    "read_ratio",
    "save_model",
    "write_json",
]

Model = NetworkDenoiser | Ratio | Planner


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of `path` only once it is whole and on disk; of several processes that train
    one network, only the first one's does."""
    if not is_first():
        with open(os.devnull, "wb") as nowhere:
            yield cast(BinaryIO, nowhere)
        return
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
    if isinstance(model, Combination):
        for index, (_, ratio) in enumerate(model.weighted_terms()):
            save_model(folder / str(index), ratio)
        return write_json(folder / "config.json", {"kind": "sum", "gamma": model.gamma, "weights": model.weights})
    if isinstance(model, SuccessiveRatio):
        for index, ratio in enumerate(model.ratios()):
            save_model(folder / str(index), ratio)
        return write_json(folder / "config.json", {"kind": model.kind, "gamma": model.gamma})
    config: dict[str, Any] = {"process": model.process.config()}
    if isinstance(model, NetworkDenoiser):
        kind = "score" if isinstance(model, ScoreDenoiser) else "denoiser"
        config |= {"kind": kind, "network": model.network.config(), "banned": list(model.banned)}
    elif isinstance(model, Planner):
        config |= {"kind": model.kind, **model.config()}
    else:
        config |= {"kind": model.kind, "gamma": model.gamma, **model.config()}
    write_json(folder / "config.json", config)
    with atomic(folder / "weights.safetensors") as handle:
        handle.write(save({key: value.contiguous().cpu() for key, value in model.state_dict().items()}))


def load_model(folder: str | Path) -> Model:
    """Reads a checkpoint; anything amiss is a ValueError or FileNotFoundError that names it."""
    folder = Path(folder)
    config = read_config(folder)
    try:
        model: Model
        if config["kind"] == "sum":
            model = Combination([(float(w), load_ratio(folder / str(i))) for i, w in enumerate(config["weights"])])
        elif config["kind"] == SuccessiveRatio.kind:
            first, then = (load_ratio(folder / str(i)) for i in range(2))
            if not isinstance(then, ConditionalRatio):
                raise ValueError(f"a {then.kind} ratio cannot come second")
            model = SuccessiveRatio(first, then)
        else:
            model = build(config)
        if isinstance(model, Ratio):
            model.gamma = float(config["gamma"])
            check_gamma(model.gamma)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'}: not a config of this project ({error})") from None
    if isinstance(model, Combination | SuccessiveRatio):
        return model.eval()
    file = folder / "weights.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"{folder}: not a checkpoint, weights.safetensors is missing")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file}: not a safetensors file ({error})") from None
    load_strictly(model, tensors, str(folder))
    return model.eval()


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder}: not a checkpoint, config.json is missing")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not a config of this project ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: not a config of this project")
    return config


def build(config: dict[str, Any]) -> Model:
    """An untrained model from its config."""
    process, kind = make_process(config["process"]), config["kind"]
    if kind in ("denoiser", "score"):
        denoiser = ScoreDenoiser if kind == "score" else NetworkDenoiser
        return denoiser(process, DiT(**config["network"]), tuple(config["banned"]))
    if kind == Planner.kind:
        return Planner.from_config(process, config)
    if kind not in RATIOS:
        raise ValueError(f"unknown kind {kind!r}")
    return RATIOS[kind].from_config(process, config)


def load_denoiser(folder: str | Path) -> NetworkDenoiser:
    """Reads a checkpoint that must be a denoiser."""
    model = load_model(folder)
    if not isinstance(model, NetworkDenoiser):
        raise ValueError(f"{folder}: holds a {'planner' if isinstance(model, Planner) else 'ratio'}, not a denoiser")
    return model


def load_planner(folder: str | Path) -> Planner:
    """Reads a checkpoint that must be a planner."""
    model = load_model(folder)
    if not isinstance(model, Planner):
        raise ValueError(f"{folder}: holds no planner; train one with `gtl train planner`")
    return model


def load_ratio(folder: str | Path) -> Ratio:
    """Reads a checkpoint as a ratio; a tuned denoiser is its difference from the source."""
    model = load_model(folder)
    if isinstance(model, Planner):
        raise ValueError(f"{folder}: holds a planner, not a ratio")
    return DifferenceRatio(model).eval() if isinstance(model, NetworkDenoiser) else model


TERM = re.compile(r"(?:(?P<weight>[0-9.]+(?:[eE]-?[0-9]+)?)\s*\*\s*)?(?P<folder>\S.*)")


def read_ratio(text: str, own_gamma: bool) -> Ratio:
    """The ratio of a folder, or of a sum such as `0.5 * runs/physics + 0.5 * runs/biology`.

    With `own_gamma` each term of a sum counts with the strength that was chosen for it as well.
    """
    if Path(text).exists() or not re.search(r"[*+]", text):
        return load_ratio(text)
    terms: list[tuple[float, Ratio]] = []
    for part in text.split("+"):
        found = TERM.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{text!r}: not a folder, and not a sum such as '0.5 * runs/a + 0.5 * runs/b'")
        ratio = load_ratio(found["folder"])
        terms.append((float(found["weight"] or 1) * (ratio.gamma if own_gamma else 1.0), ratio))
    return Combination(terms).eval()


def load_sequence_ratio(folder: str | Path) -> NetworkRatio:
    """Reads a checkpoint that must be a sequence ratio or classifier."""
    ratio = load_ratio(folder)
    if not isinstance(ratio, NetworkRatio):
        kind = "denoiser" if isinstance(ratio, DifferenceRatio) else f"{ratio.kind or 'sum'} ratio"
        raise ValueError(f"{folder}: holds a {kind}; a sequence ratio or classifier is needed here")
    return ratio
