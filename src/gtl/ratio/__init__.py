"""Density ratios: one kind per file, all under the contract of `base`."""

from gtl.ratio.base import Combination, ConditionalRatio, Ratio, SequenceRatio
from gtl.ratio.difference import DifferenceRatio
from gtl.ratio.knn import KNNRatio
from gtl.ratio.late import LateRatio
from gtl.ratio.local import LocalRatio
from gtl.ratio.sequence import NetworkRatio
from gtl.ratio.sparse import SparseRatio
from gtl.ratio.unigram import UnigramRatio

__all__ = [
    "RATIOS",
    "Combination",
    "ConditionalRatio",
    "DifferenceRatio",
    "KNNRatio",
    "LateRatio",
    "LocalRatio",
    "NetworkRatio",
    "Ratio",
    "SequenceRatio",
    "SparseRatio",
    "UnigramRatio",
]

KINDS: tuple[type[Ratio], ...] = (
    NetworkRatio, LateRatio, LocalRatio, KNNRatio, DifferenceRatio, SparseRatio, UnigramRatio,
)  # fmt: skip
RATIOS: dict[str, type[Ratio]] = {kind.kind: kind for kind in KINDS}
"""Ratios that a checkpoint can hold, by the name in its config."""
