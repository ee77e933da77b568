"""The oracle against brute force, and Theorem 1 by enumeration of the whole reverse chain."""

import itertools

import pytest
import torch
from torch import Tensor

from gtl.exact import ExactDenoiser, MarkovChain, Table, ancestral_law, enumerate_states, one_position_law
from gtl.guidance import Guided
from gtl.process import Masked
from gtl.ratio import SequenceRatio
from gtl.sample import Ancestral

KINDS = ["markov", "chain", "sparse", "table"]


def total_variation(a: Tensor, b: Tensor) -> float:
    return 0.5 * float((a - b).abs().sum())


# the laws


@pytest.mark.parametrize("mask_id", [None, 0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_laws_by_brute_force(make_pair, kind, mask_id):
    """p(z) and p(x_l = v | z) of both laws at every z, by summing over all sequences that agree with z."""
    pair = make_pair(kind, mask_id=mask_id)
    for law, p_x in ((pair.p, pair.p_x), (pair.q, pair.q_x)):
        marginal, conditional = law.log_marginal(pair.z).exp(), law.log_conditional(pair.z).exp()
        for row, z in enumerate(pair.z):
            agrees = ((pair.x == z) | (z == pair.process.mask_id)).all(-1)
            p_z = p_x[agrees].sum()
            assert abs(marginal[row] - p_z) < 1e-12
            if p_z == 0:
                continue
            for at, v in itertools.product(range(pair.length), range(pair.process.num_ids)):
                joint = p_x[agrees & (pair.x[:, at] == v)].sum()
                assert abs(conditional[row, at, v] - joint / p_z) < 1e-10


@pytest.mark.parametrize("mask_id", [None, 0, 2])
@pytest.mark.parametrize("kind", ["markov", "chain", "sparse"])
def test_chain_is_its_table(make_pair, kind, mask_id):
    """Forward-backward against the table of the same chain, V = 4, at every state that can be reached."""
    pair = make_pair(kind, vocabulary=4, mask_id=mask_id)
    for chain, p_x in ((pair.p, pair.p_x), (pair.q, pair.q_x)):
        assert isinstance(chain, MarkovChain)
        table = Table(p_x.view(4, 4, 4), pair.process)
        expected = table.log_marginal(pair.z)
        torch.testing.assert_close(chain.log_marginal(pair.z), expected, rtol=0, atol=1e-10)
        z = pair.z[expected > -torch.inf]
        torch.testing.assert_close(chain.log_conditional(z), table.log_conditional(z), rtol=0, atol=1e-10)


def test_long_chains_do_not_underflow():
    """L = 2,000: p(x) itself is far below the smallest float64."""
    length, transition = 2000, torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64)
    chain = MarkovChain(transition, Masked(3), torch.tensor([0.3, 0.7], dtype=torch.float64))
    x = torch.randint(2, (1, length), generator=torch.Generator().manual_seed(0))
    expected = torch.tensor(0.3 if x[0, 0] == 0 else 0.7).log() + transition[x[0, :-1], x[0, 1:]].log().sum()
    assert float(chain.log_marginal(x)) == pytest.approx(float(expected), rel=1e-8)
    x[:, 500:1500] = 2
    middle = chain.log_conditional(x)[0, 1000].exp()
    stationary = torch.tensor([2 / 3, 1 / 3, 0], dtype=torch.float64)
    torch.testing.assert_close(middle, stationary, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_denoiser_is_a_denoiser(make_pair, kind):
    """Normalised at every state, even an impossible one; no mask; revealed tokens carry over."""
    pair = make_pair(kind, mask_id=1)
    log_probs = pair.target_denoiser(pair.z).log_probs
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(64, 3).double(), rtol=0, atol=1e-12)
    masked = pair.z == 1
    assert bool((log_probs[masked][:, 1] == -torch.inf).all())
    assert bool((log_probs[~masked].gather(-1, pair.z[~masked].unsqueeze(-1)) == 0).all())


def test_enumerate_states():
    """All of them, the last position changing fastest."""
    expected = torch.tensor(list(itertools.product(range(3), repeat=2)))
    assert torch.equal(enumerate_states(3, 2), expected)
    assert enumerate_states(4, 1).shape == (4, 1)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"\(3, 3\)"):
        MarkovChain(torch.full((2, 2), 0.5), Masked(4))
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        Table(torch.ones(2, 3), Masked(4))


