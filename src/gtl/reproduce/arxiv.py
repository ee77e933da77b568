"""The paper's language experiments from one recipe file: every stage is a command of gtl, every folder one command's.

    prepare     data/                          mixed-R/            (a share R of the target moved into the source)
    train       source/  source-rR/            planner/
    diagnose    diagnose/
    adapt       adapt/rR-nN-sS-METHOD          N target sequences, drawn by the seed S
    likelihood  likelihood/rR-nN-sS-METHOD     held-out target under the adapted model
    sample      samples/rR-nN-sS-METHOD-dD     drawn by the seed D
    measure     measure/...                    diversity, memorisation, domain
    judge       judge/...                      MAUVE, which needs a pretrained network
    figures     results.json, results.md, summary.md, fractions.png, sweep.png, samples.md

A row of a sample has the seed 10 S + D; one of a likelihood has S.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml

from gtl.data.prepared import read_meta
from gtl.data.tokens import read_tokens, write_tokens
from gtl.estimate import METHODS
from gtl.reproduce.pieces import Piece, with_history, words

__all__ = ["STAGES", "Recipe", "World", "pieces_of", "read_recipe", "write_real"]

STAGES = ("prepare", "train", "diagnose", "adapt", "likelihood", "sample", "measure", "judge", "figures")
Flags = dict[str, Any]
"""Settings of a command, as its flags are called."""


def check_list(value: Any, name: str, kind: type | tuple[type, ...]) -> None:
    """Refuses what is no list of different things of a kind, or an empty one."""
    good = isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)
    if not good or not value or len({*value}) < len(value):
        raise ValueError(f"{name}: a list of different values is needed, not {value!r}")


@dataclass
class World:
    """A source that has seen a share of the target, and what is adapted to what is left of it."""

    share: float = 0.0
    fractions: list[float] = field(default_factory=list)
    methods: list[str | list[str]] = field(default_factory=list)
    """Those of an inner list are adapted by one command, so that what they share is trained once."""

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 <= self.share < 1:
            raise ValueError(f"share={self.share} must be in [0, 1)")
        if self.fractions or self.methods:
            check_list(self.fractions, "fractions", (int, float))
            if not isinstance(self.methods, list) or [] in self.methods:
                raise ValueError(f"methods: a list of names, or of lists of names, is needed, not {self.methods!r}")
            check_list(self.names, "methods", str)
        for fraction in self.fractions:
            if not 0 < fraction <= 1:
                raise ValueError(f"fraction {fraction} must be above 0 and at most 1")
        for method in self.names:
            if method not in METHODS:
                raise ValueError(f"unknown method {method!r}; choose among {', '.join(METHODS)}")

    @property
    def groups(self) -> list[list[str]]:
        """Methods, by the command that adapts them."""
        return [group if isinstance(group, list) else [group] for group in self.methods]

    @property
    def names(self) -> list[str]:
        """All methods."""
        return [name for group in self.groups for name in group]


@dataclass
class Sweep:
    """One ratio at many strengths and numbers of candidates, in every world."""

    method: str
    fraction: float
    gammas: list[float]
    n_ratio: list[int]
    subsets: list[int] | None = None
    """Those of the recipe's that it is done for; the first by default."""
    draws: list[int] = field(default_factory=lambda: [0])
    """Seeds of its samples."""
    outside: list[int] = field(default_factory=list)
    """Numbers of candidates for which the target mass outside them is measured; by default those of n_ratio."""

    def __post_init__(self) -> None:
        check_list(self.gammas, "gammas", (int, float))
        check_list(self.n_ratio, "n_ratio", int)
        check_list(self.draws, "draws", int)
        if not 0 <= min(self.draws) <= max(self.draws) < 10:
            raise ValueError(f"the sweep's draws {self.draws} must be from 0 to 9")
        if self.outside:
            check_list(self.outside, "outside", int)


