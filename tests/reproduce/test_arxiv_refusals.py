"""`gtl reproduce arxiv` asked wrongly, or too early: one line that says what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from toy_recipe import RECIPE, RUN, SOURCE, changed, write_recipe

from typed import contents, gtl

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("stage", ["train", "judge", "figures"])
def test_nothing_is_prepared(bare: Path, refused: Callable[..., str], stage: str):
    assert "out/data is not there yet: run the stage prepare first" in refused(f"{RUN} --stages {stage}")


def test_nothing_is_prepared_for_one_world(bare: Path, refused: Callable[..., str]):
    write_recipe(worlds=RECIPE["worlds"][:1])
    assert "out/data is not there yet: run the stage prepare first" in refused(f"{RUN} --stages train")


def test_a_failure_before_anything_is_measured(bare: Path, capsys: pytest.CaptureFixture[str]):
    source = changed("source", "fit", "learning_rate", to=-1)["source"]
    write_recipe(source=source, worlds=SOURCE, sweeps=[], planner=None)
    with pytest.raises(SystemExit):
        gtl(f"{RUN} --stages prepare train figures")
    assert "out/source failed (gtl: learning_rate=-1" in capsys.readouterr().err.splitlines()[-1]


def test_domains_by_other_names(bare: Path, capsys: pytest.CaptureFixture[str]):
    """Either they are refused, or it is said how they must be called."""
    domains = ["cs=categories:cs,math", "physics=categories:hep,astro"]
    write_recipe(prepare=RECIPE["prepare"] | {"domain": domains}, worlds=SOURCE, sweeps=[])
    with pytest.raises(SystemExit):
        gtl(f"{RUN} --stages prepare train")
    line = capsys.readouterr().err.splitlines()[-1]
    assert "run the stage prepare" not in line
    assert "target" in line


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("prepare: [a\nsource", "gtl: toy.yaml: not YAML (while parsing"),
        ("a: 1\n\tb: 2", "gtl: toy.yaml: not YAML"),
        ("", "gtl: toy.yaml: a mapping is needed"),
        (yaml.safe_dump(RECIPE | {"sweep": {}}), "gtl: toy.yaml: the recipe: unknown key 'sweep'"),
    ],
)
def test_a_bad_recipe_is_one_line(bare: Path, refused: Callable[..., str], text: str, part: str):
    """Before anything is written."""
    Path("toy.yaml").write_text(text)
    assert part in refused()
    assert not bare.exists()


FLAGS = {
    "reproduce arxiv": "needs --recipe, for example recipes/arxiv-small.yaml",
    "reproduce arxiv --recipe nowhere.yaml": "nowhere.yaml: no such recipe",
    f"{RUN} --stages bogus": "unknown stage 'bogus'; choose among prepare, train",
    f"{RUN} --stages": "--stages names none; choose among prepare",
    f"{RUN} --shares 0.3": "choose among the recipe's, 0, 0.25",
    f"{RUN} --minutes 0": "minutes=0.0 must be positive",
    f"{RUN} --minutes .nan": "minutes=nan must be positive",
    f"{RUN} --jobs 0": "jobs=0 must be at least 1",
    f"{RUN} --n 20": "--n is for markov; of arxiv it stands in the recipe",
    f"{RUN} --process uniform": "--process is for markov",
    "reproduce markov --n 1 --recipe toy.yaml": "are for arxiv",
    "reproduce markov --n 1 --stages train": "are for arxiv",
    "reproduce markov --n 1 --shares 0": "are for arxiv",
    "reproduce markov --n 1 --jobs 2": "are for arxiv",
    "reproduce markov --n 1 --minutes 3": "are for arxiv",
}


@pytest.mark.parametrize("command", FLAGS)
def test_bad_flags(bare: Path, refused: Callable[..., str], command: str):
    assert FLAGS[command] in refused(command)
    assert not Path("out").exists()
    assert not Path("runs").exists()


@pytest.mark.parametrize("flag", ["--preset paper", "--seeds 3", "--first_seed 1"])
def test_more_flags_of_markov(bare: Path, refused: Callable[..., str], flag: str):
    assert "markov" in refused(f"{RUN} --stages prepare {flag}")


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [("input", ["nowhere.json"], "nowhere.json: no such file"), ("tokenizer", "nowhere.txt", "nowhere.txt"),
     ("lengths", 8, "lengths")],
)  # fmt: skip
def test_a_stage_that_cannot_begin(bare: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any, part: str):
    """What is wrong is said, the last line names the folder, and nothing is left half written."""
    write_recipe(prepare=RECIPE["prepare"] | {key: value})
    with pytest.raises(SystemExit) as caught:
        gtl(RUN)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(part in line for line in lines)
    assert lines[-1].startswith("gtl: out/data failed (")
    assert "Traceback" not in "".join(lines)
    assert not contents(bare)


def test_the_last_line_says_why(bare: Path, capsys: pytest.CaptureFixture[str]):
    write_recipe(prepare=RECIPE["prepare"] | {"input": ["nowhere.json"]})
    with pytest.raises(SystemExit):
        gtl(RUN)
    assert "nowhere.json: no such file" in capsys.readouterr().err.splitlines()[-1]
