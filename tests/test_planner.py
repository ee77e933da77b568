"""Orders, the planner, and planner sampling: exact whatever the order, every position once, prompts untouched."""

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from draws import LEAST_P_VALUE, SAMPLES, seeded
from gtl.denoiser import NetworkDenoiser
from gtl.evaluate.planner import level, planner_levels
from gtl.nn.dit import DiT
from gtl.planner import Planner, confidence, left_to_right, next_positions, planned, random_order
from gtl.process import Masked, Uniform
from gtl.ratio import LocalRatio, NetworkRatio
from gtl.sample import OnePosition, PlannerSampler
from gtl.speed import speed_up
from gtl.train.checkpoint import load_denoiser, load_planner, load_ratio, save_model
from gtl.train.loop import FitSettings, fit
from gtl.train.planner import PlannerObjective, corrupted, first_choice_is_right


def planner(process: Masked, constant: bool = False, seed: int = 0) -> Planner:
    torch.manual_seed(seed)
    made = Planner.build(process, width=8, depth=1, heads=2).eval()
    if not constant:
        torch.nn.init.normal_(made.network.head.weight, std=3.0)
    return made


def network_denoiser(process: Masked) -> NetworkDenoiser:
    torch.manual_seed(1)
    dit = DiT(process.num_ids, process.num_ids, 8, 1, 2)
    torch.nn.init.normal_(dit.head.weight, std=0.5)
    return NetworkDenoiser(process, dit).eval()


# the law


@pytest.mark.parametrize("order", ["uniform planner", "planner", "sampled planner", "confidence"])
@pytest.mark.parametrize("kind", ["markov", "table"])
def test_one_position_a_step_is_exact_in_any_order(make_pair, chi_square, kind, order):
    """A constant planner with temperature is the random order; a planner that looks at revealed tokens is exact too."""
    pair = make_pair(kind)
    orders = {
        "uniform planner": lambda: planned(planner(pair.process, constant=True), 1.0),
        "planner": lambda: planned(planner(pair.process)),
        "sampled planner": lambda: planned(planner(pair.process), 2.0),
        "confidence": lambda: confidence(pair.denoiser),
    }
    for ratio, law in ((pair.ratio, pair.q_x), (None, pair.p_x)):
        sampler = PlannerSampler(pair.denoiser, ratio, order=orders[order]())
        samples = sampler((SAMPLES, 3), generator=seeded())
        assert chi_square(samples, law, pair.process.mask_id) > LEAST_P_VALUE


def test_several_positions_a_step_are_drawn_on_their_own(make_pair, chi_square):
    """All at once is the product of the marginals, which is not the law itself."""
    pair = make_pair("table")
    samples = PlannerSampler(pair.denoiser, pair.ratio, per_step=3)((SAMPLES, 3), generator=seeded())
    law = pair.q_x.view(3, 3, 3)
    alone = [law.sum((1, 2)), law.sum((0, 2)), law.sum((0, 1))]
    product = torch.einsum("a,b,c->abc", *alone).flatten()
    assert chi_square(samples, product, pair.process.mask_id) > LEAST_P_VALUE
    assert chi_square(samples, pair.q_x, pair.process.mask_id) < LEAST_P_VALUE


def test_random_order_is_uniform_over_the_masks():
    masked = torch.tensor([[False, True, True, False, True]]).expand(30_000, -1)
    positions = next_positions(random_order, torch.zeros(masked.shape), masked, 1, seeded())
    counts = torch.bincount(positions.flatten(), minlength=5)
    assert counts[0] == counts[3] == 0
    assert scipy.stats.chisquare(counts[[1, 2, 4]].numpy()).pvalue > LEAST_P_VALUE


def test_left_to_right_takes_the_first_mask():
    masked = torch.tensor([[False, True, True], [True, False, True], [False, False, True]])
    assert next_positions(left_to_right, torch.zeros(3, 3), masked, 1, None).tolist() == [[1], [0], [2]]


def test_a_sampled_order_follows_the_softmax():
    """The first position is l with chance softmax(logit / T)."""
    process = Masked(4)
    made = planner(process)
    z = torch.tensor([[3, 1, 3, 3, 0]]).expand(SAMPLES, -1)
    masked = z == 3
    found = next_positions(planned(made, 1.5), z, masked, 1, seeded()).flatten()
    with torch.no_grad():
        chance = (made(z[:1])[0] / 1.5).masked_fill(~masked[0], -torch.inf).softmax(-1)
    counts = torch.bincount(found, minlength=5)
    assert counts[1] == counts[4] == 0
    expected = chance * SAMPLES
    kept = expected > 0
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    assert statistic < 20


