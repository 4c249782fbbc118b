"""A forward kernel written by hand in the Triton language, through jax-triton: what Triton gives without Pallas.

Its blocks on the diagonal come last and masked, the longest tiles first; it is what Triton's own tutorial does.
"""

import jax
import jax_triton
import triton
import triton.language as tl
from jax import Array


@triton.jit
def _weigh(q, k, v, m, l, acc, scale2, rows, columns, S, masked: tl.constexpr):  # noqa: E741
    """The running softmax after some keys, k [H, block_k] and v [block_k, H]."""
    s2 = tl.dot(q, k) * scale2
    if masked:
        s2 = tl.where((columns[None, :] <= rows[:, None]) & (columns[None, :] < S), s2, float("-inf"))
    m_new = tl.maximum(m, tl.max(s2, 1))
    p = tl.exp2(s2 - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    return m_new, l * alpha + tl.sum(p, 1), acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, o_ptr, scale2: tl.constexpr, T: tl.constexpr, S: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr, is_causal: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head, of arrays [B, T, N, H] and [B, S, K, H]."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, n = tl.program_id(1) // N, tl.program_id(1) % N
    first = tile * block_q
    rows, columns, width = first + tl.arange(0, block_q), tl.arange(0, block_k), tl.arange(0, H)
    q_at = ((b * T + rows[:, None]) * N + n) * H + width[None, :]
    head = b * S * K + n // (N // K)
    q = tl.load(q_ptr + q_at, mask=rows[:, None] < T, other=0.0)
    m = tl.full((block_q,), float("-inf"), tl.float32)
    l = tl.zeros((block_q,), tl.float32)  # noqa: E741
    acc = tl.zeros((block_q, H), tl.float32)

    full_end = (first if is_causal else S) // block_k * block_k
    end = tl.minimum(first + block_q, S) if is_causal else S
    for start in range(0, full_end, block_k):
        keys = start + columns
        k = tl.load(k_ptr + (head + keys[None, :] * K) * H + width[:, None])
        v = tl.load(v_ptr + (head + keys[:, None] * K) * H + width[None, :])
        m, l, acc = _weigh(q, k, v, m, l, acc, scale2, rows, keys, S, False)  # noqa: E741
    for start in range(full_end, end, block_k):
        keys = start + columns
        k = tl.load(k_ptr + (head + keys[None, :] * K) * H + width[:, None], mask=keys[None, :] < S, other=0.0)
        v = tl.load(v_ptr + (head + keys[:, None] * K) * H + width[None, :], mask=keys[:, None] < S, other=0.0)
        last = rows if is_causal else rows * 0 + S
        m, l, acc = _weigh(q, k, v, m, l, acc, scale2, last, keys, S, True)  # noqa: E741
    tl.store(o_ptr + q_at, (acc / l[:, None]).to(o_ptr.dtype.element_ty), mask=rows[:, None] < T)


def attention(
    q: Array, k: Array, v: Array, *, scale: float, is_causal: bool, blocks: tuple[int, int, int, int],
    compute_capability: int | None = None,
) -> Array:  # fmt: skip
    """Output [B, T, N, H], without gradients.

    Args:
        q: bfloat16 or float16 [B, T, N, H], H a power of two.
        k, v: [B, S, K, H].
        scale: Of the scores.
        is_causal: Only with T = S.
        blocks: Queries and keys of a tile, warps, stages.
        compute_capability: Of an absent GPU to compile for; None: that of the current one.
    """
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    block_q, block_k, num_warps, num_stages = blocks
    return jax_triton.triton_call(
        q,
        k,
        v,
        kernel=_forward,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(triton.cdiv(T, block_q), B * N),
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=compute_capability,
        scale2=scale * 1.4426950408889634,
        **dict(T=T, S=S, N=N, K=K, H=H, block_q=block_q, block_k=block_k, is_causal=is_causal),
    )
