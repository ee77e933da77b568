"""A recipe file of the arXiv experiments: what it may say, read and checked before anything runs."""

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gtl.estimate import METHODS

__all__ = ["Flags", "Recipe", "Sweep", "Variant", "World", "read_recipe"]

Flags = dict[str, Any]
"""Settings of a command, as its flags are called."""


def check_list(value: Any, name: str, kind: type | tuple[type, ...]) -> None:
    """Refuses what is no list of different things of a kind, or an empty one."""
    good = isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)
    if not good or not value or len({*value}) < len(value):
        raise ValueError(f"{name}: a list of different values is needed, not {value!r}")


def check_fractions(value: Any) -> None:
    """Refuses what is no list of shares of the target."""
    check_list(value, "fractions", (int, float))
    for fraction in value:
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction {fraction} must be above 0 and at most 1")


def check_method(name: Any) -> None:
    """Refuses what is no method."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; choose among {', '.join(METHODS)}")


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
            check_fractions(self.fractions)
            if not isinstance(self.methods, list) or [] in self.methods:
                raise ValueError(f"methods: a list of names, or of lists of names, is needed, not {self.methods!r}")
            check_list(self.names, "methods", str)
        for method in self.names:
            check_method(method)

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
    """One ratio at many strengths and numbers of candidates.

    Where it is none of a world's methods, or not fitted to that fraction, it is fitted for the sweep alone.
    """

    method: str
    fractions: list[float]
    gammas: list[float]
    n_ratio: list[int | str] = field(default_factory=lambda: ["all"])
    """Numbers of candidates, or `all`."""
    shares: list[float] | None = None
    """Those of the worlds that it is done in; all by default."""
    subsets: list[int] | None = None
    """Those of the recipe's that it is done for; the first by default."""
    draws: list[int] = field(default_factory=lambda: [0])
    """Seeds of its samples."""
    outside: list[int] = field(default_factory=list)
    """Numbers of candidates for which it is measured how much of the target's text, and of the source's own, is outside
    them; by default those of n_ratio."""
    likelihood: bool = False
    """Whether held-out target is measured too."""

    def __post_init__(self) -> None:
        check_method(self.method)
        check_fractions(self.fractions)
        check_list(self.gammas, "gammas", (int, float))
        check_list(self.n_ratio, "n_ratio", (int, str))
        if bad := [count for count in self.n_ratio if isinstance(count, str) and count != "all"]:
            raise ValueError(f"n_ratio: {bad[0]!r} is neither a number of candidates nor 'all'")
        check_list(self.draws, "draws", int)
        if not 0 <= min(self.draws) <= max(self.draws) < 10:
            raise ValueError(f"the sweep's draws {self.draws} must be from 0 to 9")
        if self.outside:
            check_list(self.outside, "outside", int)
        else:
            self.outside = [count for count in self.n_ratio if isinstance(count, int)]


@dataclass
class Variant:
    """Further methods, or some under other settings, at some fractions, where the source has seen no target."""

    method: str | list[str]
    """Those of a list are adapted by one command."""
    fractions: list[float]
    ending: str = ""
    """Under other settings, what rows add to a method's name."""
    adapt: Flags = field(default_factory=dict)
    """Changes to the recipe's `adapt`."""
    subsets: list[int] | None = None
    """Those of the recipe's that it is done for; all by default."""

    def __post_init__(self) -> None:
        check_list(self.group, "a variant's method", str)
        for method in self.group:
            check_method(method)
        check_fractions(self.fractions)
        if not isinstance(self.adapt, dict) or bool(self.adapt) != bool(self.ending):
            raise ValueError(f"variant of {self.group[0]}: an ending of its name and changes to adapt belong together")
        for name in self.names if self.ending else []:
            if name in METHODS or not re.fullmatch(r"[a-z0-9-]+", str(self.ending)):
                raise ValueError(f"variant {name!r}: the ending must be letters and digits, and the name must be new")

    @property
    def group(self) -> list[str]:
        """Its methods."""
        return self.method if isinstance(self.method, list) else [self.method]

    @property
    def names(self) -> list[str]:
        """What rows call them."""
        return [f"{method}-{self.ending}" if self.ending else method for method in self.group]


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
    sweeps: list[Sweep] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)
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
        if len({sweep.method for sweep in self.sweeps}) < len(self.sweeps):
            raise ValueError("two sweeps are of the same method")
        shares = [world.share for world in self.worlds]
        if self.variants and 0 not in shares:
            raise ValueError("variants are fitted where share is 0: no world has that")
        taken = [name for world in self.worlds if not world.share for name in world.names]
        for name in (name for variant in self.variants for name in variant.names):
            if name in taken:
                raise ValueError(f"variant {name!r} is there already")
            taken.append(name)
        for variant in self.variants:
            variant.subsets = self.own_subsets(variant.subsets, self.subsets, "variant")
        for sweep in self.sweeps:
            sweep.subsets = self.own_subsets(sweep.subsets, self.subsets[:1], "sweep")
            sweep.shares = shares if sweep.shares is None else sweep.shares
            check_list(sweep.shares, "the sweep's shares", (int, float))
            if not {*sweep.shares} <= {*shares}:
                raise ValueError(f"the sweep's shares {sweep.shares} are not among the worlds', {shares}")

    def own_subsets(self, given: list[int] | None, default: list[int], whose: str) -> list[int]:
        """Those of a sweep or a variant, which must be among the recipe's."""
        if given is None:
            return default
        check_list(given, f"the {whose}'s subsets", int)
        if not {*given} <= {*self.subsets}:
            raise ValueError(f"the {whose}'s subsets {given} are not among the recipe's, {self.subsets}")
        return given


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
        for key, kind in {"worlds": World, "sweeps": Sweep, "variants": Variant}.items():
            if key in value:
                if not isinstance(value[key], list):
                    raise TypeError(f"{key}: a list is needed")
                value[key] = [build(kind, one, key) for one in value[key]]
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
