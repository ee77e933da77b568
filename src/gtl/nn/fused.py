"""A pooled DiT on many short sequences, fused: what exact intervention by a sequence ratio spends its time on.

Scoring n_ratio candidates one by one runs a narrow network on hundreds of thousands of sequences in every step. In
plain torch such a network is bound by memory: each operation writes a tensor that the next reads again. Here a block is
two kernels, each of which reads and writes the hidden states once and keeps everything between in registers:

    attend      h <- h + gate * Attention(LN(h))        one program a sequence
    transform   h <- h + gate * MLP(LN(h))              one program a tile of tokens

Sequences that differ from a context in one token (`fused_interventions`) share the first block's queries, keys and
values but for that token, so these are computed once for a context and once for a candidate.

Only for networks in bf16 without a time input, on CUDA, without gradients; `fusible` says where. Products are bf16 with
float32 sums, as in torch; layer norms, softmax and residual sums are float32, and h is rounded to bf16 once a kernel.

Sizes that are not powers of two are padded with zeros. The columns of query and key weights are interleaved, so that
one product gives both halves of both (rotary positions turn the halves against each other) and registers split them.
"""

import weakref
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gtl.nn.dit import DiT, modulated_norm, rotary, rotate

__all__ = ["fused_interventions", "fused_pool", "fusible", "shared_context"]

LONGEST, WIDEST = 128, 128
"""Sequences and hidden states up to which a block fits into the registers of one program."""
TILE, HIDDEN_TILE = 64, 64
"""Tokens, and units of the MLP's hidden layer, that a program holds at once."""
ATTEND, TRANSFORM = {"num_warps": 8}, {"num_warps": 4}
"""How the kernels are launched, by measurement."""
LOG2E = 1.4426950408889634


def fusible(dit: DiT, z: Tensor) -> bool:
    """Whether the kernels serve this network on these tokens."""
    return (
        z.is_cuda
        and available(z.device)
        and not torch.is_grad_enabled()
        and not dit.training
        and dit.time is None
        and dit.embedding.weight.dtype == torch.bfloat16
        and z.shape[1] <= LONGEST
        and 16 <= dit.width <= WIDEST
        and 4 * dit.width % HIDDEN_TILE == 0
        and dit.depth > 0
    )


