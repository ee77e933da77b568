"""`gtl mix`: a source that has seen some of the target."""

from pathlib import Path

from gtl.data.mixture import mix as move
from gtl.run import check_folder, command_line
from gtl.train.checkpoint import atomic, write_json

__all__ = ["mix"]


def mix(source: str, target: str, share: float, out: str, seed: int = 0) -> None:
    """Moves a random share of a prepared target domain into the source: the folders OUT/source and OUT/target.

    Args:
        source: a folder of gtl prepare.
        target: another one, of the same tokenizer and length.
        share: of the target's sequences, the paper's r.
        out: folder for both.
        seed: of the sequences that move.
    """
    folder = Path(out)
    check_folder(folder)
    move(Path(source), Path(target), share, folder, seed)
    write_json(folder / "run.json", {"seed": seed, "command": command_line()})
    with atomic(folder / "FINISHED"):
        pass
    print(f"{folder / 'source'} and {folder / 'target'}: {share:g} of the target is in the source")
