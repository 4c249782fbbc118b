"""FlashAttention-2 and nothing else, to be read from top to bottom.

Attention is `softmax(scale * q @ k.T) @ v`, and the matrix of scores is the trouble: T x S numbers that nobody wants to
store. FlashAttention cuts the scores into tiles. A tile is made, used and forgotten by one program of a kernel: forward
keeps a running softmax of its query rows, backward makes the tile again from one stored number a row. Equation numbers
are those of docs/algorithm.md. The library adds to this what users need (any sizes and dtypes, GQA, masks, speed).

Run it: python examples/minimal_flash.py     (without a GPU, Pallas interprets the kernels on the CPU)
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

BLOCK_Q, BLOCK_K = 32, 16  # a tile of scores is 32 queries by 16 keys; T and S must be multiples of these
INTERPRET = jax.default_backend() != "gpu"
dot = functools.partial(jnp.dot, precision="highest")  # float32 in earnest, no TF32


def scores2(q, k, i, j, causal):
    """Tile (i, j) of the scores in the base-2 domain (eq. 1 and 2): float32 [BLOCK_Q, BLOCK_K], -inf where masked."""
    s2 = dot(q, k.T) * (math.log2(math.e) / math.sqrt(q.shape[-1]))
    q_ids, k_ids = i * BLOCK_Q + jnp.arange(BLOCK_Q), j * BLOCK_K + jnp.arange(BLOCK_K)
    return jnp.where(k_ids[None, :] <= q_ids[:, None], s2, -jnp.inf) if causal else s2  # eq. 21 with hi = 0


def key_blocks(i, S, causal):
    """How many key blocks query block i visits: if causal, none beyond the diagonal (eq. 25)."""
    return jnp.minimum(pl.cdiv((i + 1) * BLOCK_Q, BLOCK_K), S // BLOCK_K) if causal else S // BLOCK_K


def forward_kernel(q_ref, k_ref, v_ref, o_ref, lse2_ref, *, causal):
    """One program: one query block of one head, against all the keys it may see."""
    i, q = pl.program_id(0), q_ref[...]

    def step(j, running):
        m, l, acc = running  # noqa: E741
        at = pl.ds(j * BLOCK_K, BLOCK_K)
        s2 = scores2(q, k_ref[at, :], i, j, causal)
        m_new = jnp.maximum(m, s2.max(axis=1))  # eq. 5; never -inf: key 0, in the first block, is masked for no row
        p = jnp.exp2(s2 - m_new[:, None])  # eq. 6
        alpha = jnp.exp2(m - m_new)  # eq. 7: what was summed relative to m is now relative to m_new
        return m_new, alpha * l + p.sum(axis=1), alpha[:, None] * acc + dot(p, v_ref[at, :])  # eq. 8 and 9

    start = jnp.full(BLOCK_Q, -jnp.inf), jnp.zeros(BLOCK_Q), jnp.zeros(o_ref.shape)
    m, l, acc = jax.lax.fori_loop(0, key_blocks(i, k_ref.shape[0], causal), step, start)  # noqa: E741
    o_ref[...] = acc / l[:, None]  # eq. 10
    lse2_ref[...] = m + jnp.log2(l)  # eq. 10, left in base 2: the one number a row that backward needs


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse2_ref, delta_ref, dq_ref, *, causal):
    """The same walk as forward; p comes ready normalised from the log-sum-exp, so no running state is needed."""
    i, q, do, lse2, delta = pl.program_id(0), q_ref[...], do_ref[...], lse2_ref[...], delta_ref[...]

    def step(j, dq):
        at = pl.ds(j * BLOCK_K, BLOCK_K)
        k = k_ref[at, :]
        p = jnp.exp2(scores2(q, k, i, j, causal) - lse2[:, None])  # eq. 12
        ds = p * (dot(do, v_ref[at, :].T) - delta[:, None])  # eq. 14 and 16
        return dq + dot(ds, k)

    dq = jax.lax.fori_loop(0, key_blocks(i, k_ref.shape[0], causal), step, jnp.zeros(q.shape))
    dq_ref[...] = dq / math.sqrt(q.shape[-1])  # eq. 17


def dkv_kernel(q_ref, k_ref, v_ref, do_ref, lse2_ref, delta_ref, dk_ref, dv_ref, *, causal):
    """One program: one key block, against all the queries that see it. No two programs ever write the same number."""
    j, k, v = pl.program_id(0), k_ref[...], v_ref[...]

    def step(i, gradients):
        dk, dv = gradients
        at = pl.ds(i * BLOCK_Q, BLOCK_Q)
        q, do = q_ref[at, :], do_ref[at, :]
        p = jnp.exp2(scores2(q, k, i, j, causal) - lse2_ref[at][:, None])  # eq. 12
        ds = p * (dot(do, v.T) - delta_ref[at][:, None])  # eq. 14 and 16
        return dk + dot(ds.T, q), dv + dot(p.T, do)  # eq. 18 and 13

    first = j * BLOCK_K // BLOCK_Q if causal else 0  # eq. 25 from the keys' side: the first queries to see key block j
    zeros = jnp.zeros(k.shape), jnp.zeros(v.shape)
    dk, dv = jax.lax.fori_loop(first, q_ref.shape[0] // BLOCK_Q, step, zeros)
    dk_ref[...], dv_ref[...] = dk / math.sqrt(k.shape[-1]), dv


def tile(array, size=None):
    """What program (i, n) sees of `array`, [T, N, H] or [T, N]: of head n, block i of `size` rows, or else all rows."""
    rows, where = (array.shape[0], lambda i, n: (0, n, 0)) if size is None else (size, lambda i, n: (i, n, 0))
    return pl.BlockSpec((rows, None, *array.shape[2:]), lambda i, n: where(i, n)[: array.ndim])


def forward(q, k, v, causal):
    """The output, and what to keep for backward: O(T + S) numbers, where the scores would be T x S."""
    o, lse2 = jax.ShapeDtypeStruct((*q.shape[:2], v.shape[2]), q.dtype), jax.ShapeDtypeStruct(q.shape[:2], q.dtype)
    o, lse2 = pl.pallas_call(
        functools.partial(forward_kernel, causal=causal),
        grid=(q.shape[0] // BLOCK_Q, q.shape[1]),
        in_specs=[tile(q, BLOCK_Q), tile(k), tile(v)],
        out_specs=[tile(o, BLOCK_Q), tile(lse2, BLOCK_Q)],
        out_shape=[o, lse2],
        interpret=INTERPRET,
    )(q, k, v)
    return o, (q, k, v, o, lse2)


def backward(causal, residuals, do):
    """Cotangents of q, k and v, given that of the output."""
    q, k, v, o, lse2 = residuals
    T, S, N, delta = q.shape[0], k.shape[0], q.shape[1], (o * do).sum(axis=-1)  # eq. 15
    (dq,) = pl.pallas_call(
        functools.partial(dq_kernel, causal=causal),
        grid=(T // BLOCK_Q, N),
        in_specs=[tile(q, BLOCK_Q), tile(k), tile(v), *(tile(x, BLOCK_Q) for x in (do, lse2, delta))],
        out_specs=[tile(q, BLOCK_Q)],
        out_shape=[q],
        interpret=INTERPRET,
    )(q, k, v, do, lse2, delta)
    dk, dv = pl.pallas_call(
        functools.partial(dkv_kernel, causal=causal),
        grid=(S // BLOCK_K, N),
        in_specs=[tile(q), tile(k, BLOCK_K), tile(v, BLOCK_K), tile(do), tile(lse2), tile(delta)],
        out_specs=[tile(k, BLOCK_K), tile(v, BLOCK_K)],
        out_shape=[k, v],
        interpret=INTERPRET,
    )(q, k, v, do, lse2, delta)
    return dq, dk, dv


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def flash(q, k, v, causal=False):
    """Attention of q [T, N, H] over k [S, N, H] and v [S, N, Hv], float32, to [T, N, Hv]; `jax.vmap` it for a batch."""
    return forward(q, k, v, causal)[0]


flash.defvjp(forward, backward)


def dense(q, k, v, causal=False):
    """The same, by the book: eq. 1 and 3 with the whole T x S matrix in memory."""
    s = jnp.einsum("tnh,snh->nts", q, k, precision="highest") / math.sqrt(q.shape[-1])
    s = jnp.where(jnp.tri(*s.shape[1:], dtype=bool), s, -jnp.inf) if causal else s
    return jnp.einsum("nts,snh->tnh", jax.nn.softmax(s), v, precision="highest")


if __name__ == "__main__":
    q, k, v, do = (jax.random.normal(jax.random.key(n), (T, 2, 64)) for n, T in enumerate((256, 192, 192, 256)))
    for causal in (False, True):
        o, vjp = jax.vjp(functools.partial(flash, causal=causal), q, k, v)
        o_dense, vjp_dense = jax.vjp(functools.partial(dense, causal=causal), q, k, v)
        for name, x, y in zip(("o", "dq", "dk", "dv"), (o, *vjp(do)), (o_dense, *vjp_dense(do)), strict=True):
            print(f"{causal=!s:5}  {name:2}  largest value {abs(y).max():.3f}  largest error {abs(x - y).max():.1e}")
            assert abs(x - y).max() < 1e-5 * abs(y).max(), "more than some hundred roundings of float32 apart"
