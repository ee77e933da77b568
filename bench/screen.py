"""How many of the target rows that stand in a mixed source does the screen of importance-weighted fitting find?

    python bench/screen.py --mixture runs/arxiv-small/mixed-0.25 --target runs/arxiv-small/data/target --rows 618

The mixture's source holds a share of the target's rows (`gtl mix`); of what is left, `--rows` are the target data.
Counts of tokens look through all source rows and take `--weighed`; as many at random are beside them.
"""

import time

import numpy as np
import torch
from jsonargparse import auto_cli

from gtl.data.tokens import folds, read_tokens
from gtl.estimate.screen import screen


def main(mixture: str, target: str, rows: int = 618, seeds: int = 2, weighed: int = 20_000) -> None:
    """Prints what is found, one line a seed.

    Args:
        mixture: a folder of gtl mix.
        target: the target that it was made from.
        rows: target sequences that are at hand.
        seeds: subsets of them.
        weighed: source rows to take.
    """
    known = {row.tobytes() for row in read_tokens(target).numpy()}
    source, rest = read_tokens(f"{mixture}/source"), read_tokens(f"{mixture}/target")
    hidden = sum(row.tobytes() in known for row in source.numpy())
    ids = int(max(source.numpy().max(), rest.numpy().max())) + 1
    print(f"{hidden} of {len(source)} source rows are the target's; {weighed} at random hold", end=" ")
    print(f"{hidden * weighed / len(source):.0f}")
    for seed in range(seeds):
        own = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[:rows]].long()
        started = time.perf_counter()
        made = screen(source, folds(own, 5, 0.1, seed), ids, weighed)
        seconds = time.perf_counter() - started
        alike = np.array([row.tobytes() in known for row in made.rows.numpy()])
        *fold, found = (int(alike[taken.numpy()].sum()) for taken in made.taken)
        print(
            f"seed {seed}: {found} found, {min(fold)} to {max(fold)} by a fold's rows, {len(alike)} rows in all, "
            f"k = {made.prior:g} c, {made.shares[0]:.2f} of held-out rows, {seconds:.1f} s"
        )


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
