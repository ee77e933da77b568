"""`gtl evaluate` end to end: a model, samples, or both; bad input gets one line and leaves nothing behind."""

import ast
import contextlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gtl.cli import by_position
from gtl.data.tokenizer import load_tokenizer
from gtl.evaluate import samples as suite
from gtl.progress import Bar
from judges import WORDS, save_encoder, save_language_model, save_tokenizer
from typed import KEYS, gtl, rows


def values(folder: Path) -> dict[tuple[str, str], float]:
    return {(str(row["method"]), str(row["metric"])): float(str(row["value"])) for row in rows(folder)}


# a model


def test_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    gtl("evaluate denoiser tgt.npy --ratio ratio --draws 2", "--out", tmp_path / "out")
    found = rows(tmp_path / "out")
    assert all(list(row) == KEYS and row["n"] == 10 for row in found)
    value = values(tmp_path / "out")
    assert len(value) == len(found) == 9
    for name in ("source", "guided"):
        assert value[name, "nll"] > 0
        assert value[name, "masked_nll"] > 0
        assert value[name, "perplexity_bound"] == pytest.approx(math.exp(value[name, "nll"]))
    assert value["guided", "nll_gain"] == pytest.approx(value["source", "nll"] - value["guided", "nll"])
    assert value["guided", "martingale_rms"] >= abs(value["guided", "martingale_mean"]) > 0
    assert "martingale_rms" in capsys.readouterr().out


def test_evaluate_without_a_ratio(tmp_path: Path):
    gtl("evaluate denoiser one.npy --draws 2", "--out", tmp_path / "out")
    assert [(row["method"], row["metric"]) for row in rows(tmp_path / "out")] == [
        ("source", "nll"),
        ("source", "perplexity_bound"),
        ("source", "masked_nll"),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_evaluate_where_nothing_may_be_masked(tmp_path: Path, seed: int):
    """One sequence of one token is masked in every other draw; whatever is drawn, no traceback and no NaN."""
    np.save(tmp_path / "tiny.npy", np.zeros((1, 1), dtype=int))
    command = f"evaluate denoiser {tmp_path / 'tiny.npy'} --ratio ratio --draws 1 --seed {seed}"
    with contextlib.suppress(SystemExit):
        gtl(command, "--out", tmp_path / "out")
    if (tmp_path / "out" / "FINISHED").exists():
        assert all(np.isfinite(float(str(row["value"]))) for row in rows(tmp_path / "out"))


@pytest.mark.parametrize("kept", [1, 4, 7, 9])
def test_an_interrupted_evaluation_measures_nothing_twice(tmp_path: Path, kept: int):
    command, out = "evaluate denoiser tgt.npy --ratio ratio --draws 1", tmp_path / "out"
    gtl(command, "--out", out)
    whole = rows(out)
    (out / "FINISHED").unlink()
    (out / "results.json").write_text(json.dumps(whole[:kept]))
    gtl(command, "--out", out)
    assert [(r["method"], r["metric"], r["value"]) for r in rows(out)] == [
        (r["method"], r["metric"], r["value"]) for r in whole
    ]
    assert (out / "FINISHED").exists()


def test_what_is_there_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    command, out = "evaluate denoiser tgt.npy --draws 1", tmp_path / "out"
    gtl(command, "--out", out)
    (out / "FINISHED").unlink()
    monkeypatch.setattr("gtl.commands.evaluate.likelihood", None)
    gtl(command, "--out", out)
    assert (out / "FINISHED").exists()


def test_pruned_candidates_and_sampled_positions(tmp_path: Path):
    """The bound of one normalised model is the metric; the number with the truth stands beside it with its mass."""
    command = "evaluate denoiser tgt.npy --ratio ratio --gamma 1 --n_ratio 1 --places 2 --draws 2"
    gtl(command, "--out", tmp_path / "out")
    found = values(tmp_path / "out")
    assert found["guided", "nll"] == pytest.approx(found["source", "nll"])  # one candidate keeps its probability
    assert found["guided", "nll_with_truth"] != found["guided", "nll"]
    assert found["guided", "mass_with_truth"] != 1
    gtl("evaluate denoiser tgt.npy --ratio ratio --gamma 1 --draws 2", "--out", tmp_path / "all")
    assert values(tmp_path / "all")["source", "nll"] == found["source", "nll"]


def test_what_candidates_leave_out(tmp_path: Path):
    """A row for each number, falling to nothing; with a ratio it is still the source's."""
    command = "evaluate denoiser tgt.npy --draws 2 --outside"
    gtl(f"{command} 2 1 3", "--out", tmp_path / "out")
    found = {metric: value for (who, metric), value in values(tmp_path / "out").items() if "outside" in metric}
    assert list(found) == ["outside@2", "outside@1", "outside@3"]
    assert 1 > found["outside@1"] > found["outside@2"] > found["outside@3"] == 0
    gtl(f"{command} 1 --ratio ratio", "--out", tmp_path / "guided")
    assert values(tmp_path / "guided")["source", "outside@1"] == found["outside@1"]
    (tmp_path / "out" / "FINISHED").unlink()
    some = [row for row in rows(tmp_path / "out") if row["metric"] != "outside@3"]
    (tmp_path / "out" / "results.json").write_text(json.dumps(some))
    gtl(f"{command} 2 1 3", "--out", tmp_path / "out")
    again = [(row["metric"], row["value"]) for row in rows(tmp_path / "out") if "outside" in str(row["metric"])]
    assert again == list(found.items())


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("tgt.npy --samples src.npy --outside 1", "--outside says nothing without --denoiser"),
        ("denoiser tgt.npy --outside 0", "n_ratio=0"),
        ("denoiser tgt.npy --outside 1 4", "n_ratio=4 exceeds the vocabulary (3)"),
        ("denoiser tgt.npy --outside", "--outside names no number of candidates"),
        ("denoiser tgt.npy --outside many", "many"),
        ("denoiser tgt.npy --words 3", "--words says nothing without --samples"),
    ],
)
def test_bad_candidates(refused: Callable[..., str], flags: str, part: str):
    assert part in refused(f"evaluate {flags}")


