"""`gtl reproduce arxiv` at toy size: from a snapshot of abstracts to figures, once more, and in parts."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from toy_recipe import RECIPE, RUN, SOURCE, changed, write_recipe

from gtl.data.prepared import read_meta
from gtl.reproduce import pieces
from gtl.reproduce.arxiv import pieces_of
from gtl.reproduce.recipe import Sweep, Variant, World, read_recipe
from gtl.run import read_rows
from typed import contents, gtl

PICTURES = ("fractions.png", "shares.png", "sweep-gtl-paper.png", "sweep-gtl-local.png")
FIGURES = {"results.json", "results.md", "summary.md", "samples.md", *PICTURES}
FITTED = {"gamma", "steps"}
MODEL = {"nll", "masked_nll", "perplexity_bound"}
TEXT = {"mauve", "mauve_words", "distinct_4", "token_entropy", "domain", "copied_4"}
TIMED = {"FINISHED", "results.json", "results.md"}
STAGES_OF_SAMPLES = ("samples", "measure", "judge")
LOCAL = "r0-n27-s2-gtl-local"

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def whole(quick: None, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `out` of one run of all stages; nothing may be changed in it."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(inputs, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_recipe()
        gtl(RUN)
    return folder / "out"


@pytest.fixture
def again(whole: Path, bare: Path) -> Path:
    """A copy of the whole run, to be run in again."""
    shutil.copytree(whole, bare)
    return bare


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of the pieces that run, below `out`."""
    found: list[str] = []
    perform = pieces.perform

    def counted(piece: pieces.Piece, deadline: float | None, log: Path | None) -> str | None:
        found.append(str(piece.folder.relative_to("out")))
        return perform(piece, deadline, log)

    monkeypatch.setattr(pieces, "perform", counted)
    return found


def said(out: Path, name: str) -> str:
    """The command of one piece."""
    return json.loads((out / name / "run.json").read_text())["command"]


def measured(folder: Path, method: str, metric: str) -> float:
    """What one piece said."""
    (value,) = (r.value for r in read_rows(folder / "results.json") if (r.method, r.metric) == (method, metric))
    return value


def numbers(out: Path) -> dict[float, dict[float, int]]:
    """Share -> fraction -> target sequences."""
    found = {}
    for world, data in zip(RECIPE["worlds"], ("data", "mixed-0.25"), strict=True):
        meta = read_meta(out / data / "target")
        assert meta is not None
        rows = meta.splits["train"].segments
        assert len(np.load(out / data / "target" / "train.npy")) == rows
        found[world["share"]] = {fraction: round(fraction * rows) for fraction in world["fractions"]}
    return found


# what a whole run leaves


def test_every_piece_is_there(whole: Path):
    assert {path.name for path in whole.iterdir() if path.is_file()} == FIGURES
    stages = {"adapt": 6, "likelihood": 17, "samples": 17, "measure": 17, "judge": 18}
    folders = [whole / name for name in ("data", "mixed-0.25", "source", "source-r0.25", "planner", "diagnose")]
    for stage, count in stages.items():
        inside = [path for path in (whole / stage).iterdir() if path.is_dir()]
        assert len(inside) == count, stage
        folders += inside
    assert {path.name for path in whole.iterdir() if path.is_dir()} == {f.name for f in folders[:6]} | {*stages, "real"}
    for folder in folders:
        assert (folder / "FINISHED").is_file(), folder
        assert json.loads((folder / "run.json").read_text())["command"].startswith("gtl ")
    assert not [path for path in whole.rglob(".*") if path.name != ".gitattributes"]


def test_figures_and_samples_can_be_read(whole: Path):
    for name in (*PICTURES, "diagnose/diagnosis.png", "planner/planner.png"):
        image = imread(whole / name)
        assert min(image.shape[:2]) > 200
        assert image.std() > 0.01
    page = (whole / "samples.md").read_text()
    titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
    fitted = [title for title in titles if "source" not in title]
    mixed = [title for title in fitted if "r = 0.25" in title]
    assert (len(fitted), len(mixed)) == (6, 3)
    middle = {True: f", r = 0.25, n = {numbers(whole)[0.25][0.1]}", False: f", n = {numbers(whole)[0][0.5]}"}
    assert all(title.endswith(middle[title in mixed]) for title in fitted)
    assert len(re.findall(r"^10\. ", page, re.MULTILINE)) == len(titles)
    table = (whole / "results.md").read_text()
    assert re.findall(r"^# (.*)$", table, re.MULTILINE) == [
        "arxiv", "arxiv-outside-own-r0", "arxiv-outside-own-r0.25", "arxiv-outside-r0", "arxiv-outside-r0.25",
        "arxiv-r0.25",
        "arxiv-sweep-gtl-local-r0", "arxiv-sweep-gtl-paper-r0", "arxiv-sweep-gtl-paper-r0.25",
    ]  # fmt: skip
    assert table.index("## mauve") < table.index("## nll") < table.index("## domain")


