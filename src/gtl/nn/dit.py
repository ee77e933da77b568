"""DiT: a bidirectional transformer with adaptive layer norm, rotary positions and scaled dot-product attention.

    h <- h + gate * Attention(scale * LN(h) + shift)
    h <- h + gate * MLP(scale * LN(h) + shift)

Shift, scale and gate are linear in the time embedding. Masked noise needs no time input (the number of masks tells the
time), so there time conditioning is off and they are plain weights, fused into the layer norm.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DiT", "PooledDiT", "Pooling", "gather_positions", "initialise"]

Pooling = Literal["sum", "mean"]

CPU_TOKENS = 2048
"""Tokens that a CPU runs through a network at once."""


def rotary(length: int, dim: int, device: torch.device) -> Tensor:
    """Rotations of positions 0 .. length-1 as (2, length, dim): cosine, then signed sine."""
    frequency = 10_000 ** (-torch.arange(0, dim, 2, device=device) / dim)
    angle = torch.outer(torch.arange(length, device=device), frequency)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotates the two halves of the last dimension of x (..., L, dim) against each other."""
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], -1)
    return x * rotation[0] + swapped * rotation[1]


def in_chunks(network: Callable[..., Any], z: Tensor, *more: Tensor | None) -> Any:
    """network(z, *more), a tensor or a tuple of them; on a CPU without gradients a few rows at a time: activations that
    stay in the cache run twice as fast as a large batch does."""
    rows = max(1, CPU_TOKENS // z.shape[1])
    if z.device.type != "cpu" or torch.is_grad_enabled() or len(z) <= rows:
        return network(z, *more)
    count = -(-len(z) // rows)
    inputs = [[None] * count if x is None else x.split(rows) for x in (z, *more)]
    parts = [network(*part) for part in zip(*inputs, strict=True)]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(outputs) for outputs in zip(*parts, strict=True))


def gather_positions(values: Tensor, positions: Tensor) -> Tensor:
    """values (B, L, ...) at positions (B, P): (B, P, ...). A position of -1 is padding and reads position 0."""
    index = positions.clamp(min=0)
    index = index.view(*index.shape, *(1,) * (values.dim() - 2)).expand(*index.shape, *values.shape[2:])
    return values.gather(1, index)


class TimeEmbedding(nn.Module):
    """Sinusoidal features of t in [0, 1] through a two-layer network: (B,) -> (B, width)."""

    def __init__(self, width: int, features: int = 128) -> None:
        super().__init__()
        self.features = features
        self.layers = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())

    def forward(self, t: Tensor) -> Tensor:
        half = self.features // 2
        frequency = 1000 * torch.exp(-math.log(10_000) * torch.arange(half, device=t.device) / half)
        angle = t.float().unsqueeze(-1) * frequency  # in float32 whatever the weights are
        weight = next(self.layers.parameters())
        return self.layers(torch.cat([angle.cos(), angle.sin()], -1).to(weight.dtype))


class Modulation(nn.Module):
    """`parts` vectors of the given width: linear in the condition, or plain weights where there is none."""

    def __init__(self, width: int, parts: int, conditioned: bool) -> None:
        super().__init__()
        self.parts = parts
        self.constant = nn.Parameter(torch.zeros(parts, width))
        self.linear = nn.Linear(width, parts * width, bias=False) if conditioned else None

    def forward(self, condition: Tensor | None) -> tuple[Tensor, ...]:
        if self.linear is None:
            return self.constant.unbind(0)
        assert condition is not None
        values = self.linear(condition).unflatten(-1, (self.parts, -1)) + self.constant
        return values.unsqueeze(-3).unbind(-2)  # each (B, 1, width)


