"""Screening by counts: the rows that it takes, and ratios that know of the rows that it left."""

import numpy as np
import pytest
import torch
from borrowed import tiny_problem

from gtl.data.tokens import folds
from gtl.estimate import METHODS, Training
from gtl.estimate.borrow import weigh
from gtl.estimate.screen import PRIORS, Screen, counts_of, log_odds, screen

P = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1])
Q = torch.tensor([0.1, 0.1, 0.1, 0.3, 0.4])


def draw(law: torch.Tensor, count: int, length: int, seed: int) -> torch.Tensor:
    return torch.multinomial(law.expand(count, -1), length, True, generator=torch.Generator().manual_seed(seed))


def mixed(length: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Source rows of which the first 400 are the target's, and 100 target rows."""
    source = torch.cat([draw(Q, 400, length, 0), draw(P, 7600, length, 1)])
    return source, draw(Q, 100, length, 2), torch.arange(len(source)) < 400


def test_counts_and_odds(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([[0, 1, 1], [4, 1, 0]])
    assert counts_of(x, 5).tolist() == [2, 3, 0, 0, 1]
    monkeypatch.setattr("gtl.estimate.screen.CHUNK", 3)
    assert counts_of(x.to(torch.uint16), 5).tolist() == [2, 3, 0, 0, 1]
    p, own = P.double(), torch.tensor([1.0, 0, 0, 0, 3], dtype=torch.float64)
    odds = log_odds(own, p, 0.5)  # k = 2
    assert torch.allclose(odds.exp() * p, (own + 2 * p) / 6)
    assert float((odds.exp() * p).sum()) == pytest.approx(1)


def test_it_takes_the_rows_that_look_like_the_target() -> None:
    source, target, alike = mixed()
    made = screen(source.to(torch.uint16), folds(target, 5, 0.1), 5, 500)
    assert made.taken.shape == (6, len(made.rows))
    assert (made.taken.sum(-1) == 500).all()
    assert made.taken.any(0).all()
    assert made.rows.dtype == torch.uint16  # a memory-mapped set is never widened as a whole
    known = {row.numpy().tobytes() for row in source[alike]}
    alike = torch.tensor([row.long().numpy().tobytes() in known for row in made.rows])
    assert all(int(alike[taken].sum()) > 0.9 * 400 for taken in made.taken)
    assert made.source.shape == (5, len(made.rows))
    assert made.target.shape == made.inside.shape == (100,)
    assert float(made.inside.double().mean()) > 0.8
    assert made.shares == (float(made.inside.double().mean()), 500 / 8000)


def test_target_rows_are_judged_by_the_other_folds() -> None:
    """One odd row: by its own fold's counts it would look like the target."""
    source, target, _ = mixed()
    odd = torch.full((1, 20), 2)
    target = torch.cat([target[:9], odd])
    parts = [(target[:5], target[5:]), (target[5:], target[:5])]
    made = screen(source, parts, 5, 500)
    own = counts_of(target[:5], 5)
    assert own[2] < 20  # the odd row is not among them
    assert float(made.target[4]) < float(made.target[:4].min())
    p = (counts_of(source, 5) + 1) / (counts_of(source, 5) + 1).sum()
    tables = [log_odds(counts_of(rows, 5), p, made.prior) for rows, _ in parts]
    said = [table[held].sum(-1) for table, (_, held) in zip(tables, parts, strict=True)]
    assert torch.allclose(made.target, torch.cat(said))


def test_tokens_that_the_source_never_has() -> None:
    source, target, _ = mixed()
    made = screen(source, folds(target + 1, 5, 0.1), 6, 500)  # 5 is new
    assert bool(made.source.isfinite().all())
    assert bool(made.target.isfinite().all())


def test_what_a_fold_holds_out_takes_no_part_in_what_it_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other held-out rows, the same S and the same s there; the other fold, which trains on them, has another."""
    monkeypatch.setattr("gtl.estimate.screen.PRIORS", (1.0,))
    source, target, _ = mixed()
    one, other, new = target[:6], target[6:12], draw(P, 6, 20, 3)
    first, second = (screen(source, [(one, held), (held, one)], 5, 500) for held in (other, new))

    def looked_at(made: Screen, fold: int) -> list[tuple[list[int], float]]:
        mine = made.taken[fold]
        return sorted(zip(made.rows[mine].tolist(), made.source[fold, mine].tolist(), strict=True))

    assert looked_at(first, 0) == looked_at(second, 0)
    assert looked_at(first, 1) != looked_at(second, 1)


def test_a_row_is_inside_by_its_own_fold() -> None:
    """One fold knows a single row, so that it says much more of what looks like that."""
    source, target, _ = mixed()
    parts = [(target[:1], target[1:]), (target[1:], target[:40])]
    made = screen(source, parts, 5, 300)
    least = [made.source[fold, made.taken[fold]].min() for fold in range(2)]
    by_fold = [(made.target >= each).tolist() for each in least]
    assert made.inside.tolist() == by_fold[0][:99] + by_fold[1][99:]
    assert by_fold[0][:99] != by_fold[1][:99]
    assert by_fold[0][99:] != by_fold[1][99:]


def test_held_out_rows_choose_the_prior() -> None:
    """None is needed where target rows agree and are many; all of it where one says nothing of the other."""
    source, _, _ = mixed()
    many, apart = draw(Q, 400, 20, 5), torch.tensor([[0], [1]]).expand(2, 20)
    for target, wanted in ((many, PRIORS[0]), (apart, PRIORS[-1])):
        assert screen(source[400:], folds(target, 2, 0.1), 5, 100).prior == wanted
    held = torch.tensor([[0], [1], [2], [4]]).expand(4, 20)  # one that agrees does not outvote three that do not
    assert screen(source[400:], [(apart[:1], held)], 5, 100).prior == PRIORS[-1]


def test_ratios_inside_know_of_what_is_outside() -> None:
    """E_p[r 1_S] = Q(S): calibrated ratios of screened rows, over all source rows, are the target's share in S."""
    source, _, _ = mixed()
    source, target = source[400:], draw(Q, 3000, 20, 7)
    parts = folds(target, 5, 0.1)
    made = screen(source, parts, 5, 1500)
    generator = torch.Generator().manual_seed(0)
    exact = (Q / P).log()
    held = torch.cat([rows for _, rows in parts])

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return exact[x.long()].sum(-1) + torch.randn(len(x), generator=generator)

    mine, theirs = made.combine(noisy(held), noisy(made.rows).expand(len(parts), -1))
    assert len(mine) == int(made.inside.sum())
    weighing = weigh(mine.numpy(), theirs[0][made.taken[0]].numpy(), made.shares)
    covered = np.isfinite(weighing.ratio)
    mass = weighing.ratio[covered].sum() / made.seen
    reached = made.shares[0] * float((mine <= theirs[0].max()).double().mean())
    assert mass == pytest.approx(reached, rel=0.1)


def test_both_opinions_tell_more_than_either() -> None:
    generator = torch.Generator().manual_seed(0)

    def two(count: int, at: float) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = at + torch.randn(2, count, generator=generator, dtype=torch.float64)
        return a, 100 * b  # in other units

    (a, b), (c, d) = two(400, 1.0), two(4000, 0.0)
    made = Screen(torch.zeros(4000, 1), torch.ones(2, 4000).bool(), d.unsqueeze(0), b, torch.ones(400).bool(), 4000)
    mine, theirs = made.combine(a, c.unsqueeze(0))

    def auc(x: torch.Tensor, y: torch.Tensor) -> float:
        return float((x.unsqueeze(-1) > y).double().mean())

    assert auc(mine, theirs[0]) > max(auc(a, c), auc(b, d)) + 0.05


def opinions() -> tuple[Screen, torch.Tensor, torch.Tensor]:
    """Of 200 target rows and 1,000 source rows, 900 of which are in S: counts, that are right, and a model, that is
    wrong: it likes the source's rows better."""
    generator = torch.Generator().manual_seed(0)
    own, theirs = torch.randn(2, 200, generator=generator), torch.randn(2, 2, 1000, generator=generator)
    taken = torch.ones(3, 1000).bool()
    taken[-1, 900:] = False
    made = Screen(torch.zeros(1000, 1), taken, theirs[1], own[1] + 2, torch.ones(200).bool(), 5000)
    return made, own[0] - 1, theirs[0]


def test_an_opinion_that_is_wrong_counts_the_other_way() -> None:
    made, model, theirs = opinions()
    mine, others = made.combine(model, theirs)
    assert float((mine.unsqueeze(-1) > others[0]).double().mean()) > 0.95
    assert float(torch.corrcoef(torch.stack([mine, model]))[0, 1]) < -0.1


def test_a_model_that_says_nothing_leaves_it_to_the_counts() -> None:
    made, model, theirs = opinions()
    mine, others = made.combine(torch.zeros_like(model), torch.zeros_like(theirs))
    assert float((mine.unsqueeze(-1) > others[0]).double().mean()) > 0.9
    assert bool(others.isfinite().all())


def test_opinions_have_no_unit() -> None:
    made, model, theirs = opinions()
    mine, others = made.combine(model, theirs)
    scaled = made.combine(1000 * model, 1000 * theirs)
    assert torch.allclose(scaled[0], mine, atol=1e-3)
    assert torch.allclose(scaled[1], others, atol=1e-3)


def test_opinions_are_weighed_inside_by_all_folds() -> None:
    """Of source rows that not all folds together take nothing is learned; of the others by the mean over folds."""
    made, model, theirs = opinions()
    mine, _ = made.combine(model, theirs)
    outside, turned = theirs.clone(), torch.stack([theirs[1], theirs[0]])
    outside[:, 900:] = 50
    other = Screen(made.rows, made.taken, made.source.flip(0), made.target, made.inside, made.seen)
    assert torch.equal(made.combine(model, outside)[0], mine)
    assert torch.allclose(other.combine(model, turned)[0], mine, atol=1e-5)
    changed = theirs.clone()
    changed[1, :450] += 3
    assert not torch.allclose(made.combine(model, changed)[0], mine, atol=1e-3)


def test_nothing_joins_where_no_target_row_is_inside() -> None:
    made = Screen(
        torch.zeros(3, 1), torch.ones(2, 3).bool(), torch.zeros(1, 3), torch.zeros(2), torch.zeros(2).bool(), 9
    )
    mine, theirs = made.combine(torch.zeros(2), torch.zeros(1, 3))
    assert not weigh(mine.numpy(), theirs[0].numpy(), made.shares).chance.any()


@pytest.mark.parametrize("method", ["finetuned-iw", "gtl-local-iw"])
def test_a_fit_borrows_from_all_rows(method: str) -> None:
    """More rows than models look at: target rows among them are found wherever they stand."""
    law, other = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.7])
    source = torch.cat([draw(law, 1000, 8, 0), draw(other, 40, 8, 1)])  # the last ones
    problem = tiny_problem(source, draw(other, 12, 8, 2), budget=400, weighed=60)
    notes: list[dict[str, object]] = []
    problem.log = notes.append
    made = METHODS[method](problem, method)
    (found,) = [note["borrowed"] for note in notes if "borrowed" in note]
    assert made.borrowed in (0, found)
    assert isinstance(found, int)
    assert 5 < found <= 60


def test_no_rows_to_look_at_are_refused() -> None:
    with pytest.raises(ValueError, match="weighed=0 must be at least 1"):
        Training(weighed=0)
