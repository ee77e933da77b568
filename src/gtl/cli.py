"""The command line: a table of verbs. A function's typed signature and docstring are its flags and its help."""

import inspect
import itertools
import os
import sys
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, auto_cli

from gtl.commands.adapt import adapt
from gtl.commands.diagnose import diagnose
from gtl.commands.evaluate import evaluate
from gtl.commands.markov import demo, reproduce
from gtl.commands.mix import mix
from gtl.commands.prepare import prepare
from gtl.commands.sample import sample
from gtl.commands.train import train
from gtl.rank import take_place

__all__ = ["VERBS", "main"]

VERBS: dict[str, Any] = {
    "demo": demo,
    "reproduce": reproduce,
    "prepare": prepare,
    "mix": mix,
    "train": train,
    "diagnose": diagnose,
    "adapt": adapt,
    "sample": sample,
    "evaluate": evaluate,
}
LISTS = (
    "--n",
    "--methods",
    "--method",
    "--input",
    "--domain",
    "--text",
    "--metrics",
    "--outside",
    "--stages",
    "--shares",
    "--training.rates",
)
"""Flags that take several values, which may be written apart by blanks or commas."""
SWITCHES = ("--exclusive", "--skip_bad")
"""Flags that may stand alone."""
PLACES = {"evaluate": ("denoiser", "data")}
"""Arguments that may stand by place although they can be left out; with fewer words the last ones are meant."""


class Parser(ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str, exception: Exception | None = None) -> NoReturn:
        lines = [line.strip() for line in str(message).splitlines() if line.strip()]
        fail(" ".join(lines) + f" (see {self.prog.split(' [')[0]} --help)")


def fail(message: str) -> NoReturn:
    """Prints one clear line and ends with a non-zero exit."""
    print(f"gtl: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def normalise(arguments: list[str]) -> list[str]:
    """Writes `--n 100 20`, `--n 100,20` and `--n 100 --n 20` as `--n=[100,20]`, and `--a-b` as `--a_b`."""
    done: list[str] = []
    places: dict[str, int] = {}
    at = 0
    while at < len(arguments):
        flag, equals, value = arguments[at].partition("=")
        at += 1
        flag = flag.replace("-", "_").replace("__", "--", 1) if flag.startswith("--") else flag
        if flag in SWITCHES and not equals and "".join(arguments[at : at + 1]).lower() not in ("true", "false"):
            equals, value = "=", "true"
        if flag not in LISTS:
            done.append(flag + equals + value)
            continue
        values = [value] if value else []
        while at < len(arguments) and not arguments[at].startswith("-"):
            values.append(arguments[at])
            at += 1
        text = ",".join(value.removeprefix("[").removesuffix("]") for value in values)
        if flag in places:
            done[places[flag]] = f"{done[places[flag]].removesuffix(']')},{text}]"
        else:
            places[flag] = len(done)
            done.append(f"{flag}=[{text}]")
    return done


def by_name(verb: str, rest: list[str]) -> list[str]:
    """Writes what may stand by place by its name: `evaluate D X` as `evaluate --denoiser=D --data=X`."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), rest))
    given = {word.partition("=")[0].removeprefix("--") for word in rest if word.startswith("--")}
    free = [name for name in PLACES.get(verb, ()) if name not in given]
    if len(words) > len(free):
        return rest
    names = free[len(free) - len(words) :]
    return [f"--{name}={word}" for name, word in zip(names, words, strict=True)] + rest[len(words) :]


def by_position(arguments: list[str]) -> list[str]:
    """What a verb needs may stand as `--name value` too: `sample --denoiser D` becomes `sample D`."""
    if not arguments or arguments[0] not in VERBS:
        return arguments
    verb, *rest = arguments
    rest = by_name(verb, rest)
    needed = [p.name for p in inspect.signature(VERBS[verb]).parameters.values() if p.default is p.empty]
    leading = list(itertools.takewhile(lambda word: not word.startswith("-"), rest))
    named, others, words = {}, [], iter(rest[len(leading) :])
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.removeprefix("--") in needed and flag.startswith("--"):
            named[flag.removeprefix("--")] = value if equals else next(words, "")
        else:
            others.append(word)
    if not named:
        return [verb, *rest]
    front = [named[name] if name in named else leading.pop(0) for name in needed if name in named or leading]
    return [verb, *front, *leading, *others]


def main(arguments: list[str] | None = None) -> None:
    """Runs `gtl VERB ...`."""
    given = by_position(normalise(sys.argv[1:] if arguments is None else arguments))
    try:
        take_place(given[0] if given else "")
        auto_cli(VERBS, args=given, prog="gtl", parser_class=Parser, as_positional=True)
    except (ValueError, OSError) as error:
        if os.environ.get("GTL_TRACEBACK"):
            raise
        fail(str(error))
    except KeyboardInterrupt:
        print("gtl: stopped; the same command with the same --out goes on from the last saved state", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
