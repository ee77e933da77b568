"""Masked noise (absorbing state m): p(z_t | x) = alpha_t x + (1 - alpha_t) m, and for z_t = m

p(z_s = m | z_t) = (1 - alpha_s) / (1 - alpha_t),
p(z_s = v | z_t) = (alpha_s - alpha_t) / (1 - alpha_t) p(x = v | z_t);      a revealed token never changes.
"""

from typing import Any

import torch
from torch import Tensor

from gtl.categorical import bernoulli, random_true
from gtl.process.base import Process
from gtl.schedule import Schedule

__all__ = ["Masked"]


class Masked(Process):
    """Absorbing-state diffusion: a token is kept with probability alpha_t and becomes the mask otherwise."""

    name = "masked"

    def __init__(self, num_ids: int, mask_id: int | None = None, schedule: Schedule | None = None) -> None:
        super().__init__(num_ids, schedule)
        mask_id = num_ids - 1 if mask_id is None else mask_id
        if not 0 <= mask_id < num_ids:
            raise ValueError(f"mask_id={mask_id} is not one of the {num_ids} token ids")
        self.mask_id: int = mask_id

    def corrupt(self, x: Tensor, t: Tensor, generator: torch.Generator | None = None) -> Tensor:
        masked = bernoulli(1 - self.alpha(t), tuple(x.shape), generator)
        return x.masked_fill(masked, self.mask_id)

    def prior(self, shape: tuple[int, int], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
        return torch.full(shape, self.mask_id, device=device)

    def prior_probability(self, z: Tensor) -> Tensor:
        return (z == self.mask_id).double()

    def likelihood(self, z: Tensor, s: Tensor, t: Tensor) -> Tensor:
        kept = (self.alpha(t) / self.alpha(s)).unsqueeze(-1)
        masked = (z == self.mask_id).double().unsqueeze(-1)
        values = ((1 - kept) * masked).expand(*z.shape, self.num_ids).clone()
        values.scatter_add_(-1, z.unsqueeze(-1), kept * (1 - masked))
        values[..., self.mask_id] = masked.squeeze(-1)
        return values

    def rates_into(self, z: Tensor) -> Tensor:
        masked = (z == self.mask_id).unsqueeze(-1)
        own = -torch.nn.functional.one_hot(z, self.num_ids).double()
        into_mask = torch.ones(self.num_ids, dtype=torch.float64, device=z.device)
        into_mask[self.mask_id] = 0.0
        return torch.where(masked, into_mask, own)

    def rates_out(self, z: Tensor) -> Tensor:
        rates = -torch.nn.functional.one_hot(z, self.num_ids).double()
        rates[..., self.mask_id] += 1.0
        return rates

    def score(self, z: Tensor, log_x: Tensor, t: Tensor) -> Tensor:
        alpha = self.alpha(t).unsqueeze(-1)
        odds = torch.where((z == self.mask_id).unsqueeze(-1), alpha / (1 - alpha), 1.0)
        return (odds * log_x.double().exp()).scatter(-1, z.unsqueeze(-1), 1.0)

    def mean(self, z: Tensor, score: Tensor, t: Tensor) -> Tensor:
        """Tokens in proportion to the score at a mask, the token itself elsewhere."""
        weight = torch.where((z == self.mask_id).unsqueeze(-1), score.double(), 0.0)
        weight = weight.scatter(-1, z.unsqueeze(-1), (z != self.mask_id).double().unsqueeze(-1))
        return (weight / weight.sum(-1, keepdim=True).clamp(min=1e-300)).log()

    def reveal(self, t: Tensor, s: Tensor) -> Tensor:
        """The chance that a masked position is revealed between t and s: (B, 1), float64."""
        alpha_t, alpha_s = self.alpha(t), self.alpha(s)
        return (alpha_s - alpha_t) / (1 - alpha_t)

    def posterior(self, z: Tensor, log_x: Tensor, t: Tensor, s: Tensor) -> Tensor:
        reveal = self.reveal(t, s).to(log_x.dtype).unsqueeze(-1)
        log_z = log_x + torch.log(reveal)
        log_z[..., self.mask_id] = torch.log1p(-reveal).squeeze(-1)
        return torch.where((z == self.mask_id).unsqueeze(-1), log_z, log_x)

    def nelbo(
        self, x: Tensor, z: Tensor, t: Tensor, log_x: Tensor, timeless: bool, place: Tensor | None = None
    ) -> Tensor:
        masked = z == self.mask_id
        count = masked.sum(-1)
        if place is not None:
            x, masked = x.gather(1, place.unsqueeze(1)), masked.gather(1, place.unsqueeze(1))
        cross_entropy = -torch.where(masked, log_x.gather(-1, x.unsqueeze(-1)).squeeze(-1), 0.0).sum(-1)
        if place is not None:
            cross_entropy = cross_entropy * count
        return self.weigh(cross_entropy, z, t, timeless)

    def weigh(self, cross_entropy: Tensor, z: Tensor, t: Tensor, timeless: bool) -> Tensor:
        """The NELBO (B,) of the cross-entropies (B,) summed over masked positions; as `nelbo` otherwise."""
        if timeless:
            # With 1 - alpha uniform, t given k masks of L is Beta(k + 1, L - k + 1), so 1 / (1 - alpha) averages to
            # (L + 1) / k: the same mean as the weight below, with less variance.
            return cross_entropy * (z.shape[1] + 1) / (z == self.mask_id).sum(-1).clamp(min=1)
        return cross_entropy / (1 - self.alpha(t).squeeze(-1)).to(cross_entropy.dtype)

    def some_place(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return random_true(z == self.mask_id, generator)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "mask_id": self.mask_id}
