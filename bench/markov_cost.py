"""What guidance costs on the Markov benchmark (small preset: V = 5, L = 20, n_ratio = V), everything in one run.

1. One-position guided sampling of 4,096 sequences over unguided sampling of as many by the fastest sampler here.
2. Ancestral guided sampling of 512 over the floor: the denoiser and ratio evaluations that it makes, counted, run as
large
   batches and nothing else.

    python bench/markov_cost.py [--out results/markov-cost.json]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.ratio import NetworkRatio
from gtl.reproduce.markov import PRESETS
from gtl.run import Row, command_line, device_name
from gtl.sample import Ancestral, OnePosition
from gtl.train.checkpoint import write_json

LENGTH, VOCABULARY, REPEATS, NAIVE = 20, 5, 3, 64


class Counter:
    """Counts the sequences that pass through a network."""

    def __init__(self, module: nn.Module) -> None:
        self.sequences = 0
        module.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self.sequences += len(arguments[0])


def interleaved(jobs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each job, the jobs taking turns so that a slow spell of the machine hits them all."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(REPEATS):
        for name, job in jobs.items():
            started = time.perf_counter()
            job()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


@torch.no_grad()
def main() -> None:
    """Measures and prints both ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    out = parser.parse_args().out
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = PRESETS["small"].training
    process = Masked(VOCABULARY + 1)
    torch.manual_seed(0)
    network = DiT(process.num_ids, process.num_ids, **asdict(training.denoiser))
    denoiser = NetworkDenoiser(process, network).eval().to(device)
    ratio = NetworkRatio.build(process, **asdict(training.ratio)).eval().to(device)
    for module in (network.head, ratio.network.dit.head):  # zero by default; the draws should not be degenerate
        nn.init.normal_(module.weight, std=0.1)

    def generator() -> torch.Generator:
        return torch.Generator(device).manual_seed(0)

    one, guided_one = OnePosition(denoiser), OnePosition(denoiser, ratio)
    ancestral, guided_ancestral = Ancestral(denoiser, steps=20), Ancestral(denoiser, ratio, steps=20)
    naive = Ancestral(denoiser, ratio, steps=20, stabilised=False)
    start = torch.zeros(4096, LENGTH, dtype=torch.long, device=device)

    counts: dict[str, tuple[int, int]] = {}
    for name, sampler, count in (("ancestral", guided_ancestral, 512), ("naive", naive, NAIVE)):
        seen = Counter(denoiser), Counter(ratio.network)
        sampler(start[:count], generator=generator())
        counts[name] = seen[0].sequences, seen[1].sequences

    def floor(name: str) -> Callable[[], None]:
        z = torch.randint(0, process.num_ids, (max(counts[name]), LENGTH), device=device)

        def run() -> None:
            for part in z[: counts[name][0]].split(4096):
                denoiser(part)
            for part in z[: counts[name][1]].split(4096):
                ratio.log_value(part)

        return run

    seconds = interleaved(
        {
            "one-position": lambda: one(start, generator=generator()),
            "ancestral": lambda: ancestral(start, generator=generator()),
            "guided one-position": lambda: guided_one(start, generator=generator()),
            "guided ancestral, 512": lambda: guided_ancestral(start[:512], generator=generator()),
            "its evaluations": floor("ancestral"),
            f"naive guided ancestral, {NAIVE}": lambda: naive(start[:NAIVE], generator=generator()),
            "its evaluations, naive": floor("naive"),
        }
    )
    for name, value in seconds.items():
        print(f"{name:30s} {value:8.2f} s")
    fastest = min(("one-position", "ancestral"), key=lambda name: seconds[name])
    rows = {
        ("one-position", "guided_over_unguided"): seconds["guided one-position"] / seconds[fastest],
        ("ancestral", "over_floor"): seconds["guided ancestral, 512"] / seconds["its evaluations"],
        ("naive", "over_floor"): seconds[f"naive guided ancestral, {NAIVE}"] / seconds["its evaluations, naive"],
    }
    for name, (calls, weighed) in counts.items():
        rows[name, "denoiser_evaluations"], rows[name, "ratio_evaluations"] = calls, weighed
    print(f"fastest unguided sampler: {fastest}")
    for (method, metric), value in rows.items():
        print(f"{method:16s} {metric:22s} {value:10.2f}")
    if out is not None:
        where, command = device_name(device), f"python bench/{command_line()}"
        made = [Row("markov-cost", m, None, 0, k, float(v), None, None, where, command) for (m, k), v in rows.items()]
        write_json(out, [asdict(row) for row in made])


if __name__ == "__main__":
    main()
