"""Uniform and D3PM noise: kernels, posteriors, corruption, and what they are special cases of."""

import pytest
import scipy.stats
import torch
import torch.nn.functional as F

from gtl.process import D3PM, Masked, Uniform, make_process
from gtl.process.d3pm import named_matrix
from gtl.schedule import Cosine
from known import PROCESSES

MIXING = [name for name in PROCESSES if not name.startswith("masked")]
every_process = pytest.mark.parametrize("name", MIXING)
S, T = torch.tensor([0.2, 0.5, 0.0]), torch.tensor([0.6, 0.7, 0.3])


def kernel(process, s: float, t: float) -> torch.Tensor:
    """p(z_t = j | z_s = i): (K, K)."""
    z = torch.arange(process.num_ids).unsqueeze(0)
    return process.likelihood(z, torch.tensor([s]).double(), torch.tensor([t]).double())[0].T


@every_process
def test_kernels_are_a_semigroup(name):
    process = PROCESSES[name]()
    torch.testing.assert_close(kernel(process, 0.1, 0.4) @ kernel(process, 0.4, 0.8), kernel(process, 0.1, 0.8))
    torch.testing.assert_close(kernel(process, 0.3, 0.3), torch.eye(process.num_ids).double())
    torch.testing.assert_close(kernel(process, 0.1, 0.8).sum(1), torch.ones(process.num_ids).double())


@every_process
def test_the_slowest_mode_falls_with_alpha(name):
    """The second largest eigenvalue of p(z_t | x) is alpha(t), whatever Q is."""
    process = PROCESSES[name]()
    t = torch.tensor([0.37]).double()
    sizes = torch.linalg.eigvals(kernel(process, 0.0, 0.37)).abs().sort(descending=True).values
    if name != "cyclic":  # complex modes turn as they fall
        assert float(sizes[1]) == pytest.approx(float(process.alpha(t)), abs=1e-9)


@every_process
def test_the_posterior_by_hand(name):
    """sum_x p(x | z) p(z_s = v | x) p(z_t | z_s = v) / p(z_t | x), entry by entry."""
    process = PROCESSES[name]()
    size, s, t = process.num_ids, 0.25, 0.65
    generator = torch.Generator().manual_seed(0)
    z = torch.arange(size).unsqueeze(0)
    p_x = torch.rand(1, size, size, generator=generator, dtype=torch.float64)
    if process.mask_id is not None:
        p_x[..., process.mask_id] = 0
        p_x[0] = torch.where((z[0] == process.mask_id).unsqueeze(-1), p_x[0], F.one_hot(z[0], size))
    p_x = p_x / p_x.sum(-1, keepdim=True)
    first, second, whole = kernel(process, 0.0, s), kernel(process, s, t), kernel(process, 0.0, t)
    expected = torch.zeros(size, size).double()
    for token in range(size):
        for x in range(size):
            if p_x[0, token, x] > 0:
                expected[token] += p_x[0, token, x] * first[x] * second[:, token] / whole[x, token]
    found = process.posterior(z, p_x.log(), torch.tensor([t]), torch.tensor([s]))
    torch.testing.assert_close(found[0].exp(), expected, rtol=0, atol=1e-6)
    at_zero = process.posterior(z, p_x.log(), torch.tensor([t]), torch.tensor([0.0]))
    torch.testing.assert_close(at_zero.exp(), p_x, rtol=0, atol=1e-9)


@every_process
def test_corruption_follows_the_kernel(name):
    process = PROCESSES[name]()
    count = 40_000
    for x in range(process.vocabulary):
        rows = torch.full((count, 1), x)
        z = process.corrupt(rows, torch.full((count,), 0.5), torch.Generator().manual_seed(x))
        seen = torch.bincount(z.flatten(), minlength=process.num_ids).double()
        expected = kernel(process, 0.0, 0.5)[x] * count
        kept = expected > 0
        assert float(seen[~kept].sum()) == 0
        assert scipy.stats.chisquare(seen[kept], expected[kept]).pvalue > 1e-3


@every_process
def test_configs_come_back(name):
    process = PROCESSES[name]()
    again = make_process(process.config())
    assert again.config() == process.config()
    torch.testing.assert_close(kernel(again, 0.1, 0.6), kernel(process, 0.1, 0.6))