def modulated_norm(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm of h (B, L, width) followed by (1 + scale) and shift."""
    if scale.dim() == 1:
        return F.layer_norm(h, h.shape[-1:], 1 + scale, shift)
    return F.layer_norm(h, h.shape[-1:]) * (1 + scale) + shift


def normed(linear: nn.Module, h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """linear(modulated_norm(h)). In training, scale and shift without a time input are folded into the weights, so that
    their gradients are sums over weights and not over all tokens."""
    if scale.dim() > 1 or not linear.training or type(linear) is not nn.Linear:
        return linear(modulated_norm(h, shift, scale))
    bias = (linear.weight * shift).sum(-1) + (0.0 if linear.bias is None else linear.bias)
    return F.linear(F.layer_norm(h, h.shape[-1:]), linear.weight * (1 + scale), bias)


def gated(linear: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """(1 + gate) * linear(x). In training a gate without a time input scales the weights instead, so that its gradient
    is a sum over weights and not over all tokens."""
    if gate.dim() > 1 or not linear.training or type(linear) is not nn.Linear:
        return linear(x) * (1 + gate)
    bias = None if linear.bias is None else linear.bias * (1 + gate)
    return F.linear(x, linear.weight * (1 + gate).unsqueeze(1), bias)


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, width: int, heads: int, dropout: float, conditioned: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.modulation = Modulation(width, 6, conditioned)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, h: Tensor, rotation: Tensor, condition: Tensor | None) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition)
        qkv = normed(self.qkv, h, shift_a, scale_a)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v)
        update = gated(self.out, attended.transpose(1, 2).flatten(2), gate_a)
        h = h + F.dropout(update, self.dropout, self.training)
        up, activation, down = self.mlp
        update = gated(down, activation(normed(up, h, shift_m, scale_m)), gate_m)
        return h + F.dropout(update, self.dropout, self.training)


class DiT(nn.Module):
    """Tokens (B, L) and, if conditioned, times (B,) to hidden states (B, L, width) and outputs for each position."""

    hot = ("_layers",)

    def __init__(
        self,
        num_ids: int,
        outputs: int,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
        time_conditioned: bool = False,
        tied: bool = False,
    ) -> None:
        """Builds the network.

        Args:
            num_ids: token ids that may come in, the mask among them; 0 for a network that reads `extra` alone.
            outputs: numbers that the head gives for each position.
            width: size of the hidden states; must be an even multiple of `heads`.
            depth: number of blocks.
            heads: attention heads.
            dropout: on both residual branches.
            time_conditioned: whether t is an input.
            tied: whether the head's weights are the embedding's, which saves a third of a small text model.
        """
        super().__init__()
        if tied and outputs != num_ids:
            raise ValueError(f"tied embeddings need an output for every token id: {outputs} outputs, {num_ids} ids")
        if heads < 1 or width < 1 or depth < 0 or not 0 <= dropout < 1:
            raise ValueError(f"width={width}, depth={depth}, heads={heads}, dropout={dropout}: out of range")
        if width % (2 * heads):
            raise ValueError(f"width={width} must be a multiple of 2 * heads={2 * heads} for rotary positions")
        self.num_ids, self.outputs, self.width, self.depth = num_ids, outputs, width, depth
        self.heads, self.dropout, self.time_conditioned, self.tied = heads, dropout, time_conditioned, tied
        self.embedding = nn.Embedding(num_ids, width)
        self.time = TimeEmbedding(width) if time_conditioned else None
        self.blocks = nn.ModuleList(Block(width, heads, dropout, time_conditioned) for _ in range(depth))
        self.norm = Modulation(width, 2, time_conditioned)
        self.head = nn.Linear(width, outputs)
        initialise(self, depth)
        if tied:
            self.tie()

    def tie(self) -> None:
        """Makes the head's weights the embedding's, at the head's scale. A checkpoint holds them once."""
        nn.init.normal_(self.embedding.weight, std=self.width**-0.5)
        self.head.weight = self.embedding.weight
        self.register_state_dict_post_hook(_drop_head)
        self.register_load_state_dict_pre_hook(_add_head)

    @property
    def scale(self) -> float:
        """What an embedding is multiplied by: tied ones are as small as a head's weights."""
        return self.width**0.5 if self.tied else 1.0

    def untied(self) -> "DiT":
        """A copy that computes the same with an embedding and a head of their own."""
        copied = DiT(**self.config() | {"tied": False}).to(self.head.weight)
        state = self.state_dict()
        if self.tied:
            weight = state["embedding.weight"]
            state |= {"embedding.weight": weight * self.scale, "head.weight": weight}
        copied.load_state_dict(state)
        return copied

    def layers(self, z: Tensor, t: Tensor | None = None, extra: Tensor | None = None) -> tuple[Tensor, ...]:
        """All hidden states, each (B, L, width): the embedding, what every block gives, and the last one normalised.

        `extra` (B, L, width) is added to the embedding.
        """
        return in_chunks(self._layers, z, t, extra)

    def trunk(self, z: Tensor, t: Tensor | None = None, extra: Tensor | None = None) -> Tensor:
        """The normalised last hidden states (B, L, width) that the head reads."""
        return in_chunks(lambda *inputs: self._layers(*inputs)[-1], z, t, extra)

    def _layers(self, z: Tensor, t: Tensor | None, extra: Tensor | None) -> tuple[Tensor, ...]:
        condition = None
        if self.time is not None:
            if t is None:
                raise ValueError("this network is conditioned on time: pass t")
            condition = self.time(t)
        h = self.embedding(z) if self.num_ids else torch.zeros_like(extra)  # type: ignore[arg-type]
        h = h * self.scale if self.tied else h
        kind = z.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # the residual stream too: half of the memory traffic
            h = h.to(torch.get_autocast_dtype(kind))
        h = h if extra is None else h + extra
        rotation = rotary(z.shape[1], self.width // self.heads, z.device).to(h.dtype)
        states = [h]
        for block in self.blocks:
            states.append(block(states[-1], rotation, condition))
        return (*states, modulated_norm(states[-1], *self.norm(condition)))

    def forward(self, z: Tensor, t: Tensor | None = None, extra: Tensor | None = None) -> Tensor:
        return self.head(self.trunk(z, t, extra))

    def config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        names = ("num_ids", "outputs", "width", "depth", "heads", "dropout", "time_conditioned", "tied")
        return {name: getattr(self, name) for name in names}


class PooledDiT(nn.Module):
    """A DiT whose scalar outputs are summed or averaged over positions: tokens (B, L) to one number a sequence (B,)."""

    hot = ("_pool",)

    def __init__(self, trunk: DiT, pooling: Pooling = "sum") -> None:
        super().__init__()
        if trunk.outputs != 1:
            raise ValueError(f"a pooled network needs a scalar head; this one has {trunk.outputs} outputs")
        if pooling not in ("sum", "mean"):
            raise ValueError(f"pooling={pooling!r}: choose sum or mean")
        self.dit, self.pooling = trunk, pooling

    def forward(self, z: Tensor, t: Tensor | None = None, extra: Tensor | None = None) -> Tensor:
        if z.is_cuda and extra is None:
            from gtl.nn.fused import fused_pool, fusible

            if fusible(self.dit, z):
                return fused_pool(self.dit, z) / (1 if self.pooling == "sum" else z.shape[1])
        return in_chunks(self._pool, z, t, extra)

    def _pool(self, z: Tensor, t: Tensor | None, extra: Tensor | None) -> Tensor:
        values = self.dit(z, t, extra).squeeze(-1).float()
        return values.sum(-1) if self.pooling == "sum" else values.mean(-1)


def _drop_head(network: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state.pop(f"{prefix}head.weight", None)


def _add_head(network: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if f"{prefix}embedding.weight" in state:
        state[f"{prefix}head.weight"] = state[f"{prefix}embedding.weight"]


def initialise(network: nn.Module, depth: int) -> None:
    """Draws the weights of a network of `depth` blocks whose `head` starts at zero."""
    network.apply(_initialise)
    for name, weight in network.named_parameters():
        if name.endswith(("out.weight", "mlp.2.weight")):  # residual branches start small: depth does not matter
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5 / math.sqrt(2 * depth))
        elif name == "head.weight":
            nn.init.zeros_(weight)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, Modulation) and module.linear is not None:
        nn.init.zeros_(module.linear.weight)  # `apply` reaches a module after its children
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)
