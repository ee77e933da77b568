"""Estimators: every way from a source model to a target model. A new one is a file here and a line in METHODS."""

from collections.abc import Callable

from gtl.estimate.base import Adapted, NetworkSize, Problem, Training
from gtl.estimate.baselines import finetuned, finetuned_epochs, vanilla, vanilla_epochs
from gtl.estimate.local import local
from gtl.estimate.paper import paper
from gtl.estimate.sequence import by_pooling, direct, likelihood

__all__ = ["METHODS", "Adapted", "NetworkSize", "Problem", "Training"]

Method = Callable[[Problem, str], Adapted]


def poolings(name: str, method: Method) -> dict[str, Method]:
    """A sequence estimator under its three names."""
    return {name: method, f"{name}-sum": method, f"{name}-mean": method}


METHODS: dict[str, Method] = {
    "vanilla": vanilla,
    "vanilla-epochs": vanilla_epochs,
    "finetuned": finetuned,
    "finetuned-epochs": finetuned_epochs,
    "gtl-local": local,
    **poolings("gtl-sequence", by_pooling(lambda pooling: likelihood(pooling, False))),
    **poolings("gtl-both", by_pooling(lambda pooling: likelihood(pooling, True))),
    **poolings("gtl-direct", by_pooling(direct)),
    **poolings("gtl-paper", by_pooling(paper)),
}