def test_arguments_by_place_and_by_name():
    wanted = ["evaluate", "X", "--denoiser=D"]
    assert by_position(["evaluate", "D", "X"]) == wanted
    assert by_position(["evaluate", "D", "--data", "X"]) == wanted
    assert by_position(["evaluate", "--denoiser=D", "--data", "X"]) == wanted
    assert by_position(["evaluate", "X", "--denoiser=D"]) == wanted
    assert by_position(["evaluate", "X", "--samples", "S"]) == ["evaluate", "X", "--samples", "S"]
    assert by_position(["evaluate", "--samples=S", "--data=X"]) == ["evaluate", "X", "--samples=S"]
    assert by_position(["sample", "D", "--length", "4"]) == ["sample", "D", "--length", "4"]


# samples


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples close to the target, whose sequences use the first half of the words; the source uses the second."""
    folder, random = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    target, source = (random.integers(low, low + 20, (n, 12)) for low, n in ((5, 400), (25, 150)))
    arrays = {"samples": target[:120], "held": target[120:260], "train": target[240:], "source": source}
    arrays |= {"few": target[:99], "one": target[:1], "masked": np.full((120, 12), 4), "large": target[:120] + 40}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    for name in ("samples", "held", "source"):
        lines = [" ".join(WORDS[i - 5] for i in row) for row in arrays[name]]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    save_encoder(folder / "encoder")
    save_language_model(folder / "gpt2")
    save_tokenizer(folder / "words")
    (folder / "nothing").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    return folder


@pytest.fixture
def at_text(text: Path, there, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands name files of this folder; the hub is not asked; a short classifier."""
    monkeypatch.chdir(text)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(suite, "STEPS", 30)
    return text


ALL = "--train train.npy --source source.npy --tokenizer words --featurizer encoder --language_model gpt2"
SAMPLES = "evaluate --samples samples.npy --data held.npy"


