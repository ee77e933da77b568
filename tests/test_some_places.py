"""Some positions of a row stand for all of them."""

import pytest
import torch
from torch import Tensor

from gtl.process import Masked, Process, Uniform


@pytest.mark.parametrize("process", [Masked(6), Uniform(5)])
def test_some_places_come_in_turns(process: Process) -> None:
    """Every position that counts equally often, and none twice before all have come."""
    generator = torch.Generator().manual_seed(0)
    z = torch.tensor([[5, 0, 5, 5], [0, 1, 2, 5]]).clamp(max=process.num_ids - 1).repeat(4000, 1)
    places = process.some_places(z, 6, generator).view(4000, 2, 6)
    counts = torch.stack([torch.bincount(places[:, row].flatten(), minlength=4) for row in range(2)])
    if process.mask_id is None:
        assert bool(((counts / 24_000 - 0.25).abs() < 0.01).all())
        assert bool((places[..., :4].sort(-1).values == torch.arange(4)).all())
    else:
        assert bool(((counts[0, [0, 2, 3]] / 24_000 - 1 / 3).abs() < 0.01).all())
        assert counts[0, 1] == 0
        assert counts[1].tolist() == [0, 0, 0, 24_000]
        assert bool((places[:, 0, :3].sort(-1).values == torch.tensor([0, 2, 3])).all())


@pytest.mark.parametrize("process", [Masked(6), Uniform(5)])
@pytest.mark.parametrize("timeless", [True, False])
def test_several_places_stand_for_all(process: Process, timeless: bool) -> None:
    """All positions once is the NELBO itself; fewer have its mean."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 5, (4, 7), generator=generator)
    t = torch.tensor([0.3, 0.5, 0.7, 0.9], dtype=torch.float64)
    z = process.corrupt(x, t, generator)
    z[:, 0] = process.num_ids - 1
    log_x = torch.randn(4, 7, process.num_ids, generator=generator).double()
    log_x[..., process.num_ids - 1] = -9.0
    log_x = log_x.log_softmax(-1)
    whole = process.nelbo(x, z, t, log_x, timeless)

    def at(places: Tensor) -> Tensor:
        part = log_x.repeat(len(places) // 4, 1, 1).gather(1, places.unsqueeze(-1).expand(-1, -1, process.num_ids))
        x_, z_, t_ = x.repeat(len(places) // 4, 1), z.repeat(len(places) // 4, 1), t.repeat(len(places) // 4)
        return process.nelbo_at(x_, z_, t_, part, timeless, places)

    if process.mask_id is None:
        torch.testing.assert_close(at(process.some_places(z, 7, generator)), whole)
    found = at(process.some_places(z.repeat(4000, 1), 3, generator)).view(4000, 4)
    error = found.std(0) / 4000**0.5
    assert bool(((found.mean(0) - whole).abs() < 4 * error + 1e-9).all())
