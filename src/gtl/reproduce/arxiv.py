"""The paper's language experiments from one recipe file: every stage is a command of gtl, every folder one command's.

    prepare     data/                          mixed-R/            (a share R of the target moved into the source)
    train       source/  source-rR/            planner/
    diagnose    diagnose/
    adapt       adapt/rR-nN-sS-METHOD          N target sequences, drawn by the seed S
    likelihood  likelihood/rR-nN-sS-METHOD     held-out target under the adapted model
    sample      samples/rR-nN-sS-METHOD-dD     drawn by the seed D
    measure     measure/...                    diversity, memorisation, domain
    judge       judge/...                      MAUVE, which needs a pretrained network
    figures     results.json, results.md, summary.md, fractions.png, sweep-METHOD.png, samples.md

A row of a sample has the seed 10 S + D; one of a likelihood has S.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from gtl.data.prepared import read_meta
from gtl.data.tokens import read_tokens, write_tokens
from gtl.reproduce.pieces import Piece, with_history, words
from gtl.reproduce.recipe import Flags, Recipe, Sweep, World

__all__ = ["STAGES", "pieces_of", "write_real"]

STAGES = ("prepare", "train", "diagnose", "adapt", "likelihood", "sample", "measure", "judge", "figures")


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
    sweeps = [sweep for sweep in recipe.sweeps if world.share in (sweep.shares or ())]
    if counts := sorted({count for sweep in sweeps for count in sweep.outside}):
        yield outside(counts, recipe, places, about)
    yield from drawn(recipe, places, "source", ("--denoiser", source), (places.model,), about, recipe.draws)
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
    wanted = {
        (sweep.method, number(fraction, rows), subset): sweep
        for sweep in sweeps
        for subset, fraction in product(sweep.subsets or (), sweep.fractions)
    }
    for subset, n, group in product(recipe.subsets, sizes, world.groups):
        fit = fitted(recipe, places, n, subset, group)
        yield fit
        for method in group:
            one = (recipe, places, *opened(places, fit, method))
            yield likelihood(*one)
            yield from drawn(*one, recipe.draws)
            if sweep := wanted.pop((method, n, subset), None):
                yield from swept(sweep, *one)
    for (method, n, subset), sweep in wanted.items():  # what the world does not ask for
        fit = fitted(recipe, places, n, subset, [method])
        yield fit
        yield from swept(sweep, recipe, places, *opened(places, fit, method))


def fitted(recipe: Recipe, places: Places, n: int, subset: int, group: list[str]) -> Piece:
    """What one command adapts."""
    folder = places.out / "adapt" / f"{places.cell(n, subset)}-{group[0]}"
    sides = ("--target", str(places.data / "target"), "--source", str(places.data / "source"))
    chosen = ("--method", *group, "--rows", str(n), "--seed", str(subset))
    command = ("adapt", "--denoiser", str(places.model), *sides, *chosen, *words(recipe.adapt))
    about = {"share": places.share, "n": n, "subset": subset, "methods": group}
    return Piece("adapt", folder, command, (places.data, places.model), about)


def opened(places: Places, fit: Piece, method: str) -> tuple[str, tuple[str, ...], tuple[Path, ...], Flags]:
    """What one of the methods of a fit is called, how it is opened, what it needs and what its rows say."""
    about, source = dict(fit.about), str(places.model)
    folder = str(fit.folder / method if len(about.pop("methods")) > 1 else fit.folder)
    model = ("--denoiser", folder) if is_model(method) else ("--denoiser", source, "--ratio", folder)
    name = f"{places.cell(about['n'], about['subset'])}-{method}"
    about |= {"method": method, "fitted": fit.folder / "target.npy"}
    return name, model, (places.model, fit.folder), about


def swept(
    sweep: Sweep,
    recipe: Recipe,
    places: Places,
    name: str,
    model: tuple[str, ...],
    needs: tuple[Path, ...],
    about: Flags,
) -> Iterator[Piece]:
    """Samples at every strength and number of candidates, and how likely held-out target is there."""
    for gamma, n_ratio in product(sweep.gammas, sweep.n_ratio):
        here = about | {"sweep": f"gamma={gamma:g},n_ratio={n_ratio}"}
        extra: Flags = {"gamma": gamma} | ({} if n_ratio == "all" else {"n_ratio": n_ratio})
        called = f"{name}-g{gamma:g}" + ("" if n_ratio == "all" else f"-k{n_ratio}")
        if sweep.likelihood:
            yield likelihood(recipe, places, called, model, needs, here, extra)
        yield from drawn(recipe, places, called, model, needs, here, sweep.draws, extra)


def likelihood(
    recipe: Recipe,
    places: Places,
    name: str,
    model: tuple[str, ...],
    needs: tuple[Path, ...],
    about: Flags,
    extra: Flags | None = None,
) -> Piece:
    """Held-out target under a model."""
    flags = dict(recipe.likelihood)
    if by_candidates(about["method"]):
        flags |= {key: recipe.planned[key] for key in ("n_ratio", "places") if key in recipe.planned}
    command = ("evaluate", "--data", str(places.data / "target"), *model, *words(flags | (extra or {})))
    return Piece("likelihood", places.out / "likelihood" / name, command, (places.data, *needs), about)


def outside(counts: list[int], recipe: Recipe, places: Places, about: Flags) -> Piece:
    """The target mass outside the source's candidates."""
    flags = recipe.likelihood | {"denoiser": places.model, "outside": counts}
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
    draws: list[int],
    extra: Flags | None = None,
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
    for draw in draws:
        folder, first = places.out / "samples" / f"{name}-d{draw}", draw == draws[0]
        here = about | {"draw": draw, "first": first}
        command = ("sample", *model, *words(flags | (extra or {}) | {"seed": draw}))
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
