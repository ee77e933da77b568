"""Estimators: every way from a source model to a target model. A new one is a file here and a line in METHODS."""

from gtl.estimate.base import Method, Problem
from gtl.estimate.baselines import finetuned, finetuned_epochs, vanilla, vanilla_epochs
from gtl.estimate.borrow import ENDING, borrowing
from gtl.estimate.knn import knn
from gtl.estimate.late import late
from gtl.estimate.local import local
from gtl.estimate.lora import lora
from gtl.estimate.paper import paper
from gtl.estimate.parts import Adapted
from gtl.estimate.sequence import by_pooling, direct, likelihood
from gtl.estimate.settings import NetworkSize, Training
from gtl.estimate.sparse import guided, sparse
from gtl.estimate.stack import stacked

__all__ = ["METHODS", "Adapted", "NetworkSize", "Problem", "Training", "needs_source"]


def poolings(name: str, method: Method) -> dict[str, Method]:
    """A sequence estimator under its three names."""
    return {name: method, f"{name}-sum": method, f"{name}-mean": method}


METHODS: dict[str, Method] = {
    "vanilla": vanilla,
    "vanilla-epochs": vanilla_epochs,
    "finetuned": finetuned,
    "finetuned-epochs": finetuned_epochs,
    "lora": lora,
    "sparse": sparse,
    "gtl-local": local,
    "gtl-late": late,
    "gtl-knn": knn,
    "gtl-local-knn": stacked("gtl-local"),
    "gtl-sparse": guided,
    "gtl-stack": stacked("finetuned", "gtl-local"),
    "gtl-blend": stacked("finetuned", "sparse", average=True),
    **poolings("gtl-sequence", by_pooling(lambda pooling: likelihood(pooling, False))),
    **poolings("gtl-both", by_pooling(lambda pooling: likelihood(pooling, True))),
    **poolings("gtl-direct", by_pooling(direct)),
    **poolings("gtl-paper", by_pooling(paper)),
}
BORROWERS = ("vanilla", "finetuned", "lora", "sparse", "gtl-local", "gtl-knn")
METHODS |= {f"{name}{ENDING}": borrowing(METHODS[name]) for name in BORROWERS}


def needs_source(method: str) -> bool:
    """Whether a method works on source sequences too."""
    return method.startswith(("gtl-both", "gtl-direct", "gtl-paper")) or method.endswith(ENDING)
