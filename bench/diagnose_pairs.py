"""Does the diagnosis agree with what the long runs show? `gtl diagnose` on the six chain pairs, n = 20 and 100.

The long runs are results/markov.json and results/markov-pairs.json: where fine-tuned minus local KL, paired by seed, is
more than a standard error from zero, one of them is ahead; else they are level. Advice agrees if it names the one that
is ahead, or both, or if they are level.

    python bench/diagnose_pairs.py [--seeds 1] [--out results/diagnose.json]
"""

import argparse
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from gtl.data.markov import read_matrix
from gtl.diagnose import diagnose
from gtl.progress import Bar
from gtl.reproduce.markov import PRESETS, Experiment
from gtl.run import Row, Run, command_line, device_name, read_rows
from gtl.train.checkpoint import write_json

PAIRS = {
    "markov": ("diagonal:0.1", "diagonal:0.8", 5, 20),
    "markov-antidiagonal": ("anti-diagonal:0.6", "diagonal:0.6", 5, 20),
    "markov-dirichlet-1": ("dirichlet:1", "dirichlet:1", 5, 20),
    "markov-dirichlet-4": ("dirichlet:4", "dirichlet:4", 5, 20),
    "markov-v20": ("diagonal:0.1", "diagonal:0.8", 20, 64),
    "markov-disjoint": ("diagonal:0.02", "diagonal:0.98", 5, 20),
}
RESULTS = Path(__file__).parent.parent / "results"


def verdict(rows: list[Row], pair: str, n: int) -> str:
    """Which is ahead in the long runs: gtl, fine-tuning, or level."""
    values = {
        (row.method, row.seed): row.value
        for row in rows
        if (row.experiment, row.n, row.metric) == (pair, n, "kl") and row.seed is not None
    }
    seeds = [seed for method, seed in values if method == "finetuned"]
    ahead = [values["finetuned", seed] - values["gtl-local", seed] for seed in seeds]
    mean, error = statistics.mean(ahead), statistics.stdev(ahead) / len(ahead) ** 0.5
    return "gtl" if mean > error else "fine-tuning" if mean < -error else "level"


def main() -> None:
    """Trains the source models, diagnoses, compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    long_runs = [row for name in ("markov", "markov-pairs") for row in read_rows(RESULTS / f"{name}.json")]
    rows = []
    for pair, (source, target, vocabulary, length) in PAIRS.items():
        protocol = replace(
            PRESETS["small"], source_matrix=source, target_matrix=target, vocabulary=vocabulary, length=length
        )
        p, q = (read_matrix(spec, vocabulary, number) for number, spec in enumerate((source, target)))
        for seed in range(arguments.seeds):
            run = Run(None, f"diagnose-{pair}", {"pair": pair, "seed": seed}, device)
            with Bar(1) as bar:
                experiment = Experiment(protocol, p, q, seed, run, bar, device)
                model = experiment.source_model()
            for n in (20, 100):
                started = time.perf_counter()
                found = diagnose(model, experiment.target_all[:n], experiment.source_data[0], seed)
                seconds = time.perf_counter() - started
                shown = verdict(long_runs, pair, n)
                agrees = found.use == "both" or shown == "level" or found.use == shown
                print(f"{pair}, n = {n}, seed {seed}: advice {found.use}, long runs {shown}; {seconds:.0f} s")
                for warning in found.warnings:
                    print(f"    {warning}", flush=True)
                values = {"agrees": float(agrees), "warned": float(bool(found.warnings)), "seconds": seconds}
                values |= {"token_overlap": found.token_overlap, "auc": found.auc}
                where, command = device_name(device), f"python bench/{command_line()}"
                for metric, value in values.items():
                    rows.append(Row(pair, "diagnose", n, seed, metric, value, seconds, None, where, command))
    if arguments.out is not None:
        write_json(arguments.out, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
