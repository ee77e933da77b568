"""Training up to a chosen step, and the curve from which the step is chosen."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_networks import SETTINGS, data, networks
from torch import Tensor, nn

from gtl.guidance import Guided
from gtl.train.likelihood import LikelihoodObjective
from gtl.train.loop import fit


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("stop", [1, 4, 7, 11])
def test_stopping_at_a_step_is_the_longer_run_at_that_step(stop):
    """Weight for weight: rows, noise, dropout and learning rate of a step do not depend on where the run ends."""
    going, at = networks(), {}
    goal = LikelihoodObjective(going, data())
    fit(going, goal, SETTINGS, on_step=lambda step: at.setdefault(step, weights(going)))
    stopped = networks()
    result = fit(stopped, LikelihoodObjective(stopped, data()), replace(SETTINGS, stop=stop))
    assert (result.steps, result.best_step, result.held_out) == (stop, stop, None)
    assert all(torch.equal(a, b) for a, b in zip(weights(stopped), at[stop], strict=True))
    if stop < 11:
        assert any(not torch.equal(a, b) for a, b in zip(weights(stopped), at[11], strict=True))


@pytest.mark.parametrize("stop", [0, -1, 12])
def test_a_stop_outside_the_steps_is_refused(stop):
    with pytest.raises(ValueError, match=f"stop={stop}"):
        replace(SETTINGS, stop=stop)


@pytest.mark.parametrize(("stop", "looked"), [(None, [3, 6, 9, 11]), (7, [3, 6, 7]), (2, [2])])
def test_the_curve_has_the_steps_that_were_looked_at(stop, looked):
    guided = networks()
    objective = LikelihoodObjective(guided, data(), data(4), gammas=(0.0, 1.0))
    result = fit(guided, objective, replace(SETTINGS, stop=stop))
    assert list(result.curve) == looked
    assert all(len(scores) == 2 for scores in result.curve.values())
    assert result.held_out == min(min(scores) for scores in result.curve.values())
    assert result.best_step == min(result.curve, key=lambda step: min(result.curve[step]))
    assert len({scores[0] for scores in result.curve.values()}) == 1  # gamma 0 is the source at every step


def test_without_held_out_rows_there_is_no_curve():
    guided = networks()
    assert fit(guided, LikelihoodObjective(guided, data()), replace(SETTINGS, steps=2)).curve == {}


@pytest.mark.parametrize("at", [2, 6, 8])
def test_the_curve_survives_a_resume(tmp_path: Path, at):
    def start() -> tuple[Guided, LikelihoodObjective]:
        guided = networks()
        return guided, LikelihoodObjective(guided, data(), data(4), pseudo=1.0, gammas=(0.0, 1.0, 2.0))

    def interrupt(step: int) -> None:
        if step == at:
            raise KeyboardInterrupt

    whole, objective = start()
    expected = fit(whole, objective, SETTINGS)
    stopped, objective = start()
    with pytest.raises(KeyboardInterrupt):
        fit(stopped, objective, SETTINGS, tmp_path, interrupt)
    resumed, objective = start()
    result = fit(resumed, objective, SETTINGS, tmp_path)
    assert result.curve == expected.curve
    assert all(isinstance(step, int) for step in result.curve)
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(whole), strict=True))
