"""`gtl-knn`: nearest neighbours among the frozen denoiser's hidden states. Nothing is trained."""

import time

import torch

from gtl.estimate.base import Problem
from gtl.estimate.parts import Adapted, Part, Trained
from gtl.ratio.knn import KNNRatio, nelbo_by_setting
from gtl.train.loop import Fit, mix

__all__ = ["knn", "recipe"]


def recipe(problem: Problem, part: Part) -> Trained:
    """A store of the rows; held-out rows judge temperature and lambda."""
    started, t = time.perf_counter(), problem.training
    device = problem.device
    generator = torch.Generator(device).manual_seed(problem.seed)
    passes = min(64, -(-2 * t.knn_keys // part.rows.numel()))  # about half of the tokens are noisy in each
    store = KNNRatio.build(problem.source, part.rows.to(device), passes, t.knn_keys, generator)
    curve: dict[int, list[float]] = {}
    if part.held_out is not None:
        generator.manual_seed(mix(problem.seed, 1))  # the same corruptions, however many rows the store has
        values = nelbo_by_setting(problem.source, store, part.held_out.to(device), t.evaluation_rows, generator)
        curve[0] = values.mean(1).tolist()
    seconds = time.perf_counter() - started
    fit = Fit(0, 0, min(curve[0]) if curve else None, seconds, 0, curve)
    return Trained(problem.source, store, [fit])


def knn(problem: Problem, method: str) -> Adapted:
    """A store of hidden states."""
    return problem.run(method, recipe)
