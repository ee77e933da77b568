"""`gtl-stack`: the fine-tuned model's difference from its source, a local ratio and neighbours, added up.

Other names take on other members, neighbours always among them: `gtl-local-knn` the local ratio alone, and
`gtl-blend` fine-tuning and sparse changes, the weights of their folds' fits averaged with those of the final one.

Members are trained as each is on its own, with its whole budget, so that the stack costs what its members cost (`steps`
says how much); neighbours train nothing. A member with what another left over is a flat model,
and mixing with that is shrinkage: likelier tokens on held-out rows, worse samples (measured).

The models of a fold speak of the rows that it held out, and from all held-out tokens come

1. the weights of the trained ones, which add up to 1 (a geometric mean of target models): the best one alone, unless
   held-out tokens become likelier with another by more than a standard error;
2. temperature and lambda of the neighbours, which are mixed into that model (`ratio/successive`), if that makes
   held-out tokens likelier by more than two standard errors: mixing hedges, which likelihood likes more than samples.

So the stack is never less likely there than its best member. Neighbours are not a third term of the sum: their floor
is a share of the model that they are mixed into, and mixed into the *source* they pull samples back to it (measured:
better likelihood, worse samples).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gtl.estimate.base import Method, Problem, Recipe
from gtl.estimate.baselines import recipe as baseline
from gtl.estimate.knn import recipe as knn
from gtl.estimate.local import recipe as local
from gtl.estimate.mean import mean_of_weights
from gtl.estimate.parts import Adapted, Part, Trained
from gtl.estimate.sparse import recipe as sparse
from gtl.guidance import Guided
from gtl.ratio import Combination, KNNRatio, Ratio
from gtl.ratio.gamma import CELLS
from gtl.ratio.knn import SETTINGS, nelbo_by_setting
from gtl.ratio.successive import SuccessiveRatio
from gtl.ratio.weights import gather_evidence, join, select_weights

__all__ = ["stacked"]

MEMBERS: dict[str, Recipe] = {
    "finetuned": lambda problem, part: baseline(problem, part, True),
    "sparse": sparse,
    "gtl-local": local,
}
ROWS = 4096
"""Held-out corruptions behind the weights, over all folds."""
LOOKED_UP = 1024
"""Held-out sequences of a fold, at most, that neighbours are tried on."""
LEAST = 64, 512
"""Sequences that neighbours are tried on, and places behind the weights, however large the vocabulary is."""


def weighted(weights: Sequence[float], ratios: Sequence[Ratio]) -> Combination:
    """The sum of those with a weight; what gamma each had is left to the weights."""
    return Combination([(weight, ratio) for weight, ratio in zip(weights, ratios, strict=True) if weight])


def neighbours(problem: Problem, base: Ratio, rows: Tensor, held_out: Tensor) -> np.ndarray:
    """The NELBO of held-out sequences under every setting of neighbours among `rows`, on top of `base`: (S, N)."""
    store = knn(problem, Part(rows, None, 0)).ratio
    assert isinstance(store, KNNRatio)
    model, generator = Guided(problem.source, base, 1.0), torch.Generator(problem.device).manual_seed(problem.seed)
    fitting = max(LEAST[0], 8 * cells(problem) // held_out.shape[1])
    some = held_out[: min(LOOKED_UP, fitting)].to(problem.device)
    return nelbo_by_setting(model, store, some, min(512, fitting), generator).cpu().numpy()


def cells(problem: Problem) -> int:
    """Places whose log-probabilities a device holds at once without trouble."""
    return CELLS.get(problem.device.type, 2**28) // problem.source.process.num_ids


def best_setting(values: np.ndarray) -> int:
    """The index of the setting with the lowest mean NELBO (S, N), if it is lower than none at all by more than two
    standard errors over sequences; else of none at all."""
    best, none = int(values.mean(1).argmin()), next(i for i, (_, weight) in enumerate(SETTINGS) if not weight)
    ahead = values[none] - values[best]
    sure = len(ahead) > 1 and ahead.mean() > 2 * ahead.std(ddof=1) / len(ahead) ** 0.5
    return best if sure else none


def stacked(*members: str, average: bool = False) -> Method:
    """The method that stacks some members, and neighbours; with `average`, not the final fits alone."""
    return lambda problem, method: stack(problem, method, members, average)


def stack(problem: Problem, method: str, members: Sequence[str], average: bool) -> Adapted:
    """Ratios, stacked."""
    parts, source = problem.parts(), problem.source
    attempts, finals = zip(*(problem.trained(name, MEMBERS[name]) for name in members), strict=True)
    folds = [[attempt.tried[number].as_ratio() for attempt in attempts] for number in range(len(parts))]
    whole = [
        mean_of_weights(problem, attempt, final) if average else final.as_ratio()
        for attempt, final in zip(attempts, finals, strict=True)
    ]
    rows = -(-min(ROWS, max(LEAST[1], cells(problem))) // len(parts))
    evidence = [
        gather_evidence(source, ratios, held[:rows].to(problem.device), rows, problem.seed)
        for ratios, (_, held) in zip(folds, parts, strict=True)
    ]
    weights = select_weights(join(evidence))
    fits = [fit for attempt in attempts for fit in attempt.fits()] + [fit for made in finals for fit in made.fits]
    ratio: Ratio = weighted(weights, whole)
    values = [neighbours(problem, weighted(weights, ratios), *part) for ratios, part in zip(folds, parts, strict=True)]
    index = best_setting(np.concatenate(values, 1))
    score = float(np.mean([fold[index].mean() for fold in values]))
    temperature, weight = SETTINGS[index]
    if weight:
        store = knn(problem, Part(problem.target, None, 0)).ratio
        assert isinstance(store, KNNRatio)
        store.temperature, store.weight = temperature, weight
        ratio = SuccessiveRatio(ratio, store)
    if problem.log is not None:
        chosen = dict(zip(members, weights, strict=True)) | {"neighbours": weight, "temperature": temperature}
        problem.log({"network": f"{problem.label}{method}", "weights": chosen, "held_out": score})
    made = problem.result(Trained(source, ratio, fits), fits, score)
    kept = [final.fits[-1].weights for weight, final in zip(weights, finals, strict=True) if weight]
    return replace(made, weights=sum(kept))