def test_sources_are_among_the_samples(whole: Path):
    page = (whole / "samples.md").read_text().splitlines()
    assert [line for line in page if "source" in line] == [
        "## source model, unguided", "## source model, unguided, r = 0.25"
    ]  # fmt: skip


def test_what_the_rows_are_called(whole: Path):
    """Experiment, method, n and seed of every metric that figures are drawn from, and of those of a fit."""
    rows = read_rows(whole / "results.json")
    places: dict[str, set[Any]] = {row.metric: set() for row in rows}
    for r in rows:
        places[r.metric].add((r.experiment, r.method, r.n, r.seed))
    assert sum(map(len, places.values())) == len(rows), "a measurement stands there twice"
    fitted, drawn, plain, real, outside = set(), set(), set(), set(), set()
    for world, name in zip(RECIPE["worlds"], ("arxiv", "arxiv-r0.25"), strict=True):
        n, end = numbers(whole)[world["share"]], f"r{world['share']:g}"
        fitted |= {(name, method, each, 2) for method in World(**world).names for each in n.values()}
        drawn |= {(name, method, each, 20) for method in World(**world).names for each in n.values()}
        drawn |= {(f"arxiv-sweep-gtl-paper-{end}", f"gamma={gamma},n_ratio=2", n[0.1], 23) for gamma in (0, 2)}
        plain |= {(name, "source", None, 0)}
        real |= {(name, "real", None, 0)}
        outside |= {(f"arxiv-outside-{who}{end}", f"n_ratio={k}", None, 0) for who in ("", "own-") for k in (2, 8)}
    setting = "arxiv-sweep-gtl-local-r0", "gamma=1.5,n_ratio=all"
    swept = {(*setting, n) for n in numbers(whole)[0].values()}
    drawn |= {(*one, 20) for one in swept}
    assert places["outside"] == outside
    assert places["borrowed"] == {("arxiv-r0.25", "finetuned-iw", numbers(whole)[0.25][0.1], 2)}
    for metric in FITTED:
        assert places[metric] == fitted, metric
    for metric in MODEL:
        assert places[metric] == fitted | plain | {(*one, 2) for one in swept}, metric
    for metric in TEXT:
        level = {("arxiv", "real", None, 0)} if "mauve" in metric else real
        assert places[metric] == drawn | plain | level, metric
    assert "domain_score" not in places
    assert not any(metric.startswith("outside@") for metric in places)


def test_rows_have_weights_times_and_the_command(whole: Path):
    rows = read_rows(whole / "results.json")
    assert {row.command for row in rows} == {"gtl reproduce arxiv --recipe toy.yaml"}
    kept = {}
    for cell in (whole / "adapt").iterdir():
        name = "arxiv" if cell.name.startswith("r0-") else "arxiv-r0.25"
        kept |= {(name, r.method, r.n): r.trainable_weights for r in read_rows(cell / "results.json")}
    tuned = {key: weights for key, weights in kept.items() if key[1] == "finetuned"}
    assert len(tuned) == 3
    assert all(weights and weights > 100 for key, weights in kept.items() if key[1] != "source")
    for row in rows:
        assert row.trainable_weights == kept.get((row.experiment, row.method, row.n)), row
        assert (row.seconds is None) == (row.method == "real" and not row.metric.startswith("mauve")), row


