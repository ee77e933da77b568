"""The picture of a planner: accuracy and calibration by noise level."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gtl.evaluate.planner import Level
from gtl.train.checkpoint import atomic

__all__ = ["draw"]

BLUE, ORANGE, GREY = "#2a6f97", "#e07a1f", "#888888"


def draw(path: Path, levels: list[Level]) -> None:
    """Writes the figure as a .png file; the first level is all of them together."""
    whole, *parts = levels
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    t = [(level.low + level.high) / 2 for level in parts]
    left.plot(t, [level.accuracy for level in parts], "o-", color=BLUE, label="planner")
    commoner = [max(level.right, 1 - level.right) for level in parts]
    left.plot(t, commoner, "s--", color=GREY, markersize=4, label="always the commoner answer")
    left.set(xlabel="noise level t (share masked)", ylabel="accuracy", ylim=(0.4, 1.02), xlim=(0, 1))
    left.set_title(f"all levels: {whole.accuracy:.3f}", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    right.plot(t, [level.predicted for level in parts], "o-", color=BLUE, label="predicted chance")
    right.plot(t, [level.right for level in parts], "s--", color=ORANGE, markersize=4, label="share right")
    right.set(xlabel="noise level t (share masked)", ylabel="first choice is right", ylim=(0, 1.02), xlim=(0, 1))
    right.set_title(f"calibration error: {whole.calibration_error:.3f}", fontsize=10)
    right.legend(frameon=False, fontsize=8)
    with atomic(path) as handle:
        figure.savefig(handle, format="png", dpi=150)
