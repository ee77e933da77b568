"""Samplers: one per file; the base owns the loop."""

from gtl.sample.ancestral import Ancestral
from gtl.sample.base import Sampler, Trace
from gtl.sample.one_position import OnePosition, left_to_right, random_order

__all__ = ["Ancestral", "OnePosition", "Sampler", "Trace", "left_to_right", "random_order"]