def test_rows_are_what_the_pieces_measured(whole: Path):
    rows = {(r.experiment, r.method, r.n, r.seed, r.metric): r.value for r in read_rows(whole / "results.json")}
    n, few = numbers(whole)[0][0.1], numbers(whole)[0.25][0.1]
    cell = f"r0-n{n}-s2"
    assert f"{cell}-gtl-local" == LOCAL

    def at(name: str, method: str = "samples", metric: str = "mauve") -> float:
        return measured(whole / name, method, metric)

    assert rows["arxiv", "gtl-paper", n, 20, "mauve"] == at(f"judge/{cell}-gtl-paper-d0")
    assert rows["arxiv-sweep-gtl-paper-r0", "gamma=2,n_ratio=2", n, 23, "mauve"] == at(
        f"judge/{cell}-gtl-paper-g2-k2-d3"
    )
    assert rows["arxiv", "real", None, 0, "mauve"] == at("judge/real")
    assert rows["arxiv-r0.25", "source", None, 0, "mauve"] == at("judge/r0.25-source-d0")
    swept = f"measure/r0.25-n{few}-s2-gtl-paper-g0-k2-d3"
    where = "arxiv-sweep-gtl-paper-r0.25", "gamma=0,n_ratio=2", few, 23, "domain"
    assert rows[where] == at(swept, metric="domain_score")
    real = at("measure/r0-source-d0", "held_out", "distinct_1")
    assert rows["arxiv", "real", None, 0, "distinct_1"] == real != at("measure/r0-source-d0", metric="distinct_1")
    model, guided = f"likelihood/{cell}-finetuned", f"likelihood/{cell}-gtl-local"
    assert rows["arxiv", "finetuned", n, 2, "nll"] == at(model, "source", "nll")
    assert rows["arxiv", "gtl-local", n, 2, "nll"] == at(guided, "guided", "nll") != at(guided, "source", "nll")
    stronger = rows["arxiv-sweep-gtl-local-r0", "gamma=1.5,n_ratio=all", n, 2, "nll"]
    assert stronger == at(f"{guided}-g1.5", "guided", "nll") != at(guided, "guided", "nll")
    assert rows["arxiv", "source", None, 0, "nll"] == at("likelihood/r0-source", "source", "nll")
    left_out = []
    for name in ("outside", "outside-own"):
        values = [rows[f"arxiv-{name}-r0.25", f"n_ratio={k}", None, 0, "outside"] for k in (2, 8)]
        assert values == [at(f"likelihood/r0.25-{name}", "source", f"outside@{k}") for k in (2, 8)]
        assert 1 > values[0] > values[1] > 0
        left_out.append(values)
    assert left_out[0] != left_out[1]
    assert rows["arxiv", "gtl-local", n, 2, "gamma"] == at(f"adapt/{cell}-finetuned", "gtl-local", "gamma")
    values = {value for key, value in rows.items() if key[4] == "mauve"}
    assert len(values) > 5, "the judge tells no texts apart"
    assert rows["arxiv", "real", None, 0, "mauve"] == max(values)


def test_what_each_piece_was_told(whole: Path):
    assert "--start out/source " in said(whole, "source-r0.25")
    assert "--fit.steps 4 " in said(whole, "source-r0.25")
    assert "--network" not in said(whole, "source-r0.25")
    cell = "r0-n27-s2"
    assert "--method finetuned gtl-local --rows 27 --seed 2 " in said(whole, f"adapt/{cell}-finetuned")
    assert "--method gtl-paper --rows 27 --seed 2 " in said(whole, f"adapt/{cell}-gtl-paper")
    assert f"--denoiser out/adapt/{cell}-finetuned/finetuned " in said(whole, f"samples/{cell}-finetuned-d0")
    assert "--ratio" not in said(whole, f"samples/{cell}-finetuned-d0")
    paper, local, swept = (
        said(whole, f"samples/{cell}-gtl-{name}") for name in ("paper-d0", "local-d0", "paper-g2-k2-d3")
    )
    assert f"--denoiser out/source --ratio out/adapt/{cell}-gtl-paper " in paper
    assert f"--denoiser out/source --ratio out/adapt/{cell}-finetuned/gtl-local " in local
    assert "--n_ratio 4 --planner out/planner --seed 0 " in paper
    assert "--n_ratio 2 --planner out/planner --gamma 2 --seed 3 " in swept
    assert "planner" not in local
    assert "n_ratio" not in local
    assert "--n_ratio 4 --places 2 " in said(whole, f"likelihood/{cell}-gtl-paper")
    assert "n_ratio" not in said(whole, f"likelihood/{cell}-gtl-local")
    assert "--outside 2 8 " in said(whole, "likelihood/r0.25-outside")
    assert "--data out/mixed-0.25/source " in said(whole, "likelihood/r0.25-outside-own")
    assert "--outside 2 8 " in said(whole, "likelihood/r0.25-outside-own")
    assert f"--train out/adapt/{cell}-finetuned/target.npy " in said(whole, f"measure/{cell}-gtl-local-d0")
    mixed = "r0.25-n20-s2"
    assert f"--denoiser out/source-r0.25 --ratio out/adapt/{mixed}-gtl-paper " in said(
        whole, f"samples/{mixed}-gtl-paper-d0"
    )
    sides = "--target out/mixed-0.25/target --source out/mixed-0.25/source "
    assert f"--denoiser out/source-r0.25 {sides}" in said(whole, f"adapt/{mixed}-gtl-paper")
    assert "--data out/mixed-0.25/source " in said(whole, "source-r0.25")
    for name in ("likelihood/r0.25-source", "likelihood/r0.25-outside", "judge/r0.25-source-d0"):
        assert "--data out/data/target " in said(whole, name)
    assert "--data out/data/target --source out/data/source " in said(whole, "measure/r0.25-source-d0")
    assert len(np.load(whole / "adapt" / f"{cell}-gtl-paper" / "target.npy")) == 27
    real = np.load(whole / "real" / "samples.npy")
    assert (real == np.load(whole / "data" / "target" / "train.npy")[:100]).all()


