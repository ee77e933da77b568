"""`gtl evaluate`: how good a model, or what it generated, is."""

from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from gtl.commands.models import Scoring, open_models
from gtl.data.tokens import check_tokens, read_tokens
from gtl.denoiser import Denoiser, masked_nll, nll
from gtl.evaluate.martingale import martingale_violation
from gtl.guidance import Guided
from gtl.progress import Bar
from gtl.ratio import SequenceRatio
from gtl.run import Run

__all__ = ["evaluate"]


def evaluate(
    denoiser: str,
    data: str,
    out: str | None = None,
    ratio: str | None = None,
    gamma: float | Literal["auto"] = "auto",
    n_ratio: int | None = None,
    scoring: Scoring = "intervention",
    draws: int = 8,
    seed: int = 0,
) -> None:
    """Measures held-out likelihood and, for a ratio, its gain and how far it violates the martingale identity.

    Args:
        denoiser: folder of the source model.
        data: held-out sequences of the target.
        out: folder for the results; by default a new one under runs/.
        ratio: folder of a ratio, or of a fine-tuned denoiser (which counts as its difference from the source), or a sum
            of them, as in "0.5 * runs/physics + 0.5 * runs/biology".
        gamma: guidance strength; auto is the one that was chosen when the ratio was fitted.
        n_ratio: candidates weighed at a position, all by default; other tokens keep the source's probability.
        scoring: of a sequence ratio's candidates; taylor is first-order, all of them for one pass forward and back.
        draws: corruptions of every sequence.
        seed: of the corruptions.
    """
    settings = dict(locals())
    if draws < 1:
        raise ValueError(f"draws={draws} must be at least 1")
    model, weight, strength, device = open_models(denoiser, ratio, gamma, n_ratio, out, scoring)
    process = model.process
    x = check_tokens(read_tokens(data), process.num_ids, process.mask_id, data, least=1).to(device)
    models: dict[str, Denoiser] = {"source": model}
    if weight is not None:
        models["guided"] = Guided(model, weight, strength, n_ratio, keep_tail=True)
    run = Run(out, "evaluate", settings, device)

    def fresh() -> torch.Generator:
        return torch.Generator(device).manual_seed(seed)

    with Bar(2 * len(models)) as bar:
        for name, each in models.items():
            for metric, function in (("nll", nll), ("masked_nll", masked_nll)):
                if run.has(name, len(x), seed, metric) or (metric == "masked_nll" and process.mask_id is None):
                    continue
                bar.stage(f"{metric} of the {name} model", 1)
                value = function(each, x, draws, fresh(), batch=128)
                run.add("evaluate", name, metric, value, n=len(x), seed=seed)
    if weight is not None:
        values = {(row.method, row.metric): row.value for row in run.rows}
        more = {"nll_gain": values["source", "nll"] - values["guided", "nll"]}
        if isinstance(weight, SequenceRatio) and weight.absolute:  # others obey the identity by themselves
            gap = martingale_violation(model, weight, x.repeat(draws, 1), fresh()).double()
            more |= {"martingale_rms": float(gap.square().mean().sqrt()), "martingale_mean": float(gap.mean())}
        for metric, value in more.items():
            if not run.has("guided", len(x), seed, metric):
                run.add("evaluate", "guided", metric, value, n=len(x), seed=seed)
    run.finish()
    table = Table("model", "metric", "value")
    for row in run.rows:
        table.add_row(row.method, row.metric, f"{row.value:.5f}")
    Console().print(table)
    print(f"rows in {run.folder / 'results.json'}")
