"""What many tests share: pairs of laws that are known exactly, and a chi-square test against such a law."""

import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import scipy.stats
import torch
from hypothesis import settings
from torch import Tensor

from gtl.data.markov import make_matrix
from gtl.exact import ExactDenoiser, ExactRatio, Law, MarkovChain, Table
from gtl.process import Masked
from gtl.schedule import Schedule

# Derandomised, so that a failure in one run is a failure in every run.
settings.register_profile("gtl", deadline=None, max_examples=40, derandomize=True, database=None)
settings.load_profile("gtl")

# The tensors of tests are tiny: more threads would only wait for each other and for whatever else runs.
torch.set_num_threads(1)

# A shell starts what runs in the background deaf to Ctrl-C, which some tests send to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Pair:
    """A source law p and a target law q of one process, with their exact denoiser and ratio.

    p_x and q_x are the probabilities (V^L,) of all clean sequences, the last position changing fastest,
    computed here and not by the laws themselves.
    """

    process: Masked
    length: int
    p: Law
    q: Law
    p_x: Tensor
    q_x: Tensor

    @property
    def denoiser(self) -> ExactDenoiser:
        return ExactDenoiser(self.p)

    @property
    def target_denoiser(self) -> ExactDenoiser:
        return ExactDenoiser(self.q)

    @property
    def ratio(self) -> ExactRatio:
        return ExactRatio(self.p, self.q)

    @property
    def x(self) -> Tensor:
        """All clean sequences (V^L, L), in the order of p_x and q_x."""
        tokens = torch.tensor([v for v in range(self.process.num_ids) if v != self.process.mask_id])
        return torch.cartesian_prod(*[tokens] * self.length).view(-1, self.length)

    @property
    def z(self) -> Tensor:
        """All K^L states, masks included."""
        ids = torch.arange(self.process.num_ids)
        return torch.cartesian_prod(*[ids] * self.length).view(-1, self.length)


def joint_of_chain(initial: Tensor, transition: Tensor, length: int) -> Tensor:
    """p(x) = initial(x_1) prod_l T(x_l, x_{l+1}) as a tensor with `length` dimensions of size V."""
    joint = initial.double()
    for _ in range(length - 1):
        joint = joint.unsqueeze(-1) * transition.double()
    return joint


def random_rows(*shape: int, seed: int) -> Tensor:
    """Random positive probabilities that sum to one over the last dimension."""
    values = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 2 + 0.03
    return values / values.sum(-1, keepdim=True)


def build_pair(
    kind: str,
    vocabulary: int = 3,
    length: int = 3,
    mask_id: int | None = None,
    schedule: Schedule | None = None,
    seed: int = 0,
) -> Pair:
    """A pair by kind.

    markov: the paper's benchmark, diagonal 0.1 to diagonal 0.8, uniform start.
    chain: random transition matrices, not uniform at the start.
    sparse: as chain, and the target forbids some starts and some transitions.
    table: random laws without any structure.
    """
    process = Masked(vocabulary + 1, mask_id, schedule)
    if kind == "table":
        shape = (vocabulary,) * length
        p, q = (random_rows(vocabulary**length, seed=seed + i).view(shape) for i in (1, 2))
        return Pair(process, length, Table(p, process), Table(q, process), p.flatten(), q.flatten())
    if kind == "markov":
        matrices = [make_matrix(f"diagonal:{d}", vocabulary) for d in (0.1, 0.8)]
        starts = [torch.full((vocabulary,), 1 / vocabulary, dtype=torch.float64)] * 2
    else:
        matrices = [random_rows(vocabulary, vocabulary, seed=seed + i) for i in (1, 2)]
        starts = [random_rows(vocabulary, seed=seed + i) for i in (3, 4)]
    if kind == "sparse":
        matrices[1][0, 1] = matrices[1][2, 0] = starts[1][1] = 0
        matrices[1] /= matrices[1].sum(-1, keepdim=True)
        starts[1] /= starts[1].sum()
    laws = [MarkovChain(m, process, start) for m, start in zip(matrices, starts, strict=True)]
    joints = [joint_of_chain(start, m, length).flatten() for m, start in zip(matrices, starts, strict=True)]
    return Pair(process, length, *laws, *joints)


def chi_square_p_value(x: Tensor, law: Tensor, mask_id: int) -> float:
    """The p-value of samples x (N, L) against a law (V^L,); states expected under five times are pooled."""
    vocabulary = round(len(law) ** (1 / x.shape[1]))
    assert bool((x != mask_id).all()), "a mask was left in the samples"
    rank = x - (x > mask_id).long()
    weight = vocabulary ** torch.arange(x.shape[1] - 1, -1, -1)
    counts = torch.bincount((rank * weight).sum(-1), minlength=len(law)).double()
    expected = law.double() * len(x)
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    small = expected < 5
    counts, expected = (torch.cat([v[~small], v[small].sum().view(1)]) for v in (counts, expected))
    kept = expected > 0
    return float(scipy.stats.chisquare(counts[kept].numpy(), expected[kept].numpy()).pvalue)


@pytest.fixture
def make_pair() -> Callable[..., Pair]:
    return build_pair


@pytest.fixture
def chi_square() -> Callable[[Tensor, Tensor, int], float]:
    return chi_square_p_value


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