# once more


def test_a_second_run_performs_nothing(again: Path, performed: list[str], capsys: pytest.CaptureFixture[str]):
    before = {path: path.stat().st_mtime_ns for path in again.rglob("*") if path.is_file()}
    was = contents(again)
    gtl(RUN)
    assert performed == []
    assert {path.name for path, when in before.items() if path.stat().st_mtime_ns != when} == FIGURES
    assert contents(again) == was
    assert capsys.readouterr().out.split() == [f"out/{name}" for name in
        ("results.json", "results.md", "summary.md", "samples.md", *PICTURES)]  # fmt: skip


def test_pieces_that_are_gone_are_made_again(again: Path, performed: list[str], capsys: pytest.CaptureFixture[str]):
    """Those and no others, with the same result."""
    names = ["mixed-0.25", "planner", "judge/real", f"samples/{LOCAL}-d0"]

    def lasting() -> dict[str, bytes]:
        return {key: value for key, value in (contents(again) or {}).items() if Path(key).name not in TIMED}

    before = lasting()
    for name in names:
        shutil.rmtree(again / name)
    gtl(RUN)
    assert performed == names
    said = capsys.readouterr().err
    assert re.findall(r"^\d+/\d+ out/(\S+) \d+ s (\w+)$", said, re.MULTILINE) == [(name, "done") for name in names]
    assert lasting() == before


def test_a_piece_that_was_killed_at_the_end(again: Path, performed: list[str]):
    """Results but no marker: it is finished, and no row stands there twice."""
    names = ["mixed-0.25", "source", "adapt/r0-n27-s2-finetuned", f"likelihood/{LOCAL}", f"samples/{LOCAL}-d0",
             f"measure/{LOCAL}-d0", f"judge/{LOCAL}-d0"]  # fmt: skip
    files = ("results.json", "samples.npy", "weights.safetensors", "gtl-local/weights.safetensors", "target.npy")

    def told() -> list[Any]:
        read = [again / name / file for name in names for file in files if (again / name / file).is_file()]
        return [[(r.method, r.metric, r.value) for r in read_rows(path)] if path.suffix == ".json" else
                path.read_bytes() for path in read]  # fmt: skip

    before = told()
    for name in names:
        (again / name / "FINISHED").unlink()
    gtl(f"{RUN} --stages prepare train adapt likelihood sample measure judge")
    assert performed == names
    assert told() == before


def test_another_recipe_in_the_same_place(again: Path, refused: Callable[..., str], performed: list[str]):
    """Another number of steps: a line that names the folder and says what to do."""
    write_recipe(source=changed("source", "fit", "steps", to=7)["source"])
    line = refused()
    assert "out/source holds the result of another command" in line
    assert "--fit.steps 6" in line
    assert "remove it, or choose another --out" in line
    write_recipe(sample={"count": 101})
    assert "out/samples/r0-source-d0 holds the result of another command" in refused(f"{RUN} --stages sample")
    assert performed == []


