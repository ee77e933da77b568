"""What guidance costs at the size of text: 30,522 tokens, length 128, 256 sequences, a denoiser of 59.6 M weights.

All in one run, bf16 and compiled (`gtl.speed`), every sampler with one position a step. The unguided baseline is the
fastest sampler here. `local` reads the denoiser's hidden states (`local-block` with a block of its own); `sequence` is
planner sampling with 256 candidates weighed one by one by a trunk of width 128 with 4 blocks, `sequence-paper` the same
with the paper's width 96 and 8 blocks; `late-injection` weighs 256 candidates as queries.

A second table is the paper's complexity table at a size where every row of it can be run (1,000 tokens, length 32,
8 sequences, 64 steps): network evaluations of whole sequences, counted, and seconds.

    python bench/text_cost.py [--out results/text-cost.json] [--quick]
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import markov_cost
from gtl.denoiser import NetworkDenoiser
from gtl.nn.dit import DiT
from gtl.planner import Planner, planned
from gtl.process import Masked
from gtl.ratio import LateRatio, LocalRatio, NetworkRatio, Ratio
from gtl.run import Row, command_line, device_name
from gtl.sample import Ancestral, PlannerSampler, Sampler
from gtl.speed import speed_up
from gtl.train.checkpoint import write_json
from markov_cost import Counter, interleaved

N_RATIO = 256


class Weighed:
    """Counts the candidates that a sequence ratio weighs, each a whole sequence."""

    def __init__(self, ratio: NetworkRatio) -> None:
        self.ratio, self.count, original = ratio, 0, ratio._interventions

        def counted(z: Tensor, row: Tensor, place: Tensor, tokens: Tensor, t: Tensor | None) -> Tensor:
            self.count += tokens.numel()
            return original(z, row, place, tokens, t)

        ratio._interventions = counted  # type: ignore[method-assign]

    def stop(self) -> int:
        """The count; nothing is counted any more."""
        del self.ratio._interventions
        return self.count


def awake(module: nn.Module) -> None:
    """Heads are zero at first; the draws should not be degenerate."""
    for part in module.modules():
        if isinstance(getattr(part, "head", None), nn.Linear):
            nn.init.normal_(part.head.weight, std=0.02)  # type: ignore[union-attr, arg-type]


def prepare(module: Any, device: torch.device, compile: bool = True) -> Any:
    """A model ready to sample with."""
    awake(module)
    module.eval().to(device)
    if device.type == "cuda":
        speed_up(module, "bf16", compile)
    return module


def costs(device: torch.device, quick: bool) -> dict[str, float]:
    """Seconds of "sampler, kind"."""
    vocabulary, length, rows = (500, 16, 4) if quick else (30_522, 128, 256)
    width, depth = (64, 2) if quick else (512, 9)
    process = Masked(vocabulary, 103)
    torch.manual_seed(0)
    denoiser = prepare(NetworkDenoiser(process, DiT(vocabulary, vocabulary, width, depth, 8)), device, False)
    plain = copy.deepcopy(denoiser)  # ancestral sampling asks for other numbers of rows in every step: not compiled
    if device.type == "cuda":
        speed_up(denoiser)
    planner = prepare(Planner.build(process, width=128, depth=4, heads=4), device)
    ratios: dict[str, Ratio | None] = {
        "unguided": None,
        "local": prepare(LocalRatio.build(denoiser, head="own", width=256, depth=0, heads=4), device),
        "local-block": prepare(LocalRatio.build(denoiser, head="own", width=128, depth=1, heads=4), device),
        "late-injection": prepare(LateRatio.build(process, width=128, depth=4, heads=4), device),
        "sequence": prepare(NetworkRatio.build(process, width=128, depth=4, heads=4), device),
        "sequence-paper": prepare(NetworkRatio.build(process, width=96, depth=8, heads=4), device),
    }

    def run(sampler: Sampler) -> torch.Tensor:
        return sampler((rows, length), generator=torch.Generator(device).manual_seed(0))

    jobs: dict[str, Callable[[], object]] = {}
    for kind, ratio in ratios.items():
        n_ratio = N_RATIO if kind.startswith(("sequence", "late")) else None
        sampler = partial(PlannerSampler, denoiser, ratio, n_ratio=n_ratio)
        jobs[f"planner, {kind}"] = partial(run, sampler(order=planned(planner)))
        if not kind.startswith("sequence"):
            jobs[f"random order, {kind}"] = partial(run, sampler())
    jobs["ancestral, unguided"] = partial(run, Ancestral(plain, steps=length))
    for name, job in jobs.items():
        print(f"warming up: {name}", flush=True)
        job()
    return interleaved(jobs)


def complexity(device: torch.device, quick: bool) -> dict[str, tuple[int, int, float]]:
    """The paper's table: evaluations of denoiser and ratio in sequences, and seconds."""
    vocabulary, length, rows, steps = (100, 8, 2, 16) if quick else (1000, 32, 8, 64)
    process = Masked(vocabulary)
    torch.manual_seed(1)
    denoiser = prepare(NetworkDenoiser(process, DiT(vocabulary, vocabulary, 256, 4, 8)), device, False)
    ratio = prepare(NetworkRatio.build(process, width=128, depth=4, heads=4), device, False)
    planner = prepare(Planner.build(process, width=128, depth=4, heads=4), device, False)
    n_ratio = min(N_RATIO, vocabulary - 1)
    naive = {"steps": steps, "stabilised": False}
    samplers: dict[str, Sampler] = {
        "ancestral": Ancestral(denoiser, ratio, cache=False, **naive),  # type: ignore[arg-type]
        "+ caching": Ancestral(denoiser, ratio, cache=True, **naive),  # type: ignore[arg-type]
        "+ top n": Ancestral(denoiser, ratio, cache=True, n_ratio=n_ratio, **naive),  # type: ignore[arg-type]
        "stabilised + top n": Ancestral(denoiser, ratio, steps=steps, n_ratio=n_ratio),
        "planner + top n": PlannerSampler(denoiser, ratio, n_ratio=n_ratio, order=planned(planner)),
    }
    jobs: dict[str, Callable[[], object]] = {}
    counts: dict[str, tuple[int, int]] = {}
    for name, sampler in samplers.items():
        jobs[name] = partial(sampler, (rows, length), generator=torch.Generator(device).manual_seed(0))
        passes, weighed = Counter(denoiser), Weighed(ratio)
        jobs[name]()
        counts[name] = passes.sequences, weighed.stop()
    seconds = interleaved(jobs)
    return {name: (*counts[name], seconds[name]) for name in samplers}


