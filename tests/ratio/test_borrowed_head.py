"""A local ratio that works through the source's head, without an embedding of its own."""

import pytest
import torch
from test_local import IDS, everywhere, models, states
from torch import nn

from gtl.denoiser import NetworkDenoiser
from gtl.guidance import Guided
from gtl.nn.dit import DiT
from gtl.nn.local import LocalDiT
from gtl.process import Masked
from gtl.ratio.local import LocalRatio
from gtl.train.checkpoint import load_ratio, save_model


def borrowing(depth: int = 1, timed: bool = False, trained: bool = True) -> tuple[NetworkDenoiser, LocalRatio]:
    denoiser, _ = models(timed=timed)
    torch.manual_seed(1)
    ratio = LocalRatio.build(denoiser, head="source", width=8, depth=depth, heads=2)
    if trained:
        for p in ratio.parameters():
            nn.init.normal_(p, std=0.5)
    return denoiser, ratio.eval().requires_grad_(False)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_borrowed_head_moves_words_by_their_embeddings(depth):
    """g = E u + b with u of the source's width, for the whole table and at some positions."""
    denoiser, ratio = borrowing(depth)
    z = states()
    context = denoiser(z)
    table = ratio.table(z, everywhere(z), None, context)
    network, head = ratio.network, denoiser.network.head.weight
    mixed = sum(
        w * nn.functional.layer_norm(h, (16,)) for w, h in zip(network.mix.softmax(0), context.hidden, strict=True)
    )
    u = network.dit(z, None, network.project(mixed))
    torch.testing.assert_close(table, u @ head.T + network.bias)
    places = torch.tensor([[3, 0, -1]]).expand(len(z), -1)
    some = ratio.table(z, places, None, denoiser(z, None, places))
    torch.testing.assert_close(some[:, :2], table[:, [3, 0]])


def test_it_has_no_embedding_and_no_head():
    denoiser, ratio = borrowing()
    names = dict(ratio.named_parameters())
    assert names["network.dit.embedding.weight"].numel() == 0
    assert names["network.dit.head.weight"].shape == (16, 8)
    assert names["network.bias"].shape == (IDS,)
    assert not any(p is q for p in ratio.parameters() for q in denoiser.parameters())


@pytest.mark.parametrize("timed", [False, True])
def test_a_fresh_borrower_changes_nothing_and_learns(timed):
    denoiser, ratio = borrowing(timed=timed, trained=False)
    denoiser.requires_grad_(True)
    ratio.requires_grad_(True)
    z, t = states(), torch.full((7,), 0.5)
    guided = Guided(denoiser, ratio, 1.0)
    made = guided(z, t)
    torch.testing.assert_close(made.log_probs, denoiser(z, t).log_probs)
    assert made.readout is denoiser.network.head.weight
    (-ratio.table(z, everywhere(z), t, denoiser(z, t)).log_softmax(-1)[..., 1].mean()).backward()
    assert ratio.network.dit.head.weight.grad.abs().sum() > 0
    assert denoiser.network.head.weight.grad is None or not denoiser.network.head.weight.grad.any()


def test_another_head_is_refused():
    denoiser, ratio = borrowing()
    z = states()
    context = denoiser(z)
    for readout, says in ((None, "got none"), (torch.zeros(IDS, 4), r"shape \(5, 4\)")):
        with pytest.raises(ValueError, match=says):
            ratio.table(z, everywhere(z), None, context._replace(readout=readout))
    with pytest.raises(ValueError, match="needs features"):
        LocalRatio.build(denoiser, False, "source", width=8, depth=1, heads=2)
    with pytest.raises(ValueError, match="borrowed=5"):
        LocalDiT(DiT(IDS, IDS, 8, 1, 2), 4, 16, 5)


def test_who_borrows_by_itself():
    """Where there are more tokens than the source is wide."""
    for ids, borrowed in ((16, 0), (17, 17)):
        denoiser = NetworkDenoiser(Masked(ids), DiT(ids, ids, width=16, depth=1, heads=2))
        assert LocalRatio.build(denoiser, width=8, depth=1, heads=2).network.borrowed == borrowed
        assert LocalRatio.build(denoiser, False, width=8, depth=1, heads=2).network.borrowed == 0


def test_a_borrower_is_saved(tmp_path):
    denoiser, ratio = borrowing()
    save_model(tmp_path, ratio)
    z = states()
    again = load_ratio(tmp_path)
    torch.testing.assert_close(
        again.table(z, everywhere(z), None, denoiser(z)), ratio.table(z, everywhere(z), None, denoiser(z))
    )