@dataclass
class Recipe:
    """What a recipe file says."""

    prepare: Flags
    source: Flags
    """Of `gtl train denoiser`."""
    worlds: list[World]
    adapt: Flags
    sample: Flags
    """With `count`, the sequences of each set."""
    mixed: Flags = field(default_factory=dict)
    """Changes to `source` where the source has seen some target: it is trained on from the one that has not."""
    planner: Flags | None = None
    planned: Flags = field(default_factory=dict)
    """Further settings of `gtl sample` and `gtl evaluate` for ratios that are scored candidate by candidate, which the
    planner then orders."""
    diagnose: Flags | None = None
    likelihood: Flags = field(default_factory=dict)
    measure: Flags = field(default_factory=dict)
    judge: Flags = field(default_factory=dict)
    sweep: Sweep | None = None
    subsets: list[int] = field(default_factory=lambda: [0])
    """Seeds of the target sequences."""
    draws: list[int] = field(default_factory=lambda: [0])
    """Seeds of the samples."""

    def __post_init__(self) -> None:
        for key in ("prepare", "source", "adapt", "sample", "mixed", "planned", "likelihood", "measure", "judge"):
            if not isinstance(getattr(self, key), dict):
                raise ValueError(f"{key}: a mapping is needed, not {getattr(self, key)!r}")
        for key in ("planner", "diagnose"):
            if getattr(self, key) is not None and not isinstance(getattr(self, key), dict):
                raise ValueError(f"{key}: a mapping is needed, not {getattr(self, key)!r}")
        for flags in (self.source, self.mixed, self.planner or {}):
            for key in ("fit", "network"):
                if not isinstance(flags.get(key, {}), dict):
                    raise ValueError(f"{key}: a mapping is needed, not {flags[key]!r}")
        domains = self.prepare.get("domain")
        if not isinstance(domains, list) or {str(d).partition("=")[0] for d in domains} != {"source", "target"}:
            raise ValueError("prepare.domain: two domains are needed, called source and target")
        for key in ("subsets", "draws"):
            check_list(getattr(self, key), key, int)
        if not 0 <= min(self.draws) <= max(self.draws) < 10 or min(self.subsets) < 0:
            raise ValueError(f"draws {self.draws} must be from 0 to 9, subsets {self.subsets} at least 0")
        if not self.worlds:
            raise ValueError("worlds: at least one is needed")
        if len({world.share for world in self.worlds}) < len(self.worlds):
            raise ValueError("two worlds have the same share")
        count = self.sample.get("count")
        if not isinstance(count, int) or count < 1:
            raise ValueError("sample.count, the number of sequences in a set, must be at least 1")
        if self.sweep is None:
            return
        self.sweep.subsets = self.subsets[:1] if self.sweep.subsets is None else self.sweep.subsets
        check_list(self.sweep.subsets, "the sweep's subsets", int)
        if not {*self.sweep.subsets} <= {*self.subsets}:
            raise ValueError(f"the sweep's subsets {self.sweep.subsets} are not among the recipe's, {self.subsets}")
        for world in self.worlds:
            if self.sweep.method not in world.names or self.sweep.fraction not in world.fractions:
                wanted = f"{self.sweep.method} at {self.sweep.fraction}"
                raise ValueError(f"the sweep needs {wanted}, which is not fitted at share {world.share:g}")


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe; what is unknown, missing or out of range is named."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such recipe")
    try:
        value = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    try:
        if not isinstance(value, dict):
            raise TypeError("a mapping is needed")
        if "worlds" in value:
            if not isinstance(value["worlds"], list):
                raise TypeError("worlds: a list is needed")
            value["worlds"] = [build(World, world, "worlds") for world in value["worlds"]]
        if value.get("sweep") is not None:
            value["sweep"] = build(Sweep, value["sweep"], "sweep")
        return build(Recipe, value, "the recipe")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def build(kind: type[Any], value: Any, where: str) -> Any:
    """A dataclass from a mapping; unknown and missing keys are named."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if not isinstance(value, dict):
        raise TypeError(f"{where}: a mapping is needed")
    if unknown := [key for key in value if key not in fields]:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; choose among {', '.join(fields)}")
    required = [n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in required if name not in value]:
        raise ValueError(f"{where}: {missing[0]!r} is missing")
    return kind(**value)


def is_model(method: str) -> bool:
    """Whether a method gives a denoiser, which samples by itself, and not a ratio."""
    return not method.startswith("gtl")


def by_candidates(method: str) -> bool:
    """Whether a method's ratio is scored one candidate at a time."""
    return method.startswith(("gtl-paper", "gtl-direct", "gtl-sequence", "gtl-both"))


@dataclass(frozen=True)
class Places:
    """Where things are, in a world."""

    out: Path
    share: float

    @property
    def data(self) -> Path:
        """The folder of both domains."""
        return self.out / (f"mixed-{self.share:g}" if self.share else "data")

    @property
    def model(self) -> Path:
        """The source model."""
        return self.out / (f"source-r{self.share:g}" if self.share else "source")

    def cell(self, n: int, subset: int) -> str:
        """What a set of target sequences is called."""
        return f"r{self.share:g}-n{n}-s{subset}"


