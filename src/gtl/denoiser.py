"""The denoiser: log p(x_l = v | z_t) for each position l, and the likelihood bounds that follow from it.

    NELBO(x) = E_t E_z [ w(t) sum_{l masked in z} -log p(x_l | z) ]  >=  -log p(x)        (masked noise)

A `Denoiser` settles everything that is special about a checkpoint. What comes out is normalised, has a true -inf in the
mask's column and in that of any banned id, and under masked noise repeats the tokens that are already revealed.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtl.memory import by_chunks
from gtl.nn.dit import DiT, gather_positions
from gtl.process import Masked, Mixing, Process, stratified

__all__ = ["Denoiser", "NetworkDenoiser", "Prediction", "fingerprint", "masked_nll", "nelbo", "nelbo_at", "nll"]

MOST_CELLS = 2**27
"""Log-probabilities that a likelihood holds at once."""


class Prediction(NamedTuple):
    """What one pass of a denoiser gives.

    log_probs: (B, P, K), normalised log p(x_l = v | z) at the positions asked for.
    hidden: the trunk's hidden states, (B, L, D) each, from the embedding to the last; empty where there is no trunk.
    source: (B, P, K), of a guided denoiser what its frozen source said; None of any other.
    score: (B, P, K), of a score model the concrete score that it gave.
    readout: (K, D), the head's weights, which read the last hidden state.
    """

    log_probs: Tensor
    hidden: tuple[Tensor, ...] = ()
    source: Tensor | None = None
    score: Tensor | None = None
    readout: Tensor | None = None


class Denoiser(nn.Module, ABC):
    """The contract: `forward(z, t, positions) -> Prediction`."""

    process: Process
    timeless: bool = True
    """Whether the prediction depends on z alone. Only then may a sampler reuse it at another time."""

    @abstractmethod
    def forward(self, z: Tensor, t: Tensor | None = None, positions: Tensor | None = None) -> Prediction:
        """Predicts the clean tokens.

        Args:
            z: (B, L), noisy tokens.
            t: (B,), their time; may be left out where `timeless`.
            positions: (B, P), where to predict, all by default; -1 is padding, whose output means nothing.
        """

    def best(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        """The likeliest token of every position: z (B, L) -> (B, L)."""
        return self(z, t).log_probs.argmax(-1)

    def carry_over(self, z: Tensor, log_probs: Tensor) -> Tensor:
        """Repeats the revealed tokens of z (B, P) in log_probs (B, P, K) where the process never changes them."""
        if self.process.mask_id is None:
            return log_probs
        own = torch.full_like(log_probs, -torch.inf).scatter_(-1, z.unsqueeze(-1), 0.0)
        return torch.where((z == self.process.mask_id).unsqueeze(-1), log_probs, own)


class NetworkDenoiser(Denoiser):
    """A DiT with a token head as a denoiser.

    Under mixing noise p(x_l | z) is in proportion to p(z_l | x_l) p(x_l | the rest of z). The first factor is known, so
    it is added to the logits, and the network has only the second to learn.
    """

    ban: Tensor
    """(K,), -inf where nothing is predicted, else 0."""

    def __init__(self, process: Process, network: DiT, banned: tuple[int, ...] = ()) -> None:
        """Wraps a network whose head gives one logit for each of the K ids; `banned` ids are never predicted."""
        super().__init__()
        if network.outputs != process.num_ids or network.num_ids != process.num_ids:
            raise ValueError(
                f"the network knows {network.num_ids} ids and has {network.outputs} outputs; "
                f"the process has {process.num_ids} ids"
            )
        for token in banned:
            if not 0 <= token < process.num_ids:
                raise ValueError(f"banned id {token} is outside 0 .. {process.num_ids - 1}")
        self.process, self.network, self.banned = process, network, banned
        self.timeless = not network.time_conditioned
        ban = torch.zeros(process.num_ids)
        ban[[*banned, *([] if process.mask_id is None else [process.mask_id])]] = -torch.inf
        self.register_buffer("ban", ban, persistent=False)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., K), in float32, of normalised hidden states (..., width); -inf where nothing is predicted."""
        return self.network.head(hidden).float() + self.ban

    def best(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        """Under masked noise the head runs at masked positions alone, so many at a time."""
        if self.process.mask_id is None:
            return super().best(z, t)
        hidden, where = self.masked_states(z, t)
        parts = [self.logits(hidden[part]).argmax(-1) for part in where.split(self.at_once(z))]
        found = torch.cat(parts) if parts else where
        return z.flatten().index_copy(0, where, found).view_as(z)

    def surprise(self, x: Tensor, z: Tensor, t: Tensor | None = None) -> Tensor:
        """-log p(x_l | z) summed over the masked positions of each row, the head run there alone: (B, L) twice ->
        (B,)."""
        hidden, where = self.masked_states(z, t)
        size = max(1, len(where)) if torch.is_grad_enabled() else self.at_once(z)
        parts = [
            F.cross_entropy(self.logits(hidden[part]), x.flatten()[part], reduction="none")
            for part in where.split(size)
        ]
        values = torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)
        return values.new_zeros(len(x)).index_add(0, where.div(x.shape[1], rounding_mode="floor"), values)

    def masked_states(self, z: Tensor, t: Tensor | None) -> tuple[Tensor, Tensor]:
        """Hidden states (B L, width), and the places of the masked ones among them (M,)."""
        where = z.flatten().eq(self.process.mask_id).nonzero().squeeze(-1)  # type: ignore[arg-type]
        return self.network.trunk(z, t).flatten(0, 1), where

    def at_once(self, z: Tensor) -> int:
        """Positions whose logits are held at once where no gradient is needed."""
        return 8192 if z.is_cuda else max(1, 2**22 // self.process.num_ids)

    def outputs(
        self, z: Tensor, t: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """What the head gives (B, P, K), the tokens of z (B, P) at the same positions, and the hidden states."""
        hidden = self.network.layers(z, t)
        at, tokens = hidden[-1], z
        if positions is not None:
            at, tokens = gather_positions(at, positions), gather_positions(z, positions)
        return self.network.head(at).float(), tokens, hidden

    def forward(self, z: Tensor, t: Tensor | None = None, positions: Tensor | None = None) -> Prediction:
        logits, tokens, hidden = self.outputs(z, t, positions)
        if isinstance(self.process, Mixing):
            if t is None:
                raise ValueError(f"under {self.process.name} noise a denoiser needs the time: pass t")
            logits = logits + self.process.likelihood(tokens, torch.zeros_like(t), t).log().to(logits)
        return Prediction(
            self.carry_over(tokens, (logits + self.ban).log_softmax(-1)), hidden, readout=self.network.head.weight
        )


def fingerprint(denoiser: Denoiser) -> str:
    """A hash of a denoiser's weights."""
    digest = hashlib.sha256()
    for name, value in sorted(denoiser.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def nelbo(
    denoiser: Denoiser,
    x: Tensor,
    generator: torch.Generator | None = None,
    forward: Callable[..., Prediction] | None = None,
) -> Tensor:
    """One unbiased draw of each sequence's negative evidence lower bound, in nats: x (B, L) -> (B,).

    `forward` stands in for the denoiser itself where it is wrapped, compiled or spread over processes.
    """
    process = denoiser.process
    t = process.times(len(x), x.device, generator)
    z = process.corrupt(x, t, generator)
    if forward is None:
        return nelbo_at(denoiser, x, z, t)
    return process.nelbo(x, z, t, forward(z, t).log_probs, denoiser.timeless)


def nelbo_at(denoiser: Denoiser, x: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """The same of corruptions that are given: x and z (B, L), t (B,) -> (B,). Under masked noise a network's head runs
    at masked positions alone, so many at a time."""
    process = denoiser.process
    if isinstance(process, Masked) and type(denoiser) is NetworkDenoiser:
        return process.weigh(denoiser.surprise(x, z, t), z, t, denoiser.timeless)
    return process.nelbo(x, z, t, denoiser(z, t).log_probs, denoiser.timeless)


@torch.no_grad()
def nll(
    denoiser: Denoiser, x: Tensor, draws: int = 16, generator: torch.Generator | None = None, batch: int = 1024
) -> float:
    """The NELBO per token in nats (metric `nll`), averaged over `draws` corruptions of every sequence of x (B, L)."""
    rows = x.repeat(draws, 1)
    batch = min(batch, max(1, MOST_CELLS // (x.shape[1] * denoiser.process.num_ids)))
    parts, _ = by_chunks(
        lambda part: float(nelbo(denoiser, rows[part], generator).sum()), len(rows), batch, generator, "the likelihood"
    )
    return sum(parts) / rows.numel()


@torch.no_grad()
def masked_nll(
    denoiser: Denoiser, x: Tensor, draws: int = 16, generator: torch.Generator | None = None, batch: int = 1024
) -> float:
    """Mean cross-entropy at masked positions, t uniform (metric `masked_nll`), in nats; masked noise only."""
    process, mask = denoiser.process, denoiser.process.mask_id
    if mask is None:
        raise ValueError(f"masked_nll is defined for masked noise; this process is {process.name}")
    rows = x.repeat(draws, 1)

    def loss_and_count(part: slice) -> tuple[float, int]:
        t = stratified(len(rows[part]), x.device, generator)
        z = process.corrupt(rows[part], t, generator)
        masked = z.eq(mask)
        log_x = denoiser(z, t).log_probs.gather(-1, rows[part].unsqueeze(-1)).squeeze(-1)
        return -float(log_x[masked].sum()), int(masked.sum())

    batch = min(batch, max(1, MOST_CELLS // (x.shape[1] * process.num_ids)))
    parts, _ = by_chunks(loss_and_count, len(rows), batch, generator, "the likelihood")
    loss, count = sum(loss for loss, _ in parts), sum(count for _, count in parts)
    if not count:
        raise ValueError("masked_nll: no position was masked in any draw; use more draws")
    return loss / count
