"""`gtl-paper`: the paper's estimator, a clean and a noisy classifier and then the ratio network from both."""

from gtl.estimate.base import Problem, Recipe
from gtl.estimate.parts import Part, Trained
from gtl.nn.dit import Pooling
from gtl.ratio import NetworkRatio
from gtl.train.classifier import ClassifierObjective
from gtl.train.ratio import RatioObjective

__all__ = ["paper"]


def paper(pooling: Pooling) -> Recipe:
    """The paper's three networks (four with `link: auto`)."""

    def recipe(problem: Problem, part: Part) -> Trained:
        t, process, fits = problem.training, problem.source.process, []
        train, held_out = problem.domains(part)
        each = t.steps_of_a_classifier(part.steps)
        clean, noisy = (problem.fresh_sequence_ratio(pooling, t.label_smoothing) for _ in range(2))
        for name, classifier in (("clean", clean), ("noisy", noisy)):
            objective = ClassifierObjective(process, train, held_out, classifier is noisy, t.label_smoothing)
            fits.append(problem.fit(f"{part.name}, {name} classifier", classifier, objective, each))
        links = ("undone", "capped") if t.link == "auto" else (t.link,)
        steps, ratios = (part.steps - 2 * each) // len(links), []
        for link in links:
            if link == "capped":
                clean, noisy = (NetworkRatio(process, ratio.network) for ratio in (clean, noisy))
            ratio = problem.fresh_sequence_ratio(pooling)
            last = RatioObjective(process, clean, noisy, train, held_out, t.cycle_weight)
            name = f"{part.name}, ratio ({link})"
            fits.append(problem.fit(name, ratio, problem.judged(last, ratio, part), steps, stop=part.stop))
            ratios.append(ratio)
        return Trained(problem.source, ratios[0], fits, ratios[1:])

    return recipe
