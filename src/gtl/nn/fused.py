"""A pooled DiT on many short sequences, fused: what exact intervention by a sequence ratio spends its time on.

Scoring n_ratio candidates one by one runs a narrow network on hundreds of thousands of sequences in every step. In
plain torch such a network is bound by memory: each operation writes a tensor that the next reads again. Here a block is
two kernels, each of which reads and writes the hidden states once and keeps everything between in registers:

    attend      h <- h + gate * Attention(LN(h))        one program a sequence
    transform   h <- h + gate * MLP(LN(h))              one program a tile of tokens
    pool        sum_l head(LN(h_l))                     one program a sequence

Only for networks in bf16 without a time input, on CUDA, without gradients; `fusible` says where. Products are bf16 with
float32 sums, as in torch; layer norms, softmax and residual sums are float32, and h is rounded to bf16 once a kernel.

Sizes that are not powers of two are padded with zeros. The columns of query and key weights are interleaved, so that
one product gives both halves of both (rotary positions turn the halves against each other) and registers split them.
"""

import weakref
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from gtl.nn.dit import DiT, rotary

__all__ = ["fused_pool", "fusible"]

LONGEST, WIDEST = 128, 128
"""Sequences and hidden states up to which a block fits into the registers of one program."""
TILE, HIDDEN_TILE = 64, 64
"""Tokens, and units of the MLP's hidden layer, that a program holds at once."""
ATTEND_WARPS, TRANSFORM_WARPS = 8, 4
LOG2E = 1.4426950408889634


def fusible(dit: DiT, z: Tensor) -> bool:
    """Whether the kernels serve this network on these tokens."""
    return (
        z.is_cuda
        and find_spec("triton") is not None
        and not torch.is_grad_enabled()
        and not dit.training
        and dit.time is None
        and dit.embedding.weight.dtype == torch.bfloat16
        and z.shape[1] <= LONGEST
        and 16 <= dit.width <= WIDEST
        and 4 * dit.width % HIDDEN_TILE == 0
        and dit.depth > 0
    )


def fused_pool(dit: DiT, z: Tensor) -> Tensor:
    """The sum over positions of the scalar outputs: tokens z (N, L) -> (N,), float32."""
    from gtl.nn.kernels import attend, pool, transform

    packed = packed_weights(dit, z.shape[1])
    h = dit.embedding(z)
    count, length = z.shape
    width, heads = dit.width, dit.heads
    padded = {"LP": power(length), "DP": power(width)}
    for block in packed["blocks"]:
        attend[(count,)](
            h, *block["attend"], packed["cos"], packed["sin"], length, width, LOG2E * (width // heads) ** -0.5,
            H=heads, HP=power(width // heads // 2), FULL=length == padded["LP"], **padded, num_warps=ATTEND_WARPS,
        )  # fmt: skip
        transform[(-(-count * length // TILE),)](
            h, *block["transform"], count * length, width,
            HIDDEN=4 * width, BM=TILE, C=HIDDEN_TILE, DP=padded["DP"], FAST=z.is_cuda, num_warps=TRANSFORM_WARPS,
        )  # fmt: skip
    out = torch.empty(count, device=z.device)
    pool[(count,)](h, *packed["pool"], out, length, width, **padded, num_warps=4)
    return out


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
        return torch.nn.functional.pad(v.float(), (0, wide - width)).contiguous()

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
    scale, shift = dit.norm.constant.unbind(0)[1], dit.norm.constant.unbind(0)[0]
    head = (vector(1 + scale.float()), vector(shift), vector(dit.head.weight[0]), dit.head.bias.float())
    return {"blocks": blocks, "cos": turn[0].contiguous(), "sin": turn[1].contiguous(), "pool": head}
