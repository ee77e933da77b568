"""Domains by a rule on a field: a document belongs where the first word of the field begins with one of the prefixes.

    physics=categories:physics,hep,astro-ph      the primary category is physics.*, hep-*, astro-ph.*
    math=categories:math.                        math.AG and the like, and not math-ph

Without a rule all documents are one domain, `all`. Domains are disjoint: overlapping prefixes are refused, and where
rules are on different fields every document is checked.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Rule", "domain_of", "read_rules", "words_of"]


@dataclass(frozen=True)
class Rule:
    """The domain `name` has the documents whose `field` begins with one of `prefixes`."""

    name: str
    field: str
    prefixes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.field}:{','.join(self.prefixes)}"

    def matches(self, words: Iterable[str]) -> bool:
        """Whether any of the words begins with one of the prefixes."""
        return any(word.startswith(self.prefixes) for word in words)


def read_rules(texts: Sequence[str]) -> list[Rule]:
    """Rules from `name=field:prefix,prefix,...`; they may have been parted at their commas."""
    whole: list[str] = []
    for text in texts:
        if "=" in text or not whole:
            whole.append(text)
        else:
            whole[-1] += f",{text}"
    rules: list[Rule] = []
    for text in whole:
        name, _, rest = text.partition("=")
        field, _, values = rest.partition(":")
        prefixes = tuple(value.strip() for value in values.split(",") if value.strip())
        if not name.strip() or not field.strip() or not prefixes:
            raise ValueError(f"domain {text!r}: expected NAME=FIELD:PREFIX,... such as physics=categories:physics,hep")
        rules.append(Rule(name.strip(), field.strip(), prefixes))
    _check(rules)
    return rules


def _check(rules: Sequence[Rule]) -> None:
    """Refuses names that are no folder's or come twice, and prefixes of which one begins another domain's."""
    for at, rule in enumerate(rules):
        if not re.fullmatch(r"\w[\w.+-]*", rule.name):
            raise ValueError(f"domain {rule.name!r}: its name must serve as a folder's (letters, digits, . _ + -)")
        for other in rules[:at]:
            if rule.name == other.name:
                raise ValueError(f"domain {rule.name!r} is given twice; put all of its prefixes into one rule")
            for a, b in ((a, b) for a in rule.prefixes for b in other.prefixes if rule.field == other.field):
                if a.startswith(b) or b.startswith(a):
                    short, long = sorted((a, b), key=len)
                    raise ValueError(
                        f"domains {other.name!r} and {rule.name!r} overlap: {short!r} begins {long!r} too; "
                        "make the prefixes longer (math. is not math-ph), for domains must be disjoint"
                    )


def words_of(value: Any) -> list[str]:
    """The blank-separated words of a field, of all its items where it is a list."""
    if isinstance(value, list | tuple):
        return [word for item in value for word in words_of(item)]
    return [] if value is None else str(value).split()


def domain_of(rules: Sequence[Rule], record: Mapping[str, Any], exclusive: bool) -> tuple[str | None, bool]:
    """The domain of a record, and whether it is left out for being cross-listed to another domain.

    Raises ValueError where two rules match, and KeyError with the field's name where a rule's field is missing.
    """
    found: Rule | None = None
    for rule in rules:
        if rule.matches(words_of(record[rule.field])[:1]):
            if found is not None:
                raise ValueError(f"belongs to domain {found.name!r} and to {rule.name!r}; domains must be disjoint")
            found = rule
    if found is None:
        return None, False
    others = (rule for rule in rules if rule is not found)
    return found.name, exclusive and any(rule.matches(words_of(record[rule.field])) for rule in others)
