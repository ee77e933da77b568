"""What pruned candidates leave out: ranks against the sets that `top_candidates` takes, and the mean by enumeration."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from gtl import denoiser as module
from gtl.denoiser import Denoiser, NetworkDenoiser
from gtl.evaluate.coverage import outside
from gtl.guidance import top_candidates
from gtl.nn.dit import DiT
from gtl.process import D3PM, Masked, Process, Uniform, stratified
from gtl.schedule import Cosine

IDS, LENGTH = 9, 5
COUNTS = (1, 2, 5, 7, 8)


def network(process: Process | None = None, banned: tuple[int, ...] = ()) -> NetworkDenoiser:
    """A small random network; a fresh one has zeros in its head and ignores the time, which would hide mistakes."""
    torch.manual_seed(0)
    net = DiT(IDS, IDS, width=16, depth=1, heads=2, time_conditioned=True)
    for weight in net.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return NetworkDenoiser(Masked(IDS, 3) if process is None else process, net, banned).eval()


class Wrapped(Denoiser):
    """A network that is not known to be one."""

    def __init__(self, inside: NetworkDenoiser) -> None:
        super().__init__()
        self.inside, self.process = inside, inside.process

    def forward(self, z: Tensor, t: Tensor | None = None, positions: Tensor | None = None) -> module.Prediction:
        return self.inside(z, t, positions)


def data(mask: int, count: int = 40) -> Tensor:
    x = torch.randint(IDS - 1, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return x + (x >= mask)


def brute_force(denoiser: Denoiser, x: Tensor, n: int, draws: int, batch: int, seed: int = 0) -> float:
    """By the candidates themselves, with the same draws."""
    generator, mask = torch.Generator().manual_seed(seed), denoiser.process.mask_id
    lost = total = 0
    for rows in x.repeat(draws, 1).split(batch):
        t = stratified(len(rows), x.device, generator)
        z = denoiser.process.corrupt(rows, t, generator)
        top = top_candidates(denoiser(z, t).log_probs, n, mask)
        inside = (top == rows.unsqueeze(-1)).any(-1)
        lost, total = lost + int((~inside & (z == mask)).sum()), total + int((z == mask).sum())
    return lost / total


PROCESSES = {
    "masked": lambda: Masked(IDS, 3),
    "cosine": lambda: Masked(IDS, 0, Cosine()),
    "absorbing": lambda: D3PM(IDS, "absorbing"),
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("process", PROCESSES)
def test_against_brute_force(process: str, wrapped: bool):
    """Every n in one pass, whatever fits at once."""
    denoiser = network(PROCESSES[process]())
    x = data(denoiser.process.mask_id)
    model = Wrapped(denoiser) if wrapped else denoiser
    found = outside(model, x, COUNTS, draws=3, generator=torch.Generator().manual_seed(0), batch=17)
    assert found == {n: pytest.approx(brute_force(denoiser, x, n, 3, 17)) for n in COUNTS}
    values = list(found.values())
    assert values == sorted(values, reverse=True)
    assert values[0] > values[2] > 0
    assert found[IDS - 1] == 0


def test_positions_in_parts(monkeypatch: pytest.MonkeyPatch):
    """The head runs so many positions at a time, masked ones alone; tokens may be of an unsigned type."""
    denoiser, x = network(), data(3)
    whole = outside(denoiser, x, COUNTS, 2, torch.Generator().manual_seed(0))
    sizes = []
    logits = NetworkDenoiser.logits

    def counted(self: NetworkDenoiser, hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(NetworkDenoiser, "logits", counted)
    monkeypatch.setattr(NetworkDenoiser, "at_once", lambda self, z: 7)
    assert outside(denoiser, x.to(torch.uint16), COUNTS, 2, torch.Generator().manual_seed(0)) == whole
    assert max(sizes) == 7
    assert sum(sizes) < 0.7 * 2 * x.numel()


def test_banned_tokens():
    """A token that the source never says is outside of all but the whole vocabulary."""
    denoiser = network(banned=(5, 6))
    x = torch.full((30, LENGTH), 5)
    found = outside(denoiser, x, (1, 6, 8), 2, torch.Generator().manual_seed(0))
    assert found == {1: 1.0, 6: 1.0, 8: 0.0}


def test_the_mean_by_enumeration(make_pair):
    """t uniform and the log-linear schedule: a set of k masks has probability k! (L - k)! / (L + 1)!."""
    pair = make_pair("table", vocabulary=4, mask_id=1)
    x = pair.x[torch.multinomial(pair.q_x, 40, True, generator=torch.Generator().manual_seed(3))]
    length = pair.length
    lost, total = dict.fromkeys((1, 2, 3, 4), 0.0), 0.0
    for k in range(1, length + 1):
        probability = math.factorial(k) * math.factorial(length - k) / math.factorial(length + 1)
        for places in map(list, itertools.combinations(range(length), k)):
            z = x.clone()
            z[:, places] = 1
            log_p = pair.denoiser(z).log_probs[:, places]
            total += probability * k * len(x)
            for n in lost:
                missing = (top_candidates(log_p, n, 1) != x[:, places].unsqueeze(-1)).all(-1)
                lost[n] += probability * float(missing.sum())
    found = outside(pair.denoiser, x, [*lost], draws=300, generator=torch.Generator().manual_seed(0))
    assert found == {n: pytest.approx(value / total, abs=0.01) for n, value in lost.items()}
    assert found[2] > 0.1


def test_what_is_refused():
    x = data(3)
    with pytest.raises(ValueError, match="outside is defined for masked noise; this process is uniform"):
        outside(network(Uniform(IDS)), x, COUNTS)
    with pytest.raises(ValueError, match=r"n_ratio=9 exceeds the vocabulary \(8\)"):
        outside(network(), x, (1, 9))
    with pytest.raises(ValueError, match="n_ratio=0 must be at least 1"):
        outside(network(), x, (0, 1))
    with pytest.raises(ValueError, match="no position was masked"):
        outside(network(), x[:0], COUNTS)
