"""`gtl reproduce arxiv`: the paper's language experiments."""

import math
import time
from pathlib import Path

from rich.console import Console

from gtl.data.prepared import read_meta
from gtl.reproduce.arxiv import STAGES, pieces_of, write_real
from gtl.reproduce.collect import draw_figures, measured
from gtl.reproduce.pieces import Piece, Report, is_done, run_pieces
from gtl.reproduce.recipe import read_recipe

__all__ = ["reproduce_arxiv"]


def reproduce_arxiv(
    recipe: str,
    out: str | None,
    stages: list[str] | None,
    shares: list[float] | None,
    jobs: int,
    minutes: float | None,
) -> None:
    """Runs the stages of a recipe, each piece once; see `gtl reproduce --help`."""
    asked = list(STAGES) if stages is None else stages
    if unknown := [stage for stage in asked if stage not in STAGES]:
        raise ValueError(f"unknown stage {unknown[0]!r}; choose among {', '.join(STAGES)}")
    if not asked:
        raise ValueError(f"--stages names none; choose among {', '.join(STAGES)}")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes={minutes} must be positive")
    plan = read_recipe(Path(recipe))
    if shares is not None:
        known = [world.share for world in plan.worlds]
        if not shares or {*shares} - {*known}:
            raise ValueError(f"--shares {shares}: choose among the recipe's, {', '.join(f'{r:g}' for r in known)}")
        plan.worlds = [world for world in plan.worlds if world.share in shares]
    folder = Path("runs") / Path(recipe).stem if out is None else Path(out)
    console = Console(stderr=True)
    deadline = None if minutes is None or math.isinf(minutes) else time.time() + 60 * minutes

    def run(pieces: list[Piece]) -> Report:
        report = run_pieces(pieces, jobs, None if deadline is None else deadline - time.time(), console)
        here = report.left - len(report.missing)
        if here and not report.failed:
            print(f"{report.done} pieces are done, {here} are left: the same command goes on with them")
        if report.missing:
            folder, need = next(iter(report.missing.items()))
            print(f"{len(report.missing)} pieces wait for other stages: {folder} needs {need}")
        return report

    if "prepare" in asked:  # what comes after it depends on how much data there is
        report = run([piece for piece in pieces_of(plan, folder) if piece.stage == "prepare"])
        settle(report)
        if report.left:
            return
    if read_meta(folder / "data" / "target") is None:
        raise FileNotFoundError(f"{folder / 'data'} is not there yet: run the stage prepare first")
    pieces = pieces_of(plan, folder)
    for piece in pieces:
        is_done(piece)  # results of another recipe are refused, whatever the stage
    if "judge" in asked:
        write_real(plan, folder)
    report = run([piece for piece in pieces if piece.stage in asked and piece.stage != "prepare"])
    if "figures" in asked and (measured(pieces) or not (report.left or report.failed)):
        for path in draw_figures(plan, folder, pieces, f"gtl reproduce arxiv --recipe {recipe}"):
            print(path)
    settle(report)


def settle(report: Report) -> None:
    """Ends with an error that names what failed, if anything did."""
    if report.failed:
        folder, error = next(iter(report.failed.items()))
        more = f", and {len(report.failed) - 1} more" if len(report.failed) > 1 else ""
        raise ValueError(f"{folder} failed ({error}){more}; what is done is kept")