@pytest.mark.parametrize("stages", ["figures", "measure"])
def test_another_recipe_and_later_stages_alone(again: Path, refused: Callable[..., str], stages: str):
    write_recipe(source=changed("source", "fit", "steps", to=7)["source"])
    assert "out/source holds the result of another command" in refused(f"{RUN} --stages {stages}")


def test_what_was_made_from_another_source_is_not_taken_over(again: Path, whole: Path):
    """The source is trained anew, as the line above said; its samples must be refused or drawn anew."""
    write_recipe(source=changed("source", "fit", "steps", to=7)["source"])
    shutil.rmtree(again / "source")
    with contextlib.suppress(SystemExit):
        gtl(f"{RUN} --stages train sample")
        drawn = [folder / "samples" / "r0-source-d0" / "samples.npy" for folder in (again, whole)]
        assert drawn[0].read_bytes() != drawn[1].read_bytes()


def test_real_text_follows_the_number_of_samples(again: Path):
    write_recipe(sample={"count": 101}, worlds=SOURCE, sweeps=[])
    for name in ("samples", "measure", "judge"):
        shutil.rmtree(again / name)
    gtl(f"{RUN} --stages sample judge")
    assert len(np.load(again / "samples" / "r0-source-d0" / "samples.npy")) == 101
    assert len(np.load(again / "real" / "samples.npy")) == 101


def test_real_text_is_judged_as_samples_are(again: Path):
    """As many sequences, although only samples were to be removed."""
    write_recipe(sample={"count": 101}, worlds=SOURCE, sweeps=[])
    shutil.rmtree(again / "samples")
    shutil.rmtree(again / "measure")
    for folder in (again / "judge").iterdir():
        if folder.name != "real":
            shutil.rmtree(folder)
    with contextlib.suppress(SystemExit):
        gtl(f"{RUN} --stages sample judge")
        assert {row.n for row in read_rows(again / "judge" / "real" / "results.json")} == {101}


def test_real_text_follows_the_data(again: Path):
    """Prepared anew, after all that was made from it is gone."""
    for folder in [path for path in again.iterdir() if path.is_dir() and path.name != "real"]:
        shutil.rmtree(folder)
    write_recipe(prepare=RECIPE["prepare"] | {"seed": 7}, worlds=SOURCE, sweeps=[], planner=None)
    gtl(f"{RUN} --stages prepare train sample judge")
    assert (np.load(again / "real" / "samples.npy") == np.load(again / "data" / "target" / "train.npy")[:100]).all()


# some of it


def test_stages_and_worlds_can_be_chosen(
    bare: Path, refused: Callable[..., str], performed: list[str], capfd: pytest.CaptureFixture[str]
):
    """One after the other; each says which earlier one is missing."""
    few = [{"share": share, "fractions": [0.1], "methods": ["finetuned"]} for share in (0, 0.25)]
    write_recipe(worlds=few, sweeps=[])
    gtl(f"{RUN} --stages prepare")
    assert performed == ["data", "mixed-0.25"]
    missing = "needs out/source, which is not there yet: run its stage first"
    assert f"out/adapt/r0-n27-s2-finetuned {missing}" in refused(f"{RUN} --stages adapt")
    assert "needs out/source-r0.25, which is not there" in refused(f"{RUN} --stages likelihood --shares 0.25")
    assert "out: nothing is measured yet; run the earlier stages first" in refused(f"{RUN} --stages figures")
    performed.clear()
    gtl(f"{RUN} --stages likelihood,train --shares 0", "--stages", "adapt")
    fit = "r0-n27-s2-finetuned"
    assert performed == ["source", "planner", "likelihood/r0-source", f"adapt/{fit}", f"likelihood/{fit}"]
    assert "needs out/samples/r0-source-d0" in refused(f"{RUN} --stages measure --shares 0")
    gtl(f"{RUN} --stages likelihood --shares 0 0.25")
    waits = "2 pieces wait for other stages: out/likelihood/r0.25-source needs out/source-r0.25"
    assert waits in capfd.readouterr().out
    gtl(f"{RUN} --stages figures --shares 0")
    rows = read_rows(bare / "results.json")
    assert {row.metric for row in rows} == MODEL | FITTED
    assert {row.experiment for row in rows} == {"arxiv"}
    assert (bare / "fractions.png").is_file()
    assert not [*bare.glob("sweep*.png")]