# the martingale identity


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask_id", [None, 1])
def test_martingale_identity(make_pair, kind, mask_id):
    """sum_v p(x_l = v | z) r(z with l <- v) = r(z) for every z and every masked l."""
    pair = make_pair(kind, mask_id=mask_id)
    process, z = pair.process, pair.z
    p, r = pair.denoiser(z).log_probs.exp(), pair.ratio.log_value(z).exp()
    for at in range(pair.length):
        masked = z[:, at] == process.mask_id
        mean = torch.zeros(int(masked.sum()), dtype=torch.float64)
        for v in range(process.num_ids):
            if v != process.mask_id:
                changed = z[masked].clone()
                changed[:, at] = v
                mean += p[masked, at, v] * pair.ratio.log_value(changed).exp()
        torch.testing.assert_close(mean, r[masked], rtol=1e-9, atol=1e-9)


def test_ratio_of_everything_masked_is_one(make_pair):
    pair = make_pair("table")
    assert float(pair.ratio.log_value(torch.full((1, 3), 3))) == pytest.approx(0.0, abs=1e-12)


# Theorem 1: the law of what the samplers draw


@pytest.mark.parametrize("mask_id", [None, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_one_position_law_is_the_target(make_pair, kind, mask_id):
    """Exact source, exact ratio, gamma = 1: q. gamma = 0: p. No ratio: p."""
    pair = make_pair(kind, mask_id=mask_id)
    for gamma, expected in ((1.0, pair.q_x), (0.0, pair.p_x)):
        law = one_position_law(Guided(pair.denoiser, pair.ratio, gamma), pair.length)
        torch.testing.assert_close(law, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(one_position_law(pair.denoiser, pair.length), pair.p_x, rtol=0, atol=1e-12)


def test_one_position_law_of_a_longer_chain(make_pair):
    """V = 3, L = 6 on the paper's benchmark: 4,096 states."""
    pair = make_pair("markov", length=6)
    law = one_position_law(Guided(pair.denoiser, pair.ratio), 6)
    torch.testing.assert_close(law, pair.q_x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stabilised", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_ancestral_law_converges_to_the_target(make_pair, kind, stabilised):
    """The factorisation error is of order 1 / T: from T = 4 L on it falls by 1.6 or more when T doubles."""
    pair = make_pair(kind, mask_id=1)
    errors = []
    for steps in (12, 24, 48, 96, 192):
        sampler = Ancestral(pair.denoiser, pair.ratio, steps=steps, stabilised=stabilised)
        law = ancestral_law(sampler, pair.length)
        assert float(law.sum()) == pytest.approx(1.0, abs=1e-9)
        errors.append(total_variation(law, pair.q_x))
    assert all(before / after >= 1.6 for before, after in itertools.pairwise(errors))
    assert errors[-1] < 5e-3


def test_a_single_step_reveals_all_at_once(make_pair):
    """T = 1: the product of the target's marginals, by Theorem 1 at the all-masked state."""
    pair = make_pair("table")
    law = ancestral_law(Ancestral(pair.denoiser, pair.ratio, steps=1), 3)
    q = pair.q_x.view(3, 3, 3)
    first, second, third = q.sum((1, 2)), q.sum((0, 2)), q.sum((0, 1))
    product = torch.einsum("a,b,c->abc", first, second, third).flatten()
    torch.testing.assert_close(law, product, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stabilised", [True, False])
@pytest.mark.parametrize("kind", ["markov", "chain", "table"])
def test_ancestral_law_without_guidance(make_pair, kind, stabilised):
    """gamma = 0 is the unguided sampler; gamma = 1 is that of the target's own denoiser.

    The target must be positive: positions revealed at once may be impossible together under a sparse one, and
    what follows from an impossible state is a convention, not a theorem.
    """
    pair = make_pair(kind)
    for gamma, denoiser in ((0.0, pair.denoiser), (1.0, pair.target_denoiser)):
        guided = Ancestral(pair.denoiser, pair.ratio, gamma=gamma, steps=6, stabilised=stabilised)
        unguided = ancestral_law(Ancestral(denoiser, steps=6), pair.length)
        torch.testing.assert_close(ancestral_law(guided, pair.length), unguided, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["markov", "table"])
def test_stabilised_and_naive_kernels(make_pair, kind):
    """Identical for an exact ratio at gamma = 1 (the martingale identity); at gamma = 2 they are not."""
    pair = make_pair(kind, mask_id=1)

    def kernel(gamma: float, stabilised: bool) -> Tensor:
        sampler = Ancestral(pair.denoiser, pair.ratio, gamma=gamma, stabilised=stabilised)
        return sampler.kernel(pair.z, 0.8, 0.5).exp()

    torch.testing.assert_close(kernel(1.0, True), kernel(1.0, False), rtol=0, atol=1e-10)
    assert float((kernel(2.0, True) - kernel(2.0, False)).abs().max()) > 0.05
    target = Ancestral(pair.target_denoiser).kernel(pair.z, 0.8, 0.5).exp()
    torch.testing.assert_close(kernel(1.0, True), target, rtol=0, atol=1e-10)


@pytest.mark.parametrize("gamma", [1.0, 2.0])
@pytest.mark.parametrize("stabilised", [True, False])
def test_kernel_by_hand(make_pair, gamma, stabilised):
    """Log-linear noise, t = 0.8 to s = 0.5: p(stay) = 0.5 / 0.8; naive: the mask is weighed by r(z)^gamma."""
    pair = make_pair("table", mask_id=1)
    sampler = Ancestral(pair.denoiser, pair.ratio, gamma=gamma, stabilised=stabilised)
    z = torch.tensor([[1, 3, 1]])
    kernel = sampler.kernel(z, 0.8, 0.5).exp()[0]
    for at in (0, 2):
        changed = z.expand(4, -1).clone()
        changed[:, at] = torch.arange(4)  # 1 is the mask, that is z itself
        r = pair.ratio.log_value(changed).exp() ** gamma
        p = pair.denoiser(z).log_probs.exp()[0, at] * 0.375
        p[1] = 0.625
        q = p * r
        if stabilised:
            q[1] = 0
            q = q / q.sum() * 0.375
            q[1] = 0.625
        torch.testing.assert_close(kernel[at], q / q.sum(), rtol=0, atol=1e-10)
    torch.testing.assert_close(kernel[1], torch.tensor([0.0, 0.0, 0.0, 1.0]).double())


class JensenRatio(SequenceRatio):
    """The classical mistake: E[log r(x) | z] where log E[r(x) | z] should stand."""

    def __init__(self, pair) -> None:
        super().__init__()
        self.process, self.pair = pair.process, pair

    def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        agrees = ((self.pair.x == z.unsqueeze(1)) | (z.unsqueeze(1) == self.process.mask_id)).all(-1)
        weight = agrees * self.pair.p_x
        return (weight @ (self.pair.q_x / self.pair.p_x).log()) / weight.sum(-1)


@pytest.mark.parametrize("kind", ["markov", "table"])
def test_a_wrong_ratio_is_seen(make_pair, kind):
    """Controls: Jensen's mistake, the inverse ratio, gamma = 1.2 and a wrong denoiser are all far from q."""
    pair = make_pair(kind)
    wrong = [
        Guided(pair.denoiser, JensenRatio(pair)),
        Guided(pair.denoiser, -pair.ratio),
        Guided(pair.denoiser, pair.ratio, gamma=1.2),
        Guided(ExactDenoiser(pair.q), pair.ratio),
    ]
    for model in wrong:
        assert total_variation(one_position_law(model, pair.length), pair.q_x) > 0.01
    steps = Ancestral(pair.denoiser, JensenRatio(pair), steps=192)
    assert total_variation(ancestral_law(steps, pair.length), pair.q_x) > 0.01
