"""`gtl diagnose`: what to use, before anyone spends a GPU-hour."""

from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from gtl.data.prepared import check_meta, same_tokens
from gtl.data.tokens import check_tokens, read_meta, read_tokens
from gtl.diagnose import Diagnosis, estimators
from gtl.diagnose import diagnose as look
from gtl.progress import Bar
from gtl.report.diagnose import draw
from gtl.run import Run, check_folder
from gtl.train.checkpoint import load_denoiser, write_json

__all__ = ["diagnose"]


def diagnose(
    denoiser: str,
    target: str,
    out: str | None = None,
    source: str | None = None,
    steps: int = 240,
    seed: int = 0,
) -> None:
    """Says in about a minute what will work: GTL, fine-tuning, both, or neither.

    Args:
        denoiser: folder of the source model.
        target: sequences of the target domain (a folder of gtl prepare, whose training rows are used; .npy of shape
            (N, L); or text with one sequence of ids a line).
        out: folder for diagnosis.json and diagnosis.png; by default a new one under runs/.
        source: sequences of the source domain; without them the model's own samples stand in.
        steps: gradient steps of each of the small fits.
        seed: of folds, fits and corruptions.
    """
    settings = dict(locals())
    if out is not None:
        check_folder(Path(out))
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_denoiser(denoiser).to(device)
    process = model.process
    check_meta(read_meta(target), process.num_ids, process.mask_id, target)
    x = check_tokens(read_tokens(target), process.num_ids, process.mask_id, target, banned=model.banned).long()
    if len(x) < 6:
        raise ValueError(f"{target}: {len(x)} sequences are too few to hold any out; give at least 6")
    rows = None
    if source is not None:
        same_tokens({name: read_meta(name) for name in (target, source)})
        rows = check_tokens(
            read_tokens(source), process.num_ids, process.mask_id, source, length=x.shape[1], banned=model.banned
        ).long()
    run = Run(out, "diagnose", settings, device)
    with Bar((18 if "sparse" in estimators(model) else 14) * steps) as bar:
        found = look(model, x, rows, seed, steps, bar, run.log)
    write_json(run.folder / "diagnosis.json", asdict(found))
    draw(run.folder / "diagnosis.png", found)
    for gain in found.gains:
        run.add("diagnose", gain.name, "nll_gain", gain.gain, n=len(x), seed=seed, seconds=gain.seconds)
    run.finish()
    show(found)
    print(f"figure and numbers: {run.folder / 'diagnosis.png'}, {run.folder / 'diagnosis.json'}")


def show(found: Diagnosis) -> None:
    """Prints the table, warnings and hints, and the verdict."""
    table = Table(title="gain over the source on held-out target rows", title_justify="left")
    for name in ("estimator", "nats a token", "95 % interval"):
        table.add_column(name)
    for gain in sorted(found.gains, key=lambda gain: -gain.gain):
        table.add_row(gain.name, f"{gain.gain:.4f}", f"{gain.low:.4f} to {gain.high:.4f}")
    console = Console()
    console.print(table)
    source = "samples of the source model" if found.source_sampled else "source rows"
    console.print(
        f"AUC {found.auc:.3f}, calibration error {found.calibration_error:.3f} against {found.source_rows} {source}; "
        f"effective rows {found.effective_rows:.1f}; token overlap {found.token_overlap:.3g}"
        + ("" if found.martingale_rms is None else f"; martingale violation {found.martingale_rms:.2f}"),
        highlight=False,
    )
    for name, lines in (("warning", found.warnings), ("hint", found.hints)):
        for line in lines:
            console.print(f"[bold]{name}:[/bold] {line}", highlight=False)
    console.print(f"[bold]{found.advice}[/bold]", highlight=False)
