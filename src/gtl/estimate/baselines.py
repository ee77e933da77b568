"""The baselines: a denoiser trained on the target, from noise (vanilla) or from the source (fine-tuned).

Under the common rule of choice, or as the paper trains them: a number of epochs over all target rows, last weights
kept.
"""

import copy

from gtl.denoiser import NetworkDenoiser
from gtl.estimate.base import Problem
from gtl.estimate.parts import Adapted, Part, Trained

__all__ = ["finetuned", "finetuned_epochs", "vanilla", "vanilla_epochs"]


def start(problem: Problem, from_source: bool) -> NetworkDenoiser:
    """The network that a baseline starts from."""
    return copy.deepcopy(problem.source).requires_grad_(True) if from_source else problem.fresh_denoiser()


def recipe(problem: Problem, part: Part, from_source: bool) -> Trained:
    """A denoiser on the target."""
    if part.start is None:
        model = start(problem, from_source)
    else:
        assert isinstance(part.start.denoiser, NetworkDenoiser)
        model = copy.deepcopy(part.start.denoiser)
    t, changes = problem.training, {}
    if from_source:
        changes = {"warmup": t.finetuned_warmup, "learning_rate": t.tuning_rate(problem.size)}
    objective = problem.denoiser_objective(model, part.rows, part.held_out)
    fit = problem.fit(part.name, model, objective, part.steps, stop=part.stop, **changes)
    return Trained(model, None, [fit])


def epochs(problem: Problem, method: str, from_source: bool, count: int) -> Adapted:
    """As the paper trains it."""
    model = start(problem, from_source)
    steps = count * -(-len(problem.target) // problem.training.batch_size)
    fit = problem.fit(method, model, problem.denoiser_objective(model, problem.target), steps, ema=0.0)
    return Adapted(model, steps=fit.steps, seconds=fit.seconds, weights=fit.weights)


def vanilla(problem: Problem, method: str) -> Adapted:
    """A denoiser trained on the target alone."""
    return problem.run(method, lambda problem, part: recipe(problem, part, False))


def finetuned(problem: Problem, method: str) -> Adapted:
    """The source denoiser trained on, on the target."""
    return problem.run(method, lambda problem, part: recipe(problem, part, True))


def vanilla_epochs(problem: Problem, method: str) -> Adapted:
    """Vanilla as the paper trains it."""
    return epochs(problem, method, False, problem.training.vanilla_epochs)


def finetuned_epochs(problem: Problem, method: str) -> Adapted:
    """Fine-tuned as the paper trains it."""
    return epochs(problem, method, True, problem.training.finetuned_epochs)