def test_the_folder_is_called_after_the_recipe(bare: Path):
    gtl("reproduce arxiv --recipe toy.yaml --stages prepare --shares 0")
    assert (Path("runs") / "toy" / "data" / "FINISHED").is_file()


def test_what_fails_leaves_the_rest_alone(again: Path, performed: list[str], capsys: pytest.CaptureFixture[str]):
    """Two fits are made again and one of them fails: the rest is drawn, and the end is one line."""
    first, second = "likelihood/r0-source", f"samples/{LOCAL}-d0"
    for name in (first, second):
        shutil.rmtree(again / name)
    (again / first).mkdir()
    (again / first / "thesis.txt").write_text("x")
    with pytest.raises(SystemExit) as caught:
        gtl(RUN)
    assert caught.value.code == 2
    assert performed == [first, second]
    said = capsys.readouterr()
    assert "what is done is kept" in said.err.splitlines()[-1]
    assert f"out/{first} failed (" in said.err.splitlines()[-1]
    assert "out/results.json" in said.out
    assert (again / second / "FINISHED").is_file()
    assert (again / first / "thesis.txt").read_text() == "x"


def test_a_time_limit_leaves_the_rest_for_later(again: Path, performed: list[str], capsys: pytest.CaptureFixture[str]):
    """What is not finished is in no table yet."""
    names = ["judge/real", f"samples/{LOCAL}-d0"]
    for name in names:
        (again / name / "FINISHED").unlink()
    gtl(f"{RUN} --minutes 1e-9")
    assert performed == []
    assert "2 are left: the same command goes on with them" in capsys.readouterr().out
    real = {row.metric for row in read_rows(again / "results.json") if row.method == "real"}
    assert "distinct_4" in real
    assert "mauve" not in real
    gtl(f"{RUN} --minutes 5 --stages sample judge")
    assert performed == names
    assert "left" not in capsys.readouterr().out


def test_a_time_limit_before_anything_is_measured(bare: Path, capsys: pytest.CaptureFixture[str]):
    gtl(f"{RUN} --minutes 1e-9")
    assert "the same command goes on" in capsys.readouterr().out


def test_a_time_limit_without_end(bare: Path):
    gtl(f"{RUN} --stages prepare --minutes .inf")


def test_metrics_can_be_named(again: Path):
    """Also those of the source, which was fitted on nothing: what it copies is looked for in all of the target."""
    write_recipe(measure={"metrics": ["diversity", "memorisation"]}, worlds=SOURCE, sweeps=[])
    shutil.rmtree(again / "measure")
    gtl(f"{RUN} --stages measure")
    (folder,) = (again / "measure").iterdir()
    metrics = {row.metric for row in read_rows(folder / "results.json") if row.method == "samples"}
    assert {"distinct_4", "copied_4"} < metrics
    assert not any(metric.startswith("domain") for metric in metrics)


def test_draws_need_not_begin_with_zero(again: Path):
    write_recipe(draws=[3], worlds=SOURCE, sweeps=[])
    gtl(f"{RUN} --stages sample measure judge figures")
    rows = {(row.method, row.seed) for row in read_rows(again / "results.json") if row.metric == "distinct_4"}
    assert ("source", 3) in rows
    real = {row.metric for row in read_rows(again / "results.json") if row.method == "real"}
    assert {"mauve", "domain", "distinct_4"} <= real


def test_two_fractions_of_one_number(again: Path):
    """2 sequences at least: the same cell, which is fitted once."""
    worlds = [{"share": 0, "fractions": [0.001, 0.002], "methods": ["finetuned"]}]
    write_recipe(worlds=worlds, sweeps=[])
    gtl(f"{RUN} --stages adapt")


def test_a_sweep_at_one_of_two_fractions_of_one_number(again: Path, performed: list[str]):
    worlds = [{"share": 0, "fractions": [0.001, 0.002], "methods": ["gtl-paper"]}]
    write_recipe(worlds=worlds, sweeps=[RECIPE["sweeps"][0] | {"fractions": [0.002]}])
    gtl(f"{RUN} --stages adapt sample")
    assert "samples/r0-n2-s2-gtl-paper-g2-k2-d3" in performed


