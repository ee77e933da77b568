"""Density ratios: one kind per file, all under the contract of `base`."""

from gtl.ratio.base import Combination, Ratio, SequenceRatio
from gtl.ratio.local import LocalRatio
from gtl.ratio.sequence import NetworkRatio

__all__ = ["RATIOS", "Combination", "LocalRatio", "NetworkRatio", "Ratio", "SequenceRatio"]

RATIOS: dict[str, type[NetworkRatio] | type[LocalRatio]] = {kind.kind: kind for kind in (NetworkRatio, LocalRatio)}
"""Ratios that a checkpoint can hold, by the name in its config."""
