"""Density ratios: one estimator per file, all under the contract of `base`."""

from gtl.ratio.base import Combination, Ratio, SequenceRatio
from gtl.ratio.sequence import NetworkRatio

__all__ = ["Combination", "NetworkRatio", "Ratio", "SequenceRatio"]
