"""What `gtl evaluate --samples` measures: metrics by name, each a list of (who, metric, value).

Whatever is said of the samples is said of held-out data too, as many sequences of the same length, so that a reader
sees the level of real text. Everything is opened and checked before anything is measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

import torch
from torch import Tensor

from gtl.evaluate.diversity import diversity, token_entropy
from gtl.evaluate.domain import FEWEST, Domain, DomainClassifier, fit_domain
from gtl.evaluate.mauve import enough, mauve_of_texts, open_featurizer
from gtl.evaluate.memorisation import memorisation
from gtl.evaluate.perplexity import generative_perplexity, open_language_model
from gtl.evaluate.texts import Reader, equal, open_reader

__all__ = ["METRICS", "Metric", "Samples", "choose"]

Metric = Literal["mauve", "diversity", "memorisation", "perplexity", "domain"]
Value = tuple[str, str, float]
Progress = Callable[[float], None]
METRICS: dict[str, tuple[str | None, str]] = {
    "diversity": (None, "token_entropy"),
    "memorisation": ("train", "longest_copy"),
    "mauve": ("featurizer", "mauve"),
    "perplexity": ("language_model", "generative_perplexity"),
    "domain": ("source", "domain_score"),
}
"""The flag that a metric needs, and the last of the samples' rows that it writes."""
STEPS = 300
"""Of the domain classifier, at most."""
TRAINED: dict[tuple[object, ...], tuple[DomainClassifier, Domain]] = {}
"""The last domain classifier, by what it was trained on."""


def choose(metrics: list[Metric] | None, given: dict[str, str | None]) -> list[str]:
    """The metrics to measure, in order: those asked for, or all whose flag is given."""
    if metrics is None:
        return [name for name, (flag, _) in METRICS.items() if flag is None or given[flag] is not None]
    if not metrics:
        raise ValueError(f"--metrics names none; choose among {', '.join(METRICS)}")
    for name in metrics:
        flag = METRICS[name][0]
        if flag is not None and given[flag] is None:
            raise ValueError(f"the metric {name} needs --{flag}")
    return [name for name in METRICS if name in metrics]


