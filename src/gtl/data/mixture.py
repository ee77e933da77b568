"""Mixtures: the paper's r > 0, a source that has seen a random share r of the target domain.

    source' = source + r of target,        target' = the other 1 - r of target

in every split. Rows move, not documents: one that runs over two rows may be cut between the domains. Of one seed, the
rows that move at a smaller share are among those of a larger one.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtl.data.documents import sha256_of
from gtl.data.prepared import Meta, open_split, read_meta, same_tokens
from gtl.train.checkpoint import atomic, write_json

__all__ = ["mix"]


def mix(source: Path, target: Path, share: float, out: Path, seed: int = 0) -> None:
    """Writes the prepared folders out/source and out/target; a folder that was made just so is left as it is.

    Rows of the new source are shuffled, so that the first ones are a fair sample; those of the new target keep their
    order.

    Args:
        source: a prepared folder.
        target: another, of the same tokenizer and length.
        share: r, of the target's rows, that moves to the source.
        out: folder for both.
        seed: of the rows that move and of the shuffling.
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share} must be a fraction between 0 and 1")
    folders = {"source": source, "target": target}
    metas = {name: prepared(path) for name, path in folders.items()}
    same_tokens({str(folders[name]): meta for name, meta in metas.items()})
    about: dict[str, Any] = {"source": str(source), "target": str(target), "share": share, "seed": seed}
    about["sha256"] = {name: {s: part.sha256 for s, part in meta.splits.items()} for name, meta in metas.items()}
    out = out.resolve()
    if is_done(out, about):
        return
    folder = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        parts: dict[str, dict[str, Any]] = {name: {} for name in folders}
        for name, path in folders.items():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("*.npy", "meta.json"))
        for split in metas["target"].splits:
            p, q = (open_split(folders[name], metas[name], split, verify=True).numpy() for name in folders)
            rows = dict(zip(folders, move(p, q, share, seed), strict=True))
            known = {name: meta.splits[split].documents for name, meta in metas.items()}
            kept = round(known["target"] * len(rows["target"]) / len(q))
            documents = {"source": sum(known.values()) - kept, "target": kept}
            for name in folders:
                parts[name][split] = write(folder / name / f"{split}.npy", rows[name], documents[name])
        for name, path in folders.items():
            meta = json.loads((path / "meta.json").read_text())
            write_json(folder / name / "meta.json", meta | {"splits": parts[name], "mixture": about})
        os.replace(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def prepared(folder: Path) -> Meta:
    """The meta.json of a folder that must have one."""
    meta = read_meta(folder)
    if meta is None:
        raise FileNotFoundError(f"{folder}: no prepared folder; make it with gtl prepare")
    return meta


def is_done(out: Path, about: dict[str, Any]) -> bool:
    """Whether the folder holds this very mixture; a file, and a folder with other things in it, are refused."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    files = [out / name / "meta.json" for name in ("source", "target")]
    found = [json.loads(file.read_text()).get("mixture") for file in files if file.is_file()]
    if found == [about, about]:
        return True
    what = "a mixture of other arguments or data" if any(found) else "no mixture"
    raise FileExistsError(f"{out} exists and holds {what}; choose another folder, or remove it")


def move(p: NDArray[Any], q: NDArray[Any], share: float, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows p (N, L) of the source with a share of q (M, L), shuffled, and the rest of q in its order."""
    count = round(share * len(q))
    if not 0 < count < len(q):
        raise ValueError(f"share={share} of {len(q)} rows are {count}; one at least must move and one must stay")
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(q))
    joined = np.concatenate([p, q[np.sort(order[:count])]])
    return joined[generator.permutation(len(joined))], q[np.sort(order[count:])]


def write(file: Path, rows: NDArray[Any], documents: int) -> dict[str, Any]:
    """Writes one split; what meta.json says of it."""
    with atomic(file) as handle:
        np.save(handle, rows, allow_pickle=False)
    return {
        "documents": documents,
        "tokens": rows.size,
        "segments": len(rows),
        "left_over": 0,
        "bytes": file.stat().st_size,
        "sha256": sha256_of(file),
    }
