"""The kernels behind `nn/fused`, in Triton. Shapes: h (N, L, D), padded to LP and DP; a head's half to HP.

Registers are dearer than reads that the cache serves, so h is read again at the end instead of being kept.
"""

import triton
import triton.language as tl

__all__ = ["attend", "attend_first", "transform"]


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
def attended(scores, v, rows, L, FULL: tl.constexpr):
    """softmax(scores) v, scores (LP, LP) in units of log 2, of L keys."""
    if not FULL:
        scores = tl.where((rows < L)[None, :], scores, float("-inf"))
    weight = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return tl.dot(weight.to(v.dtype), v) / tl.sum(weight, 1)[:, None]


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
        wv = tl.load(value + head * DP * 2 * HP + cols[:, None] * (2 * HP) + whole[None, :])
        found = attended(scores, tl.dot(x, wv).to(h_ptr.dtype.element_ty), rows, L, FULL)
        wo = tl.load(out + head * 2 * HP * DP + whole[:, None] * DP + cols[None, :])
        total = tl.dot(found.to(h_ptr.dtype.element_ty), wo, total)
    h = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    h = h + total * tl.load(gate + cols)[None, :]
    tl.store(pointer, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def attend_first(
    h_ptr, embedding, z_ptr, token_ptr, row_ptr, place_ptr, context, candidate, gate, out, first, count, L, D,
    H: tl.constexpr, HP: tl.constexpr, LP: tl.constexpr, DP: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The first block's attention where sequences differ from a context in one token: h <- e + gate * Attention(LN(e)).

    context (B, 3, H, L, 2 HP) holds queries, keys and values of the contexts, candidate (N, 3, H, 2 HP) those of the
    changed tokens; row and place say which context, and where in it.
    """
    rows, cols, whole = tl.arange(0, LP), tl.arange(0, DP), tl.arange(0, 2 * HP)
    number = tl.program_id(0).to(tl.int64)
    which = (first + number) // count
    row, place = tl.load(row_ptr + which), tl.load(place_ptr + which)
    changed = (rows == place)[:, None]
    inside = (rows < L)[:, None] & (cols < D)[None, :]
    total = tl.zeros((LP, DP), tl.float32)
    shared = rows[:, None] * (2 * HP) + whole[None, :]
    for head in range(H):
        at = context + (row * 3 * H + head) * L * 2 * HP + shared
        mine = candidate + (number * 3 * H + head) * 2 * HP + whole
        q = tl.load(at, mask=(rows < L)[:, None], other=0.0)
        q = tl.where(changed, tl.load(mine)[None, :], q)
        k = tl.load(at + H * L * 2 * HP, mask=(rows < L)[:, None], other=0.0)
        k = tl.where(changed, tl.load(mine + H * 2 * HP)[None, :], k)
        v = tl.load(at + 2 * H * L * 2 * HP, mask=(rows < L)[:, None], other=0.0)
        v = tl.where(changed, tl.load(mine + 2 * H * 2 * HP)[None, :], v)
        found = attended(tl.dot(q, tl.trans(k)), v, rows, L, FULL)
        wo = tl.load(out + head * 2 * HP * DP + whole[:, None] * DP + cols[None, :])
        total = tl.dot(found.to(h_ptr.dtype.element_ty), wo, total)
    token = tl.load(z_ptr + row * L + rows, mask=rows < L, other=0)
    token = tl.where(rows == place, tl.load(token_ptr + first + number), token)
    h = tl.load(embedding + token[:, None] * D + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    h = h + total * tl.load(gate + cols)[None, :]
    pointer = h_ptr + number * L * D + rows[:, None] * D + cols[None, :]
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
    h_ptr, scale, shift, gate, first, first_bias, second, second_bias, M, D, norm_scale, norm_shift, head, values,
    HIDDEN: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, DP: tl.constexpr, FAST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """h <- h + gate * MLP(LN(h)) of a tile of tokens; after the last block head(LN(h)) of each token instead."""
    rows, cols, units = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM), tl.arange(0, DP), tl.arange(0, C)
    pointer = h_ptr + rows[:, None] * D + cols[None, :]
    inside = (rows < M)[:, None] & (cols < D)[None, :]
    h = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    x = normalised(h, scale, shift, cols, D).to(h_ptr.dtype.element_ty)
    total = tl.zeros((BM, DP), tl.float32)
    for start in range(0, HIDDEN, C):
        w = tl.load(first + cols[:, None] * HIDDEN + (start + units)[None, :])
        u = gelu(tl.dot(x, w) + tl.load(first_bias + start + units)[None, :], FAST)
        w = tl.load(second + (start + units)[:, None] * DP + cols[None, :])
        total = tl.dot(u.to(h_ptr.dtype.element_ty), w, total)
    h = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    h = h + (total + tl.load(second_bias + cols)[None, :]) * tl.load(gate + cols)[None, :]
    if LAST:
        x = normalised(h, norm_scale, norm_shift, cols, D)
        tl.store(values + rows, tl.sum(x * tl.load(head + cols)[None, :], 1), mask=rows < M)
    else:
        tl.store(pointer, h.to(h_ptr.dtype.element_ty), mask=inside)