def pieces_of(recipe: Recipe, out: Path) -> list[Piece]:
    """All commands in an order in which they can run, each model followed by what is asked of it, so that a time limit
    leaves whole cells. Those after `prepare` are known once it is done."""
    found = [Piece("prepare", out / "data", ("prepare", *words(recipe.prepare)))]
    plain = Places(out, 0.0)
    for share in (world.share for world in recipe.worlds if world.share):
        sides = ("--source", str(plain.data / "source"), "--target", str(plain.data / "target"))
        folder = Places(out, share).data
        found.append(Piece("prepare", folder, ("mix", *sides, "--share", f"{share:g}"), (plain.data,)))
    if read_meta(plain.data / "target") is None:
        return with_history(found)
    found.append(train(plain, recipe.source))
    if recipe.planner is not None:
        sides = ("--data", str(plain.data / "source"), "--denoiser", str(plain.model))
        command = ("train", "planner", *sides, *words(recipe.planner))
        found.append(Piece("train", out / "planner", command, (plain.data, plain.model)))
    for share in (world.share for world in recipe.worlds if world.share):
        flags = merged(recipe.source, recipe.mixed) | {"start": str(plain.model)}
        flags.pop("network", None)
        found.append(train(Places(out, share), flags, plain.model))
    if recipe.diagnose is not None:
        sides = ("--target", str(plain.data / "target"), "--source", str(plain.data / "source"))
        command = ("diagnose", "--denoiser", str(plain.model), *sides, *words(recipe.diagnose))
        found.append(Piece("diagnose", out / "diagnose", command, (plain.data, plain.model)))
    for world in recipe.worlds:
        found += world_pieces(recipe, world, Places(out, world.share))
    return with_history(found)


def train(places: Places, flags: Flags, *needs: Path) -> Piece:
    """A source model."""
    command = ("train", "denoiser", "--data", str(places.data / "source"), *words(flags))
    return Piece("train", places.model, command, (places.data, *needs))


def merged(first: Flags, second: Flags) -> Flags:
    """Settings with some replaced, however deep."""
    both = dict(first)
    for key, value in second.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and key in both else value
    return both


def number(fraction: float, rows: int) -> int:
    """Sequences that a fraction of all rows is."""
    return max(2, round(fraction * rows))


def world_pieces(recipe: Recipe, world: World, places: Places) -> Iterator[Piece]:
    """What is adapted, drawn and measured in a world."""
    meta = read_meta(places.data / "target")
    if meta is None:
        return
    about: dict[str, Any] = {"share": world.share, "method": "source", "n": None, "subset": 0}
    source = str(places.model)
    yield likelihood(recipe, places, f"r{places.share:g}-source", ("--denoiser", source), (places.model,), about)
    if recipe.sweep is not None:
        yield outside(recipe.sweep, recipe, places, about)
    yield from drawn(recipe, places, "source", ("--denoiser", source), (places.model,), about, {})
    if not world.share:
        real = ("--samples", str(places.out / "real" / "samples.npy"))
        yield judged(
            recipe,
            places,
            "real",
            real,
            (places.data,),
            about | {"method": "real", "draw": 0, "count": recipe.sample["count"]},
        )
    rows = meta.splits["train"].segments
    sizes = dict.fromkeys(number(fraction, rows) for fraction in world.fractions)  # small ones may be the same
    for subset, n, group in product(recipe.subsets, sizes, world.groups):
        cell = places.cell(n, subset)
        fitted = places.out / "adapt" / f"{cell}-{group[0]}"
        sides = ("--target", str(places.data / "target"), "--source", str(places.data / "source"))
        chosen = ("--method", *group, "--rows", str(n), "--seed", str(subset))
        command = ("adapt", "--denoiser", source, *sides, *chosen, *words(recipe.adapt))
        about = {"share": world.share, "n": n, "subset": subset}
        yield Piece("adapt", fitted, command, (places.data, places.model), about)
        for method in group:
            folder = str(fitted / method if len(group) > 1 else fitted)
            model = ("--denoiser", folder) if is_model(method) else ("--denoiser", source, "--ratio", folder)
            name, here = f"{cell}-{method}", about | {"method": method, "fitted": fitted / "target.npy"}
            needs = (places.model, fitted)
            yield likelihood(recipe, places, name, model, needs, here)
            yield from drawn(recipe, places, name, model, needs, here, {})
            sweep = recipe.sweep
            if sweep is None or method != sweep.method or n != number(sweep.fraction, rows):
                continue
            if subset in (sweep.subsets or ()):
                yield from swept(recipe, sweep, places, name, model, needs, here)


