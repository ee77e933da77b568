"""The picture of a diagnosis: gains with their intervals, calibration, and how far apart the domains are."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gtl.diagnose import Diagnosis
from gtl.train.checkpoint import atomic

__all__ = ["draw"]

BLUE, ORANGE, GREY = "#2a6f97", "#e07a1f", "#888888"


def draw(path: Path, found: Diagnosis) -> None:
    """Writes the figure as a .png file."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.15, 0.85, 1))
    gains = sorted(found.gains, key=lambda gain: gain.gain)
    places = range(len(gains))
    centre = [gain.gain for gain in gains]
    spread = [[g.gain - g.low for g in gains], [g.high - g.gain for g in gains]]
    colours = [ORANGE if gain.name == "finetuned" else BLUE for gain in gains]
    left.barh(places, centre, xerr=spread, color=colours, height=0.6, ecolor="#333333", capsize=3)
    left.set_yticks(places, [gain.name for gain in gains])
    left.axvline(0, color=GREY, linewidth=0.8)
    left.set_xlabel("gain over the source, nats a token (95 %)")
    left.set_title("held-out likelihood", fontsize=10)
    middle.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle="--")
    predicted, observed, rows = (np.array(each) for each in zip(*found.reliability, strict=True))
    middle.scatter(predicted, observed, s=15 + 120 * rows / rows.sum(), color=BLUE, alpha=0.8)
    middle.plot(predicted, observed, color=BLUE, linewidth=1)
    middle.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xlabel="predicted chance of target", ylabel="share of target")
    middle.set_title(f"calibration (error {found.calibration_error:.3f})", fontsize=10)
    values = found.log_ratios
    low, high = (np.quantile([*values["target"], *values["source"]], q) for q in (0.002, 0.998))
    high = max(high, low + 1e-3)
    bins = np.linspace(low, high, 40)
    name = "source (its samples)" if found.source_sampled else "source"
    right.hist(np.clip(values["source"], low, high), bins, density=True, color=GREY, alpha=0.7, label=name)
    right.hist(np.clip(values["target"], low, high), bins, density=True, color=ORANGE, alpha=0.7, label="target")
    right.set(xlabel="log r of a sequence", yticks=[])
    right.legend(frameon=False, fontsize=8)
    right.set_title(f"overlap (AUC {found.auc:.3f}, effective rows {found.effective_rows:.0f})", fontsize=10)
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
    with atomic(path) as handle:
        figure.savefig(handle, dpi=150, format="png")