@torch.no_grad()
def main() -> None:
    """Measures and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    parser.add_argument("--quick", action="store_true", help="at toy size, to see that it runs")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    markov_cost.REPEATS = 2
    where, command = device_name(device), f"python bench/{command_line()}"
    made: list[Row] = []

    def add(method: str, metric: str, value: float) -> None:
        made.append(Row("text-cost", method, None, 0, metric, float(value), None, None, where, command))

    for name, (passes, weighed, seconds) in complexity(device, arguments.quick).items():
        print(f"{name:20s} denoiser {passes:8d} ratio {weighed:10d} {seconds:8.2f} s", flush=True)
        add(name, "denoiser_evaluations", passes)
        add(name, "ratio_evaluations", weighed)
        add(name, "seconds", seconds)
    times = costs(device, arguments.quick)
    fastest = min((name for name in times if "unguided" in name), key=lambda name: times[name])
    for name, value in times.items():
        print(f"{name:30s} {value:8.3f} s")
        add(name, "seconds", value)
    print(f"fastest unguided sampler: {fastest}")
    for kind in ("local", "local-block", "late-injection", "sequence", "sequence-paper"):
        value = min(s for name, s in times.items() if name.endswith(f", {kind}")) / times[fastest]
        print(f"{kind:16s} guided_over_unguided {value:8.2f}")
        add(kind, "guided_over_unguided", value)
    if arguments.out is not None:
        write_json(arguments.out, [asdict(row) for row in made])


if __name__ == "__main__":
    main()
