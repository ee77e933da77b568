"""`gtl reproduce arxiv`: the paper's language experiments."""

from pathlib import Path

from rich.console import Console

from gtl.reproduce.arxiv import STAGES, pieces_of, read_recipe, write_real
from gtl.reproduce.collect import draw_figures
from gtl.reproduce.pieces import Report, run_pieces

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
    seconds = None if minutes is None else 60 * minutes
    report = Report()
    if "prepare" in asked:  # what comes after it depends on how much data there is
        report = run_pieces([p for p in pieces_of(plan, folder) if p.stage == "prepare"], jobs, seconds, console)
        settle(report)
    pieces = pieces_of(plan, folder)
    if len(pieces) == 1 and asked != ["prepare"]:
        raise FileNotFoundError(f"{pieces[0].folder} is not there yet: run the stage prepare first")
    if "judge" in asked:
        write_real(plan, folder)
    later = [piece for piece in pieces if piece.stage in asked and piece.stage != "prepare"]
    report = run_pieces(later, jobs, seconds, console)
    made = []
    if "figures" in asked:
        made = draw_figures(plan, folder, pieces, f"gtl reproduce arxiv --recipe {recipe}")
    for path in made:
        print(path)
    settle(report)
    if report.left:
        print(f"{report.done} pieces are done, {report.left} are left: the same command goes on with them")


def settle(report: Report) -> None:
    """Ends with an error that names what failed, if anything did."""
    if report.failed:
        folder, error = next(iter(report.failed.items()))
        more = f", and {len(report.failed) - 1} more" if len(report.failed) > 1 else ""
        raise ValueError(f"{folder} failed ({error}){more}; what is done is kept")
