"""The denoiser's contract (masks, revealed tokens, banned ids, positions) and the likelihoods built on it."""

import math

import pytest
import torch

from gtl.denoiser import NetworkDenoiser, masked_nll, nelbo, nll
from gtl.exact import ExactDenoiser, Table
from gtl.guidance import Guided
from gtl.nn.dit import DiT
from gtl.process import D3PM, Masked, Uniform


class Timed(ExactDenoiser):
    """An exact denoiser that claims to depend on t, so that the weight 1 / (1 - alpha) is used."""

    timeless = False


def network_denoiser(mask_id: int | None = None, banned: tuple[int, ...] = (), timed: bool = False):
    """A small random network over six ids; a fresh head is zero, which would hide mistakes."""
    torch.manual_seed(0)
    network = DiT(6, 6, width=16, depth=1, heads=2, time_conditioned=timed)
    torch.nn.init.normal_(network.head.weight)
    return NetworkDenoiser(Masked(6, mask_id), network, banned).eval()


@pytest.mark.parametrize("mask_id", [None, 0, 2])
@pytest.mark.parametrize("banned", [(), (1, 4)])
def test_network_prediction(generator, mask_id, banned):
    """Normalised; a true -inf for the mask and banned ids; revealed tokens carry over."""
    denoiser = network_denoiser(mask_id, banned)
    mask_id = denoiser.process.mask_id
    z = torch.randint(6, (8, 7), generator=generator)
    prediction = denoiser(z)
    log_probs, masked = prediction.log_probs, z == mask_id
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(8, 7), rtol=0, atol=1e-5)
    assert bool((log_probs[masked][:, [mask_id, *banned]] == -torch.inf).all())
    allowed = [v for v in range(6) if v not in (mask_id, *banned)]
    assert bool(log_probs[masked][:, allowed].isfinite().all())
    own = torch.full((8, 7, 6), -torch.inf).scatter(-1, z.unsqueeze(-1), 0.0)
    assert torch.equal(log_probs[~masked], own[~masked])
    assert [h.shape for h in prediction.hidden] == [(8, 7, 16)] * len(prediction.hidden)


@pytest.mark.parametrize("kind", ["exact", "network", "guided", "guided top-2"])
def test_positions_pick_from_the_full_output(make_pair, generator, kind):
    """forward(z, positions)[b, p] = forward(z)[b, positions[b, p]]; -1 is padding."""
    pair = make_pair("table", vocabulary=5, mask_id=2)
    denoiser = {
        "exact": pair.denoiser,
        "network": network_denoiser(2),
        "guided": Guided(pair.denoiser, pair.ratio),
        "guided top-2": Guided(pair.denoiser, pair.ratio, n_ratio=2),
    }[kind]
    z = torch.randint(6, (20, 3), generator=generator)
    z[torch.rand(20, 3, generator=generator) < 0.6] = 2
    full = denoiser(z).log_probs
    for count in (1, 2, 4):
        positions = torch.randint(3, (20, count), generator=generator)
        if count > 1:
            positions[::3, -1] = -1
        part = denoiser(z, positions=positions).log_probs
        assert part.shape == (20, count, 6)
        row, column = (positions >= 0).nonzero(as_tuple=True)
        torch.testing.assert_close(part[row, column], full[row, positions[row, column]], rtol=1e-5, atol=1e-6)


def test_rows_do_not_see_each_other(generator):
    """A large batch, which a CPU runs in chunks, gives what single rows give, each at its own time."""
    denoiser = network_denoiser(timed=True)
    z, t = torch.randint(6, (300, 20), generator=generator), torch.rand(300, generator=generator)
    with torch.no_grad():
        together = denoiser(z, t).log_probs
        for row in (0, 101, 102, 203, 299):
            alone = denoiser(z[row : row + 1], t[row : row + 1]).log_probs[0]
            torch.testing.assert_close(together[row], alone, rtol=1e-4, atol=1e-5)


def test_time_conditioning():
    """A network with a time input is not timeless and says so when t is missing; a fresh one may ignore t."""
    denoiser = network_denoiser(timed=True)
    assert not denoiser.timeless
    assert network_denoiser().timeless
    with pytest.raises(ValueError, match="time"):
        denoiser(torch.full((1, 4), 5))


def test_network_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="7 ids"):
        NetworkDenoiser(Masked(6), DiT(7, 7, width=16, depth=1, heads=2))


@pytest.mark.parametrize("kind", [ExactDenoiser, Timed])
@pytest.mark.parametrize("mask_id", [None, 1])
def test_nelbo_draws_average_to_the_log_likelihood(make_pair, generator, kind, mask_id):
    """E nelbo(x) = -log p(x) for an exact denoiser, with either weight, within 4 standard errors."""
    pair = make_pair("table", mask_id=mask_id)
    for index in (0, 11, 26):
        draws = nelbo(kind(pair.p), pair.x[index].expand(40_000, -1), generator)
        error = float(draws.std()) / math.sqrt(len(draws))
        assert abs(float(draws.mean()) + math.log(pair.p_x[index])) < 4 * error


@pytest.mark.parametrize("batch", [77, 100_000])
def test_nll_is_the_log_likelihood_per_token(make_pair, generator, batch):
    """Every sequence once, many corruptions: the mean of -log p(x) / L, however it is batched."""
    pair = make_pair("table")
    expected = -float(pair.p_x.log().mean()) / pair.length
    assert nll(pair.denoiser, pair.x, 400, generator, batch) == pytest.approx(expected, rel=0.03)


def test_masked_nll(make_pair, generator):
    """E sum_masked -log p(x_l | z) / E |masked|; at uniform t, M has chance 1 / ((L + 1) C(L, |M|))."""
    pair = make_pair("table", mask_id=0)
    loss = count = 0.0
    for z in pair.z:
        masked = z == 0
        agrees = ((pair.x == z) | masked).all(-1)  # the sequences of which z is a masking
        if not bool(masked.any()):
            continue
        log_p = pair.denoiser(z.unsqueeze(0)).log_probs[0]
        weight = 1 / math.comb(3, int(masked.sum()))
        for x in pair.x[agrees]:
            loss -= weight * float(log_p[torch.arange(3), x][masked].sum())
        count += weight * float(masked.sum()) * float(agrees.sum())
    assert masked_nll(pair.denoiser, pair.x, 400, generator) == pytest.approx(loss / count, rel=0.03)


@pytest.mark.parametrize("process", [Uniform(5), D3PM(5, "gaussian:1"), D3PM(6, "absorbing")], ids=lambda p: p.name)
def test_an_untrained_network_knows_the_noise(process):
    """It is the exact denoiser of uniform sequences, for p(z | x) is built in; near t = 0 it repeats z."""
    torch.manual_seed(0)
    network = DiT(process.num_ids, process.num_ids, width=16, depth=1, heads=2, time_conditioned=True)
    denoiser = NetworkDenoiser(process, network).eval()
    x = torch.randint(5, (400, 2), generator=torch.Generator().manual_seed(0))
    exact = ExactDenoiser(Table(torch.ones(5, 5), process))
    values = [nll(model, x, generator=torch.Generator().manual_seed(1)) for model in (denoiser, exact)]
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert values[0] == pytest.approx(math.log(5), rel=0.1)
    close = denoiser(x[:8], torch.full((8,), 1e-7)).log_probs.exp()
    torch.testing.assert_close(close.gather(-1, x[:8].unsqueeze(-1)), torch.ones(8, 2, 1))
    with pytest.raises(ValueError, match="pass t"):
        denoiser(x[:8])
