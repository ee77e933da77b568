"""What the losses are minimal at, by exact expectations over all sequences and maskings (V = 2, L = 2)."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gtl.denoiser import Denoiser, Prediction
from gtl.process import Masked
from gtl.ratio import SequenceRatio
from gtl.ratio.sequence import unsmooth
from gtl.train.classifier import ClassifierObjective, logistic
from gtl.train.denoiser import DenoiserObjective
from gtl.train.ratio import RatioObjective, bregman

# p and q over 00, 01, 10, 11 in tenths: ten rows that follow each law exactly.
P, Q = (4, 3, 2, 1), (1, 1, 3, 5)
SEQUENCES = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
# With 1 - alpha uniform a pattern with k of 2 masks has the chance Beta(k + 1, 3 - k): 2, 1, 1 and 2 sixths.
PATTERNS = torch.tensor([[0, 0], [0, 0], [0, 1], [1, 0], [1, 1], [1, 1]]).bool()
STATES = torch.cartesian_prod(torch.arange(3), torch.arange(3))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny tensors are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Enumerated(Masked):
    """Masked noise that goes through all maskings, as often as they are likely, instead of drawing one."""

    def __init__(self) -> None:
        super().__init__(3)

    def corrupt(self, x: Tensor, t: Tensor, generator: torch.Generator | None = None) -> Tensor:
        assert len(x) % len(PATTERNS) == 0
        return x.masked_fill(PATTERNS.repeat(len(x) // len(PATTERNS), 1), self.mask_id)


class FreeRatio(SequenceRatio):
    """One free number for every noisy state."""

    def __init__(self, values: Tensor | None = None) -> None:
        super().__init__()
        self.process = Enumerated()
        self.values = nn.Parameter(torch.zeros(9, dtype=torch.float64) if values is None else values.clone())

    def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        return self.values[3 * z[:, 0] + z[:, 1]]

    def forward(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        return self.log_value(z, t)


class FreeDenoiser(Denoiser):
    """Free logits for every noisy state and position."""

    def __init__(self) -> None:
        super().__init__()
        self.process = Enumerated()
        self.values = nn.Parameter(torch.zeros(9, 2, 3, dtype=torch.float64))

    def forward(self, z: Tensor, t: Tensor | None = None, positions: Tensor | None = None) -> Prediction:
        never = torch.tensor([2])
        log_probs = self.values[3 * z[:, 0] + z[:, 1]].index_fill(-1, never, -torch.inf).log_softmax(-1)
        return Prediction(self.carry_over(z, log_probs))


def rows(counts: tuple[int, ...]) -> Tensor:
    """Every sequence as often as it is likely, each followed by all its maskings."""
    return SEQUENCES.repeat_interleave(torch.tensor(counts) * len(PATTERNS), 0)


def domains() -> dict[str, Tensor]:
    return {"source": rows(P), "target": rows(Q)}


def visible(counts: tuple[int, ...]) -> Tensor:
    """The chance of the visible tokens of each of the nine states."""
    agrees = (STATES[:, None] == SEQUENCES) | (STATES[:, None] == 2)
    return agrees.all(-1).double() @ torch.tensor(counts).double() / 10


LOG_R = (visible(Q) / visible(P)).log()


def minimise(table: nn.Module, loss: Callable[[], Tensor]) -> float:
    """Minimises a smooth loss of a table in place and returns its value."""
    optimizer = torch.optim.LBFGS(
        table.parameters(),
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(closure)
    return float(loss().detach())


def optimum(objective: ClassifierObjective | RatioObjective, start: Tensor | None = None) -> Tensor:
    table = FreeRatio(start)
    minimise(table, lambda: objective.loss(table, domains(), None))
    return table.values.detach()


def test_the_stub_has_the_law_of_the_process():
    """The fixed patterns are as frequent as real corruptions are."""
    count = 60_000
    generator = torch.Generator().manual_seed(0)
    process = Masked(3)
    t = process.times(count, torch.device("cpu"), generator)
    z = process.corrupt(torch.zeros(count, 2, dtype=torch.long), t, generator)
    index = (z == 2).long() @ torch.tensor([2, 1])
    assert torch.allclose(index.bincount() / count, torch.tensor([2, 1, 1, 2]) / 6, atol=0.01)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_noisy_classifier_learns_log_r(smoothing: float):
    """Label smoothing bends the output, and `unsmooth` straightens it."""
    objective = ClassifierObjective(Enumerated(), domains(), smoothing=smoothing)
    assert torch.allclose(unsmooth(optimum(objective), smoothing), LOG_R, atol=1e-6, rtol=0)


def test_clean_classifier_learns_log_r_of_clean_sequences():
    learned = optimum(ClassifierObjective(Enumerated(), domains(), noisy=False))
    clean = (STATES != 2).all(-1)
    assert torch.allclose(learned[clean], LOG_R[clean], atol=1e-6, rtol=0)
    assert not learned[~clean].any()  # it never sees a mask


@pytest.mark.parametrize("smoothing", [0.1, 0.4])
def test_smoothing_caps_the_output(smoothing: float):
    """The optimal d is the mean label, (p (1 - eps/2) + q eps/2) / (p + q)."""
    p, q = visible(P), visible(Q)
    d = (p * (1 - smoothing / 2) + q * smoothing / 2) / (p + q)
    expected = ((1 - d) / d).log()
    learned = optimum(ClassifierObjective(Enumerated(), domains(), smoothing=smoothing))
    assert torch.allclose(learned, expected, atol=1e-6, rtol=0)
    assert float((learned - LOG_R).abs().max()) > 0.05
    cap = math.log((1 - smoothing / 2) / (smoothing / 2))
    assert float(learned.abs().max()) < cap


def test_the_cap_is_the_documented_one():
    """However sure the classifier may be, labels 0.05 and 0.95 stop it at 2.94."""
    s = torch.linspace(-8, 8, 16001, dtype=torch.float64)
    loss = logistic(s, source=False, smoothing=0.1)
    assert float(s[loss.argmin()]) == pytest.approx(math.log(19), abs=1e-3)


@pytest.mark.parametrize("source", [True, False])
def test_logistic_in_the_tails(source: bool):
    """Finite with finite gradients for log r of any size, as heavy tails need."""
    for smoothing in (0.0, 0.1):
        s = torch.tensor([-200.0, -30.0, 0.0, 30.0, 200.0], requires_grad=True)
        loss = logistic(s, source, smoothing)
        loss.sum().backward()
        assert loss.isfinite().all()
        assert s.grad is not None
        assert s.grad.isfinite().all()
        order = loss.detach() if source else loss.detach().flip(0)
        if smoothing == 0:
            assert (order.diff() >= 0).all()  # a source sequence should have a small ratio


def test_bregman_is_minimal_at_the_log_of_the_mean():
    """In expectation over x given z the minimum is log E[r(x) | z], not E[log r(x) | z]."""
    p, log_r = torch.tensor(P).double() / 10, (torch.tensor(Q).double() / torch.tensor(P)).log()
    agrees = ((STATES[:, None] == SEQUENCES) | (STATES[:, None] == 2)).all(-1)
    posterior = agrees * p
    posterior = posterior / posterior.sum(-1, keepdim=True)  # p(x | z), one row a state
    table = FreeRatio()
    minimise(table, lambda: (posterior * bregman(log_r, table.values[:, None])).sum())
    learned = table.values.detach()
    assert torch.allclose(learned, (posterior @ log_r.exp()).log(), atol=1e-6, rtol=0)
    assert torch.allclose(learned, LOG_R, atol=1e-6, rtol=0)
    mean_of_log = posterior @ log_r
    masked = (STATES == 2).any(-1)
    assert (learned[masked] - mean_of_log[masked] > 0.005).all()  # Jensen: the other one guides too weakly
    assert float(learned[-1]) == pytest.approx(0.0, abs=1e-6)  # E_p[r] = 1
    assert float(mean_of_log[-1]) < -0.3


def test_bregman_has_the_stated_gradient():
    log_r = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64)
    s = torch.tensor([1.0, -4.0, 0.5], dtype=torch.float64, requires_grad=True)
    bregman(log_r, s).sum().backward()
    assert torch.allclose(s.grad, torch.sigmoid(s) - log_r.exp() * torch.sigmoid(-s))  # type: ignore[arg-type]


@pytest.mark.parametrize("cycle_weight", [0.0, 0.1, 3.0])
def test_ratio_objective_learns_log_r(cycle_weight: float):
    exact = FreeRatio(LOG_R)
    objective = RatioObjective(Enumerated(), exact, exact, domains(), cycle_weight=cycle_weight)
    assert torch.allclose(optimum(objective), LOG_R, atol=1e-6, rtol=0)


def test_guidance_loss_needs_no_noisy_classifier():
    """E_p[r(x) | z] = r(z): the clean ratio on source data is all that the guidance loss reads."""
    wrong = FreeRatio(torch.linspace(-3, 3, 9).double())
    clean = FreeRatio(torch.where((STATES != 2).all(-1), LOG_R, torch.nan))  # never asked of a noisy state
    objective = RatioObjective(Enumerated(), clean, wrong, domains(), cycle_weight=0.0)
    assert torch.allclose(optimum(objective), LOG_R, atol=1e-6, rtol=0)


def test_cycle_loss_is_minimal_at_the_noisy_classifier():
    """The cycle loss alone, which is the difference that cycle_weight makes, pulls to log r(z)."""
    flat = FreeRatio(torch.zeros(9).double())
    for noisy in (LOG_R, torch.linspace(-2, 2, 9).double()):
        goals = [RatioObjective(Enumerated(), flat, FreeRatio(noisy), domains(), cycle_weight=w) for w in (1.0, 0.0)]
        table = FreeRatio()

        def cycle(goals=goals, table=table) -> Tensor:
            return goals[0].loss(table, domains(), None) - goals[1].loss(table, domains(), None)

        minimise(table, cycle)
        assert torch.allclose(table.values.detach(), noisy, atol=1e-6, rtol=0)


def test_frozen_classifiers_get_no_gradient():
    clean, noisy, table = FreeRatio(LOG_R), FreeRatio(LOG_R), FreeRatio()
    RatioObjective(Enumerated(), clean, noisy, domains()).loss(table, domains(), None).backward()
    assert table.values.grad is not None
    assert clean.values.grad is None
    assert noisy.values.grad is None


def test_one_extreme_source_row_does_not_rule_the_batch():
    """log r(x) of source data is capped before it is exponentiated."""
    extreme = FreeRatio(torch.full((9,), 300.0).double())
    loss = RatioObjective(Enumerated(), extreme, FreeRatio(), domains()).loss(FreeRatio(), domains(), None)
    assert bool(loss.isfinite())


def test_denoiser_objective_is_minimal_at_the_exact_conditionals():
    """And its minimum is the entropy per token: for masked noise the bound is tight."""
    model = FreeDenoiser()
    x = rows(P)
    least = minimise(model, lambda: DenoiserObjective(model, x).loss(model, {"data": x}, None))
    p = torch.tensor(P).double() / 10
    assert least == pytest.approx(float(-(p * p.log()).sum()) / 2, abs=1e-9)
    learned = model(STATES).log_probs.exp().detach()
    assert torch.allclose(learned[8, :, 0], torch.tensor([0.7, 0.6]).double(), atol=1e-6)  # nothing visible
    assert float(learned[STATES.tolist().index([1, 2]), 1, 0]) == pytest.approx(2 / 3, abs=1e-6)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_label_smoothing_out_of_range(smoothing: float):
    with pytest.raises(ValueError, match="label_smoothing"):
        ClassifierObjective(Enumerated(), domains(), smoothing=smoothing)