def test_uniform_is_a_d3pm():
    fast, slow = Uniform(5, Cosine()), D3PM(5, "uniform", Cosine())
    z = torch.randint(5, (3, 4), generator=torch.Generator().manual_seed(0))
    weight = torch.rand(3, 4, 5).double()
    torch.testing.assert_close(fast.likelihood(z, S, T), slow.likelihood(z, S, T))
    torch.testing.assert_close(fast.spread(weight, T), slow.spread(weight, T))
    torch.testing.assert_close(fast.gather(weight, T), slow.gather(weight, T))
    torch.testing.assert_close(fast.rates_into(z), slow.rates_into(z))
    torch.testing.assert_close(fast.rates_out(z), slow.rates_out(z))


def test_masked_is_a_d3pm():
    """Posterior and NELBO of the absorbing matrix are those of masked noise."""
    fast, slow = Masked(5), D3PM(5, "absorbing")
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(4, (3, 6), generator=generator)
    z = fast.corrupt(x, T, generator)
    log_x = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64)
    log_x[..., 4] = -torch.inf
    own = torch.full_like(log_x, -torch.inf).scatter(-1, z.unsqueeze(-1), 0.0)
    log_x = torch.where((z == 4).unsqueeze(-1), log_x.log_softmax(-1), own)
    torch.testing.assert_close(
        slow.posterior(z, log_x, T, S).exp(), fast.posterior(z, log_x, T, S).exp(), rtol=0, atol=1e-7
    )
    torch.testing.assert_close(
        slow.nelbo(x, z, T, log_x, False), fast.nelbo(x, z, T, log_x, False), rtol=1e-5, atol=1e-6
    )


def test_uniform_builds_no_matrix():
    """30,000 ids: a K x K matrix would be 7 GB."""
    process = Uniform(30_000)
    x = torch.randint(30_000, (2, 3))
    t, s = torch.tensor([0.5, 0.9]), torch.tensor([0.4, 0.8])
    z = process.corrupt(x, t)
    log_x = torch.randn(2, 3, 30_000).log_softmax(-1)
    assert process.posterior(z, log_x, t, s).exp().sum(-1).allclose(torch.ones(2, 3), atol=1e-4)
    assert bool(process.nelbo(x, z, t, log_x, False).isfinite().all())


@pytest.mark.parametrize("name", ["uniform", "absorbing", "gaussian:0.5", "gaussian:2", "banded:1", "banded:3"])
def test_named_matrices_are_stochastic(name):
    matrix = named_matrix(name, 6)
    torch.testing.assert_close(matrix.sum(1), torch.ones(6).double())
    assert bool((matrix >= 0).all())
    if ":" in name:
        torch.testing.assert_close(matrix, matrix.T)
    if name == "banded:1":
        assert float(matrix[0, 2]) == 0


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ("nonsense", "choose uniform"),
        ("gaussian", "expected gaussian:WIDTH"),
        ("gaussian:-1", "must be positive"),
        ("banded:0.5", "at least 1"),
        ([[1.0, 0.0], [0.0, 1.0]], "3 ids"),
        ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], "more than one stationary law"),
        ([[0.5, 0.4, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], "rows must sum to 1"),
    ],
)
def test_bad_matrices(matrix, message):
    with pytest.raises(ValueError, match=message):
        D3PM(3, matrix)


@every_process
def test_one_place_stands_for_all(name):
    """The NELBO is the mean over positions of what one place says."""
    process = PROCESSES[name]()
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(3, (3, 4), generator=generator)
    z = process.corrupt(x, T, generator)
    log_x = torch.randn(3, 4, process.num_ids, generator=generator, dtype=torch.float64)
    if process.mask_id is not None:
        log_x[..., process.mask_id] = -torch.inf
        own = torch.full_like(log_x, -torch.inf).scatter(-1, z.unsqueeze(-1), 0.0)
        log_x = torch.where((z == process.mask_id).unsqueeze(-1), log_x, own)
    log_x = log_x.log_softmax(-1)
    parts = [process.nelbo(x, z, T, log_x[:, at : at + 1], False, torch.full((3,), at)) for at in range(4)]
    torch.testing.assert_close(torch.stack(parts).mean(0), process.nelbo(x, z, T, log_x, False))
    places = process.some_place(z.repeat(500, 1), generator)
    assert torch.equal(places.unique(), torch.arange(4))