def swept(
    recipe: Recipe,
    sweep: Sweep,
    places: Places,
    name: str,
    model: tuple[str, ...],
    needs: tuple[Path, ...],
    about: Flags,
) -> Iterator[Piece]:
    """Samples at every strength and number of candidates."""
    for gamma in sweep.gammas:
        for n_ratio in sweep.n_ratio:
            here = about | {"sweep": f"gamma={gamma:g},n_ratio={n_ratio}"}
            extra = {"gamma": gamma, "n_ratio": n_ratio}
            name_here = f"{name}-g{gamma:g}-k{n_ratio}"
            yield from drawn(replace(recipe, draws=sweep.draws), places, name_here, model, needs, here, extra)


def likelihood(
    recipe: Recipe, places: Places, name: str, model: tuple[str, ...], needs: tuple[Path, ...], about: Flags
) -> Piece:
    """Held-out target under a model."""
    flags = dict(recipe.likelihood)
    if by_candidates(about["method"]):
        flags |= {key: recipe.planned[key] for key in ("n_ratio", "places") if key in recipe.planned}
    command = ("evaluate", "--data", str(places.data / "target"), *model, *words(flags))
    return Piece("likelihood", places.out / "likelihood" / name, command, (places.data, *needs), about)


def outside(sweep: Sweep, recipe: Recipe, places: Places, about: Flags) -> Piece:
    """The target mass outside the source's candidates."""
    flags = recipe.likelihood | {"denoiser": places.model, "outside": sweep.outside or sweep.n_ratio}
    command = ("evaluate", "--data", str(places.data / "target"), *words(flags))
    folder = places.out / "likelihood" / f"r{places.share:g}-outside"
    return Piece("likelihood", folder, command, (places.data, places.model), about | {"outside": True})


def drawn(
    recipe: Recipe,
    places: Places,
    name: str,
    model: tuple[str, ...],
    needs: tuple[Path, ...],
    about: Flags,
    extra: Flags,
) -> Iterator[Piece]:
    """Samples of a model, and what is measured of them."""
    meta = read_meta(places.data / "target")
    assert meta is not None
    flags = recipe.sample | {"length": meta.length, "tokenizer": str(places.data / "target")}
    if by_candidates(about["method"]):
        flags |= {key: value for key, value in recipe.planned.items() if key != "places"}
        if recipe.planner is not None:
            flags["planner"], needs = str(places.out / "planner"), (*needs, places.out / "planner")
    if name == "source":
        name = f"r{places.share:g}-source"
    for draw in recipe.draws:
        folder, first = places.out / "samples" / f"{name}-d{draw}", draw == recipe.draws[0]
        here = about | {"draw": draw, "first": first}
        command = ("sample", *model, *words(flags | extra | {"seed": draw}))
        yield Piece("sample", folder, command, needs, here)
        samples = ("--samples", str(folder / "samples.npy"))
        fitted = about.get("fitted", places.data / "target")
        sides = {"data": places.data / "target", "source": places.data / "source", "train": fitted}
        command = ("evaluate", *samples, *words(sides | recipe.measure))
        yield Piece("measure", places.out / "measure" / folder.name, command, (places.data, folder), here)
        yield judged(recipe, places, folder.name, samples, (places.data, folder), here)


def judged(
    recipe: Recipe, places: Places, name: str, samples: tuple[str, ...], needs: tuple[Path, ...], about: Flags
) -> Piece:
    """MAUVE against held-out target."""
    command = ("evaluate", "--data", str(places.data / "target"), *samples, "--metrics", "mauve")
    return Piece("judge", places.out / "judge" / name, (*command, *words(recipe.judge)), needs, about)


def write_real(recipe: Recipe, out: Path) -> None:
    """Real target sequences, as many as a set of samples has, to be judged as samples are."""
    path, count = out / "real" / "samples.npy", recipe.sample["count"]
    real = read_tokens(out / "data" / "target")[:count].long()
    if not path.is_file() or not torch.equal(read_tokens(path), real):
        write_tokens(path, real)
