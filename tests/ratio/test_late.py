"""Late injection: many candidates at once have the values that each has on its own, for one pass of the trunk."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_ratios import CLOSE, IDS, LENGTH, NOISE, ROWS, denoiser, every_noise, make, question
from torch import Tensor, nn

from gtl.exact import one_position_law
from gtl.guidance import Guided
from gtl.nn.dit import DiT
from gtl.nn.late import LateDiT
from gtl.process import Masked, Uniform
from gtl.ratio.late import LateRatio
from gtl.sample import Ancestral, OnePosition
from gtl.train.checkpoint import load_ratio, save_model

# A second implementation, for one candidate: an extra token of a sequence of L + 1, with an explicit attention mask.


def norm(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    centred = h - h.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + scale) + shift


def turn(x: Tensor, position: Tensor) -> Tensor:
    """x (T, heads, dim) at positions (T,), as complex numbers."""
    half = x.shape[-1] // 2
    angle = position[:, None, None].to(x) * 10_000.0 ** (-torch.arange(half).to(x) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def alone(ratio: LateRatio, z: Tensor, place: int, token: int, t: Tensor | None) -> float:
    """log r of one candidate at one place of one row z (L,)."""
    network, dit = ratio.network, ratio.network.dit
    mask_id = ratio.process.mask_id
    hole = IDS if mask_id is None else mask_id
    z = torch.cat([z[:place], torch.tensor([hole]), z[place + 1 :]])
    time = None if t is None else t.view(1)
    h = dit.trunk(z.unsqueeze(0), time)[0]
    value = float((h @ dit.head.weight[0] + dit.head.bias).sum())
    if token == mask_id:
        return value
    condition = None if dit.time is None else dit.time(time)[0]

    def modulation(module: nn.Module) -> Tensor:
        constant = module.constant
        return constant if condition is None else constant + (module.linear.weight @ condition).view_as(constant)

    width, heads = dit.width, dit.heads
    key, value_of = network.keys_values.weight.view(2, network.late, width, width)
    u = dit.embedding.weight[token] + network.project.weight @ h[place]
    position = torch.tensor([*range(LENGTH), place])
    sees = torch.zeros(LENGTH + 1, LENGTH + 1, dtype=torch.bool)
    sees[:, :LENGTH] = True
    for number, block in enumerate(network.blocks):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation(block.modulation)
        q = torch.cat([h, norm(u, shift_a, scale_a).unsqueeze(0)]) @ block.query.weight.T
        tokens = torch.cat([h, u.unsqueeze(0)])
        q, k, v = (x.view(LENGTH + 1, heads, -1) for x in (q, tokens @ key[number].T, tokens @ value_of[number].T))
        scores = torch.einsum("qhd,khd->hqk", turn(q, position), turn(k, position)) / (width // heads) ** 0.5
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).reshape(LENGTH + 1, width)[-1]
        u = u + block.out.weight @ attended * (1 + gate_a)
        first, _, second = block.mlp
        inner = nn.functional.gelu(first.weight @ norm(u, shift_m, scale_m) + first.bias, approximate="tanh")
        u = u + (second.weight @ inner + second.bias) * (1 + gate_m)
    return value + float(network.head.weight[0] @ norm(u, *modulation(network.norm)) + network.head.bias)


def one_by_one(ratio: LateRatio, z: Tensor, positions: Tensor, candidates: Tensor, t: Tensor | None) -> Tensor:
    values = torch.zeros(candidates.shape)
    for b, p, n in torch.cartesian_prod(*(torch.arange(size) for size in candidates.shape)).tolist():
        if positions[b, p] >= 0:
            time = None if t is None else t[b]
            values[b, p, n] = alone(ratio, z[b], int(positions[b, p]), int(candidates[b, p, n]), time)
    return values


def same_where_asked(actual: Tensor, expected: Tensor, positions: Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    torch.testing.assert_close(actual[positions >= 0], expected[positions >= 0], **CLOSE)


# candidates


@every_noise
@pytest.mark.parametrize(("timed", "blocks"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("places", [1, 2, 7])
def test_candidates_have_the_value_that_each_has_alone(noise, timed, blocks, places):
    """Masked and revealed positions, padding, positions asked for twice, contexts shared and of their own."""
    ratio = make(noise, timed, blocks)
    z, positions, candidates, t = question(places, places)
    expected = one_by_one(ratio, z, positions, candidates, t if timed else None)
    assert float(expected[positions >= 0].std(-1).mean()) > 0.3
    same_where_asked(ratio.log_ratio(z, positions, candidates, t), expected, positions)


@given(
    seed=st.integers(0, 1000),
    noise=st.sampled_from([*NOISE]),
    places=st.integers(1, 6),
    count=st.integers(1, 5),
    budget=st.integers(1, 120),
)
def test_any_question_in_any_chunks(seed, noise, places, count, budget):
    ratio = make(noise, timed=noise != "masked")
    ratio.max_tokens = budget
    z, positions, candidates, t = question(seed, places, count)
    copies = [x.clone() for x in (z, positions, candidates)]
    values = ratio.log_ratio(z, positions, candidates, t)
    assert all(torch.equal(*pair) for pair in zip((z, positions, candidates), copies, strict=True))
    same_where_asked(values, one_by_one(ratio, z, positions, candidates, t), positions)


@given(seed=st.integers(0, 1000), noise=st.sampled_from([*NOISE]), places=st.integers(1, 4), data=st.data())
def test_a_permutation_of_candidates_permutes_the_values(seed, noise, places, data):
    order = data.draw(st.permutations(range(5)))
    ratio = make(noise)
    z, positions, candidates, _ = question(seed, places, 5, padded=False)
    values = ratio.log_ratio(z, positions, candidates)
    torch.testing.assert_close(ratio.log_ratio(z, positions, candidates[..., order]), values[..., order], **CLOSE)


@every_noise
def test_candidates_do_not_see_each_other(noise):
    """Nor do the positions and the rows that are asked about together."""
    ratio = make(noise)
    z, positions, candidates, _ = question(3, 3, 5, padded=False)
    values = ratio.log_ratio(z, positions, candidates)
    other = (candidates + 1) % IDS
    other[2, 1, 3] = candidates[2, 1, 3]
    changed = ratio.log_ratio(z, positions, other)
    torch.testing.assert_close(changed[2, 1, 3], values[2, 1, 3], **CLOSE)
    assert float((changed - values).abs().amax()) > 0.1
    single = ratio.log_ratio(z[2:3], positions[2:3, 1:2], candidates[2:3, 1:2, 3:4])
    torch.testing.assert_close(single.squeeze(), values[2, 1, 3], **CLOSE)


@pytest.mark.parametrize("noise", ["masked", "absorbing"])
@pytest.mark.parametrize("places", [1, 4])
def test_the_mask_has_the_value_of_the_sequence(noise, places):
    """A(z with l <- mask), at masked and at revealed positions."""
    ratio = make(noise)
    mask_id = ratio.process.mask_id
    z, positions, candidates, _ = question(4, places, padded=False)
    candidates[..., 1] = mask_id
    values = ratio.log_ratio(z, positions, candidates)
    for p in range(places):
        changed = z.scatter(1, positions[:, p : p + 1], mask_id)
        torch.testing.assert_close(values[:, p, 1], ratio.log_value(changed), rtol=0, atol=2e-6)
    assert float((values[..., :1] - values[..., 1:2]).abs().max()) > 0.1


def test_the_hole_hides_the_token_that_stood_there():
    """What is asked about a position does not depend on its token, with masks or without."""
    for noise in NOISE:
        ratio = make(noise)
        z, positions, candidates, _ = question(5, 1)
        other = z.scatter(1, positions, (z.gather(1, positions) + 1) % IDS)
        torch.testing.assert_close(
            ratio.log_ratio(z, positions, candidates), ratio.log_ratio(other, positions, candidates), **CLOSE
        )
        elsewhere = (positions + 1) % LENGTH
        other = z.scatter(1, elsewhere, (z.gather(1, elsewhere) + 1) % IDS)
        gap = ratio.log_ratio(other, positions, candidates) - ratio.log_ratio(z, positions, candidates)
        assert float((gap - gap.mean(-1, keepdim=True)).abs().max()) > 0.05


@every_noise
def test_nothing_but_padding(noise):
    ratio = make(noise)
    z, positions, candidates, _ = question(6)
    values = ratio.log_ratio(z, torch.full_like(positions, -1), candidates)
    assert values.shape == candidates.shape
    assert values.dtype == torch.float32
    assert not values.any()


def test_the_table_is_log_ratio_of_every_token():
    for noise in NOISE:
        ratio = make(noise)
        z, positions, _, _ = question(7, 3, padded=False)
        table = ratio.table(z, positions)
        values = ratio.log_ratio(z, positions, torch.arange(IDS).expand(ROWS, 3, IDS))
        tokens = [v for v in range(IDS) if v != ratio.process.mask_id]
        torch.testing.assert_close(table[..., tokens], values[..., tokens], rtol=1e-6, atol=1e-6)


# samplers


@pytest.mark.parametrize(("gamma", "n_ratio"), [(1.0, None), (2.0, 3)])
def test_one_position_samples_follow_their_law(chi_square, generator, gamma, n_ratio):
    """The law is enumerated with all positions at once, what is drawn takes one position of a row at a time."""
    ratio, source = make(), denoiser(Masked(IDS, 2))
    law = one_position_law(Guided(source, ratio, gamma, n_ratio), 3)
    law = law / law.sum()  # a sum of float32 probabilities
    x = OnePosition(source, ratio, gamma=gamma, n_ratio=n_ratio)((5000, 3), generator=generator)
    assert chi_square(x, law, 2) > 1e-3
    unguided = one_position_law(source, 3)
    assert chi_square(x, unguided / unguided.sum(), 2) < 1e-6


def test_the_naive_kernel_weighs_the_mask_by_a():
    """p(z_s | z_t) r(z_s) / Z with the reference's values, the mask a candidate like any other."""
    ratio, source = make(), denoiser(Masked(IDS, 2))
    z, _, _, _ = question(10)
    sampler = Ancestral(source, ratio, gamma=1.0, stabilised=False)
    t, s = (torch.full((ROWS,), u, dtype=torch.float64) for u in (0.8, 0.5))
    log_p = source.process.posterior(z, source(z).log_probs, t, s)
    everywhere = torch.arange(LENGTH).expand_as(z)
    log_r = one_by_one(ratio, z, everywhere, torch.arange(IDS).expand(*z.shape, IDS), None)
    expected = torch.where((z == 2).unsqueeze(-1), (log_p + log_r).softmax(-1), log_p.exp())
    torch.testing.assert_close(sampler.kernel(z, 0.8, 0.5).exp(), expected, **CLOSE)


