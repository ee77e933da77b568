"""A recipe at toy size, what it starts from, and a folder to run it in."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from toy_recipe import RUN, write_recipe

from gtl.evaluate import samples as suite
from judges import save_encoder
from texts import WORDS, documents, lines_of, write, write_vocabulary
from typed import contents, gtl


@pytest.fixture(scope="module")
def quick():
    """A short domain classifier and a short diagnosis, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "STEPS", 5)
        patch.setattr("gtl.diagnose.MOST_TARGET", 24)
        patch.setattr("gtl.diagnose.HELD_OUT_TOKENS", 128)
        patch.setattr("gtl.diagnose.BATCH_TOKENS", 128)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a recipe starts from."""
    folder = tmp_path_factory.mktemp("inputs")
    write_vocabulary(folder / "vocab.txt")
    write(folder / "arxiv-metadata-oai-snapshot.json", lines_of(documents(600)))
    save_encoder(folder / "reader", WORDS)
    return folder


@pytest.fixture
def bare(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which nothing has run yet, and in which commands run; its `out`."""
    shutil.copytree(inputs, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    write_recipe()
    return tmp_path / "here" / "out"


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end in one line on stderr, a non-zero exit, and `out` left as it was."""

    def check(command: str = RUN) -> str:
        before = contents(Path("out"))
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            gtl(command)
        lines = capfd.readouterr().err.splitlines()
        assert caught.value.code not in (0, None)
        assert len(lines) == 1, lines
        assert lines[0].startswith("gtl: ")
        assert contents(Path("out")) == before
        return lines[0]

    return check
