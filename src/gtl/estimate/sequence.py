"""Sequence ratios: the paper's network, one number for a sequence, candidates scored by intervention.

    gtl-direct      one network, logistic loss on noisy sequences of both domains
    gtl-sequence    the same network fitted by the likelihood of target tokens
    gtl-both        by both losses together

Each as -sum, as -mean, or by the pooling that the experiment asks for.
"""

from collections.abc import Callable

from gtl.estimate.base import Problem, Recipe
from gtl.estimate.parts import Adapted, Part, Trained
from gtl.guidance import Guided
from gtl.nn.dit import Pooling
from gtl.train.classifier import ClassifierObjective
from gtl.train.likelihood import LikelihoodObjective

__all__ = ["by_pooling", "direct", "likelihood"]


def direct(pooling: Pooling) -> Recipe:
    """The direct estimator: a noisy classifier is the ratio."""

    def recipe(problem: Problem, part: Part) -> Trained:
        ratio = problem.fresh_sequence_ratio(pooling)
        objective = ClassifierObjective(problem.source.process, *problem.domains(part))
        fit = problem.fit(part.name, ratio, problem.judged(objective, ratio, part), part.steps, stop=part.stop)
        return Trained(problem.source, ratio, [fit])

    return recipe


def likelihood(pooling: Pooling, logistic: bool) -> Recipe:
    """The paper's network fitted by conditional likelihood, alone or together with the logistic loss."""

    def recipe(problem: Problem, part: Part) -> Trained:
        ratio = problem.fresh_sequence_ratio(pooling)
        guided = Guided(problem.source, ratio, 1.0, problem.candidates, keep_tail=True)
        source = problem.domains(part)[0]["source"] if logistic else None
        objective = LikelihoodObjective(guided, part.rows, part.held_out, source=source)
        fit = problem.fit(part.name, guided, objective, part.steps, stop=part.stop)
        return Trained(problem.source, guided.ratio, [fit])

    return recipe


def by_pooling(recipe: Callable[[Pooling], Recipe]) -> Callable[[Problem, str], Adapted]:
    """A method from a recipe for each pooling: METHOD-sum, METHOD-mean, or METHOD, the one that validates better."""

    def method(problem: Problem, name: str) -> Adapted:
        if name.endswith("-sum"):
            return problem.run(name, recipe("sum"))
        if name.endswith("-mean"):
            return problem.run(name, recipe("mean"))
        wanted = problem.training.pooling
        names = [f"{name}-{pooling}" for pooling in (("sum", "mean") if wanted == "auto" else (wanted,))]
        return min((problem.adapted(each) for each in names), key=lambda result: result.score)

    return method
