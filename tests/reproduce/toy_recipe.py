"""A recipe at toy size."""

import copy
from pathlib import Path
from typing import Any

import yaml

NETWORK = {"width": 8, "depth": 1, "heads": 2}
FIT = {"batch_size": 16, "evaluation_rows": 64}
RECIPE: dict[str, Any] = {
    "prepare": {
        "input": ["arxiv-metadata-oai-snapshot.json"],
        "tokenizer": "vocab.txt",
        "length": 8,
        "domain": ["source=categories:cs,math", "target=categories:hep,astro"],
        "exclusive": True,
        "validation": 0.5,
    },
    "source": {"network": NETWORK | {"tied": True}, "fit": FIT | {"steps": 6, "evaluate_every": 3}},
    "mixed": {"fit": {"steps": 4}},
    "planner": {"network": NETWORK, "fit": FIT | {"steps": 4, "evaluate_every": 2}},
    "diagnose": {"steps": 1},
    "subsets": [2],
    "draws": [0],
    "worlds": [
        {"share": 0, "fractions": [0.5, 0.1], "methods": [["finetuned", "gtl-local"], "gtl-paper"]},
        {"share": 0.25, "fractions": [0.1], "methods": ["gtl-paper", ["finetuned", "finetuned-iw"]]},
    ],
    "adapt": {"training": {"budget": 12, "folds": 2, "ratio": NETWORK, "evaluate_every": 2, **FIT}},
    "sample": {"count": 100},
    "planned": {"n_ratio": 4, "places": 2},
    "likelihood": {"draws": 1},
    "measure": {},
    "judge": {"featurizer": "reader", "kmeans_seeds": 1, "words": 4},
    "sweeps": [
        {
            "method": "gtl-paper", "fractions": [0.1], "gammas": [0, 2], "n_ratio": [2], "outside": [2, 8],
            "subsets": [2], "draws": [3],
        },
        {"method": "gtl-local", "fractions": [0.5, 0.1], "gammas": [1.5], "shares": [0], "likelihood": True},
    ],
}  # fmt: skip

SOURCE = [{"share": 0}]
"""A world in which nothing is adapted."""
RUN = "reproduce arxiv --recipe toy.yaml --out out"


def write_recipe(**changes: Any) -> None:
    Path("toy.yaml").write_text(yaml.safe_dump(RECIPE | changes))


def changed(*path: str | int, to: Any = ...) -> dict[str, Any]:
    """The recipe with something else in one place, or with nothing there."""
    recipe = copy.deepcopy(RECIPE)
    place: Any = recipe
    for key in path[:-1]:
        place = place[key]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return recipe
