"""Samplers: one per file; the base owns the loop."""

from gtl.sample.ancestral import Ancestral
from gtl.sample.base import Sampler, Trace
from gtl.sample.first_hitting import FirstHitting
from gtl.sample.planner import OnePosition, PlannerSampler
from gtl.sample.rates import Euler, TauLeaping
from gtl.sample.remasking import Remasking
from gtl.sample.thinning import Thinning

__all__ = [
    "Ancestral",
    "Euler",
    "FirstHitting",
    "OnePosition",
    "PlannerSampler",
    "Remasking",
    "Sampler",
    "TauLeaping",
    "Thinning",
    "Trace",
]
