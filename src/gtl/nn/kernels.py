"""The kernels behind `nn/fused`, in Triton. Shapes: h (N, L, D), padded to LP and DP; a head's half to HP."""

import triton
import triton.language as tl

__all__ = ["attend", "pool", "transform"]


@triton.jit
def normalised(h, scale, shift, cols, D):
    """Layer norm of h (M, DP) over its first D columns, then scale and shift; padding stays 0."""
    mean = tl.sum(h, 1) / D
    centred = tl.where(cols[None, :] < D, h - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / D
    return (
        centred * tl.rsqrt(variance + 1e-5)[:, None] * tl.load(scale + cols)[None, :] + tl.load(shift + cols)[None, :]
    )


@triton.jit
def attend(
    h_ptr, scale, shift, gate, qk, value, out, cos_ptr, sin_ptr, L, D, factor,
    H: tl.constexpr, HP: tl.constexpr, LP: tl.constexpr, DP: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """h <- h + gate * Attention(LN(h)) of one sequence."""
    rows, cols = tl.arange(0, LP), tl.arange(0, DP)
    part, both, whole = tl.arange(0, HP), tl.arange(0, 4 * HP), tl.arange(0, 2 * HP)
    pointer = h_ptr + tl.program_id(0).to(tl.int64) * L * D + rows[:, None] * D + cols[None, :]
    inside = (rows < L)[:, None] & (cols < D)[None, :]
    h = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    x = normalised(h, scale, shift, cols, D).to(h_ptr.dtype.element_ty)
    cos = tl.load(cos_ptr + rows[:, None] * HP + part[None, :])
    sin = tl.load(sin_ptr + rows[:, None] * HP + part[None, :])
    total = tl.zeros((LP, DP), tl.float32)
    for head in range(H):
        w = tl.load(qk + head * DP * 4 * HP + cols[:, None] * (4 * HP) + both[None, :])
        product = tl.reshape(tl.dot(x, w), (LP, HP, 2, 2))
        query, key = tl.split(product)
        q1, q2 = tl.split(query)
        k1, k2 = tl.split(key)
        q_first, q_second = (q1 * cos - q2 * sin) * factor, (q2 * cos + q1 * sin) * factor
        k_first, k_second = k1 * cos - k2 * sin, k2 * cos + k1 * sin
        scores = tl.dot(q_first.to(h_ptr.dtype.element_ty), tl.trans(k_first.to(h_ptr.dtype.element_ty)))
        scores = tl.dot(q_second.to(h_ptr.dtype.element_ty), tl.trans(k_second.to(h_ptr.dtype.element_ty)), scores)
        if not FULL:
            scores = tl.where((rows < L)[None, :], scores, float("-inf"))
        weight = tl.exp2(scores - tl.max(scores, 1)[:, None])
        norm = tl.sum(weight, 1)
        wv = tl.load(value + head * DP * 2 * HP + cols[:, None] * (2 * HP) + whole[None, :])
        v = tl.dot(x, wv).to(h_ptr.dtype.element_ty)
        found = tl.dot(weight.to(h_ptr.dtype.element_ty), v) / norm[:, None]
        wo = tl.load(out + head * 2 * HP * DP + whole[:, None] * DP + cols[None, :])
        total = tl.dot(found.to(h_ptr.dtype.element_ty), wo, total)
    h = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)  # again: registers are dearer than the read
    h = h + total * tl.load(gate + cols)[None, :]
    tl.store(pointer, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gelu(u, FAST: tl.constexpr):
    """GELU by tanh, from one instruction where there is one."""
    inner = 0.7978845608028654 * u * (1 + 0.044715 * u * u)
    if FAST:
        tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [inner], tl.float32, True, 1)
    else:
        tanh = 2 / (1 + tl.exp(-2 * inner)) - 1
    half = 0.5 * u
    return half + half * tanh


@triton.jit
def transform(
    h_ptr, scale, shift, gate, first, first_bias, second, second_bias, M, D,
    HIDDEN: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, DP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """h <- h + gate * MLP(LN(h)) of a tile of tokens."""
    rows, cols, units = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM), tl.arange(0, DP), tl.arange(0, C)
    pointer = h_ptr + rows[:, None] * D + cols[None, :]
    inside = (rows < M)[:, None] & (cols < D)[None, :]
    h = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    x = normalised(h, scale, shift, cols, D).to(h_ptr.dtype.element_ty)
    total = tl.zeros((BM, DP), tl.float32)
    for start in range(0, HIDDEN, C):
        w = tl.load(first + cols[:, None] * HIDDEN + (start + units)[None, :])
        u = tl.dot(x, w) + tl.load(first_bias + start + units)[None, :]
        u = gelu(u, FAST)
        w = tl.load(second + (start + units)[:, None] * DP + cols[None, :])
        total = tl.dot(u.to(h_ptr.dtype.element_ty), w, total)
    h = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    h = h + (total + tl.load(second_bias + cols)[None, :]) * tl.load(gate + cols)[None, :]
    tl.store(pointer, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def pool(
    h_ptr, scale, shift, weight, bias, out, L, D,
    LP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """sum_l head(LN(h_l)) of one sequence."""
    rows, cols = tl.arange(0, LP), tl.arange(0, DP)
    pointer = h_ptr + tl.program_id(0).to(tl.int64) * L * D + rows[:, None] * D + cols[None, :]
    inside = (rows < L)[:, None] & (cols < D)[None, :]
    h = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    x = normalised(h, scale, shift, cols, D)
    values = tl.sum(x * tl.load(weight + cols)[None, :], 1) + tl.load(bias)
    tl.store(out + tl.program_id(0), tl.sum(tl.where(rows < L, values, 0.0)))