def test_all_metrics_of_samples(at_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    gtl(f"{SAMPLES} {ALL} --kmeans_seeds 2", "--out", tmp_path / "out")
    said = capsys.readouterr()
    assert said.err.count("warning: MAUVE of 120 sequences") == 1
    for name in suite.METRICS:
        assert f"{name} of the samples" in said.err
    found = values(tmp_path / "out")
    assert all(row["n"] == 120 and list(row) == KEYS for row in rows(tmp_path / "out"))
    assert found["samples", "mauve"] > 0.7
    assert found["samples", "mauve_buckets"] == 12
    assert found["samples", "mauve_words"] == 12
    assert found["samples", "mauve_seeds"] == 2
    assert found["samples", "mauve_spread"] >= 0
    for who in ("samples", "held_out"):
        assert {"distinct_4", "seq_rep_4", "token_entropy", "generative_perplexity", "copied_4"} <= {
            metric for name, metric in found if name == who
        }
    assert found["samples", "copied_4"] < found["held_out", "copied_4"] < 0.3  # 20 of those were trained on
    assert found["held_out", "longest_copy_max"] == 12
    assert found["classifier", "domain_auc"] > 0.9
    assert found["samples", "domain_score"] < 0.5 < found["source", "domain_score"]


def test_perplexity_comes_with_entropy(at_text: Path, tmp_path: Path):
    gtl(f"{SAMPLES} --metrics perplexity --tokenizer words --language_model gpt2", "--out", tmp_path / "out")
    metrics = [(str(row["method"]), str(row["metric"])) for row in rows(tmp_path / "out")]
    pair = ("token_entropy", "generative_perplexity")
    assert metrics == [(who, metric) for who in ("held_out", "samples") for metric in pair]


def test_the_words_that_mauve_looks_at(at_text: Path, tmp_path: Path):
    """The number that is given, or the samples' own; fewer of them are another number."""
    command = f"{SAMPLES} --metrics mauve --tokenizer words --featurizer encoder --kmeans_seeds 1"
    found = []
    for name, more in (("own", ""), ("three", "--words 3"), ("many", "--words 500")):
        gtl(f"{command} {more}", "--out", tmp_path / name)
        found.append([values(tmp_path / name)["samples", metric] for metric in ("mauve_words", "mauve")])
    assert [words for words, _ in found] == [12, 3, 500]
    assert found[0][1] == found[2][1] != found[1][1]


def test_text_is_what_its_tokens_are(at_text: Path, tmp_path: Path):
    """Documents a line, or their ids: the same numbers; metrics may be written in a list."""
    more = "--metrics diversity perplexity --tokenizer words --language_model gpt2"
    gtl(f"evaluate --samples samples.txt --data held.txt {more}", "--out", tmp_path / "text")
    gtl(f"{SAMPLES} {more}", "--out", tmp_path / "ids")
    assert values(tmp_path / "text") == pytest.approx(values(tmp_path / "ids"))


def test_token_ids_need_no_tokenizer(at_text: Path, tmp_path: Path):
    """Without --metrics: what the flags allow."""
    gtl(f"{SAMPLES} --train train.npy", "--out", tmp_path / "out")
    metrics = {metric for _, metric in values(tmp_path / "out")}
    assert {"distinct_1", "copied_8"} <= metrics
    assert not {"mauve", "generative_perplexity", "domain_score"} & metrics


def test_interrupted_samples_go_on(at_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is there is not measured again, and the rest gives the same numbers."""
    command = f"{SAMPLES} --train train.npy --metrics diversity memorisation"
    gtl(command, "--out", tmp_path / "out")
    whole = rows(tmp_path / "out")
    (tmp_path / "out" / "FINISHED").unlink()
    (tmp_path / "out" / "results.json").write_text(json.dumps(whole[:17]))
    stages: list[str] = []
    monkeypatch.setattr(Bar, "stage", lambda self, name, units: stages.append(name))
    monkeypatch.setattr(Bar, "advance", lambda self, fraction: None)
    gtl(command, "--out", tmp_path / "out")
    assert stages == ["memorisation of the samples"]
    assert values(tmp_path / "out") == {(r["method"], r["metric"]): r["value"] for r in whole}


def test_a_model_and_its_samples_together(shared: Path, tmp_path: Path):
    gtl(f"evaluate {shared / 'denoiser'} tgt.npy --samples src.npy --draws 1", "--out", tmp_path / "out")
    found = values(tmp_path / "out")
    assert {("source", "nll"), ("samples", "distinct_1"), ("held_out", "distinct_1")} <= found.keys()


BAD = {
    "evaluate held.npy": "give --denoiser to measure a model, --samples",
    f"{SAMPLES} --ratio somewhere": "--ratio says nothing without --denoiser",
    f"{SAMPLES} --metrics mauve": "the metric mauve needs --featurizer",
    f"{SAMPLES} --metrics memorisation": "needs --train",
    f"{SAMPLES} --metrics perplexity": "needs --language_model",
    f"{SAMPLES} --metrics diversity domain": "needs --source",
    f"{SAMPLES} --metrics nonsense": "nonsense",
    f"{SAMPLES} --metrics": "metrics",
    f"{SAMPLES} --featurizer encoder": "give a --tokenizer",
    f"{SAMPLES} --featurizer encoder --tokenizer nowhere.json": "tokenizer nowhere.json: no such file",
    f"{SAMPLES} --featurizer nowhere/at/all --tokenizer words": "featurizer nowhere/at/all: no such file or folder",
    f"{SAMPLES} --featurizer no-such/model --tokenizer words": "featurizer no-such/model: cannot be loaded",
    f"{SAMPLES} --featurizer nothing --tokenizer words": "holds no config.json",
    f"{SAMPLES} --featurizer broken --tokenizer words": "featurizer broken: cannot be loaded",
    f"{SAMPLES} --featurizer package:no-such --tokenizer words": "not installed; pip install no-such",
    f"{SAMPLES} --featurizer held.npy --tokenizer words": "expected a Hugging Face name, a folder or a .gguf file",
    f"{SAMPLES} --language_model encoder --tokenizer words": "the checkpoint lacks",
    f"{SAMPLES} --language_model nowhere.gguf --tokenizer words": "nowhere.gguf: no such file",
    "evaluate --samples few.npy --data held.npy --featurizer encoder --tokenizer words": "MAUVE of 99 sequences",
    "evaluate --samples nowhere.npy --data held.npy": "nowhere.npy: no such file",
    "evaluate --samples one.npy --data held.npy": "one.npy: 1 sequence;",
    "evaluate --samples samples.txt --data held.npy": "samples.txt: text needs a --tokenizer",
    "evaluate --samples large.npy --data held.npy --tokenizer words": "large.npy: token id",
    f"{SAMPLES} --source one.npy": "one.npy: 1 sequence;",
    f"{SAMPLES} --kmeans_seeds 0 --featurizer encoder --tokenizer words": "kmeans_seeds=0",
    f"{SAMPLES} --buckets 1 --featurizer encoder --tokenizer words": "buckets=1",
    f"{SAMPLES} --words 0 --featurizer encoder --tokenizer words": "words=0 must be at least 1",
    f"{SAMPLES} --words=-3 --featurizer encoder --tokenizer words": "words=-3 must be at least 1",
    f"{SAMPLES} --buckets 1000 --featurizer encoder --tokenizer words": "buckets=1000 exceeds",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_samples(at_text: Path, refused: Callable[..., str], command: str):
    assert BAD[command] in refused(command)


@pytest.mark.parametrize("flag", ["--metrics diversity", "--train src.npy", "--featurizer encoder", "--buckets 3"])
def test_flags_of_samples_without_samples(refused: Callable[..., str], flag: str):
    assert "says nothing without --samples" in refused(f"evaluate denoiser tgt.npy {flag}")


def test_bad_places(refused: Callable[..., str]):
    assert "places=0" in refused("evaluate denoiser tgt.npy --ratio ratio --places 0")


def test_mauve_text_is_an_extra(at_text: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mauve", None)
    assert "pip install 'gtl[eval]'" in refused(f"{SAMPLES} --featurizer encoder --tokenizer words")


def test_imports_stay_lazy():
    """The command line does not wait for transformers, MAUVE or faiss: no module imports them at its top."""
    folder = Path(suite.__file__).parent
    for path in [*folder.glob("*.py"), folder.parent / "commands" / "evaluate.py"]:
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not {"transformers", "mauve", "faiss", "tokenizers"} & {name.split(".")[0] for name in names}, path


def test_the_tokenizer_of_the_tests(at_text: Path):
    assert load_tokenizer("words").decode([5, 6]) == "w0 w1"
