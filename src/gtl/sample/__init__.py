"""Samplers: one per file; the base owns the loop."""

from gtl.sample.ancestral import Ancestral
from gtl.sample.base import Sampler, Trace
from gtl.sample.first_hitting import FirstHitting
from gtl.sample.one_position import OnePosition, left_to_right, random_order
from gtl.sample.rates import Euler, TauLeaping
from gtl.sample.remasking import Remasking
from gtl.sample.thinning import Thinning

__all__ = [
    "Ancestral",
    "Euler",
    "FirstHitting",
    "OnePosition",
    "Remasking",
    "Sampler",
    "TauLeaping",
    "Thinning",
    "Trace",
    "left_to_right",
    "random_order",
]