def test_a_sweep_of_a_method_that_no_world_asks_for(again: Path, performed: list[str]):
    """Is fitted for the sweep, and for nothing else."""
    worlds = [{"share": 0, "fractions": [0.002], "methods": ["finetuned"]}]
    write_recipe(worlds=worlds, sweeps=[RECIPE["sweeps"][0] | {"fractions": [0.003]}])
    gtl(f"{RUN} --stages adapt likelihood sample")
    swept = [name for name in performed if "gtl-paper" in name]
    cell = "r0-n2-s2-gtl-paper"
    assert swept == [f"adapt/{cell}", *(f"samples/{cell}-g{gamma}-k2-d3" for gamma in (0, 2))]


def test_a_variant(again: Path, performed: list[str], monkeypatch: pytest.MonkeyPatch):
    """Methods once more, under other settings: fitted with them, and measured under names of their own; they have no
    line in the figure."""
    lines: set[str] = set()
    monkeypatch.setattr(
        "gtl.reproduce.collect.by_fraction", lambda path, rows, *_: lines.update(r.method for r in rows)
    )
    worlds = [{"share": 0, "fractions": [0.002], "methods": ["finetuned"]}, {"share": 0.25}]
    group = ["finetuned", "gtl-sparse"]
    variants = [
        {"ending": "longer", "method": group, "fractions": [0.002, 0.003], "adapt": {"training": {"budget": 24}}},
        {"method": "lora", "fractions": [0.003]},
    ]
    write_recipe(worlds=worlds, sweeps=[], variants=variants)
    gtl(f"{RUN} --stages adapt likelihood sample measure judge figures")
    cell = "r0-n2-s2"
    wanted = [f"adapt/{cell}-finetuned-longer"]
    for method in group:
        name = f"{cell}-{method}-longer"
        wanted += [f"likelihood/{name}", *(f"{stage}/{name}-d0" for stage in STAGES_OF_SAMPLES)]
    assert [name for name in performed if "longer" in name] == wanted
    plain, longer = said(again, f"adapt/{cell}-finetuned"), said(again, wanted[0])
    assert "--method finetuned gtl-sparse --rows 2 --seed 2 " in longer
    assert "--training.budget 24 " in longer
    assert longer.replace("budget 24", "budget 12").replace("-longer", "").replace(" gtl-sparse", "") == plain
    assert "--method lora --rows 2 " in said(again, f"adapt/{cell}-lora")
    for method, flag in zip(group, ("denoiser", "ratio"), strict=True):
        assert f"--{flag} out/{wanted[0]}/{method} " in said(again, f"samples/{cell}-{method}-longer-d0")
    found = [row for row in read_rows(again / "results.json") if row.experiment == "arxiv"]
    rows = {(r.metric, r.method, r.n, r.seed): r for r in found}
    assert len(rows) == len(found)
    few, many = (rows["steps", name, 2, 2].value for name in ("finetuned", "finetuned-longer"))
    assert 0 < few <= 12 < many <= 24
    names = ("finetuned", "finetuned-longer", "lora", "gtl-sparse-longer")
    metrics = [{key[0] for key in rows if key[1] == name} for name in names]
    assert metrics[0] == metrics[1] == metrics[2]
    assert metrics[0] <= metrics[3]
    assert rows["nll", "finetuned-longer", 2, 2].trainable_weights == rows["nll", "finetuned", 2, 2].trainable_weights
    assert lines == {"finetuned", "source", "real"}


def test_a_sweep_of_a_variant(whole: Path):
    """Uses its fit: no folder is made by two commands."""
    worlds = [World(0, [0.1], ["finetuned"])]
    variants, sweeps = [Variant("gtl-local", [0.1])], [Sweep("gtl-local", [0.1], [1.5], subsets=[2], shares=[0])]
    recipe = replace(read_recipe(whole.parent / "toy.yaml"), worlds=worlds, sweeps=sweeps, variants=variants)
    folders = [str(piece.folder.relative_to(whole)) for piece in pieces_of(recipe, whole)]
    assert len({*folders}) == len(folders)
    assert f"adapt/{LOCAL}" in folders
    assert f"samples/{LOCAL}-g1.5-d0" in folders
