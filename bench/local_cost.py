"""What guidance by a local ratio costs at V = 1,000 and L = 128, everything in one run.

The unguided baseline is the faster of the two samplers here (ancestral runs fewer rows: a row is evaluated only when
one of its positions is revealed). A local ratio reads the denoiser's hidden states; `local` has no blocks of its own,
`local-block` has one. Plain intervention weighs n_ratio = V candidates one by one; it is timed over two steps and
scaled to L of them.

    python bench/local_cost.py [--out results/local-cost.json]
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import nn

from gtl.denoiser import NetworkDenoiser
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.ratio import LocalRatio, NetworkRatio
from gtl.run import Row, command_line, device_name
from gtl.sample import Ancestral, OnePosition
from gtl.train.checkpoint import write_json
from markov_cost import interleaved

VOCABULARY, LENGTH, ROWS, WEIGHED = 1000, 128, 8, 2


def report(
    experiment: str, seconds: dict[str, float], kinds: Sequence[str], device: torch.device, out: Path | None
) -> None:
    """Prints the seconds of "sampler, kind", and of each kind the best over the fastest unguided sampler, as rows."""
    for name, value in seconds.items():
        print(f"{name:30s} {value:8.2f} s")
    fastest = min((name for name in seconds if "unguided" in name), key=lambda name: seconds[name])
    print(f"fastest unguided sampler: {fastest}")
    where, command = device_name(device), f"python bench/{command_line()}"
    rows = []
    for kind in kinds:
        value = min(s for name, s in seconds.items() if name.endswith(f", {kind}")) / seconds[fastest]
        print(f"{kind:16s} guided_over_unguided {value:8.2f}")
        rows.append(Row(experiment, kind, None, 0, "guided_over_unguided", value, None, None, where, command))
    if out is not None:
        write_json(out, [asdict(row) for row in rows])


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
    local = LocalRatio.build(denoiser, head="own", width=256, depth=0, heads=8).eval().to(device)
    block = LocalRatio.build(denoiser, head="own", width=64, depth=1, heads=4).eval().to(device)
    sequence = NetworkRatio.build(process, width=64, depth=1, heads=4).eval().to(device)
    for dit in (network, local.network.dit, block.network.dit, sequence.network.dit):
        nn.init.normal_(dit.head.weight, std=0.1)  # zero by default; the draws should not be degenerate
    start = torch.full((ROWS, LENGTH), process.mask_id, device=device)
    prompt = torch.randint(0, VOCABULARY, (ROWS, LENGTH), device=device)
    frozen = torch.arange(LENGTH, device=device).ge(WEIGHED).expand(ROWS, -1)

    def generator() -> torch.Generator:
        return torch.Generator(device).manual_seed(0)

    jobs: dict[str, Callable[[], object]] = {}
    for kind, ratio in (("unguided", None), ("local", local), ("local-block", block)):
        one, many = OnePosition(denoiser, ratio), Ancestral(denoiser, ratio, steps=LENGTH)
        jobs[f"one-position, {kind}"] = partial(lambda sampler: sampler(start, generator=generator()), one)
        jobs[f"ancestral, {kind}"] = partial(lambda sampler: sampler(start, generator=generator()), many)
    weighing = OnePosition(denoiser, sequence)
    jobs["one-position, intervention"] = lambda: weighing(prompt, frozen=frozen, generator=generator())
    seconds = interleaved(jobs)
    seconds["one-position, intervention"] *= LENGTH / WEIGHED
    report("local-cost", seconds, ("local", "local-block", "intervention"), device, out)


if __name__ == "__main__":
    main()