def test_a_deterministic_order_is_the_argmax():
    process = Masked(4)
    made, z = planner(process), torch.tensor([[3, 1, 3, 3, 0], [3, 3, 3, 3, 3]])
    with torch.no_grad():
        best = made(z).masked_fill(z != 3, -torch.inf).argmax(-1, keepdim=True)
        assert torch.equal(next_positions(planned(made), z, z == 3, 1, None), best)
        two = next_positions(planned(made), z, z == 3, 2, None)
    assert torch.equal(two[:, :1], best)
    assert bool((z.gather(1, two) == 3).all())


def test_confidence_is_the_denoisers(make_pair):
    pair = make_pair("table")
    z = pair.z[:20]
    wanted = pair.denoiser(z).log_probs.amax(-1)
    assert torch.equal(confidence(pair.denoiser)(z, None), wanted)


# every position exactly once


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 4), st.integers(0, 10_000), st.booleans())
def test_every_position_is_revealed_once_and_prompts_stay(rows, length, per_step, seed, ordered):
    process = Masked(6)
    generator = seeded(seed)
    prompt = torch.randint(0, 5, (rows, length), generator=generator)
    frozen = torch.rand(rows, length, generator=generator) < 0.4
    order = planned(planner(process, seed=seed)) if ordered else random_order
    sampler = PlannerSampler(network_denoiser(process), order=order, per_step=per_step)
    samples, trace = sampler(prompt, frozen, generator, trace=True)
    assert bool((samples != process.mask_id).all())
    assert torch.equal(samples[frozen], prompt[frozen])
    states = torch.stack(trace.states)
    masked = states == process.mask_id
    assert not bool((~masked[:-1] & masked[1:]).any())  # never masked again
    assert bool((states[1:] == states[:-1])[~masked[:-1]].all())  # a revealed token never changes
    most = int((~frozen).sum(-1).max())
    assert len(states) - 1 == -(-most // per_step)
    left = masked.sum(-1)
    assert bool((left[:-1] - left[1:] == left[:-1].clamp(max=per_step)).all())


def test_all_candidates_are_no_pruning(make_pair):
    pair = make_pair("markov")
    every = PlannerSampler(pair.denoiser, pair.ratio, n_ratio=3, order=left_to_right)((500, 3), generator=seeded())
    assert torch.equal(
        every, PlannerSampler(pair.denoiser, pair.ratio, order=left_to_right)((500, 3), generator=seeded())
    )
    assert torch.equal(
        OnePosition(pair.denoiser, pair.ratio)((500, 3), generator=seeded()),
        PlannerSampler(pair.denoiser, pair.ratio)((500, 3), generator=seeded()),
    )


def test_rows_do_not_depend_on_their_batch():
    """Deterministic orders and one row at a time: a row's positions are those that it has in a batch."""
    process = Masked(6)
    order, z = planned(planner(process)), torch.randint(0, 6, (8, 9), generator=seeded(3))
    together = next_positions(order, z, z == 5, 1, None)
    alone = torch.cat([next_positions(order, row, row == 5, 1, None) for row in z.split(1)])
    some = (z == 5).any(-1)
    assert torch.equal(together[some], alone[some])


# the network and its training


def test_any_length():
    made = planner(Masked(6))
    assert made(torch.full((2, 4), 5)).shape == (2, 4)
    assert made(torch.full((3, 11), 5)).shape == (3, 11)


@pytest.mark.parametrize("kind", ["markov", "table"])
def test_labels_say_whether_the_first_choice_is_right(make_pair, kind):
    pair = make_pair(kind)
    z = pair.z[:40]
    x = pair.x[:1].expand(40, -1)
    best = pair.denoiser(z).log_probs.argmax(-1)
    assert torch.equal(first_choice_is_right(pair.denoiser, x, z), best == x)


def test_a_networks_first_choice_is_that_of_its_whole_prediction():
    process = Masked(6, 2)
    model = network_denoiser(process)
    z = torch.randint(0, 6, (30, 7), generator=seeded(4))
    with torch.no_grad():
        assert torch.equal(model.best(z), model(z).log_probs.argmax(-1))
        assert torch.equal(model.best(z[:0]), z[:0])


def test_it_learns_where_the_denoiser_is_right(make_pair):
    """Trained on draws of the chain, its chances come close to the exact ones, at every noise level."""
    pair = make_pair("markov")
    rows = torch.multinomial(pair.p_x, 3000, replacement=True, generator=seeded(5))
    x = pair.x[rows]
    torch.manual_seed(0)
    made = Planner.build(pair.process, width=16, depth=1, heads=2)
    settings = FitSettings(steps=250, batch_size=128, learning_rate=5e-3, evaluate_every=50)
    result = fit(made, PlannerObjective(pair.denoiser, made, x[:2500], x[2500:]), settings)
    z = pair.z[(pair.z == pair.process.mask_id).any(-1)]
    with torch.no_grad():
        chance = torch.sigmoid(made(z))
    exact = pair.denoiser(z).log_probs.exp().amax(-1)  # the chance that the likeliest token is the true one
    masked = z == pair.process.mask_id
    assert float((chance - exact)[masked].abs().mean()) < 0.05
    assert result.held_out is not None
    levels = planner_levels(pair.denoiser, made, x[2500:], 2000, seeded(6))
    assert len(levels) == 11
    whole, parts = levels[0], levels[1:]
    assert whole.places == sum(level.places for level in parts)
    assert whole.accuracy >= max(whole.right, 1 - whole.right) - 0.02
    assert whole.calibration_error < 0.06
    assert parts[0].right > parts[-1].right  # less noise, more is known


def test_the_loss_is_of_masked_positions(make_pair):
    """By hand: the mean over masked positions of the logistic loss, revealed ones left out."""
    pair = make_pair("table")
    x = pair.x[:12]
    made = planner(pair.process)
    objective = PlannerObjective(pair.denoiser, made, x)
    with torch.no_grad():
        found = objective.loss(made, {"data": x}, seeded(8))
        z, _ = corrupted(pair.process, x, seeded(8))
        losses = []
        for row in range(12):
            for place in range(3):
                if z[row, place] == pair.process.mask_id:
                    right = pair.denoiser(z[row : row + 1]).log_probs[0, place].argmax() == x[row, place]
                    s = made(z[row : row + 1])[0, place]
                    losses.append(torch.nn.functional.softplus(-s if right else s))
    assert 0 < len(losses) < 36
    torch.testing.assert_close(found, torch.stack(losses).mean())


def test_a_level_by_hand():
    """Chances .15, .15, .95, .95 of which one of each pair is right: gaps .35 and .45, so .4 in all."""
    found = level(0.0, 0.1, np.array([0.15, 0.15, 0.95, 0.95]), np.array([1.0, 0.0, 1.0, 0.0]))
    assert found.calibration_error == pytest.approx(0.4)
    assert (found.accuracy, found.right, found.places) == (0.5, 0.5, 4)
    assert found.predicted == pytest.approx(0.55)


def test_what_does_not_fit_is_refused(make_pair):
    with pytest.raises(ValueError, match="noise has none"):
        Planner.build(Uniform(5), width=8, depth=1, heads=2)
    with pytest.raises(ValueError, match="scalar head"):
        Planner(Masked(6), DiT(6, 6, 8, 1, 2))
    with pytest.raises(ValueError, match="the process has 6"):
        Planner(Masked(6), DiT(7, 1, 8, 1, 2))
    with pytest.raises(ValueError, match="without a time input"):
        Planner(Masked(6), DiT(6, 1, 8, 1, 2, time_conditioned=True))
    with pytest.raises(ValueError, match="knows 6 ids"):
        planner(Masked(6)).check(make_pair("markov").denoiser)
    with pytest.raises(ValueError, match="per_step=0"):
        PlannerSampler(network_denoiser(Masked(6)), per_step=0)
    for temperature in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature"):
            planned(planner(Masked(6)), temperature)


def test_a_checkpoint(tmp_path):
    made = planner(Masked(6, 2))
    save_model(tmp_path, made)
    again = load_planner(tmp_path)
    z = torch.randint(0, 6, (3, 5), generator=seeded())
    with torch.no_grad():
        assert torch.equal(again(z), made(z))
    with pytest.raises(ValueError, match="holds a planner"):
        load_denoiser(tmp_path)
    with pytest.raises(ValueError, match="holds a planner"):
        load_ratio(tmp_path)
    save_model(tmp_path / "other", network_denoiser(Masked(6)))
    with pytest.raises(ValueError, match="holds no planner"):
        load_planner(tmp_path / "other")


@pytest.mark.gpu
@pytest.mark.parametrize("guided", ["no", "local", "sequence"])
def test_no_step_waits_for_the_device(guided):
    process = Masked(6)
    denoiser = network_denoiser(process).cuda()
    ratio = None
    if guided == "local":
        ratio = LocalRatio.build(denoiser, width=16, depth=1, heads=2).eval().cuda()
    elif guided == "sequence":
        ratio = NetworkRatio.build(process, width=16, depth=1, heads=2).eval().cuda()
    for model in (denoiser, ratio):
        if model is not None:
            speed_up(model, "bf16", compile=False)
    made = planner(process).cuda()
    sampler = PlannerSampler(denoiser, ratio, n_ratio=3, order=planned(made, 1.0))
    generator = torch.Generator("cuda").manual_seed(0)
    z = torch.full((4, 9), process.mask_id, device="cuda")
    sampler.begin()
    with torch.no_grad():
        sampler.step(z, 1.0, 0.9, generator)  # kernels are compiled, weights packed
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                z = sampler.step(z, 1.0, 0.9, generator)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert int((z != process.mask_id).sum()) == 12
