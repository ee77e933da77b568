"""Mixtures of two domains: every row goes somewhere exactly once, and what comes out is a prepared folder."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gtl.data import mixture
from gtl.data.mixture import mix
from gtl.data.prepared import open_split, read_meta
from gtl.data.tokenizer import load_tokenizer
from gtl.data.tokens import check_tokens, read_tokens
from texts import documents, lines_of, write, write_vocabulary
from typed import contents, gtl

SPLITS = ("train", "validation")


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two domains; the same with another tokenizer and with another length."""
    folder = tmp_path_factory.mktemp("prepared")
    write(folder / "x.jsonl", lines_of(documents(400)))
    call = f"prepare {folder / 'x.jsonl'} --domain source=categories:cs target=categories:math --validation 0.3"
    vocab, fewer = write_vocabulary(folder / "vocab.txt"), write_vocabulary(folder / "fewer.txt", ["z"])
    gtl(f"{call} --tokenizer {vocab} --length 8", "--out", folder / "two")
    gtl(f"{call} --tokenizer {fewer} --length 8", "--out", folder / "other")
    gtl(f"{call} --tokenizer {vocab} --length 9", "--out", folder / "longer")
    return folder


@pytest.fixture
def pair(domains: Path) -> tuple[Path, Path]:
    return domains / "two" / "source", domains / "two" / "target"


def rows(folder: Path, split: str) -> list[bytes]:
    """The rows of a split, in order, once it is seen that they are what meta.json says."""
    meta = read_meta(folder)
    assert meta is not None
    x = open_split(folder, meta, split, verify=True)
    check_tokens(x, meta.vocabulary, meta.mask_id, least=1)
    return [row.tobytes() for row in x.numpy()]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("share", [0.05, 0.25, 0.6])
def test_every_row_is_somewhere_once(pair: tuple[Path, Path], tmp_path: Path, share: float, split: str):
    """Multisets: source' + target' = source + target, source' holds the source, and a share r of the target moved."""
    p, q = pair
    mix(p, q, share, tmp_path / "out")
    before = [rows(folder, split) for folder in pair]
    after = [rows(tmp_path / "out" / name, split) for name in ("source", "target")]
    moved = round(share * len(before[1]))
    assert [len(part) for part in after] == [len(before[0]) + moved, len(before[1]) - moved]
    assert Counter(after[0] + after[1]) == Counter(before[0] + before[1])
    assert Counter(before[0]) <= Counter(after[0])
    assert Counter(after[1]) + (Counter(after[0]) - Counter(before[0])) == Counter(before[1])
    places = iter(before[1])
    assert all(row in places for row in after[1])  # a subsequence: what stays keeps its order


def numbered(pair: tuple[Path, Path], folder: Path) -> tuple[Path, Path]:
    """Copies of the domains whose rows are all different: eight times a number, from 1,000 on in the target."""
    found = []
    for path, start in zip(pair, (0, 1000), strict=True):
        shutil.copytree(path, folder / path.name)
        meta = json.loads((path / "meta.json").read_text()) | {"vocabulary": 5000, "mask_id": 4999}
        for split in SPLITS:
            file = folder / path.name / f"{split}.npy"
            count = meta["splits"][split]["segments"]
            np.save(file, np.repeat(np.arange(start, start + count, dtype=np.uint16)[:, None], 8, 1))
            meta["splits"][split] |= {"bytes": file.stat().st_size, "sha256": mixture.sha256_of(file)}
        (folder / path.name / "meta.json").write_text(json.dumps(meta))
        found.append(folder / path.name)
    return found[0], found[1]


def test_which_rows_move(pair: tuple[Path, Path], tmp_path: Path):
    """The domains stay disjoint; a seed decides; a larger share moves the same rows and more; sources are shuffled."""
    p, q = numbered(pair, tmp_path)
    moved = {}
    for name, share, seed in (("a", 0.2, 0), ("again", 0.2, 0), ("more", 0.5, 0), ("other", 0.2, 1)):
        mix(p, q, share, tmp_path / name, seed)
        for split in SPLITS:
            source, target = (read_tokens(tmp_path / name / d, split).numpy()[:, 0] for d in ("source", "target"))
            assert not set(source) & set(target)
            moved[name, split] = {int(number) for number in source if number >= 1000}
            assert list(source[source < 1000]) != sorted(source[source < 1000])
    source = read_tokens(tmp_path / "a" / "source").numpy()[:, 0] >= 1000
    halves = [half.mean() for half in np.array_split(source, 2)]
    assert halves == [pytest.approx(source.mean(), abs=0.05)] * 2
    for split in SPLITS:
        assert moved["a", split] == moved["again", split] < moved["more", split]
        assert moved["a", split] != moved["other", split]
    assert (tmp_path / "a/source/train.npy").read_bytes() == (tmp_path / "again/source/train.npy").read_bytes()


