"""LoRA: adapters that start at nothing, train alone, merge into plain weights, and go the way of every method."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gtl.denoiser import NetworkDenoiser, nll
from gtl.estimate import NetworkSize, Problem, Training
from gtl.estimate.lora import LowRank, adapters_of, add_adapters, merge_adapters, recipe
from gtl.estimate.parts import Part
from gtl.nn.dit import DiT
from gtl.process import Masked, Uniform
from gtl.score import ScoreDenoiser
from gtl.train.checkpoint import load_denoiser, save_model
from typed import SMALL, gtl, rows

SIZE = NetworkSize(width=16, depth=2, heads=2, dropout=0.1)
TRAINING = Training(
    denoiser=SIZE, ratio=SIZE, budget=18, folds=2, evaluation_rows=8, batch_size=4, evaluate_every=2, warmup=2,
    finetuned_warmup=2, lora_rank=3, lora_head=False,
)  # fmt: skip
ADAPTERS = 2 * 3 * ((16 + 48) + (16 + 16) + (16 + 64) + (64 + 16))
"""Numbers in the adapters: depth x rank x (in + out) of every adapted map."""


def denoiser(kind: str = "masked", depth: int = 2) -> NetworkDenoiser:
    """A denoiser with random weights, head included."""
    torch.manual_seed(0)
    process = Masked(4) if kind in ("masked", "tied") else Uniform(4)
    size = vars(replace(SIZE, depth=depth, tied=kind == "tied"))
    network = DiT(4, 4, **size, time_conditioned=not isinstance(process, Masked))
    for weight in network.parameters():
        nn.init.normal_(weight, std=0.2)
    return (ScoreDenoiser if kind == "score" else NetworkDenoiser)(process, network).eval()


def problem(**changes: Any) -> Problem:
    generator = torch.Generator().manual_seed(1)
    source, held_out, target = (torch.randint(3, (count, 5), generator=generator) for count in (20, 6, 6))
    return Problem(replace(TRAINING, **changes), denoiser(), (source, held_out), target, seed=3)


def state(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def moved(model: NetworkDenoiser) -> NetworkDenoiser:
    """The adapters anywhere but at their start."""
    torch.manual_seed(5)
    for weight in adapters_of(model).values():
        nn.init.normal_(weight, std=0.3)
    return model


@pytest.mark.parametrize("kind", ["masked", "tied", "uniform", "score"])
@pytest.mark.parametrize("head", [False, True])
def test_adapters_start_at_the_source_and_merge_into_plain_weights(kind: str, head: bool):
    source = denoiser(kind)
    before = state(source)
    z, t = torch.randint(0, 4, (7, 5), generator=torch.Generator().manual_seed(2)), torch.linspace(0.1, 0.9, 7)
    model = add_adapters(source, 3, 6, head).eval()
    assert torch.equal(model(z, t).log_probs, source(z, t).log_probs)
    moved(model)
    wanted = model(z, t).log_probs.exp()
    merged = merge_adapters(source, model)
    torch.testing.assert_close(merged(z, t).log_probs.exp(), wanted, atol=1e-5, rtol=0)
    assert float((wanted - source(z, t).log_probs.exp()).detach().abs().max()) > 0.05
    assert type(merged) is type(source)
    assert merged.network.tied == (kind == "tied" and not head)
    assert merged.state_dict().keys() - {"network.head.weight"} == before.keys() - {"network.head.weight"}
    assert not any(isinstance(module, LowRank) for module in merged.modules())
    assert all(torch.equal(value, before[name]) for name, value in source.state_dict().items())


def test_which_maps_are_adapted():
    """qkv, out and both of the MLP in every block; the head only where asked for. Nothing else trains or changes."""
    source = denoiser()
    maps = {f"network.blocks.{i}.{name}.weight" for i in (0, 1) for name in ("qkv", "out", "mlp.0", "mlp.2")}
    for head, wanted in ((False, maps), (True, maps | {"network.head.weight"})):
        model = moved(add_adapters(source, 3, 6, head))
        assert sum(w.numel() for w in adapters_of(model).values()) == ADAPTERS + head * 3 * (16 + 4)
        after = merge_adapters(source, model).state_dict()
        assert {name for name, value in source.state_dict().items() if not torch.equal(value, after[name])} == wanted


def test_what_is_added_has_the_rank_and_the_scale():
    source = denoiser()
    name = "blocks.1.mlp.0"
    deltas = []
    for alpha in (6, 12):
        merged = merge_adapters(source, moved(add_adapters(source, 3, alpha)))
        deltas.append(merged.network.get_submodule(name).weight - source.network.get_submodule(name).weight)
    assert int(torch.linalg.matrix_rank(deltas[0].detach(), rtol=1e-4)) == 3
    torch.testing.assert_close(2 * deltas[0], deltas[1])


@pytest.mark.parametrize("method", ["lora", "lora-iw"])
@pytest.mark.parametrize("folds", [2, 0])
def test_the_method(method: str, folds: int):
    """A plain denoiser, the source bit for bit as it was, only adapters counted, within the budget."""
    made = problem(folds=folds)
    before = state(made.source)
    result = made.adapted(method)
    assert all(torch.equal(value, before[name]) for name, value in made.source.state_dict().items())
    assert result.ratio is None
    assert result.weights == ADAPTERS
    assert 1 <= result.steps <= made.training.budget
    assert result.denoiser.state_dict().keys() == before.keys()
    assert any(not torch.equal(value, before[name]) for name, value in result.denoiser.state_dict().items())
    assert math.isfinite(result.score)


def test_training_makes_the_target_likelier():
    """Sequences of one token, which the source does not favour; a higher rate has gone further after as many steps."""
    made = problem(folds=0, budget=60, patience=0)
    made.target = torch.full((24, 5), 2)
    values = []
    for rate in (1e-9, 1e-3, 2e-2):
        made.training.lora_learning_rate = rate
        result = made.run("lora", recipe)
        values.append(nll(result.denoiser, made.target, generator=torch.Generator().manual_seed(0)))
    assert values[0] == pytest.approx(
        nll(made.source, made.target, generator=torch.Generator().manual_seed(0)), abs=1e-4
    )
    assert values[0] > values[1] > values[2]


def test_it_is_seeded():
    models = []
    for seed, noise in ((3, 0), (3, 1), (4, 0)):
        made = problem()
        made.seed = seed
        torch.manual_seed(noise)
        models.append(state(made.adapted("lora").denoiser))
    a, b, c = models
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_a_start_goes_on_with_its_own_adapters():
    """Not with new ones on top of the merged weights: the rank stays what it was."""
    made = problem()
    first = recipe(made, Part(made.target, None, 4))
    made.training.lora_learning_rate = 1e-12
    again = recipe(made, Part(made.target, None, 4, start=first))
    for name, value in first.denoiser.state_dict().items():
        torch.testing.assert_close(again.denoiser.state_dict()[name], value, atol=1e-6, rtol=0)
    assert first.adapters.keys() == again.adapters.keys()
    assert any(bool(value.any()) for name, value in first.adapters.items() if name.endswith(".b"))


def test_a_merged_model_is_saved_like_any_other(tmp_path: Path):
    result = problem().adapted("lora")
    assert isinstance(result.denoiser, NetworkDenoiser)
    save_model(tmp_path / "model", result.denoiser)
    again = load_denoiser(tmp_path / "model").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in result.denoiser.state_dict().items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lora_rank": 0}, "lora_rank=0 must be at least 1"),
        ({"lora_rank": -4}, "lora_rank=-4"),
        ({"lora_alpha": 0}, "lora_alpha=0"),
        ({"lora_learning_rate": 0.0}, "lora_learning_rate=0"),
        ({"lora_learning_rate": math.nan}, "lora_learning_rate=nan"),
        ({"lora_learning_rate": math.inf}, "lora_learning_rate=inf"),
    ],
)
def test_settings_out_of_range(change: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        replace(TRAINING, **change)


def test_a_network_without_blocks():
    with pytest.raises(ValueError, match="has none: use lora_head"):
        add_adapters(denoiser(depth=0), 3, 6)
    assert len(adapters_of(add_adapters(denoiser(depth=0), 3, 6, True))) == 2


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """adapt, then sample and evaluate by the difference, and as a denoiser of its own."""
    random = np.random.default_rng(0)
    for name, count in (("src", 20), ("tgt", 10)):
        np.save(tmp_path / f"{name}.npy", random.integers(0, 3, (count, 6)))
    source, target, made = tmp_path / "source", tmp_path / "tgt.npy", tmp_path / "lora"
    gtl(f"train denoiser --data {tmp_path / 'src.npy'} {SMALL}", "--out", source)
    before = (source / "weights.safetensors").read_bytes()
    tiny = "--training.budget 12 --training.folds 2 --training.lora_rank 2 --training.lora_learning_rate 0.05"
    gtl(f"adapt {source} {target} --method lora {tiny}", "--out", made)
    assert "held-out nll" in capsys.readouterr().out
    assert (source / "weights.safetensors").read_bytes() == before
    assert json.loads((made / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    counts = {row["trainable_weights"] for row in rows(made) if row["method"] == "lora"}
    assert counts == {2 * ((8 + 24) + (8 + 8) + (8 + 32) + (32 + 8) + (8 + 4))}  # the head's too
    gtl(f"sample {source} --ratio {made} --length 4 --count 9", "--out", tmp_path / "guided")
    gtl(f"sample {made} --length 4 --count 9", "--out", tmp_path / "alone")
    drawn = [np.load(tmp_path / name / "samples.npy") for name in ("guided", "alone")]
    assert all(x.shape == (9, 4) and x.max() < 3 for x in drawn)
    gtl(f"evaluate {source} {target} --ratio {made}", "--out", tmp_path / "e")
    assert {row["method"] for row in rows(tmp_path / "e")} == {"source", "guided"}
    with pytest.raises(SystemExit):
        gtl(f"adapt {source} {target} --method lora --training.lora_rank 0", "--out", tmp_path / "none")
    assert "lora_rank=0" in capsys.readouterr().err
