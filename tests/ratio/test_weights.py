"""The weights of a sum of ratios: convex, never worse than a member, and no member for nothing."""

import pytest
import torch

from gtl.ratio.weights import Evidence, best_weights, join, log_likelihood, select_weights


def evidence(places: int, members: int, seed: int, signal: list[float], spread: float = 0.7) -> Evidence:
    """Places where member i says signal[i] times the truth's log-ratio, plus noise of its own."""
    generator = torch.Generator().manual_seed(seed)
    log_p = torch.randn(places, 5, generator=generator).double().log_softmax(-1)
    truth = torch.randn(places, 5, generator=generator).double()
    noise = spread * torch.randn(places, 5, members, generator=generator).double()
    log_r = truth.unsqueeze(-1) * torch.tensor(signal).double() + noise
    token = torch.multinomial((log_p + truth).softmax(-1), 1, generator=generator).squeeze(-1)
    return Evidence(log_p, log_r, token, torch.arange(places) // 8)


@pytest.mark.parametrize("total", [None, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_beats_every_other_point(seed: int, total: float | None) -> None:
    seen = evidence(400, 3, seed, [1.0, 0.5, 0.0])
    found = best_weights(seen, total=total)
    best = float(log_likelihood(seen, found).mean())
    assert min(found) >= 0
    if total:
        assert sum(found) == pytest.approx(total, abs=1e-6)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(200):
        other = torch.rand(3, generator=generator).double() * 1.5
        other = other / other.sum() if total else other
        assert float(log_likelihood(seen, other.tolist()).mean()) <= best + 1e-6
    for member in range(3):
        assert float(log_likelihood(seen, [float(i == member) for i in range(3)]).mean()) <= best + 1e-12


def test_members_left_out_get_nothing() -> None:
    found = best_weights(evidence(200, 3, 0, [1.0, 1.0, 1.0]), members=[0, 2])
    assert found[1] == 0
    assert found[0] > 0 < found[2]


def test_a_useless_member_is_left_out_and_a_useful_one_taken() -> None:
    useless, useful = evidence(4000, 2, 1, [1.0, 0.0], 0.05), evidence(4000, 2, 1, [1.0, 1.0])
    assert select_weights(useless) == [1.0, 0.0]
    both = select_weights(useful)
    assert min(both) > 0.3
    assert sum(both) == pytest.approx(1, abs=1e-6)
    for seen in (useless, useful):
        chosen = float(log_likelihood(seen, select_weights(seen)).mean())
        for member in range(2):
            assert chosen >= float(log_likelihood(seen, [float(i == member) for i in range(2)]).mean()) - 1e-12


def test_errors_are_over_sequences_not_tokens() -> None:
    """The same tokens as one sequence a token, and as two sequences: what is sure for many is not for two."""
    seen = evidence(300, 2, 3, [1.0, 0.35])
    many, few = seen._replace(row=torch.arange(300)), seen._replace(row=torch.arange(300) % 2)
    assert sum(w > 0 for w in select_weights(few)) <= sum(w > 0 for w in select_weights(many))
    assert (
        select_weights(seen._replace(row=torch.zeros(300, dtype=torch.long)))[0] == 1.0
    )  # one sequence proves nothing


def test_joining_keeps_sequences_apart() -> None:
    parts = [evidence(16, 2, seed, [1.0, 1.0]) for seed in range(2)]
    both = join(parts)
    assert both.row.tolist() == [0] * 8 + [1] * 8 + [2] * 8 + [3] * 8
    assert torch.equal(both.token, torch.cat([part.token for part in parts]))