@dataclass
class Samples:
    """Samples, what they are compared with, and what judges them; see `gtl evaluate --help`."""

    samples: str
    data: str
    metrics: list[str]
    train: str | None = None
    source: str | None = None
    tokenizer: str | None = None
    featurizer: str | None = None
    language_model: str | None = None
    kmeans_seeds: int = 5
    buckets: int | None = None
    words: int | None = None
    seed: int = 0
    device: str | torch.device = "cpu"

    def __post_init__(self) -> None:
        if self.kmeans_seeds < 1:
            raise ValueError(f"kmeans_seeds={self.kmeans_seeds} must be at least 1")
        if self.buckets is not None and self.buckets < 2:
            raise ValueError(f"buckets={self.buckets} must be at least 2")
        if self.words is not None and self.words < 1:
            raise ValueError(f"words={self.words} must be at least 1")
        self.reader: Reader = open_reader(self.tokenizer, self.data, self.train, self.source)
        if self.reader.tokenizer is None and {"mauve", "perplexity"} & {*self.metrics}:
            name = "mauve" if "mauve" in self.metrics else "perplexity"
            raise ValueError(f"the metric {name} reads text: give a --tokenizer, or --data that gtl prepare made")
        self.all_samples, self.held_out = (self.reader.read(path) for path in (self.samples, self.data))
        x, real = equal(self.all_samples, self.held_out, self.seed)
        self.sides = {name: torch.from_numpy(side) for name, side in (("samples", x), ("held_out", real))}
        self.n = len(x)
        if "memorisation" in self.metrics and self.train is not None:
            self.training = self.reader.read(self.train, "train").numpy()
        if "domain" in self.metrics and self.source is not None:
            self.domains = [self.reader.content(v) for v in (self.reader.read(self.source), self.held_out)]
            for name, domain in zip((self.source, self.data), self.domains, strict=True):
                if len(domain) < FEWEST:
                    raise ValueError(f"{name}: {len(domain)} sequences; the domain classifier needs {FEWEST}")
        if "mauve" in self.metrics and self.featurizer is not None:
            if self.buckets is not None and self.buckets > 2 * self.n:
                raise ValueError(f"buckets={self.buckets} exceeds the {2 * self.n} sequences of both sides")
            self.features = open_featurizer(self.featurizer, self.device)
            enough(len(self.all_samples), len(self.held_out))
        if "perplexity" in self.metrics and self.language_model is not None:
            self.judge = open_language_model(self.language_model, self.device)

    def measure(self, name: str, on_progress: Progress) -> list[Value]:
        """The rows of a metric; the last is the one that `METRICS` names."""
        return getattr(self, f"_{name}")(on_progress)

    def _beside(self, function: Callable[[Tensor, Progress], dict[str, float]], on_progress: Progress) -> list[Value]:
        """A function of held-out tokens, then of the samples', as rows."""

        def half(start: float) -> Progress:
            return lambda done: on_progress(start + done / 2)

        rows: list[Value] = []
        for name, start in (("held_out", 0.0), ("samples", 0.5)):
            rows += [(name, metric, value) for metric, value in function(self.sides[name], half(start)).items()]
        return rows

    def _diversity(self, on_progress: Progress) -> list[Value]:
        return self._beside(lambda x, _: diversity(self.reader.content(x).numpy()), on_progress)

    def _memorisation(self, on_progress: Progress) -> list[Value]:
        def of(x: Tensor, done: Progress) -> dict[str, float]:
            return memorisation(self.reader.content(x).numpy(), self.training, on_progress=done)

        return self._beside(of, on_progress)

    def _mauve(self, on_progress: Progress) -> list[Value]:
        samples, held_out = (self.reader.texts(self.sides[name]) for name in ("samples", "held_out"))
        options = (self.kmeans_seeds, self.buckets, self.seed, on_progress)
        found = mauve_of_texts(samples, held_out, self.features, *options, self.words)
        about = [("mauve_buckets", found.buckets), ("mauve_words", found.words), ("mauve_seeds", len(found.values))]
        values = [*about, ("mauve_spread", found.spread), ("mauve", found.mean)]
        return [("samples", metric, float(value)) for metric, value in values]

    def _perplexity(self, on_progress: Progress) -> list[Value]:
        def of(x: Tensor, done: Progress) -> dict[str, float]:
            entropy = token_entropy(self.reader.content(x).numpy())
            perplexity = generative_perplexity(self.reader.texts(x), *self.judge, on_progress=done)
            return {"token_entropy": entropy, "generative_perplexity": perplexity}

        return self._beside(of, on_progress)

    def _classifier(
        self, source: Tensor, target: Tensor, num_ids: int, on_progress: Progress
    ) -> tuple[DomainClassifier, Domain]:
        """The judge of the domain, trained once for all samples that one process compares with the same data."""
        key = num_ids, self.seed, *(sha256(x.numpy().tobytes()).hexdigest() for x in (source, target))
        if key not in TRAINED:
            TRAINED.clear()
            made = fit_domain(source, target, num_ids, STEPS, self.seed, lambda step: on_progress(step / STEPS))
            TRAINED[key] = made
        return TRAINED[key]

    def _domain(self, on_progress: Progress) -> list[Value]:
        source, target = self.domains
        samples = self.reader.content(self.all_samples)
        length = min(x.shape[1] for x in (source, target, samples))  # the length must not tell the domains apart
        most = int(max(x.max() for x in (source, target, samples))) + 1
        num_ids = most if self.reader.tokenizer is None else self.reader.num_ids
        classifier, found = self._classifier(source[:, :length], target[:, :length], num_ids, on_progress)
        return [
            ("classifier", "domain_accuracy", found.accuracy),
            ("classifier", "domain_auc", found.auc),
            ("source", "domain_score", found.source),
            ("held_out", "domain_score", found.target),
            ("samples", "domain_score", float(classifier.scores(samples[:, :length]).mean())),
        ]
