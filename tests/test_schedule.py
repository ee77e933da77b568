"""Schedules: alpha falls from one to zero, sigma = -log alpha, and `inverse` undoes alpha."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtl.schedule import Cosine, Geometric, LogLinear, make_schedule

SCHEDULES = [LogLinear(), Cosine(), Geometric(), Geometric(1e-3, 8.0)]
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: str(s.config()))


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@schedules
def test_ends(schedule):
    """alpha(0) = 1 and alpha(1) = 0; geometric noise starts at sigma_min and ends at sigma_max instead."""
    first, last = 1.0, 0.0
    if isinstance(schedule, Geometric):
        first, last = math.exp(-schedule.sigma_min), math.exp(-schedule.sigma_max)
    assert float(schedule.alpha(scalar(0.0))) == pytest.approx(first, abs=1e-12)
    assert float(schedule.alpha(scalar(1.0))) == pytest.approx(last, abs=1e-12)


@schedules
def test_monotone(schedule):
    t = torch.linspace(0, 1, 501, dtype=torch.float64)
    assert bool((schedule.alpha(t).diff() < 0).all())


@schedules
@given(t=st.floats(0, 1))
def test_inverse(schedule, t):
    """inverse(alpha(t)) = t. Near t = 1 a cosine is flat, which costs half of the digits."""
    assert float(schedule.inverse(schedule.alpha(scalar(t)))) == pytest.approx(t, abs=1e-7)


@schedules
@given(t=st.floats(0, 0.999))
def test_sigma_is_minus_log_alpha(schedule, t):
    alpha, sigma = float(schedule.alpha(scalar(t))), float(schedule.sigma(scalar(t)))
    assert sigma == pytest.approx(-math.log(alpha), rel=1e-9)


@given(t=st.floats(0, 1), sigma_min=st.floats(1e-5, 1e-2), sigma_max=st.floats(1, 30))
def test_geometric_sigma(t, sigma_min, sigma_max):
    """sigma(t) = sigma_min^(1 - t) sigma_max^t."""
    sigma = Geometric(sigma_min, sigma_max).sigma(scalar(t))
    assert float(sigma) == pytest.approx(sigma_min ** (1 - t) * sigma_max**t, rel=1e-9)


def test_known_values():
    assert float(LogLinear().alpha(scalar(0.3))) == pytest.approx(0.7)
    assert float(Cosine().alpha(scalar(0.5))) == pytest.approx(1 - math.sqrt(0.5))
    assert float(Geometric().sigma(scalar(0.0))) == pytest.approx(1e-4)
    assert float(Geometric().sigma(scalar(1.0))) == pytest.approx(20.0)


@schedules
def test_config_round_trip(schedule):
    again = make_schedule(**schedule.config())
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    assert type(again) is type(schedule)
    assert torch.equal(again.alpha(t), schedule.alpha(t))


def test_errors_name_the_value():
    with pytest.raises(ValueError, match=r"'linear'.*log-linear"):
        make_schedule("linear")
    with pytest.raises(ValueError, match=r"sigma_min=3\.0"):
        Geometric(3.0, 2.0)
