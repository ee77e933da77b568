"""Late injection as a ratio: the context is encoded once, and n_ratio candidates are cheap queries to it.

    log r(z)                    =  A(z)                           the trunk's pooled scalar
    log r(z with l <- v)        =  A(z with l <- hole) + B(z with l <- hole, l, v),        B = 0 where v is the hole

A plain sequence ratio runs its whole network for every candidate; this one runs its trunk for every context (see
`nn/late`). The hole is the mask where there is one: a masked position is a hole already, so one pass of the trunk
serves all masked positions of a row, and the mask as a candidate has the value A(z) itself. Any other position has a
context of its own, with the hole written into it; under noise without a mask the hole is one more id, which only this
network knows. A there is a constant of (z, l), as the contract allows.

A is fitted as a sequence ratio is, B by the likelihood of target tokens (`estimate/late`). The likelihood leaves a
constant of (z, l) open in B: enough for guidance, and for the stabilised kernel. The naive kernel of
`sample/ancestral`, which compares tokens with the mask, relies on that constant and is not for this ratio.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gtl.denoiser import Prediction
from gtl.nn.dit import DiT
from gtl.nn.late import LateDiT
from gtl.process import Process
from gtl.ratio.base import SequenceRatio

__all__ = ["LateRatio"]


class LateRatio(SequenceRatio):
    """A network with late injection as a ratio."""

    kind = "late"

    def __init__(self, process: Process, network: LateDiT) -> None:
        """Wraps a network that knows the ids of the process and, where none of them is the mask, a hole after them."""
        super().__init__()
        ids = process.num_ids + (process.mask_id is None)
        if network.dit.num_ids != ids:
            raise ValueError(f"the network knows {network.dit.num_ids} ids; with a hole the process has {ids}")
        self.process, self.network = process, network
        self.hole = process.num_ids if process.mask_id is None else process.mask_id
        self.timeless = not network.dit.time_conditioned

    @classmethod
    def build(cls, process: Process, late: int = 1, **network: Any) -> "LateRatio":
        """A fresh ratio: `late` blocks of queries; width, depth, heads, dropout, time_conditioned as for `DiT`."""
        return cls(process, LateDiT(DiT(process.num_ids + (process.mask_id is None), 1, **network), late))

    def forward(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        """A(z), (B,)."""
        return self.network(z, t)

    def log_value(self, z: Tensor, t: Tensor | None = None, extra: Tensor | None = None) -> Tensor:
        """log r(z); `extra` (B, L, width) is added to the token embeddings."""
        return self.network(z, t, extra)

    def log_ratio(
        self,
        z: Tensor,
        positions: Tensor,
        candidates: Tensor,
        t: Tensor | None = None,
        context: Prediction | None = None,
    ) -> Tensor:
        batch, places, count = candidates.shape
        flat, length = positions.flatten(), z.shape[1]
        if places == 1:  # every row has its context; nothing here waits for the device
            row, place = torch.arange(batch, device=z.device), flat.clamp(min=0)
            values = self._weigh(z, row * (length + 1) + place, row, place, candidates.squeeze(1), range(batch + 1), t)
            return values.unsqueeze(1)
        kept = (flat >= 0).nonzero().squeeze(-1)
        row, place = kept // places, flat[kept]
        hole = torch.where(z[row, place] == self.hole, length, place)  # the holes of a row share what needs no new one
        key, which = (row * (length + 1) + hole).unique(return_inverse=True)
        order = which.argsort()
        kept, which, place = kept[order], which[order], place[order]
        ends = [0, *which.bincount(minlength=len(key)).cumsum(0).tolist()]
        values = self._weigh(z, key, which, place, candidates.flatten(0, 1)[kept], ends, t)
        return values.new_zeros(batch * places, count).index_copy(0, kept, values).view(batch, places, count)

    def _weigh(
        self,
        z: Tensor,
        key: Tensor,
        which: Tensor,
        place: Tensor,
        tokens: Tensor,
        ends: Sequence[int],
        t: Tensor | None,
    ) -> Tensor:
        """log r of M sets of candidates in C contexts, within the memory budget.

        Args:
            z: (B, L)
            key: (C,), (L + 1) row + hole: the row of a context and where a hole is written into it; L writes none.
            which: (M,), ascending: the context of a set.
            place: (M,), the position that it would fill.
            tokens: (M, N), its candidates.
            ends: C + 1 numbers; sets ends[c] .. ends[c + 1] belong to context c.
            t: (B,)

        Returns:
            (M, N)
        """
        length, count = z.shape[1], tokens.shape[1]
        budget = self.budget(z.device)
        contexts, sets = max(1, budget // length), max(1, budget // (length + count))
        everywhere = torch.arange(length, device=z.device)
        parts = [torch.zeros(0, count, device=z.device)]
        for first in range(0, len(key), contexts):
            last = min(first + contexts, len(key))
            row, hole = key[first:last] // (length + 1), key[first:last] % (length + 1)
            holed = torch.where(everywhere == hole.unsqueeze(1), self.hole, z[row])
            context = self.network.encode(holed, None if t is None else t[row])
            value = self.network.pooled(context.hidden)
            for at in range(ends[first], ends[last], sets):
                asked = slice(at, min(at + sets, ends[last]))
                among = which[asked] - first
                b = self.network.query(context, among, place[asked], tokens[asked])
                parts.append(value[among].unsqueeze(1) + b.masked_fill(tokens[asked] == self.hole, 0.0))
        return torch.cat(parts)

    def config(self) -> dict[str, Any]:
        return {"network": self.network.config()}

    @classmethod
    def from_config(cls, process: Process, config: dict[str, Any]) -> "LateRatio":
        return cls(process, LateDiT.from_config(config["network"]))
