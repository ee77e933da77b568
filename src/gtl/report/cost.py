"""What a fit costs, in words: how many weights, and how many gradient steps, those of its search included."""

from collections.abc import Iterable, Mapping, Sequence

from gtl.run import Row

__all__ = ["cost", "labels", "million"]


def million(weights: int) -> str:
    """How many weights: in millions, or one by one where there are few."""
    return f"{weights / 1e6:,.1f} M" if weights >= 1e5 else f"{weights:,}"


def cost(rows: Iterable[Row]) -> str:
    """What all fits of some rows have, '' where nothing is known; where fits differ it is the least and the most."""
    rows = list(rows)
    weights = sorted({row.trainable_weights for row in rows if row.trainable_weights})
    steps = sorted({row.value for row in rows if row.metric == "steps"})
    sizes = [f"{span([million(number) for number in weights])} weights"] if weights else []
    return ", ".join(sizes + ([f"{span([f'{number:,.0f}' for number in steps])} steps"] if steps else []))


def labels(rows: Sequence[Row], methods: Iterable[str], titles: Mapping[str, str]) -> dict[str, str]:
    """Methods as a legend has them: what a reader calls each, and in a second line what it costs."""
    costs = {method: cost(row for row in rows if row.method == method) for method in methods}
    return {method: f"{titles.get(method, method)}\n{words}".strip() for method, words in costs.items()}


def span(rising: list[str]) -> str:
    """The first and the last, once where they are the same."""
    return " to ".join(dict.fromkeys((rising[0], rising[-1])))
