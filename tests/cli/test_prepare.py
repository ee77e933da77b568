"""gtl prepare at the command line: what is refused, what is left behind, what other verbs make of its folders."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gtl.data.tokens import read_tokens
from texts import csv_of, documents, lines_of, vocabulary, write, write_vocabulary
from typed import SMALL, contents, gtl

RECORDS = documents(80)
GOOD = "--tokenizer vocab.txt --length 8"
DOMAINS = "--domain math=categories:math. cs=categories:cs"


@pytest.fixture(scope="module", autouse=True)
def texts(shared: Path) -> None:
    """Texts, good and bad, in the folder in which commands run."""
    write_vocabulary(shared / "vocab.txt")
    write_vocabulary(shared / "other.txt", ["z"])
    write_vocabulary(shared / "maskless.txt", ["[MASK]"])
    write_vocabulary(shared / "endless.txt", ["[SEP]"])
    write_vocabulary(shared / "no_unk.txt", ["[UNK]"])
    lines = lines_of(RECORDS)
    write(shared / "x.jsonl", lines)
    write(shared / "text.jsonl", lines_of({"text": record["abstract"]} for record in RECORDS))
    write(shared / "bad.jsonl", lines_of(RECORDS[:6]) + b'{"id": 1\n' + lines)
    write(shared / "array.json", json.dumps(RECORDS).encode())
    write(shared / "latin.txt", b"we prove\n" + "naïve\n".encode("latin-1"))
    write(shared / "missing.jsonl", lines_of(RECORDS[:3]) + b'{"title": "a group", "body": "is finite"}\n')
    write(shared / "null.jsonl", lines_of([*RECORDS[:3], {"title": "a", "abstract": None}]))
    write(shared / "bodies.jsonl", lines_of([{"body": "we prove"}]))
    write(shared / "uneven.csv", csv_of(RECORDS) + b"1,2\n")
    write(shared / "open.csv", csv_of(RECORDS) + b'1,2,"3\n')
    write(shared / "none.jsonl", b"")
    write(shared / "few.jsonl", lines_of(RECORDS[:2]))
    write(shared / "x.docx", b"text")
    write(shared / "cut.parquet", b"PAR1 and no more")
    noise = b"".join(lines_of(documents(40, seed)) for seed in range(40))
    for suffix in (".gz", ".xz"):
        whole = write(shared / f"cut.jsonl{suffix}", noise).read_bytes()
        (shared / f"cut.jsonl{suffix}").write_bytes(whole[: len(whole) // 2])
        (shared / f"damaged.jsonl{suffix}").write_bytes(whole[:200] + bytes(200) + whole[400:])
        (shared / f"no.jsonl{suffix}").write_bytes(b"not packed at all")
    (shared / "tokenizer.json").write_text("{}")
    (shared / "nothing-here").mkdir(exist_ok=True)


BAD = {
    f"bad.jsonl {GOOD}": "bad.jsonl, line 7: not JSON",
    f"bad.jsonl {GOOD} --text abstract": "--skip_bad",
    f"array.json {GOOD} --text title": "array.json, line 1: not a JSON object; expected one object a line",
    f"latin.txt {GOOD}": "latin.txt, line 2: not UTF-8 text",
    f"missing.jsonl {GOOD}": "missing.jsonl, line 4: no field 'abstract'; it has title, body",
    f"null.jsonl {GOOD}": "null.jsonl, line 4: field 'abstract' is null, not text",
    f"bodies.jsonl {GOOD}": "choose with --text among body",
    f"bodies.jsonl {GOOD} --text ''": "text must name at least one field",
    f"x.jsonl {GOOD} --text title summary": "x.jsonl, line 1: no field 'summary'; it has id, submitter",
    f"text.jsonl {GOOD} {DOMAINS}": "text.jsonl, line 1: no field 'categories'; it has text",
    f"uneven.csv {GOOD}": "2 fields where the header has 5",
    f"open.csv {GOOD}": "not CSV",
    f"cut.jsonl.gz {GOOD}": "the compressed file ends too early; fetch it again",
    f"cut.jsonl.xz {GOOD}": "the compressed file ends too early; fetch it again",
    f"damaged.jsonl.gz {GOOD}": "damaged.jsonl.gz, line",
    f"damaged.jsonl.xz {GOOD}": "damaged.jsonl.xz, line 1: the compressed file is damaged",
    f"no.jsonl.gz {GOOD}": "no.jsonl.gz, line 1: the compressed file is damaged",
    f"no.jsonl.xz {GOOD}": "no.jsonl.xz, line 1: the compressed file is damaged",
    f"cut.parquet {GOOD}": "cut.parquet: not a whole parquet file",
    f"none.jsonl {GOOD}": "domain 'all' is empty",
    f"few.jsonl {GOOD}": "less than one segment of 8; give more text",
    f"nowhere.jsonl {GOOD}": "nowhere.jsonl: no such file",
    f"--input x.jsonl nowhere.jsonl {GOOD}": "nowhere.jsonl: no such file",
    f"./nowhere {GOOD}": "nowhere: no such file or folder",
    f"x.docx {GOOD}": "x.docx: unknown kind of file",
    f"nothing-here {GOOD}": "nothing-here: an empty folder",
    f"some-org/nothing {GOOD}": "the Hugging Face hub cannot be reached",
    f"{GOOD}": "input",
    # tokenizers
    "x.jsonl": "needs --tokenizer",
    "x.jsonl --tokenizer nowhere.json": "tokenizer nowhere.json: no such file",
    "x.jsonl --tokenizer some-org/nothing": "tokenizer some-org/nothing: no such file or folder, not in the Hugging",
    "x.jsonl --tokenizer tokenizer.json": "tokenizer tokenizer.json: not a tokenizer.json",
    "x.jsonl --tokenizer no_unk.txt": "no_unk.txt: not a BERT vocabulary",
    "x.jsonl --tokenizer src.npy": "tokenizer src.npy: expected a folder",
    "x.jsonl --tokenizer nothing-here": "tokenizer nothing-here: cannot be loaded",
    "x.jsonl --tokenizer maskless.txt": "has no mask token; add one with --mask_token",
    "x.jsonl --tokenizer endless.txt": "no separator (sep or eos) token; name a token with --separator",
    f"x.jsonl {GOOD} --separator nonsense": "separator 'nonsense' is not a token",
    f"x.jsonl {GOOD} --separator [MASK]": "is the mask token",
    # domains
    f"x.jsonl {GOOD} --domain math": "expected NAME=FIELD:PREFIX",
    f"x.jsonl {GOOD} --domain a=categories:math b=categories:math.AG": "'a' and 'b' overlap: 'math' begins 'math.AG'",
    f"x.jsonl {GOOD} --domain a=categories:math a=categories:cs": "domain 'a' is given twice",
    f"x.jsonl {GOOD} --domain ../a=categories:math": "must serve as a folder's",
    f"x.jsonl {GOOD} --domain a=categories:math b=title:W,T,H": "belongs to domain 'a' and to 'b'",
    f"x.jsonl {GOOD} {DOMAINS} bio=categories:q-bio": "values seen most: math.AG (12), math.NT (12), hep-th (12)",
    # numbers
    f"x.jsonl {GOOD} --length 1": "length=1",
    f"x.jsonl {GOOD} --validation 1": "validation=1",
    f"x.jsonl {GOOD} --validation 0": "validation=0",
    f"x.jsonl {GOOD} --seed -1": "seed=-1",
    f"x.jsonl {GOOD} --workers 0": "workers=0",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = refused(f"prepare {command}")
    assert BAD[command] in line, line
    assert list(tmp_path.iterdir()) == []  # nothing beside --out either


def test_the_line_at_which_a_file_was_cut(refused: Callable[..., str], shared: Path):
    """Everything before it can be read."""
    import zlib

    data = zlib.decompressobj(wbits=31).decompress((shared / "cut.jsonl.gz").read_bytes())
    assert f"cut.jsonl.gz, line {data.count(bytes([10])) + 1}: " in refused(f"prepare cut.jsonl.gz {GOOD}")


def test_out_is_needed(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        gtl(f"prepare x.jsonl {GOOD}")
    assert capsys.readouterr().err == "gtl: prepare needs --out\n"


def test_again(refused: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The same command says that it is done, whatever the number of processes; another is refused."""
    out = tmp_path / "out"
    gtl(f"prepare x.jsonl {GOOD} {DOMAINS}", "--out", out)
    before = contents(out)
    assert "math: 24 documents" in capsys.readouterr().out
    gtl(f"prepare x.jsonl {GOOD} {DOMAINS} --workers 1", "--out", out)
    assert "already prepared" in capsys.readouterr().out
    assert contents(out) == before
    for other in ("--seed 1", "--exclusive true", "--length 9", "--tokenizer other.txt"):
        assert "finished run of another config" in refused(f"prepare x.jsonl {GOOD} {DOMAINS} {other}", out)
    assert "finished run of another config" in refused(f"prepare x.jsonl {GOOD}", out)


