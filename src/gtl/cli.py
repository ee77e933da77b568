"""The command line: a table of verbs. A function's typed signature and docstring are its flags and its help."""

import os
import sys
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, auto_cli

from gtl.commands.adapt import evaluate, sample
from gtl.commands.markov import demo, reproduce
from gtl.commands.train import train

__all__ = ["VERBS", "main"]

VERBS: dict[str, Any] = {
    "demo": demo,
    "reproduce": reproduce,
    "train": train,
    "sample": sample,
    "evaluate": evaluate,
}
LISTS = ("--n", "--methods")
"""Flags that take several values, which may be written apart by blanks or commas."""


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
    """Writes `--n 100 20` and `--n 100,20` as `--n=[100,20]`, and `--source-matrix` as `--source_matrix`."""
    done: list[str] = []
    at = 0
    while at < len(arguments):
        flag, equals, value = arguments[at].partition("=")
        at += 1
        flag = flag.replace("-", "_").replace("__", "--", 1) if flag.startswith("--") else flag
        if flag not in LISTS:
            done.append(flag + equals + value)
            continue
        values = [value] if value else []
        while at < len(arguments) and not arguments[at].startswith("-"):
            values.append(arguments[at])
            at += 1
        text = ",".join(values)
        done.append(f"{flag}={text}" if text.startswith("[") else f"{flag}=[{text}]")
    return done


def main(arguments: list[str] | None = None) -> None:
    """Runs `gtl VERB ...`."""
    given = normalise(sys.argv[1:] if arguments is None else arguments)
    try:
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
