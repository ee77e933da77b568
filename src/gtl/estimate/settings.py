"""How the networks of an experiment are trained: sizes, budgets, rules of choice."""

import math
from dataclasses import dataclass, field
from typing import Literal

from gtl.train.loop import FitSettings

__all__ = ["LARGE", "NetworkSize", "Training"]

LARGE = 1_000_000
"""Weights from which a source forgets what it knows at the rates of small ones, and can be changed at a few weights
alone."""


@dataclass
class NetworkSize:
    """A DiT's size."""

    width: int = 64
    depth: int = 2
    heads: int = 4
    dropout: float = 0.0
    tied: bool = False
    """Whether a denoiser's head has the weights of its embedding."""


@dataclass
class Training:
    """How the networks of an experiment are trained."""

    denoiser: NetworkSize = field(default_factory=lambda: NetworkSize(64, 2, 4, 0.1))
    """The source model, and vanilla and fine-tuned ones."""
    ratio: NetworkSize = field(default_factory=lambda: NetworkSize(64, 1, 4, 0.2))
    """Ratio networks and classifiers."""
    source_steps: int = 500
    """Gradient steps of the source model."""
    budget: int = 3600
    """Gradient steps of every method after that, over all its networks, those of the folds among them."""
    classifier_steps: int | None = None
    """Of each of the paper's two classifiers; a third of a recipe's share by default. The ratio network has the
    rest."""
    folds: int = 5
    """Parts of which each is held out once where target sequences are few; 0 keeps one split and trains nothing
    twice."""
    batch_size: int = 96
    learning_rate: float = 2e-3
    warmup: int = 20
    """Steps that the learning rate rises."""
    rates: list[float] = field(default_factory=lambda: [1.0])
    """What each method's learning rate is multiplied by: every one is tried, and the one with the likeliest held-out
    rows is kept; one that diverges is not. They share the budget."""
    finetuned_learning_rate: float | None = None
    """Fine-tuning's own; by default `learning_rate`, at most 3e-4 where the source has a million weights or more."""
    finetuned_warmup: int = 20
    """The same for fine-tuning, which starts from weights worth keeping."""
    lora_rank: int = 8
    """Rank of LoRA's adapters."""
    lora_alpha: int = 16
    """Their scale: what they add counts alpha / rank times."""
    lora_learning_rate: float = 2e-3
    """LoRA's own. Adapters change whole directions at once: more than this flattens the model before it learns."""
    lora_head: bool = True
    """Whether the head gets an adapter too, beside the blocks. Behind a layer norm a frozen head bounds how sure the
    model can be."""
    sparse_share: float = 0.05
    """Share of each of the source's weights that `sparse` and `gtl-sparse` change."""
    sparse_learning_rate: float | None = None
    """Their own; by default fine-tuning's where that is given, else `learning_rate`, and at most 8e-4 where the source
    has a million weights or more."""
    weighed: int = 20_000
    """Source rows that the model of each fold looks at for `-iw`; of more, counts of tokens choose."""
    unigram: bool = True
    """Whether `gtl-sparse` corrects how often each token comes, by counts on held-out rows."""
    weight_decay: float = 0.01
    ema: float = 0.99
    patience: int = 12
    """Evaluations without progress before a network stops; 0 uses the whole budget."""
    stop_ratios: bool = False
    """With `folds: 0`, whether classifiers and ratio networks keep the weights with the best held-out loss, as
    denoisers do, or the last ones. A few held-out sequences stop a classifier when it becomes overconfident, long
    before it is as good as it gets: gamma takes care of the scale."""
    evaluate_every: int = 20
    """Steps between two evaluations."""
    evaluation_rows: int = 256
    """Corrupted rows, at least, in one evaluation."""
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    label_smoothing: float = 0.1
    """Of the paper's classifiers, in torch's convention (labels 0.05 and 0.95)."""
    link: Literal["undone", "capped", "auto"] = "capped"
    """Whether the smoothing is undone before the paper's ratio network learns from the classifiers, so that its optimum
    is log r; auto trains both ratio networks, half of the steps each, and keeps the one that validates better."""
    cycle_weight: float = 0.1
    """The paper's lambda."""
    pseudo: float = 0.25
    """How many sequences the local ratio's pull toward r = 1 is worth."""
    features: bool = True
    """Whether the local ratio reads the denoiser's hidden states."""
    head: Literal["own", "source", "auto"] = "auto"
    """Whether the local ratio has an embedding and a head of its own or works through the source's; auto does where
    there are more tokens than the source is wide."""
    places: int | None = None
    """Positions of a row that the local ratio learns from in a step; by default as many as fit. At large vocabularies
    more rows with fewer places each teach more for the same work."""
    n_ratio: int | None = None
    """Candidates that sequence ratios weigh while they are fitted and judged; by default all, or 256 where there are
    more than 1,024 tokens."""
    knn_keys: int = 32_768
    """Keys, about, in a store of neighbours; sequences are corrupted as often as it takes, at most 64 times."""
    warm_start: bool = True
    """Whether sequence ratios start from the source denoiser's first blocks (where the widths agree) or from noise."""
    gamma_rule: Literal["likelihood", "samples"] = "likelihood"
    """How gamma is chosen on held-out target data: by conditional likelihood, or (with `folds: 0`) by what the samples
    look like."""
    pooling: Literal["sum", "mean", "auto"] = "sum"
    """Of sequence ratios; auto trains both and keeps the one that validates better."""
    vanilla_epochs: int = 60
    """Of `vanilla-epochs`, the paper's own baseline: epochs over the target data, last weights kept."""
    finetuned_epochs: int = 90
    """Of `finetuned-epochs`."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be in [0, 1)")
        for name in ("lora_rank", "lora_alpha", "places", "n_ratio", "weighed"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.sparse_share <= 1:
            raise ValueError(f"sparse_share={self.sparse_share} must be above 0 and at most 1")
        for name in ("lora_learning_rate", "finetuned_learning_rate", "sparse_learning_rate"):
            rate = getattr(self, name)
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"{name}={rate} must be positive")
        if not self.rates or not all(math.isfinite(rate) and rate > 0 for rate in self.rates):
            raise ValueError(f"rates={self.rates}: at least one positive number is needed")
        if len(self.rates) > 1 and not self.folds:
            raise ValueError("several rates need folds: with folds=0 nothing is trained twice")
        if self.folds < 0 or self.folds == 1:
            raise ValueError(f"folds={self.folds}: give 0 for one split, or at least 2")
        if self.folds and (self.gamma_rule == "samples" or self.link == "auto"):
            raise ValueError("gamma_rule=samples and link=auto need folds=0: a final fit on all rows holds nothing out")
        FitSettings(
            self.source_steps, batch_size=self.batch_size, learning_rate=self.learning_rate,
            weight_decay=self.weight_decay, ema=self.ema, evaluate_every=self.evaluate_every,
        )  # fmt: skip
        least = 3 * (self.folds * len(self.rates) + 1)
        if self.budget < least:
            raise ValueError(f"budget={self.budget}: {self.folds} folds and the final fit need at least {least} steps")
        share = self.budget // (self.folds * len(self.rates) + 1)
        if not 0 < 2 * self.steps_of_a_classifier(share) < share:
            raise ValueError(
                f"two classifiers of {self.classifier_steps} steps use up a budget of {self.budget} steps"
                f"{f' over {self.folds} folds and a final fit' if self.folds else ''}"
            )

    def steps_of_a_classifier(self, share: int) -> int:
        """Gradient steps of each of the paper's classifiers in a run of its recipe."""
        return share // 3 if self.classifier_steps is None else self.classifier_steps

    def tuning_rate(self, weights: int) -> float:
        """Fine-tuning's learning rate for a source of so many weights."""
        most = 3e-4 if weights >= LARGE else math.inf
        return self.finetuned_learning_rate or min(self.learning_rate, most)

    def sparse_rate(self, weights: int) -> float:
        """That of sparse changes."""
        most = 8e-4 if weights >= LARGE else math.inf
        return self.sparse_learning_rate or self.finetuned_learning_rate or min(self.learning_rate, most)

    def candidates(self, vocabulary: int) -> int:
        """How many candidates a sequence ratio weighs in a fit."""
        return min(vocabulary, self.n_ratio or (256 if vocabulary > 1024 else vocabulary))
