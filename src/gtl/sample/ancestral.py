"""Ancestral sampling (the appendix algorithm): T steps of the token-factorised reverse kernel.

    naive        z_s ~ prod_l  p(z_s^l | z_t) r(z_t with l <- z_s^l)^gamma / Z     the mask is a candidate like any
    other stabilised   p(z_s^l = m | z_t) as in the source; a revealed token is guided

The stabilised kernel says which positions are revealed before any network runs. So that is drawn first, and the
networks see only the rows that change and only the positions that are revealed: each position is weighed once in the
whole run instead of once in every step, and no cache is needed. The naive kernel needs all masked positions at every
step; `cache` reuses a row's outputs until one of its tokens changes, which is right only for networks without a time
input.

As printed the algorithm draws z_s from x_theta, which would reveal everything in the first step; the reverse kernel
p(z_s | z_t) stands there instead. Revealing several positions at once is exact only as T grows.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from gtl.categorical import bernoulli, categorical
from gtl.denoiser import Denoiser
from gtl.guidance import Gamma, guide, stabilise, top_candidates
from gtl.process import Masked
from gtl.ratio.base import Ratio
from gtl.sample.base import Sampler, uniform_grid

__all__ = ["Ancestral"]


class Ancestral(Sampler):
    """T ancestral steps on a uniform grid of times."""

    def __init__(
        self,
        denoiser: Denoiser,
        ratio: Ratio | None = None,
        *,
        gamma: Gamma | None = None,
        n_ratio: int | None = None,
        steps: int = 20,
        stabilised: bool = True,
        cache: bool | None = None,
    ) -> None:
        """Sets the models and the kind of kernel.

        Args:
            denoiser: the frozen source model.
            ratio: the target-to-source ratio; None samples from the source.
            gamma: guidance strength, or a schedule gamma(t); by default the one that was chosen for the ratio.
            n_ratio: candidates weighed at each position; all by default.
            steps: T.
            stabilised: keep the source's chance of staying masked (see the module).
            cache: for the naive kernel, reuse the outputs of rows that did not change; by default wherever that is
                right, which is where no network has the time as an input.
        """
        super().__init__(denoiser, ratio, gamma=gamma, n_ratio=n_ratio)
        if steps < 1:
            raise ValueError(f"steps={steps} must be at least 1")
        self.steps, self.stabilised = steps, stabilised
        timeless = denoiser.timeless and (ratio is None or ratio.timeless)
        if cache and not timeless:
            raise ValueError(
                "cache=True: a network has the time as an input, so its outputs cannot be reused at another"
            )
        self.cache = timeless if cache is None else cache
        self.begin()

    def begin(self) -> None:
        self.model, self._noisy = self.parts()
        self._memory: tuple[Tensor, ...] | None = None

    def times(self, z: Tensor) -> Iterable[tuple[float, float]]:
        return uniform_grid(self.steps)

    def step(self, z: Tensor, t: float, s: float, generator: torch.Generator | None) -> Tensor:
        if isinstance(self.process, Masked) and (self.stabilised or self.ratio is None):
            chance = self.process.reveal(*(torch.tensor([u], device=z.device) for u in (t, s)))
            return self.reveal(self.process, z, chance, t, generator)
        return categorical(self.kernel(z, t, s), generator)

    def reveal(self, process: Masked, z: Tensor, chance: Tensor, t: float, generator: torch.Generator | None) -> Tensor:
        """Draws which masks are revealed, each with the given chance, then their tokens."""
        chosen = bernoulli(chance, tuple(z.shape), generator) & (z == process.mask_id)
        count = chosen.sum(-1)
        rows = count.nonzero().squeeze(-1)
        if not len(rows):
            return z
        places = chosen[rows].to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, : int(count.max())]
        places = places.masked_fill(~chosen[rows].gather(1, places), -1)
        part = z[rows]
        log_probs = self.model(part, torch.full((len(rows),), t, device=z.device), places).log_probs
        row, column = (places >= 0).nonzero(as_tuple=True)
        part[row, places[row, column]] = categorical(log_probs[row, column], generator)
        return z.index_copy(0, rows, part)

    def kernel(self, z: Tensor, t: float, s: float) -> Tensor:
        """The log-probabilities of z_s at every position, (B, L, K): what `step` draws from, position by position."""
        time, after = (torch.full((len(z),), u, device=z.device, dtype=torch.float64) for u in (t, s))
        if not isinstance(self.process, Masked):
            return self._mixing_kernel(z, time, after)
        mask_id = self.process.mask_id
        log_x, candidates, log_r = self._evaluate(z, time)
        log_p = self.process.posterior(z, log_x, time, after)
        if log_r is None or candidates is None:
            return log_p
        gamma = self.strength(time)
        if self.stabilised:  # the last candidate is the mask
            log_q = guide(log_p, log_r[..., :-1], gamma, candidates[..., :-1])
            log_q = stabilise(log_q, log_p, mask_id)
        else:
            log_q = guide(log_p, log_r, gamma, candidates)
        return torch.where((z == mask_id).unsqueeze(-1), log_q, log_p)

    def _mixing_kernel(self, z: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """A clean ratio has tilted p(x | z_t) already; a noisy one weighs z_s, every id being a candidate."""
        source = self.model(z, t)
        log_p = self.process.posterior(z, source.log_probs, t, s)
        if self._noisy is None:
            return log_p
        positions = torch.arange(z.shape[1], device=z.device).expand_as(z)
        candidates = top_candidates(log_p, self.n_ratio or self.process.num_ids)
        log_r = self._noisy.log_ratio(z, positions, candidates, s, source)
        return guide(log_p, log_r, self.strength(t), candidates)

    def _evaluate(self, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The networks' outputs for every row, run only on rows that changed since the last call if cached."""
        memory = self._memory
        if memory is None or not self.cache or memory[0].shape != z.shape:
            outputs = self._networks(z, t)
        else:
            changed = (z != memory[0]).any(-1).nonzero().squeeze(-1)
            outputs = memory[1:]
            if len(changed):
                fresh = self._networks(z[changed], t[changed])
                outputs = tuple(old.index_copy(0, changed, new) for old, new in zip(outputs, fresh, strict=True))
        self._memory = (z, *outputs)
        return (outputs[0], outputs[1], outputs[2]) if len(outputs) == 3 else (outputs[0], None, None)

    def _networks(self, z: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        """log p(x | z), and the candidates (the mask last) of each position with their log-ratios."""
        source = self.denoiser(z, t)
        if self.ratio is None:
            return (source.log_probs,)
        mask_id = self.process.mask_id
        assert mask_id is not None
        tokens = top_candidates(source.log_probs, self.n_ratio or self.process.vocabulary, mask_id)
        candidates = torch.cat([tokens, torch.full_like(tokens[..., :1], mask_id)], -1)
        positions = torch.arange(z.shape[1], device=z.device).expand_as(z).masked_fill(z != mask_id, -1)
        return source.log_probs, candidates, self.ratio.log_ratio(z, positions, candidates, t, source)