@pytest.mark.parametrize("noise", ["uniform", "absorbing"])
def test_the_posterior_is_guided_under_mixing_noise(noise):
    """p(z_s | z_t) r_s(z_s) / Z at every position, at the level after the step."""
    ratio = make(noise, timed=True)
    source = denoiser(ratio.process, timed=True)
    z, _, _, _ = question(11)
    t, s = (torch.full((ROWS,), u, dtype=torch.float64) for u in (0.8, 0.5))
    log_p = source.process.posterior(z, source(z, t).log_probs, t, s)
    everywhere = torch.arange(LENGTH).expand_as(z)
    log_r = one_by_one(ratio, z, everywhere, torch.arange(IDS).expand(*z.shape, IDS), s)
    kernel = Ancestral(source, ratio, gamma=1.0).kernel(z, 0.8, 0.5).exp()
    torch.testing.assert_close(kernel, (log_p + log_r).softmax(-1), **CLOSE)


# the network


def test_a_fresh_ratio_says_nothing():
    for process in NOISE.values():
        ratio = LateRatio.build(process(), width=8, depth=1, heads=2)
        z, positions, candidates, _ = question(12)
        assert not ratio.log_ratio(z, positions, candidates).any()
        assert not ratio.log_value(z).any()


def test_time_is_an_input_where_it_is_asked_for():
    ratio = make("uniform", timed=True)
    assert not ratio.timeless
    assert make("uniform").timeless
    z, positions, candidates, t = question(13)
    with pytest.raises(ValueError, match="conditioned on time"):
        ratio.log_ratio(z, positions, candidates)
    later = ratio.log_ratio(z, positions, candidates, t.where(torch.arange(ROWS) != 2, 0.9))
    moved = (later - ratio.log_ratio(z, positions, candidates, t)).abs().amax((-1, -2)) > 1e-4
    assert moved.tolist() == [row == 2 for row in range(ROWS)]


