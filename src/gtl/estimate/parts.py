"""What a recipe works on, what it gives, and what comes of it on every fold."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gtl.denoiser import Denoiser
from gtl.guidance import Guided
from gtl.ratio import DifferenceRatio, KNNRatio, Ratio
from gtl.ratio.gamma import GAMMAS
from gtl.ratio.knn import SETTINGS
from gtl.train.loop import Fit

__all__ = ["Adapted", "Attempt", "Part", "Trained"]


@dataclass
class Part:
    """What one run of a recipe works on."""

    rows: Tensor
    """Target rows to train on."""
    held_out: Tensor | None
    """Target rows to judge by; None in the final fit."""
    steps: int
    """Gradient steps at most, over all networks."""
    stop: int | None = None
    """The chosen step of the last network, in the final fit."""
    name: str = ""
    start: "Trained | None" = None
    """A model to train on, instead of a fresh one."""
    number: int = 0
    """Of the fold, from 1; 0 is the final fit."""


@dataclass
class Trained:
    """What a recipe gives."""

    denoiser: Denoiser
    ratio: Ratio | None
    fits: list[Fit]
    """Of every network; the last one's curve is what step and gamma are chosen from."""
    rivals: Sequence[Ratio] = ()
    """Further ratios that may turn out better (with `folds: 0`)."""

    def settle(self, index: int) -> None:
        """Takes up the setting that was chosen: of a score's numbers the one at this index, as a rule a gamma."""
        if isinstance(self.ratio, KNNRatio):
            self.ratio.temperature, self.ratio.weight = SETTINGS[index]
        elif self.ratio is not None:
            self.ratio.gamma = GAMMAS[index]

    def favourite(self) -> int | None:
        """The index of gamma = 1, where the settings are gammas."""
        return None if self.ratio is None or isinstance(self.ratio, KNNRatio) else GAMMAS.index(1.0)

    def as_ratio(self) -> Ratio:
        """What it says, as a ratio; a tuned model's is its difference from the source."""
        return DifferenceRatio(self.denoiser) if self.ratio is None else self.ratio  # type: ignore[arg-type]

    def model(self) -> Denoiser:
        """The target model."""
        return self.denoiser if self.ratio is None else Guided(self.denoiser, self.ratio)


@dataclass
class Adapted:
    """A target model: a denoiser, with a ratio if it is guided."""

    denoiser: Denoiser
    ratio: Ratio | None = None
    gamma: float = 1.0
    score: float = float("nan")
    """What held-out target rows said of it when it was chosen; lower is better."""
    steps: int = 0
    seconds: float = 0.0
    weights: int = 0
    """Trainable numbers, over all networks of the model that is kept."""
    borrowed: int | None = None
    """Source rows that joined the target's in the final fit, where that was asked for."""
    judged: int | None = None
    """Held-out parts that said so, where it was not all of them."""


@dataclass
class Attempt:
    """A recipe on every fold."""

    tried: list[Trained]
    steps: int
    """Gradient steps at most, in each."""
    step: int
    """The chosen step of the last network."""
    index: int
    """The chosen setting."""
    score: float
    """The mean held-out score there."""
    rate: float = 1.0
    """What learning rates were multiplied by."""
    others: list[Fit] = field(default_factory=list)
    """Fits at other rates, which were not better or diverged."""

    def fits(self) -> list[Fit]:
        """Of every network that was trained."""
        return [*(fit for trained in self.tried for fit in trained.fits), *self.others]
