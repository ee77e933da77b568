"""Counts as a ratio: against enumeration, on sequences whose law is known, and judged by rows that were not counted."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gtl.denoiser import Denoiser, NetworkDenoiser, Prediction
from gtl.estimate.unigram import PSEUDO, calibrate, log_ratios, nelbo_by_ratio, tally
from gtl.guidance import Guided
from gtl.nn.dit import DiT, gather_positions
from gtl.process import Masked, Process, Uniform
from gtl.ratio import UnigramRatio
from gtl.ratio.gamma import nll_by_gamma
from gtl.train.checkpoint import load_ratio, save_model

LENGTH = 6


class Fixed(Denoiser):
    """A denoiser that expects the same law at every place, and knows the tokens that are not masked."""

    def __init__(self, process: Process, law: Tensor) -> None:
        super().__init__()
        self.process, self.law = process, law

    def forward(self, z: Tensor, t: Tensor | None = None, positions: Tensor | None = None) -> Prediction:
        log_p = self.carry_over(z, self.law.log().expand(*z.shape, -1))
        return Prediction(log_p if positions is None else gather_positions(log_p, positions))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(law: Tensor, rows: int, seed: int = 1) -> Tensor:
    return torch.multinomial(law, rows * LENGTH, True, generator=seeded(seed)).view(rows, LENGTH)


def masked_law(*weights: float) -> Tensor:
    """A law over tokens, the mask as the last id with none."""
    law = torch.tensor([*weights, 0.0])
    return law / law.sum()


P = masked_law(4, 3, 2, 1)
Q = masked_law(1, 1, 1, 5)


def test_counts_are_those_of_the_noisy_places():
    """By hand, from the same corruptions; as many in all as there are tokens, expected ones too."""
    process, x = Masked(5), drawn(Q, 40)
    model = Fixed(process, P)
    counts = tally(model, x, 100, seeded(3))
    again, seen = x.repeat(3, 1), torch.zeros(5, dtype=torch.float64)
    generator = seeded(3)
    t = process.times(len(again), x.device, generator)
    for part, time in zip(again.split(64), t.split(64), strict=True):
        z = process.corrupt(part, time, generator)
        for token in part[z == process.mask_id].tolist():
            seen[token] += 1
    torch.testing.assert_close(counts[0], seen * x.numel() / seen.sum())
    torch.testing.assert_close(counts[1], P.double() * x.numel(), rtol=1e-5, atol=0)


def test_log_ratios():
    counts = torch.tensor([[9.0, 0.0, 0.0, 3.0], [1.0, 1.0, 0.0, 3.0]])
    found = log_ratios(counts, (1.0, 3.0))
    torch.testing.assert_close(found[0], torch.tensor([5.0, 0.5, 1.0, 1.0]).log())
    torch.testing.assert_close(found[1], torch.tensor([3.0, 0.75, 1.0, 1.0]).log())


@pytest.mark.parametrize(("process", "p", "q"), [(Masked(5), P, Q), (Uniform(4), P[:4], Q[:4])])
def test_it_finds_the_ratio_of_two_laws(process: Process, p: Tensor, q: Tensor):
    """Independent tokens: the true ratio is q / p, and guidance by it is the target."""
    source = Fixed(process, p)
    x = drawn(q, 400)
    ratio, score = calibrate([source], [x], 800)
    assert ratio is not None
    gap = (ratio.log_r.exp() * p)[:4] - q[:4]
    assert float(gap.abs().max()) < 0.02  # three standard errors of 2,400 tokens
    fresh = drawn(q, 400, seed=7)
    before, after = (float(nll_by_gamma(source, ratio, fresh, (gamma,), generator=seeded())) for gamma in (0.0, 1.0))
    assert after < before - 0.3
    assert score == pytest.approx(after, abs=0.05)
    if process.mask_id is not None:
        z = torch.full((2, LENGTH), process.mask_id)
        torch.testing.assert_close(Guided(source, ratio, 1.0)(z).log_probs[0, 0].exp(), q, atol=0.02, rtol=0)


@pytest.mark.parametrize("process", [Masked(5), Uniform(5)])
def test_the_nelbo_of_a_tilt_is_that_of_the_guided_model(process: Process):
    """For a network, row by row, against the guided denoiser under the same corruptions."""
    torch.manual_seed(0)
    network = DiT(5, 5, 16, 1, 2, time_conditioned=process.mask_id is None)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model = NetworkDenoiser(process, network).eval()
    x = drawn(Q, 9)
    log_r = torch.randn(3, 5, generator=seeded(4)).double()
    found = nelbo_by_ratio(model, log_r, x, 30, seeded(5))
    assert found.shape == (3, 9)
    for number, one in enumerate(log_r):
        guided, generator = Guided(model, UnigramRatio(process, one), 1.0), seeded(5)
        again = x.repeat(4, 1)
        t = process.times(len(again), x.device, generator)
        z = process.corrupt(again, t, generator)
        with torch.no_grad():
            wanted = process.nelbo(again, z, t, guided(z, t).log_probs, model.timeless)
        torch.testing.assert_close(found[number], (wanted / LENGTH).view(4, 9).mean(0).double(), atol=1e-4, rtol=1e-4)


def test_nothing_to_correct():
    """Where the model expects what comes, chance alone must not pass for a correction."""
    found = [calibrate([Fixed(Masked(5), Q)], [drawn(Q, 60, seed)], 200, seed)[0] for seed in range(12)]
    assert sum(ratio is not None for ratio in found) <= 2


def test_few_rows_are_trusted_less():
    """Of 40 tokens that come once each in few rows, none becomes much likelier."""
    law = torch.cat([torch.ones(40), torch.zeros(1)]) / 40
    model = Fixed(Masked(41), law)
    x = torch.randint(0, 40, (5, LENGTH), generator=seeded(2))
    ratio, score = calibrate([model], [x], 200)
    assert ratio is None
    assert score == pytest.approx(math.log(40), rel=0.02)


def test_rows_are_judged_by_what_others_say():
    """Two folds with a token of their own each: both are common on the whole, but what either says is wrong for the
    other, and nothing is kept."""
    model = Fixed(Masked(5), masked_law(1, 1, 1, 1))
    apart = [torch.full((6, LENGTH), token) for token in (0, 1)]
    assert calibrate([model] * 2, apart, 100)[0] is None
    whole, _ = calibrate([model] * 2, [torch.full((6, LENGTH), 2)] * 2, 100)
    assert whole is not None
    assert int(whole.log_r.argmax()) == 2


def test_each_model_is_asked_about_its_own_rows():
    """Two models that err in opposite ways on what the other has seen."""
    first, second = Fixed(Masked(5), P), Fixed(Masked(5), Q)
    rows = [drawn(P, 100, 1), drawn(Q, 100, 2)]
    kept, score = calibrate([first, second], rows, 400)
    crossed, worse = calibrate([second, first], rows, 400)
    assert score < worse - 0.1
    assert kept is None or float(kept.log_r.abs().max()) < 0.3
    assert crossed is None or float(crossed.log_r.abs().max()) < 0.3  # the errors cancel in the counts


def test_it_is_seeded_and_settings_are_in_order():
    x = drawn(Q, 50)
    one, two = (calibrate([Fixed(Masked(5), P)], [x], 100, seed=3) for _ in range(2))
    assert one[0] is not None
    assert two[0] is not None
    assert torch.equal(one[0].log_r, two[0].log_r)
    assert one[1] == two[1]
    assert list(PSEUDO) == sorted(PSEUDO)


def test_a_checkpoint(tmp_path: Path):
    ratio = UnigramRatio(Masked(5), torch.tensor([0.5, -1.0, 0.0, 2.0, 0.0]))
    ratio.gamma = 0.75
    save_model(tmp_path, ratio)
    again = load_ratio(tmp_path)
    assert isinstance(again, UnigramRatio)
    assert torch.equal(again.log_r, ratio.log_r)
    assert again.gamma == 0.75


@pytest.mark.parametrize("bad", [torch.zeros(4), torch.tensor([0.0, 0.0, 0.0, 0.0, math.inf])])
def test_bad_input(bad: Tensor):
    with pytest.raises(ValueError, match="log_r"):
        UnigramRatio(Masked(5), bad)
    with pytest.raises(ValueError, match="do not belong together"):
        calibrate([Fixed(Masked(5), P)], [], 10)
