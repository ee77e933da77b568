"""Which weights of a source to change when there are few target sequences: held-out likelihood of many ways.

    python bench/few_sequences.py --denoiser runs/arxiv-small/source --target runs/arxiv-small/data/target \\
        --n 824 165 --out results/few-sequences.json

Every way starts at the source and is fitted to the same n rows, at several learning rates. Other training rows
judge it: `nll` is the best over steps and rates, an optimistic choice that is the same for all. For some ways the
fits of five folds follow, at the best rate and step: `one_fold` is one of them, `mean` the geometric mean of all,
`mean_of_weights` the model with the mean of their weights, and `..._counts` either with what `gtl.estimate.unigram`
counts on the rows that each fold did not see.
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from gtl.data.tokens import folds, read_tokens
from gtl.denoiser import NetworkDenoiser
from gtl.estimate.lora import LowRank, add_adapters
from gtl.estimate.mean import averaged
from gtl.estimate.unigram import calibrate
from gtl.nn.dit import DiT
from gtl.ratio import Combination, DifferenceRatio, Ratio
from gtl.ratio.gamma import nll_by_gamma
from gtl.run import Row, command_line, device_name
from gtl.train.checkpoint import load_denoiser, write_json
from gtl.train.denoiser import DenoiserObjective
from gtl.train.loop import Fit, FitSettings, fit, mix


class Shared(nn.Module):
    """weight -> weight + B A, for an embedding and the head that it is tied to."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn_like(weight[:rank]) * (3 * weight.shape[1]) ** -0.5)
        self.b = nn.Parameter(weight.new_zeros(len(weight), rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


Way = Callable[[NetworkDenoiser, Tensor], NetworkDenoiser]
"""From a source and target rows to a copy of the source, what is to be trained marked."""


def some(wanted: Callable[[str], bool]) -> Way:
    """Weights with certain names."""

    def way(source: NetworkDenoiser, rows: Tensor) -> NetworkDenoiser:
        model = copy.deepcopy(source)
        for name, weight in model.named_parameters():
            weight.requires_grad_(wanted(name))
        return model

    return way


def low_rank(rank: int, head: bool = False, tied: bool = False, norms: bool = False, along: bool = False) -> Way:
    """Adapters of the blocks; of the head, of a tied embedding, norms and biases beside them; along the gradient."""

    def way(source: NetworkDenoiser, rows: Tensor) -> NetworkDenoiser:
        model = add_adapters(source, rank, 2 * rank, head)
        if tied:
            change = Shared(model.network.embedding.weight, rank)
            register_parametrization(model.network.embedding, "weight", change)
            register_parametrization(model.network.head, "weight", change)
        for name, weight in model.named_parameters():
            if norms and (name.endswith(".constant") or (name.endswith(".bias") and "head" not in name)):
                weight.requires_grad_(True)
        if along:
            begin_along(model.network, gradient(source, rows), rank)
        return model

    return way


Measure = Literal["gradient", "squares", "sure", "steady", "chance"]


def sizes(source: NetworkDenoiser, rows: Tensor, by: Measure) -> dict[str, Tensor]:
    """What each entry counts for, by weight: its gradient, its squared gradients of single rows, its gradient less the
    standard error or in units of it, or a random number."""
    if by == "chance":
        generator = torch.Generator(rows.device).manual_seed(0)
        return {n: torch.rand(w.shape, device=w.device, generator=generator) for n, w in source.named_parameters()}
    if by == "gradient":
        return {name: total.abs() for name, total in gradient(source, rows).items()}
    if by == "squares":
        return gradient(source, rows[:256], 1, 2)
    some, each = rows[:1024], 8
    totals, squares, parts = gradient(source, some, each), gradient(source, some, each, 2), -(-len(some) // each)
    found = {}
    for name, total in totals.items():
        mean = (total / parts).abs()
        error = (squares[name] / parts - mean**2).clamp(min=0).div(parts).sqrt()
        found[name] = mean - error if by == "sure" else mean / error.clamp(min=1e-12)
    return found


def entries(share: float, by: Measure = "gradient", at_once: bool = False, where: str = "") -> Way:
    """A share of the entries of each weight with a word in its name, or of all of these at once: the largest by some
    measure."""

    def way(source: NetworkDenoiser, rows: Tensor) -> NetworkDenoiser:
        model = copy.deepcopy(source).requires_grad_(True)
        size = {name: value for name, value in sizes(source, rows, by).items() if where in name}
        every, count = torch.cat([value.flatten() for value in size.values()]), 0
        bound = every.topk(int(share * len(every))).values[-1]
        for name, weight in model.named_parameters():
            weight.requires_grad_(name in size)
            if name in size:
                own = size[name].flatten()
                kept = size[name] >= (bound if at_once else own.topk(max(1, int(share * len(own)))).values[-1])
                weight.register_hook(lambda gradient, kept=kept: gradient.where(kept, 0.0))
                count += int(kept.sum())
        model.entries = count  # type: ignore[assignment]
        return model

    return way


def gradient(source: NetworkDenoiser, rows: Tensor, batch: int = 64, power: int = 1) -> dict[str, Tensor]:
    """Of the loss, to a power, summed over batches of rows, by weight."""
    model = copy.deepcopy(source).requires_grad_(True)
    objective, weights = DenoiserObjective(model, rows), dict(model.named_parameters())
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    generator = torch.Generator(rows.device).manual_seed(0)
    for part in rows.split(batch):
        with torch.autocast(rows.device.type, torch.bfloat16):
            loss = objective.loss(objective.wrap(model), {"data": part}, generator)
        for name, found in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            total[name] += found**power
    return total


@torch.no_grad()
def begin_along(network: DiT, gradients: dict[str, Tensor], rank: int) -> None:
    """A's rows become the gradient's first right singular vectors, as long as random rows are."""
    for name, module in network.named_modules():
        if isinstance(module, LowRank):
            found = gradients[f"network.{name}.weight"]
            module.a.copy_(torch.linalg.svd(found, full_matrices=False)[2][:rank] / 3**0.5)


WAYS: dict[str, tuple[Way, tuple[float, ...]]] = {
    "all weights": (some(lambda name: True), (6e-5, 1.2e-4, 2.4e-4)),
    "blocks and norms": (some(lambda name: "embedding" not in name), (1e-4, 2e-4, 4e-4)),
    "embedding": (some(lambda name: "embedding" in name), (2e-4, 5e-4)),
    "low rank, 4": (low_rank(4), (1e-3, 2e-3)),
    "low rank, 15": (low_rank(15), (5e-4, 1e-3, 2e-3)),
    "low rank, 46": (low_rank(46), (2e-4, 4e-4, 1e-3)),
    "low rank, 15, and head": (low_rank(15, head=True), (2e-4, 5e-4)),
    "low rank, 15, and tied embedding": (low_rank(15, tied=True), (2e-4, 5e-4)),
    "low rank, 15, and norms": (low_rank(15, norms=True), (5e-4, 1e-3)),
    "low rank, 15, along the gradient": (low_rank(15, along=True), (5e-4, 1e-3)),
    "2 % of each weight": (entries(0.02), (3e-4, 6e-4, 1.2e-3)),
    "6.8 % of each weight": (entries(0.068), (1.5e-4, 3e-4, 6e-4, 1.2e-3)),
    "6.8 %, squared gradients": (entries(0.068, "squares"), (3e-4, 6e-4)),
    "6.8 %, sure gradients": (entries(0.068, "sure"), (1.5e-4, 3e-4, 6e-4)),
    "6.8 %, steady gradients": (entries(0.068, "steady"), (3e-4, 6e-4)),
    "6.8 %, any": (entries(0.068, "chance"), (3e-4, 6e-4, 1.2e-3)),
    "6.8 % of all at once": (entries(0.068, at_once=True), (3e-4, 6e-4)),
    "15.8 % of the blocks": (entries(0.158, where="blocks"), (3e-4, 6e-4)),
    "20 % of each weight": (entries(0.2), (1.5e-4, 3e-4, 6e-4)),
}
"""Name -> what is trained, and learning rates."""
FOLDED = ("all weights", "low rank, 15", "6.8 % of each weight")
"""Ways whose folds are fitted too."""
FOLDS = 5


class Bench:
    """One source, and rows of the target."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.source = load_denoiser(arguments.denoiser).to(self.device).eval()
        x = read_tokens(arguments.target).long()
        x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(arguments.seed))]
        self.x, self.judges = x.to(self.device), x[-arguments.judges :].to(self.device)

    def fit(
        self, way: Way, rows: Tensor, rate: float, steps: int, stop: int = 0, number: int = 0
    ) -> tuple[NetworkDenoiser, Fit]:
        """One fit to all rows, judged as it goes, or to those of a fold up to a step."""
        seed, own = mix(self.arguments.seed, number), folds(rows, FOLDS, 0.0)[number - 1][0] if number else rows
        torch.manual_seed(seed)
        model = way(self.source, rows)
        settings = FitSettings(
            steps, stop or None, batch_size=self.arguments.batch_size, learning_rate=rate, ema=0.95, precision="bf16",
            weight_decay=0.0, evaluate_every=max(1, steps // 20), evaluation_rows=len(self.judges), patience=6,
            seed=seed,
        )  # fmt: skip
        found = fit(model, DenoiserObjective(model, own, None if stop else self.judges), settings)
        return model, replace(found, weights=getattr(model, "entries", found.weights))

    def nll(self, ratio: Ratio, gamma: float = 1.0) -> float:
        """Of the judges under the guided source, always under the same corruptions."""
        generator = torch.Generator(self.device).manual_seed(1)
        return float(nll_by_gamma(self.source, ratio, self.judges, (gamma,), len(self.judges), generator=generator))

    def folded(self, way: Way, rows: Tensor, rate: float, steps: int, stop: int) -> dict[str, float]:
        """What the fits of folds say, alone and together."""
        numbers = range(1, FOLDS + 1)
        models = [self.fit(way, rows, rate, steps, stop, number)[0].requires_grad_(False) for number in numbers]
        ratios = [DifferenceRatio(model) for model in models]
        joint: dict[str, Ratio] = {"mean": Combination([(1 / FOLDS, ratio) for ratio in ratios])}
        if models[0].state_dict().keys() == self.source.state_dict().keys():
            joint["mean_of_weights"] = DifferenceRatio(averaged(models))
        held_out = [held for _, held in folds(rows, FOLDS, 0.0)]
        counts, _ = calibrate(models, held_out, 2048, self.arguments.seed)
        found = {"one_fold": self.nll(ratios[0])}
        for name, ratio in joint.items():
            found[name] = self.nll(ratio)
            found[f"{name}_counts"] = found[name] if counts is None else self.nll(ratio + counts)
        return found


def main() -> None:
    """Fits, prints and writes as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--denoiser", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--n", type=int, nargs="+", default=[824, 165])
    parser.add_argument("--steps", type=int, nargs="+", default=[400, 120], help="gradient steps at most, for each n")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--judges", type=int, default=1024, help="rows, the last of all in a random order")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    command, where = f"python bench/{command_line()}", device_name(bench.device)
    value = bench.nll(DifferenceRatio(bench.source), 0.0)
    blank = Row("few-sequences", "source", None, arguments.seed, "nll", value, None, None, where, command)
    made = [blank]
    for n, steps in zip(arguments.n, arguments.steps, strict=True):
        rows = bench.x[:n]
        for name in arguments.ways:
            way, rates = WAYS[name]
            fits = {rate: bench.fit(way, rows, rate, steps) for rate in rates}
            rate = min(fits, key=lambda each: fits[each][1].held_out or torch.inf)
            model, best = fits[rate]
            values = {"nll": bench.nll(DifferenceRatio(model)), "step": best.best_step, "rate": rate}
            if name in FOLDED:
                values |= bench.folded(way, rows, rate, steps, best.best_step)
            seconds = sum(each.seconds for _, each in fits.values())
            row = replace(blank, method=name, n=n, trainable_weights=best.weights, seconds=round(seconds, 1))
            made += [replace(row, metric=metric, value=value) for metric, value in values.items()]
            print(n, name, best.weights, {k: round(v, 5) for k, v in values.items()}, f"{seconds:.0f} s", flush=True)
            if arguments.out is not None:
                write_json(arguments.out, [asdict(each) for each in made])


if __name__ == "__main__":
    main()