@cache
def available(device: torch.device) -> bool:
    """Whether Triton is there and the device multiplies bf16 matrices."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def fused_pool(dit: DiT, z: Tensor) -> Tensor:
    """The sum over positions of the scalar outputs: tokens z (N, L) -> (N,), float32."""
    h, packed = dit.embedding(z), packed_weights(dit, z.shape[1])
    attend(dit, packed, 0, h)
    return after_attention(dit, packed, h)


def shared_context(dit: DiT, z: Tensor) -> Tensor:
    """The first block's queries, keys and values of contexts z (B, L): (B, 3, heads, L, padded)."""
    found = queries_keys_values(dit, z, rotary(z.shape[1], dit.width // dit.heads, z.device).unsqueeze(2))
    return found.transpose(1, 3).transpose(1, 2).contiguous()


def fused_interventions(
    dit: DiT, z: Tensor, context: Tensor, row: Tensor, place: Tensor, tokens: Tensor, part: slice
) -> Tensor:
    """The sum over positions of the scalar outputs of contexts with one token changed.

    Args:
        dit: the network.
        z: (B, L), the contexts.
        context: their `shared_context`.
        row: (M,), the context of each set of candidates.
        place: (M,), the position that they would fill.
        tokens: (M, N), the candidates.
        part: those that are asked for, out of all M N in order.

    Returns:
        (part,), float32.
    """
    from gtl.nn import kernels

    count, length, width = part.stop - part.start, z.shape[1], dit.width
    tokens, each = tokens.flatten(), tokens.shape[1]
    which = torch.arange(part.start, part.stop, device=z.device) // each
    rotation = rotary(length, width // dit.heads, z.device)[:, place[which]].unsqueeze(2)
    candidates = queries_keys_values(dit, tokens[part], rotation).contiguous()
    packed = packed_weights(dit, length)
    h = torch.empty(count, length, width, device=z.device, dtype=dit.embedding.weight.dtype)
    *_, gate, _, _, out = packed["blocks"][0]["attend"]
    kernels.attend_first[(count,)](
        h, dit.embedding.weight, z, tokens, row, place, context, candidates, gate, out, part.start, each, length, width,
        **shape(dit, length), **ATTEND,
    )  # fmt: skip
    return after_attention(dit, packed, h)


def queries_keys_values(dit: DiT, z: Tensor, rotation: Tensor) -> Tensor:
    """Of the first block, for tokens z (...): (..., 3, heads, padded), rotated, the queries scaled for base 2."""
    block: Any = dit.blocks[0]
    shift, scale = block.modulation.constant.unbind(0)[:2]
    q, k, v = block.qkv(modulated_norm(dit.embedding(z), shift, scale)).unflatten(-1, (3, dit.heads, -1)).unbind(-3)
    size = q.shape[-1]
    q = rotate(q.float(), rotation) * (LOG2E * size**-0.5)
    found = torch.stack([q.to(v.dtype), rotate(k.float(), rotation).to(v.dtype), v], -3)
    return F.pad(found, (0, 2 * power(size // 2) - size))


def attend(dit: DiT, packed: dict[str, Any], number: int, h: Tensor) -> None:
    """A block's attention, on hidden states h (N, L, width) in place."""
    from gtl.nn import kernels

    count, length, width = h.shape
    kernels.attend[(count,)](
        h, *packed["blocks"][number]["attend"], packed["cos"], packed["sin"], length, width,
        LOG2E * (width // dit.heads) ** -0.5, **shape(dit, length), **ATTEND,
    )  # fmt: skip


def after_attention(dit: DiT, packed: dict[str, Any], h: Tensor) -> Tensor:
    """All that follows the first block's attention: hidden states h (N, L, width), which are used up -> (N,)."""
    from gtl.nn import kernels

    count, length, width = h.shape
    values = torch.empty(count, length, device=h.device)
    for number, block in enumerate(packed["blocks"]):
        if number:
            attend(dit, packed, number, h)
        kernels.transform[(-(-count * length // TILE),)](
            h, *block["transform"], count * length, width, *packed["head"], values,
            HIDDEN=4 * width, BM=TILE, C=HIDDEN_TILE, DP=power(width), FAST=h.is_cuda,
            LAST=number == dit.depth - 1, **TRANSFORM,
        )  # fmt: skip
    return values.sum(-1) + length * packed["bias"]


def shape(dit: DiT, length: int) -> dict[str, Any]:
    """The sizes that the kernels of attention are compiled for."""
    long = power(length)
    return {
        "H": dit.heads, "HP": power(dit.width // dit.heads // 2), "LP": long, "DP": power(dit.width),
        "FULL": length == long,
    }  # fmt: skip


def power(size: int) -> int:
    """The smallest power of two that holds size, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


PACKED: "weakref.WeakKeyDictionary[DiT, tuple[Any, dict[str, Any]]]" = weakref.WeakKeyDictionary()


def packed_weights(dit: DiT, length: int) -> dict[str, Any]:
    """The weights as the kernels read them, kept until one of them changes."""
    version = length, *((p.data_ptr(), p._version) for p in dit.parameters())
    known = PACKED.get(dit)
    if known is None or known[0] != version:
        known = PACKED[dit] = version, pack(dit, length)
    return known[1]


@torch.no_grad()
def pack(dit: DiT, length: int) -> dict[str, Any]:
    """Pads and interleaves the weights."""
    width, heads, half = dit.width, dit.heads, dit.width // dit.heads // 2
    wide, long, part = power(width), power(length), power(half)

    def vector(v: Tensor) -> Tensor:
        return F.pad(v.float(), (0, wide - width)).contiguous()

    blocks = []
    block: Any
    for block in dit.blocks:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = block.modulation.constant.unbind(0)
        q, k, v = block.qkv.weight.view(3, heads, 2, half, width).unbind(0)
        both = q.new_zeros(heads, part, 2, 2, wide)  # (head, j, half, query or key, input)
        both[:, :half, :, :, :width] = torch.stack([q, k], 2).permute(0, 3, 1, 2, 4)
        value = v.new_zeros(heads, 2 * part, wide)
        value[:, : 2 * half, :width] = v.reshape(heads, 2 * half, width)
        out = v.new_zeros(heads, 2 * part, wide)
        out[:, : 2 * half, :width] = block.out.weight.view(width, heads, 2 * half).permute(1, 2, 0)
        up, down = block.mlp[0], block.mlp[2]
        first = up.weight.new_zeros(wide, 4 * width)
        first[:width] = up.weight.T
        second = down.weight.new_zeros(4 * width, wide)
        second[:, :width] = down.weight.T
        blocks.append(
            {
                "attend": (
                    vector(1 + scale_a.float()), vector(shift_a), vector(1 + gate_a.float()),
                    both.flatten(1, 3).transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous(),
                    out.contiguous(),
                ),
                "transform": (
                    vector(1 + scale_m.float()), vector(shift_m), vector(1 + gate_m.float()),
                    first, up.bias.float(), second, vector(down.bias),
                ),
            }
        )  # fmt: skip
    cos, sin = rotary(length, 2 * half, dit.embedding.weight.device)[:, :, half:]
    turn = torch.zeros(2, long, part, device=cos.device)
    turn[0, :length, :half], turn[1, :length, :half] = cos, sin
    shift, scale = dit.norm.constant.unbind(0)
    return {
        "blocks": blocks, "cos": turn[0].contiguous(), "sin": turn[1].contiguous(),
        "head": (vector(1 + scale.float()), vector(shift), vector(dit.head.weight[0])), "bias": dit.head.bias.float(),
    }  # fmt: skip
