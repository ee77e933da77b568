"""The paper's failure mode: large gamma and pruned candidates hurt most where the domains overlap little.

Three pairs of chains (5 states, length 20) from close to nearly disjoint. For each a source model, a local ratio and a
sequence ratio (one noisy classifier) are trained on 100 target sequences; then gamma and n_ratio vary and everything
else stays. Token overlap is 1 / E_q[q(x_l | z) / p(x_l | z)], exact.

    python bench/failure_mode.py --out docs/failure-mode.png
"""

import argparse
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from gtl.data.markov import read_matrix, sample_chain
from gtl.denoiser import NetworkDenoiser
from gtl.estimate import Problem, Training
from gtl.estimate.local import recipe as local
from gtl.estimate.parts import Part
from gtl.estimate.sequence import direct
from gtl.evaluate.transition import transition_kl
from gtl.exact import ExactDenoiser, MarkovChain
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.ratio import Ratio
from gtl.sample import OnePosition
from gtl.train.denoiser import DenoiserObjective

PAIRS = {"close": (0.4, 0.6), "apart": (0.1, 0.8), "nearly disjoint": (0.02, 0.98)}
COLOURS = {"close": "#2a9d5c", "apart": "#2a6f97", "nearly disjoint": "#c1440e"}
GAMMAS, CANDIDATES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), (1, 2, 3, 4, 5)
LENGTH, SAMPLES, TARGET = 20, 1024, 100


@torch.no_grad()
def overlap(source: Tensor, target: Tensor) -> float:
    """The exact token overlap of two chains."""
    process = Masked(len(source) + 1)
    p, q = (ExactDenoiser(MarkovChain(matrix, process)) for matrix in (source, target))
    generator = torch.Generator().manual_seed(0)
    x = sample_chain(target, 4096, LENGTH, generator)
    z = process.corrupt(x, process.times(len(x), x.device, generator), generator)
    place = process.some_place(z, generator).unsqueeze(1)
    log_p, log_q = (model(z, None, place).log_probs for model in (p, q))
    return float(1 / torch.where(log_q == -torch.inf, log_q, 2 * log_q - log_p).exp().sum(-1).mean())


def train(source: Tensor, target: Tensor) -> tuple[NetworkDenoiser, dict[str, Ratio]]:
    """A source model, and two ratios from 100 target sequences."""
    generator = torch.Generator().manual_seed(0)
    rows, x = sample_chain(source, 10_000, LENGTH, generator), sample_chain(target, TARGET, LENGTH, generator)
    process = Masked(len(source) + 1)
    torch.manual_seed(0)
    model = NetworkDenoiser(process, DiT(process.num_ids, process.num_ids, 64, 2, 4, 0.1))
    problem = Problem(Training(), model, (rows, rows[:0]), x, 0)
    problem.fit("source", model, DenoiserObjective(model, rows), 400, patience=0)
    ratios = {}
    for name, recipe in (("local", local), ("sequence", direct("sum"))):
        ratio = recipe(problem, Part(x, None, 300, name=name)).ratio
        assert ratio is not None
        ratios[name] = ratio.eval()
    return model.requires_grad_(False), ratios


def main() -> None:
    """Trains, samples, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the figure, a .png file")
    out = parser.parse_args().out
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for name, stays in PAIRS.items():
        source, target = (read_matrix(f"diagonal:{stay}", 5, 0) for stay in stays)
        share = overlap(source, target)
        model, ratios = train(source, target)
        for kind, ratio in ratios.items():

            def kl(gamma: float, n_ratio: int, ratio: Ratio = ratio) -> float:
                sampler = OnePosition(model, ratio, gamma=gamma, n_ratio=n_ratio)  # noqa: B023
                x = sampler((SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
                return transition_kl(target, x)  # noqa: B023

            by_gamma, by_count = [kl(gamma, 5) for gamma in GAMMAS], [kl(1.0, count) for count in CANDIDATES]
            print(f"{name}, {kind}: gamma", *(f"{v:.4f}" for v in by_gamma), "n_ratio", *(f"{v:.4f}" for v in by_count))
            style = {
                "color": COLOURS[name],
                "linestyle": "-" if kind == "local" else "--",
                "marker": "o",
                "markersize": 3,
            }
            label = f"{name} (overlap {share:.2g})" if kind == "local" else None
            left.plot(GAMMAS, by_gamma, **style, label=label)
            right.plot(CANDIDATES, by_count, **style)
    left.plot([], [], color="#555555", label="local ratio")
    left.plot([], [], color="#555555", linestyle="--", label="sequence ratio")
    left.set(xlabel="gamma (all candidates)", ylabel="KL to the target chain (nats)", yscale="log")
    right.set(xlabel="candidates n_ratio (gamma 1)", xticks=CANDIDATES)
    left.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.5)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()