def test_what_is_said_of_it(pair: tuple[Path, Path], tmp_path: Path):
    """meta.json and the tokenizer are taken over; documents add up."""
    p, q = pair
    mix(p, q, 0.25, tmp_path / "out", seed=3)
    total = dict.fromkeys(SPLITS, 0)
    for name, folder in (("source", p), ("target", q)):
        old, new = (json.loads((f / "meta.json").read_text()) for f in (folder, tmp_path / "out" / name))
        about = new.pop("mixture")
        assert {key: about[key] for key in ("source", "target", "share", "seed")} == {
            "source": str(p), "target": str(q), "share": 0.25, "seed": 3,
        }  # fmt: skip
        for split in SPLITS:
            assert old["splits"][split].keys() == new["splits"][split].keys()
            part = new["splits"][split]
            assert part["tokens"] == 8 * part["segments"] == np.load(tmp_path / "out" / name / f"{split}.npy").size
            total[split] += new["splits"][split]["documents"] - old["splits"][split]["documents"]
        assert {**old, "splits": 0} == {**new, "splits": 0}
        assert {f.name for f in folder.iterdir()} == {f.name for f in (tmp_path / "out" / name).iterdir()}
        assert load_tokenizer(str(tmp_path / "out" / name)).get_vocab() == load_tokenizer(str(folder)).get_vocab()
    assert total == {"train": 0, "validation": 0}
    kept = json.loads((tmp_path / "out" / "target" / "meta.json").read_text())["splits"]["train"]["documents"]
    assert kept == pytest.approx(
        0.75 * json.loads((q / "meta.json").read_text())["splits"]["train"]["documents"], abs=1
    )
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_again(pair: tuple[Path, Path], tmp_path: Path):
    """The same arguments leave the folder as it is; others, and data that changed, are refused."""
    p, q = numbered(pair, tmp_path)
    out = tmp_path / "out"
    mix(p, q, 0.25, out)
    before, written = contents(out), (out / "source" / "train.npy").stat().st_mtime_ns
    mix(p, q, 0.25, out)
    assert (out / "source" / "train.npy").stat().st_mtime_ns == written
    for share, seed in ((0.3, 0), (0.25, 1)):
        with pytest.raises(FileExistsError, match="mixture of other arguments or data; choose another folder"):
            mix(p, q, share, out, seed)
    meta = json.loads((q / "meta.json").read_text())
    np.save(q / "train.npy", np.load(q / "train.npy")[::-1])
    meta["splits"]["train"]["sha256"] = mixture.sha256_of(q / "train.npy")
    (q / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(FileExistsError, match="other arguments or data"):
        mix(p, q, 0.25, out)
    assert contents(out) == before


def test_folders_that_are_refused(pair: tuple[Path, Path], tmp_path: Path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("file", "full"):
        with pytest.raises(FileExistsError, match="exists and holds no mixture; choose another folder, or remove it"):
            mix(*pair, 0.25, tmp_path / name)
    mix(*pair, 0.25, tmp_path / "empty")
    assert read_meta(tmp_path / "empty" / "target") is not None


def test_bad_arguments(domains: Path, pair: tuple[Path, Path], tmp_path: Path):
    p, q = pair
    for share in (0.0, 1.0, -0.5, float("nan")):
        with pytest.raises(ValueError, match=r"share=.* must be a fraction between 0 and 1"):
            mix(p, q, share, tmp_path / "out")
    for share in (1e-6, 1 - 1e-6):
        with pytest.raises(ValueError, match="one at least must move and one must stay"):
            mix(p, q, share, tmp_path / "out")
    with pytest.raises(ValueError, match="different tokenizers"):
        mix(p, domains / "other" / "target", 0.5, tmp_path / "out")
    with pytest.raises(ValueError, match="different lengths"):
        mix(p, domains / "longer" / "target", 0.5, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="nowhere: no prepared folder; make it with gtl prepare"):
        mix(p, tmp_path / "nowhere", 0.5, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_failure(pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither of one in the middle, nor, after the next call, of a process that was killed; changed data are seen."""
    (tmp_path / ".out.unfinished" / "source").mkdir(parents=True)
    (tmp_path / ".out.unfinished" / "source" / "junk.npy").write_text("x")
    with monkeypatch.context() as patch:
        patch.setattr(mixture, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            mix(*pair, 0.25, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    p, q = numbered(pair, tmp_path)
    array = np.load(p / "train.npy")
    array[0, 0] += 1
    np.save(p / "train.npy", array)
    with pytest.raises(ValueError, match="has changed since it was prepared"):
        mix(p, q, 0.25, tmp_path / "out")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["source", "target"]
