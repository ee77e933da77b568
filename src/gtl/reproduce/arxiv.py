"""The paper's language experiments from one recipe file: every stage is a command of gtl, every folder one command's.

    prepare     data/                          mixed-R/            (a share R of the target moved into the source)
    train       source/  source-rR/            planner/
    diagnose    diagnose/
    adapt       adapt/rR-nN-sS-METHOD          N target sequences, drawn by the seed S
    likelihood  likelihood/rR-nN-sS-METHOD     held-out target under the adapted model
    sample      samples/rR-nN-sS-METHOD-dD     drawn by the seed D
    measure     measure/...                    diversity, memorisation, domain
    judge       judge/...                      MAUVE, which needs a pretrained network
    figures     results.json, results.md, summary.md, fractions.png, shares.png, sweep-METHOD.png, samples.md

A row of a sample has the seed 10 S + D; one of a likelihood has S.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import torch

from gtl.data.prepared import read_meta
from gtl.data.tokens import read_tokens, write_tokens
from gtl.reproduce.pieces import Piece, with_history, words
from gtl.reproduce.recipe import Flags, Recipe, Sweep, Variant, World

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
    def judges(self) -> Path:
        """The folder of both domains whose held-out rows no source was trained on: one judge for all worlds."""
        return self.out / "data"

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


def numbers(fractions: Iterable[float], rows: int) -> list[int]:
    """Sequences that fractions of all rows are; small ones may be the same."""
    return list(dict.fromkeys(max(2, round(fraction * rows)) for fraction in fractions))


def world_pieces(recipe: Recipe, world: World, places: Places) -> Iterator[Piece]:
    """What is adapted, drawn and measured in a world."""
    meta = read_meta(places.data / "target")
    if meta is None:
        return
    about: Flags = {"share": world.share, "method": "source", "n": None, "subset": 0}
    source = Model(f"r{world.share:g}-source", ("--denoiser", str(places.model)), (places.model,), about)
    yield likelihood(recipe, places, source)
    sweeps = [sweep for sweep in recipe.sweeps if world.share in (sweep.shares or ())]
    if counts := sorted({count for sweep in sweeps for count in sweep.outside}):
        yield outside(recipe, places, source, counts)
        yield outside(recipe, places, source, counts, own=True)
    yield from drawn(recipe, places, source, recipe.draws)
    if not world.share:
        about = about | {"method": "real", "draw": 0, "count": recipe.sample["count"]}
        yield judged(recipe, places, "real", places.out / "real", (places.judges,), about)
    rows = meta.splits["train"].segments
    wanted = {
        (sweep.method, n, subset): sweep
        for sweep in sweeps
        for subset, n in product(sweep.subsets or (), numbers(sweep.fractions, rows))
    }
    fits: list[tuple[int, int, list[str], Variant | None]] = [
        *product(recipe.subsets, numbers(world.fractions, rows), world.groups, [None])
    ]
    for variant in () if world.share else recipe.variants:
        fits += product(variant.subsets or (), numbers(variant.fractions, rows), [variant.group], [variant])
    for subset, n, group, kind in fits:
        fit, models = fitted(recipe, places, n, subset, group, kind)
        yield fit
        for model in models:
            yield likelihood(recipe, places, model)
            yield from drawn(recipe, places, model, recipe.draws)
            if sweep := wanted.pop((model.about["method"], n, subset), None):
                yield from swept(recipe, places, model, sweep)
    for (method, n, subset), sweep in wanted.items():  # what the world does not ask for
        fit, (model,) = fitted(recipe, places, n, subset, [method])
        yield fit
        yield from swept(recipe, places, model, sweep)


@dataclass(frozen=True)
class Model:
    """What likelihoods and samples are of."""

    name: str
    words: tuple[str, ...]
    """How a command opens it."""
    needs: tuple[Path, ...]
    about: Flags
    """What its rows will be called."""
    extra: Flags = field(default_factory=dict)
    """Further settings of commands that open it."""


def fitted(
    recipe: Recipe, places: Places, n: int, subset: int, group: list[str], variant: Variant | None = None
) -> tuple[Piece, list[Model]]:
    """One command that adapts, and the model of each of its methods."""
    cell, source = places.cell(n, subset), str(places.model)
    names = group if variant is None else variant.names
    folder = places.out / "adapt" / f"{cell}-{names[0]}"
    sides = ("--target", str(places.data / "target"), "--source", str(places.data / "source"))
    chosen = ("--method", *group, "--rows", str(n), "--seed", str(subset))
    flags = recipe.adapt if variant is None else merged(recipe.adapt, variant.adapt)
    command = ("adapt", "--denoiser", source, *sides, *chosen, *words(flags))
    about: Flags = {"share": places.share, "n": n, "subset": subset}
    models = []
    for method, name in zip(group, names, strict=True):
        made = str(folder / method if len(group) > 1 else folder)
        opened = ("--denoiser", made) if is_model(method) else ("--denoiser", source, "--ratio", made)
        here = about | {"method": name, "fitted": folder / "target.npy"}
        models.append(Model(f"{cell}-{name}", opened, (places.model, folder), here))
    called = dict(zip(group, names, strict=True))
    return Piece("adapt", folder, command, (places.data, places.model), about | {"called": called}), models


def swept(recipe: Recipe, places: Places, model: Model, sweep: Sweep) -> Iterator[Piece]:
    """Samples at every strength and number of candidates, and how likely held-out target is there."""
    for gamma, n_ratio in product(sweep.gammas, sweep.n_ratio):
        some = n_ratio != "all"
        name = f"{model.name}-g{gamma:g}" + (f"-k{n_ratio}" if some else "")
        about = model.about | {"sweep": f"gamma={gamma:g},n_ratio={n_ratio}"}
        extra = {"gamma": gamma, "n_ratio": n_ratio if some else None}
        here = replace(model, name=name, about=about, extra=extra)
        if sweep.likelihood:
            yield likelihood(recipe, places, here)
        yield from drawn(recipe, places, here, sweep.draws)


def likelihood(recipe: Recipe, places: Places, model: Model) -> Piece:
    """Held-out target under a model."""
    flags = dict(recipe.likelihood)
    if by_candidates(model.about["method"]):
        flags |= {key: recipe.planned[key] for key in ("n_ratio", "places") if key in recipe.planned}
    command = ("evaluate", "--data", str(places.judges / "target"), *model.words, *words(flags | model.extra))
    folder = places.out / "likelihood" / model.name
    return Piece("likelihood", folder, command, (places.judges, *model.needs), model.about)


def outside(recipe: Recipe, places: Places, source: Model, counts: list[int], own: bool = False) -> Piece:
    """The mass of the target, or of the source's own domains, outside the source's candidates."""
    name, data = ("outside-own", places.data / "source") if own else ("outside", places.judges / "target")
    flags = recipe.likelihood | {"denoiser": places.model, "outside": counts}
    command = ("evaluate", "--data", str(data), *words(flags))
    folder = places.out / "likelihood" / f"r{places.share:g}-{name}"
    return Piece("likelihood", folder, command, (data.parent, *source.needs), source.about | {"outside": name})


def drawn(recipe: Recipe, places: Places, model: Model, draws: list[int]) -> Iterator[Piece]:
    """Samples of a model, and what is measured of them."""
    meta = read_meta(places.judges / "target")
    assert meta is not None
    flags, needs = recipe.sample | {"length": meta.length, "tokenizer": str(places.judges / "target")}, model.needs
    if by_candidates(model.about["method"]):
        flags |= {key: value for key, value in recipe.planned.items() if key != "places"}
        if recipe.planner is not None:
            flags["planner"], needs = str(places.out / "planner"), (*needs, places.out / "planner")
    for draw in draws:
        folder = places.out / "samples" / f"{model.name}-d{draw}"
        about = model.about | {"draw": draw, "first": draw == draws[0]}
        command = ("sample", *model.words, *words(flags | model.extra | {"seed": draw}))
        yield Piece("sample", folder, command, needs, about)
        train = about.get("fitted", places.judges / "target")
        sides = {"data": places.judges / "target", "source": places.judges / "source", "train": train}
        command = ("evaluate", "--samples", str(folder / "samples.npy"), *words(sides | recipe.measure))
        yield Piece("measure", places.out / "measure" / folder.name, command, (places.judges, folder), about)
        yield judged(recipe, places, folder.name, folder, (places.judges, folder), about)


def judged(recipe: Recipe, places: Places, name: str, samples: Path, needs: tuple[Path, ...], about: Flags) -> Piece:
    """MAUVE of a folder's samples against held-out target."""
    sides = ("--data", str(places.judges / "target"), "--samples", str(samples / "samples.npy"))
    command = ("evaluate", *sides, "--metrics", "mauve", *words(recipe.judge))
    return Piece("judge", places.out / "judge" / name, command, needs, about)


def write_real(recipe: Recipe, out: Path) -> None:
    """Real target sequences, as many as a set of samples has, to be judged as samples are."""
    path, count = out / "real" / "samples.npy", recipe.sample["count"]
    real = read_tokens(out / "data" / "target")[:count].long()
    if not path.is_file() or not torch.equal(read_tokens(path), real):
        write_tokens(path, real)
