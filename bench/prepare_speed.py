"""How fast `gtl prepare` is against the tokenizer library itself, both in turn in one run, and the memory it takes.

The library's own speed is `encode_batch_fast` (or `encode_batch`, if that is faster) on the same texts, held in memory,
with as many threads as there are processes here. Ours is the whole of it: reading, unpacking, parsing, tokenising,
packing, hashing and writing, from the start of the processes to the end. Memory is that of the program and all of its
processes together at their highest. Every round also gives the input twice: `beyond the start` is the speed of what
came second, without the seconds that imports and the start of processes take, and memory should not grow.

    python bench/prepare_speed.py [FILES ...] [--tokenizer T] [--workers N] [--out results/prepare-speed.json]

Without files the text is made up: words of a vocabulary that is made up too, as common as words are.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from gtl.data.documents import open_source, read_blocks, records
from gtl.data.prepare import choose_text
from gtl.run import Row, command_line, device_name
from gtl.train.checkpoint import write_json

BEYOND = "gtl prepare, beyond the start"
LIBRARY = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
texts = json.load(open(sys.argv[2]))
getattr(tokenizer, sys.argv[3])(texts[:100], add_special_tokens=False)
start = time.perf_counter()
made = getattr(tokenizer, sys.argv[3])(texts, add_special_tokens=False)
seconds = time.perf_counter() - start
print(json.dumps([seconds, sum(len(each) for each in made) + len(made)]))
"""
OURS = """
import json, sys, threading, time
import psutil
from gtl.cli import main
held = []
def watch():
    own = psutil.Process()
    while True:
        try:
            held.append(sum(each.memory_info().rss for each in [own, *own.children()]))
        except psutil.NoSuchProcess:
            pass
        time.sleep(0.1)
threading.Thread(target=watch, daemon=True).start()
start = time.perf_counter()
main(sys.argv[1:])
seconds = time.perf_counter() - start
print(json.dumps([seconds, max(held) / 2**20]))
"""


def made_up(folder: Path, megabytes: int) -> tuple[Path, Path]:
    """A vocabulary of 20,000 words and a file of documents in them, with Zipf's frequencies."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 11))) for _ in range(20_000)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), *".,"]
    vocabulary, text = folder / "vocab.txt", folder / "text.jsonl"
    vocabulary.write_text("".join(f"{token}\n" for token in dict.fromkeys([*tokens, *words[: len(words) * 9 // 10]])))
    weights = [1 / (rank + 10) for rank in range(len(words))]
    with text.open("w") as file:
        number = 0
        while file.tell() < megabytes * 2**20:
            chosen = draw.choices(words, weights, k=2000)
            for first in range(0, 2000, 200):
                number += 1
                body = " ".join(chosen[first + 10 : first + 200]).capitalize() + "."
                record = {"id": number, "title": " ".join(chosen[first : first + 10]), "abstract": body}
                file.write(json.dumps(record) + "\n")
    return vocabulary, text


def run(program: str, arguments: list[str], **environment: str) -> list[float]:
    """The numbers that a program prints last."""
    call = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(call, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measures and prints tokens a second, their ratio and the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files to prepare; made-up text by default")
    parser.add_argument("--tokenizer", help="needed with files")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=24, help="of made-up text")
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files, tokenizer = given.files, given.tokenizer
        if not files:
            tokenizer, text = made_up(folder, given.megabytes)
            files = [str(text)]
        measure(folder, files, str(tokenizer), given.workers, given.rounds, given.out)


def measure(folder: Path, files: list[str], tokenizer: str, workers: int, rounds: int, out: Path | None) -> None:
    """Both ways in turn, `rounds` times; medians count."""
    from gtl.data.tokenizer import load_tokenizer

    load_tokenizer(tokenizer).save_pretrained(folder / "tokenizer")
    sources = [open_source(name) for name in files]
    fields = choose_text(sources, None)
    texts = [
        "\n".join(record[field] for field in fields)
        for source in sources
        for block in read_blocks(source)
        for _, record in records(block)
        if isinstance(record, dict)
    ]
    (folder / "texts.json").write_text(json.dumps(texts))
    print(f"{len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} million characters, {workers} workers")
    speeds: dict[str, list[float]] = {"encode_batch": [], "encode_batch_fast": [], "gtl prepare": [], BEYOND: []}
    memory: dict[int, float] = {}
    tokens = 0.0
    for _ in range(rounds):
        for method in ("encode_batch", "encode_batch_fast"):
            arguments = [str(folder / "tokenizer" / "tokenizer.json"), str(folder / "texts.json"), method]
            seconds, tokens = run(
                LIBRARY, arguments, TOKENIZERS_PARALLELISM="true", RAYON_NUM_THREADS=str(workers)
            )  # fmt: skip
            speeds[method].append(tokens / seconds)
        seconds, memory[1] = prepare(folder, files, tokenizer, workers)
        twice, memory[2] = prepare(folder, files * 2, tokenizer, workers)
        speeds["gtl prepare"].append(tokens / seconds)
        speeds[BEYOND].append(tokens / max(twice - seconds, 1e-9))
        print({name: round(values[-1]) for name, values in speeds.items()}, flush=True)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    best = max(medians["encode_batch"], medians["encode_batch_fast"])
    ratios = {name: medians[name] / best for name in ("gtl prepare", BEYOND)}
    for name, value in medians.items():
        print(f"{name:30s} {value:12,.0f} tokens/s")
    for name, value in ratios.items():
        print(f"{name:30s} {value:12.2f} over the library")
    print(f"memory {memory[1]:.0f} MB, {memory[2]:.0f} MB for twice the input")
    if out is not None:
        where = f"{device_name(torch.device('cpu'))}, {workers} workers"
        command = f"python bench/{command_line()}"
        values = [(name, "tokens_per_second", value) for name, value in medians.items()]
        values += [(name, "over_library", value) for name, value in ratios.items()]
        values += [("gtl prepare", "megabytes", memory[1])]
        values += [("gtl prepare, twice the input", "megabytes", memory[2])]
        rows = [
            Row("prepare-speed", method, len(texts), 0, metric, value, None, None, where, command)
            for method, metric, value in values
        ]
        write_json(out, [asdict(row) for row in rows])


def prepare(folder: Path, files: list[str], tokenizer: str, workers: int) -> tuple[float, float]:
    """Seconds of one whole run of gtl prepare, and at most how many megabytes it and its processes held."""
    target = folder / f"out-{time.time_ns()}"
    arguments = [
        "prepare",
        "--input",
        *files,
        "--tokenizer",
        tokenizer,
        "--workers",
        str(workers),
        "--out",
        str(target),
    ]
    seconds, megabytes = run(OURS, arguments)
    shutil.rmtree(target)
    return seconds, megabytes


if __name__ == "__main__":
    main()
