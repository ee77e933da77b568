"""How fast a denoiser of the paper's size trains: tokens a second, and the share of the device's arithmetic in use.

    python bench/train_speed.py [--out results/train-speed.json]

59.6 M weights (width 512, 9 blocks, 8 heads, 30,522 tokens), bf16, compiled, AdamW with averaged weights: `gtl train
denoiser` as it is, on random tokens. Operations counted: 6 for each weight of a block and token, 6 for each weight of
the head and *masked* token, 12 L width for each block and token of attention. `utilisation` is theirs over --peak.
"""

import argparse
import time
from dataclasses import asdict
from pathlib import Path

import torch

from gtl.denoiser import NetworkDenoiser
from gtl.nn.dit import DiT
from gtl.process import Masked
from gtl.run import Row, command_line, device_name
from gtl.train.checkpoint import write_json
from gtl.train.denoiser import DenoiserObjective
from gtl.train.loop import FitSettings, fit


def measure(arguments: argparse.Namespace, length: int, rows: int, device: torch.device) -> tuple[float, float, int]:
    """Tokens a second, operations a second and the number of weights."""
    torch.manual_seed(0)
    vocabulary, width, depth = arguments.vocabulary, arguments.width, arguments.depth
    process = Masked(vocabulary, 103)
    denoiser = NetworkDenoiser(process, DiT(vocabulary, vocabulary, width, depth, arguments.heads, tied=arguments.tied))
    data = torch.randint(104, vocabulary, (20 * rows, length))
    times: list[float] = []

    def on_step(step: int) -> None:
        if step in (arguments.warm, arguments.steps):
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    settings = FitSettings(
        arguments.steps, batch_size=rows, learning_rate=1e-4, precision="bf16", compile=device.type == "cuda",
        evaluate_every=arguments.steps, save_every=arguments.steps + 1,
    )  # fmt: skip
    fit(denoiser, DenoiserObjective(denoiser, data), settings, on_step=on_step)
    torch.compiler.reset()
    speed = (arguments.steps - arguments.warm) * rows * length / (times[1] - times[0])
    head = vocabulary * width
    blocks = sum(p.numel() for p in denoiser.network.blocks.parameters())
    operations = 6.0 * blocks + 6 * head / 2 + 12 * length * width * depth
    return speed, speed * operations, sum(p.numel() for p in denoiser.parameters())


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    parser.add_argument("--sizes", nargs="+", default=["128x1024", "512x256"], help="LENGTHxROWS of a batch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=25, help="steps that are not timed")
    parser.add_argument("--peak", type=float, default=989, help="dense bf16 TFLOP/s of the device")
    for name, size in (("vocabulary", 30522), ("width", 512), ("depth", 9), ("heads", 8)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--tied", action="store_true", help="a head with the weights of the embedding")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where, command = device_name(device), f"python bench/{command_line()}"
    made = []
    for shape in arguments.sizes:
        length, rows = map(int, shape.split("x"))
        speed, operations, weights = measure(arguments, length, rows, device)
        share = operations / (1e12 * arguments.peak)
        print(f"L = {length}, {rows} rows: {speed / 1e6:.3f} M tokens/s, utilisation {share:.3f}", flush=True)
        for metric, value in (("tokens_per_second", speed), ("utilisation", share)):
            made.append(
                Row("train-speed", f"L = {length}, {rows} rows", None, 0, metric, value, None, weights, where, command)
            )
        if arguments.out is not None:
            write_json(arguments.out, [asdict(row) for row in made])


if __name__ == "__main__":
    main()