@every_noise
def test_gradients_reach_all_weights(noise):
    ratio = make(noise, timed=True, blocks=2).requires_grad_(True)
    z, positions, candidates, t = question(14, 1)
    (ratio.log_ratio(z, positions, candidates, t).square().sum() + ratio.log_value(z, t).sum()).backward()
    for name, p in ratio.named_parameters():
        assert p.grad is not None, name
        assert bool(p.grad.isfinite().all()), name
        assert bool(p.grad.any()), name


@every_noise
@pytest.mark.parametrize(("timed", "blocks"), [(False, 1), (True, 2)])
def test_checkpoint_round_trip(tmp_path: Path, noise, timed, blocks):
    ratio = make(noise, timed, blocks).float()
    ratio.gamma = 1.5
    save_model(tmp_path, ratio)
    loaded = load_ratio(tmp_path)
    assert isinstance(loaded, LateRatio)
    assert (loaded.gamma, loaded.timeless, loaded.network.late) == (1.5, not timed, blocks)
    assert loaded.config() == ratio.config()
    z, positions, candidates, t = question(15)
    assert torch.equal(loaded.log_ratio(z, positions, candidates, t), ratio.log_ratio(z, positions, candidates, t))


def test_what_is_refused():
    with pytest.raises(ValueError, match="late=0"):
        LateDiT(DiT(IDS, 1, width=8, heads=2), 0)
    with pytest.raises(ValueError, match="3 outputs"):
        LateDiT(DiT(IDS, 3, width=8, heads=2))
    with pytest.raises(ValueError, match="5 ids; with a hole the process has 6"):
        LateRatio(Uniform(IDS), LateDiT(DiT(IDS, 1, width=8, heads=2)))
    with pytest.raises(ValueError, match="6 ids; with a hole the process has 5"):
        LateRatio(Masked(IDS), LateDiT(DiT(IDS + 1, 1, width=8, heads=2)))
