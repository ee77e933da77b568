"""What the pieces of the arXiv experiments measured, as rows of one table, and the figures from them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gtl.data.prepared import read_meta
from gtl.report.arxiv import by_fraction, experiment, sweep
from gtl.report.markov import TITLES
from gtl.report.pages import samples_page, summary
from gtl.report.shares import by_share
from gtl.report.table import markdown
from gtl.reproduce.arxiv import Places, numbers
from gtl.reproduce.pieces import Piece
from gtl.reproduce.recipe import Recipe
from gtl.run import Row, read_rows
from gtl.train.checkpoint import atomic, write_json

__all__ = ["draw_figures", "measured", "rows_of"]

NAMES = {"domain_score": "domain"}
"""Metrics that figures call by another name."""
FITTED = ("gamma", "steps", "borrowed")
"""What a fit says of itself. How likely held-out rows were when it was chosen is under the method's own corruptions."""
PANELS = ("mauve", "nll", "domain")
SWEPT = ("arxiv-sweep", "arxiv-outside")
"""What experiments of the sweeps begin with."""


def measured(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces with rows that are done."""
    return [p for p in pieces if p.about and p.stage != "sample" and (p.folder / "FINISHED").is_file()]


def rows_of(pieces: Iterable[Piece], command: str) -> list[Row]:
    """The rows of all pieces that are done, each with its method and the weights that were fitted for its subset."""
    found = {row: piece.about["subset"] for piece in measured(pieces) for row in renamed(piece)}
    weights = {
        (row.experiment, row.method, row.n, subset): row.trainable_weights
        for row, subset in found.items()
        if row.trainable_weights
    }
    return [
        replace(row, command=command, trainable_weights=weights.get((row.experiment, row.method, row.n, subset)))
        for row, subset in found.items()
    ]


def renamed(piece: Piece) -> Iterator[Row]:
    """What one piece measured."""
    about = piece.about
    share, n = about["share"], about["n"]
    main = experiment(share)
    name, method = main, about.get("method", "")
    if "sweep" in about:
        name, method = f"arxiv-sweep-{method}-r{share:g}", about["sweep"]
    seed = 10 * about["subset"] + about["draw"] if "draw" in about else about["subset"]
    who = "guided" if "--ratio" in piece.command else "source"
    for row in read_rows(piece.folder / "results.json"):
        metric = NAMES.get(row.metric, row.metric)
        if piece.stage == "adapt":
            if metric in FITTED:
                yield replace(row, experiment=main, method=about["called"][row.method])
        elif piece.stage == "likelihood":
            if metric.startswith("outside@"):
                count = f"n_ratio={metric.partition('@')[2]}"
                left_out = f"arxiv-{about['outside']}-r{share:g}"
                yield replace(row, experiment=left_out, method=count, metric="outside", n=None, seed=seed)
            elif row.method == who and "outside" not in about:
                yield replace(row, experiment=name, method=method, n=n, seed=seed)
        elif row.method == "samples":
            yield replace(row, experiment=name, method=method, metric=metric, n=n, seed=seed)
        elif row.method == "held_out" and method == "source" and about["first"]:
            yield replace(row, experiment=name, method="real", metric=metric, n=None, seed=0, seconds=None)


def draw_figures(recipe: Recipe, out: Path, pieces: Sequence[Piece], command: str) -> list[Path]:
    """Writes rows, tables, figures and samples from what is there; returns the files."""
    rows = rows_of(pieces, command)
    if not rows:
        raise FileNotFoundError(f"{out}: nothing is measured yet; run the earlier stages first")
    order = {metric: index for index, metric in enumerate((*PANELS, "masked_nll"))}
    rows.sort(key=lambda row: (row.experiment, order.get(row.metric, len(order)), row.metric))
    made = [out / name for name in ("results.json", "results.md", "summary.md", "samples.md")]
    write_json(made[0], [asdict(row) for row in rows])
    write(made[1], markdown(rows))
    titles = TITLES | {"real": "real text"}
    write(made[2], summary([row for row in rows if not row.experiment.startswith(SWEPT)], titles))
    aside = {name for variant in recipe.variants for name in variant.names}
    main = [row for row in rows if row.experiment == "arxiv" and row.method not in aside]
    panels = [metric for metric in PANELS if any(row.metric == metric and row.n is not None for row in main)]
    meta = read_meta(out / "data" / "target")
    if panels and meta is not None:
        made.append(out / "fractions.png")
        by_fraction(made[-1], main, panels, titles, meta.splits["train"].segments)
    shares = rows_by_share(recipe, out, rows)
    known = {row.metric for mine in shares.values() for row in mine}
    panels = [metric for metric in PANELS[:2] if metric in known]
    if len(shares) > 1 and panels:
        made.append(out / "shares.png")
        by_share(made[-1], shares, panels, titles)
    for one in recipe.sweeps:
        mine = [row for row in rows if row.experiment.startswith(f"arxiv-sweep-{one.method}-r")]
        mine += [row for row in rows if row.experiment.startswith("arxiv-outside") and one.outside]
        panels = [m for m in ("domain", "mauve", "nll", "outside") if any(row.metric == m for row in mine)]
        mine += [row for row in rows if row.method in (one.method, "source")]
        if panels:
            made.append(out / f"sweep-{one.method}.png")
            real = [row for row in main if (row.method, row.metric) == ("real", "domain")]
            sweep(made[-1], mine + real, panels)
    write(made[3], samples_page(shown(recipe, out, pieces)))
    return made


def target_rows(out: Path, share: float) -> int:
    """Target sequences that there are to train on, in a world."""
    meta = read_meta(Places(out, share).data / "target")
    return 0 if meta is None else meta.splits["train"].segments


def rows_by_share(recipe: Recipe, out: Path, rows: Sequence[Row]) -> dict[float, list[Row]]:
    """For each world's r, the rows of those methods that the first world with r > 0 has, at its first fraction, and of
    the source."""
    first = next((world for world in recipe.worlds if world.share and world.fractions), None)
    found: dict[float, list[Row]] = {}
    if first is None:
        return found
    for world in recipe.worlds:
        (n,) = numbers(first.fractions[:1], target_rows(out, world.share))
        here = {(name, n) for name in first.names} | {("source", None)}
        mine = [row for row in rows if row.experiment == experiment(world.share) and (row.method, row.n) in here]
        if any(row.n for row in mine):
            found[world.share] = mine
    return found


def shown(recipe: Recipe, out: Path, pieces: Sequence[Piece]) -> dict[str, list[str]]:
    """The first samples of each method, of the first subset and draw, at the middle fraction of each world."""
    found: dict[str, list[str]] = {}
    for world in recipe.worlds:
        known = sorted(numbers(world.fractions, target_rows(out, world.share)))
        middle = known[len(known) // 2] if known else None
        for piece in pieces:
            about, text = piece.about, piece.folder / "samples.txt"
            if piece.stage != "sample" or about["share"] != world.share or "sweep" in about or not text.is_file():
                continue
            n, where = about["n"], f", r = {world.share:g}" if world.share else ""
            first = about["draw"] == recipe.draws[0] and (n is None or about["subset"] == recipe.subsets[0])
            if first and n in (None, middle):  # the source is of no subset
                title = TITLES.get(about["method"], about["method"]) + where + ("" if n is None else f", n = {n:,}")
                found[title] = text.read_text().splitlines()
    return found


def write(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    with atomic(path) as handle:
        handle.write(text.encode())