def test_folders_that_are_refused(refused: Callable[..., str], tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    assert "not empty" in refused(f"prepare x.jsonl {GOOD}", tmp_path / "full")
    assert "is a file" in refused(f"prepare x.jsonl {GOOD}", tmp_path / "file")


def test_a_killed_run(tmp_path: Path):
    """Nothing looks finished, and the same command starts over."""
    pipe = tmp_path / "slow.txt"
    text = b"we prove that the field of a group is finite\n" * 200_000
    pipe.write_bytes(text)
    call = [sys.executable, "-m", "gtl.cli", "prepare", str(pipe), *GOOD.split(), "--workers", "2"]
    run = subprocess.Popen([*call, "--out", str(tmp_path / "out")], stderr=subprocess.PIPE)
    started = tmp_path / ".out.unfinished" / "all" / "train.npy"
    while not (started.exists() and started.stat().st_size > 10_000):
        assert run.poll() is None
        time.sleep(0.02)
    os.kill(run.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    pipe.write_bytes(text[:4500])
    gtl(f"prepare {pipe} {GOOD}", "--out", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "slow.txt"]
    assert json.loads((tmp_path / "out" / "all" / "meta.json").read_text())["inputs"][0]["bytes"] == 4500


@pytest.fixture(scope="module")
def domains(texts: None, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two domains, and the same with another tokenizer and with another length."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(shared)
        gtl(f"prepare x.jsonl {GOOD} {DOMAINS}", "--out", folder / "two")
        gtl(f"prepare x.jsonl {GOOD} {DOMAINS} --tokenizer other.txt", "--out", folder / "other")
        gtl(f"prepare x.jsonl {GOOD} {DOMAINS} --length 9", "--out", folder / "longer")
    return folder


def test_training_on_prepared_folders(refused: Callable[..., str], domains: Path, tmp_path: Path):
    """The ids come from meta.json; what does not go together is refused."""
    math, cs = domains / "two" / "math", domains / "two" / "cs"
    gtl(f"train denoiser --data {math} {SMALL}", "--out", tmp_path / "d")
    process = json.loads((tmp_path / "d" / "config.json").read_text())["process"]
    assert (process["num_ids"], process["mask_id"]) == (len(vocabulary()), 4)
    gtl(f"train ratio --source {math} --target {cs} --like {tmp_path / 'd'} {SMALL}", "--out", tmp_path / "r")
    gtl(f"train denoiser --data {math} --process uniform {SMALL}", "--out", tmp_path / "u")
    pair = f"train ratio --source {math} {SMALL} --target"
    assert "different tokenizers" in refused(f"{pair} {domains / 'other' / 'cs'}")
    assert "different lengths (8 and 9)" in refused(f"{pair} {domains / 'longer' / 'cs'}")
    assert "the model has 4 ids and mask 3" in refused(f"train denoiser --data {math} --like denoiser {SMALL}")
    assert "choose one of its domains: cs, math" in refused(f"train denoiser --data {domains / 'two'} {SMALL}")


def test_adapting_to_prepared_folders(refused: Callable[..., str], domains: Path, tmp_path: Path):
    math, cs = domains / "two" / "math", domains / "two" / "cs"
    gtl(f"train denoiser --data {math} {SMALL}", "--out", tmp_path / "d")
    small = "--training.budget 9 --training.folds 2"
    gtl(f"adapt {tmp_path / 'd'} {cs} --source {math} --method gtl-direct {small}", "--out", tmp_path / "a")
    assert "the model has 4 ids and mask 3" in refused(f"adapt denoiser {cs}")
    assert "different lengths" in refused(f"adapt {tmp_path / 'd'} {cs} --source {domains / 'longer' / 'math'}")
    assert "the model has 4 ids and mask 3" in refused(f"diagnose denoiser {cs}")
    assert "different tokenizers" in refused(f"diagnose {tmp_path / 'd'} {cs} --source {domains / 'other' / 'math'}")


def test_mixing_prepared_folders(
    refused: Callable[..., str], domains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A share of the target is in the source; a killed run is finished, and a finished one is never touched."""
    math, cs, out = domains / "two" / "math", domains / "two" / "cs", tmp_path / "mixed"
    command = f"mix --source {math} --target {cs} --share 0.25 --seed 3"
    gtl(command, "--out", out)
    assert f"{out / 'source'} and {out / 'target'}: 0.25 of the target is in the source" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"source", "target", "run.json", "FINISHED"}
    about = json.loads((out / "run.json").read_text())
    assert about == {"seed": 3, "command": f"gtl {command} --out {out}"}
    before, after = ([len(read_tokens(folder)) for folder in pair] for pair in
                     ((math, cs), (out / "source", out / "target")))  # fmt: skip
    moved = round(0.25 * before[1])
    assert after == [before[0] + moved, before[1] - moved]
    gtl(f"train denoiser --data {out / 'source'} {SMALL}", "--out", tmp_path / "d")
    assert "already holds a finished run" in refused(command, out)
    was = contents(out)
    (out / "FINISHED").unlink()
    gtl(command, "--out", out)
    assert contents(out) == was
    (out / "FINISHED").unlink()
    assert "holds a mixture of other arguments or data" in refused(command.replace("0.25", "0.5"), out)


def test_what_cannot_be_mixed(refused: Callable[..., str], domains: Path):
    mix = f"mix --source {domains / 'two' / 'math'} --target"
    cs = domains / "two" / "cs"
    for share in ("0", "1", "-0.5", ".nan"):
        assert "must be a fraction between 0 and 1" in refused(f"{mix} {cs} --share={share}")
    assert "one at least must move" in refused(f"{mix} {cs} --share 1e-6")
    assert "different tokenizers" in refused(f"{mix} {domains / 'other' / 'cs'} --share 0.5")
    assert "different lengths" in refused(f"{mix} {domains / 'longer' / 'cs'} --share 0.5")
    assert "nowhere: no prepared folder; make it with gtl prepare" in refused(f"{mix} nowhere --share 0.5")
    assert "share" in refused(f"{mix} {cs}")


def test_a_changed_array(refused: Callable[..., str], shared: Path, tmp_path: Path):
    gtl(f"prepare x.jsonl {GOOD}", "--out", tmp_path / "p")
    file = tmp_path / "p" / "all" / "train.npy"
    file.write_bytes(file.read_bytes()[:-4])
    assert "prepare the data again" in refused(f"train denoiser --data {tmp_path / 'p' / 'all'} {SMALL}")
