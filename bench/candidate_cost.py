"""What it costs to weigh n_ratio candidates at V = 1,000 and L = 128, everything in one run.

The unguided baseline is the faster of the two samplers here; the ratios' trunks are 64 wide. `late-injection` encodes
the context once and asks for 256 candidates; `taylor` takes one forward and one backward pass of a sequence ratio, for
256 candidates or (`taylor-all`) all of them; `knn` looks among a million keys; `intervention` runs the same network for
each of 256 candidates and is timed over a few steps and scaled to L of them.

    python bench/candidate_cost.py [--out results/candidate-cost.json]
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from gtl.denoiser import NetworkDenoiser, fingerprint
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.ratio import KNNRatio, LateRatio, NetworkRatio, Ratio
from gtl.ratio.taylor import taylor
from gtl.sample import Ancestral, OnePosition, Sampler
from local_cost import LENGTH, ROWS, VOCABULARY, report
from markov_cost import interleaved

N_RATIO, WEIGHED, KEYS = 256, 4, 1_000_000


@torch.no_grad()
def main() -> None:
    """Measures and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    out = parser.parse_args().out
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    process = Masked(VOCABULARY + 1)
    torch.manual_seed(0)
    network = DiT(process.num_ids, process.num_ids, width=256, depth=6, heads=8)
    denoiser = NetworkDenoiser(process, network).eval().to(device)
    late = LateRatio.build(process, width=64, depth=1, heads=4).eval().to(device)
    sequence = NetworkRatio.build(process, width=64, depth=1, heads=4).eval().to(device)
    for head in (network.head, late.network.dit.head, late.network.head, sequence.network.dit.head):
        nn.init.normal_(head.weight, std=0.1)  # zero by default; the draws should not be degenerate
    keys = torch.randn(KEYS, network.width, device=device)
    store = KNNRatio(process, keys, torch.randint(0, VOCABULARY, (KEYS,), device=device), fingerprint(denoiser))
    kinds: dict[str, tuple[Ratio | None, int | None]] = {
        "unguided": (None, None),
        "late-injection": (late, N_RATIO),
        "taylor": (taylor(sequence), N_RATIO),
        "taylor-all": (taylor(sequence), None),
        "knn": (store, None),
    }
    start = torch.full((ROWS, LENGTH), process.mask_id, device=device)
    prompt = torch.randint(0, VOCABULARY, (ROWS, LENGTH), device=device)
    frozen = torch.arange(LENGTH, device=device).ge(WEIGHED).expand(ROWS, -1)

    def draw(sampler: Sampler) -> object:
        return sampler(start, generator=torch.Generator(device).manual_seed(0))

    jobs: dict[str, Callable[[], object]] = {}
    for kind, (ratio, count) in kinds.items():
        jobs[f"one-position, {kind}"] = partial(draw, OnePosition(denoiser, ratio, n_ratio=count))
        jobs[f"ancestral, {kind}"] = partial(draw, Ancestral(denoiser, ratio, n_ratio=count, steps=LENGTH))
    weighing = OnePosition(denoiser, sequence, n_ratio=N_RATIO)
    jobs["one-position, intervention"] = lambda: weighing(prompt, frozen=frozen)
    seconds = interleaved(jobs)
    seconds["one-position, intervention"] *= LENGTH / WEIGHED
    report("candidate-cost", seconds, [*list(kinds)[1:], "intervention"], device, out)


if __name__ == "__main__":
    main()
