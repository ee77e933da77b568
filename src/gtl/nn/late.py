"""Late injection: a context with a hole is encoded once, and candidates for the hole are queries that read it.

    h = trunk(z with l <- hole)                     (L, width), once for all candidates
    A(z) = sum_j head(h_j)                          one number for the context
    u = embedding(v) + W h_l                        the query of candidate v
    u <- u + gate * CrossAttention(scale * LN(u) + shift ; h)        keys and values from h, the query at position l
    u <- u + gate * MLP(scale * LN(u) + shift)                       `late` times
    B(z, l, v) = head'(LN(u))

Queries see the context and nothing else, neither each other nor are they seen, so a batch of candidates has the values
that each has on its own. n of them cost n / L of a pass through as many blocks; keys and values are computed once for a
context. Both heads start at zero.
"""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from gtl.nn.dit import DiT, Modulation, in_chunks, initialise, modulated_norm, rotary, rotate

__all__ = ["Context", "CrossBlock", "LateDiT"]


class Context(NamedTuple):
    """What is computed once for each of C contexts.

    hidden: (C, L, width), the trunk's normalised hidden states.
    keys, values: (C, late, heads, L, width / heads), for every block of queries; the keys are rotated.
    condition: (C, width), the embedded time; None where the network has no time input.
    """

    hidden: Tensor
    keys: Tensor
    values: Tensor
    condition: Tensor | None


class CrossBlock(nn.Module):
    """One block of queries: attention to keys and values that are given, then an MLP."""

    def __init__(self, width: int, heads: int, dropout: float, conditioned: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.modulation = Modulation(width, 6, conditioned)
        self.query = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, u: Tensor, keys: Tensor, values: Tensor, rotation: Tensor, condition: Tensor | None) -> Tensor:
        """Queries u (M, N, width), keys and values (M, heads, L, dim), rotation (2, M, 1, 1, dim) -> (M, N, width)."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition)
        q = self.query(modulated_norm(u, shift_a, scale_a)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(rotate(q, rotation), keys, values)
        u = u + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout, self.training) * (1 + gate_a)
        update = self.mlp(modulated_norm(u, shift_m, scale_m))
        return u + F.dropout(update, self.dropout, self.training) * (1 + gate_m)


class LateDiT(nn.Module):
    """A DiT with a scalar head, and blocks of queries on top of its hidden states."""

    hot = ("_query",)

    def __init__(self, dit: DiT, late: int = 1) -> None:
        """Puts `late` blocks of queries on a trunk; they take its width, heads, dropout and time."""
        super().__init__()
        if dit.outputs != 1:
            raise ValueError(f"a network with late injection needs a scalar head; this one has {dit.outputs} outputs")
        if late < 1:
            raise ValueError(f"late={late}: at least one block of queries is needed")
        width, timed = dit.width, dit.time_conditioned
        self.late = late
        self.project = nn.Linear(width, width, bias=False)
        self.keys_values = nn.Linear(width, 2 * late * width, bias=False)
        self.blocks = nn.ModuleList(CrossBlock(width, dit.heads, dit.dropout, timed) for _ in range(late))
        self.norm = Modulation(width, 2, timed)
        self.head = nn.Linear(width, 1)
        initialise(self, late)
        self.dit = dit

    def forward(self, z: Tensor, t: Tensor | None = None, extra: Tensor | None = None) -> Tensor:
        """A(z), (B,); `extra` (B, L, width) is added to the embedding."""
        return self.pooled(self.dit.trunk(z, t, extra))

    def pooled(self, hidden: Tensor) -> Tensor:
        """A of contexts whose hidden states (C, L, width) are known: (C,)."""
        return self.dit.head(hidden).squeeze(-1).float().sum(-1)

    def encode(self, z: Tensor, t: Tensor | None = None) -> Context:
        """Contexts z (C, L) at times t (C,), holes written into them."""
        hidden = self.dit.trunk(z, t)
        split = self.keys_values(hidden).unflatten(-1, (2, self.late, self.dit.heads, -1))
        keys, values = split.permute(2, 0, 3, 4, 1, 5)
        condition = None if self.dit.time is None or t is None else self.dit.time(t)
        return Context(hidden, rotate(keys, self._rotation(hidden)), values, condition)

    def query(self, context: Context, which: Tensor, place: Tensor, tokens: Tensor) -> Tensor:
        """B of candidates.

        Args:
            context: of C sequences.
            which: (M,), the context that a set of candidates belongs to.
            place: (M,), where the hole is that they would fill.
            tokens: (M, N), the candidates.

        Returns:
            (M, N)
        """
        hidden, keys, values, condition = context
        rotation = self._rotation(hidden)[:, place].transpose(0, 1)
        condition = None if condition is None else condition[which]
        return in_chunks(self._query, tokens, hidden[which, place], keys[which], values[which], rotation, condition)

    def _query(
        self, tokens: Tensor, at: Tensor, keys: Tensor, values: Tensor, rotation: Tensor, condition: Tensor | None
    ) -> Tensor:
        u = self.dit.embedding(tokens) + self.project(at).unsqueeze(1)
        rotation = rotation.transpose(0, 1)[:, :, None, None]
        for number, block in enumerate(self.blocks):
            u = block(u, keys[:, number], values[:, number], rotation, condition)
        return self.head(modulated_norm(u, *self.norm(condition))).squeeze(-1).float()

    def _rotation(self, hidden: Tensor) -> Tensor:
        return rotary(hidden.shape[1], self.dit.width // self.dit.heads, hidden.device).to(hidden.dtype)

    def config(self) -> dict[str, Any]:
        """What `from_config` needs."""
        return {"dit": self.dit.config(), "late": self.late}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LateDiT":
        """A network of the same shape."""
        return cls(DiT(**config["dit"]), config["late"])
