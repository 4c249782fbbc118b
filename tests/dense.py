"""Attention by way of the whole T×S matrix, in the dtype of its inputs: what a tolerance is derived from.

An implementation's error against the oracle may be at most twice the error of this, plus a rounding floor.
"""

import math

import jax.numpy as jnp
import numpy as np
import oracle
from jax import Array, lax


def attend(
    query,
    key,
    value,
    dtype,
    *,
    scale=None,
    precision=None,
    logits_scale=None,
    bias=None,
    alibi_slopes=None,
    logits_soft_cap=None,
    score_functions=(),
    sinks=None,
    dropout_keep=True,
    dropout_rate=0.0,
    **options,
) -> tuple[Array, Array]:
    """Output [B, T, N, Hv] in `dtype` and residual [B, T, N] in float32 (or float64), differentiable by JAX.

    Dots take `dtype` and accumulate in float32, the softmax is float32, and probabilities are rounded to `dtype`.

    Args:
        query: [B, T, N, H], converted to `dtype`, as are all three.
        key: [B, S, K, H].
        value: [B, S, K, Hv].
        dtype: Of the computation.
        scale: Number or scalar array; None: 1/sqrt(H).
        precision: Of the dots.
        logits_scale, bias, alibi_slopes, logits_soft_cap, score_functions, sinks: As for `oracle.attend`.
        dropout_keep, dropout_rate: Likewise.
        **options: Those of `oracle.kept`, not traced.

    Source: FlashAttention's own tests measure against twice the error of the dense computation.
    """
    q, k, v = (jnp.asarray(x, dtype) for x in (query, key, value))
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    wide = jnp.promote_types(dtype, jnp.float32)
    keep = oracle.kept(B, N, T, S, **options)
    rows, columns = keep.any(3), keep.reshape(B, K, N // K, T, S).any((2, 3))
    q, k, v = _only(rows, q), _only(columns, k), _only(columns, v)
    scale = 1 / math.sqrt(H) if scale is None else scale

    q = q.reshape(B, T, K, N // K, H)
    s = jnp.einsum("btkgh,bskh->bkgts", q, k, precision=precision, preferred_element_type=wide)
    s, keep = scale * s.reshape(B, N, T, S), jnp.asarray(keep)
    b, n, t, u = np.ogrid[:B, :N, :T, :S]

    def part(x, letters: str) -> Array:
        x = oracle.spread(jnp.asarray(x), letters)
        x = x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return jnp.where(keep, x, jnp.zeros_like(x))

    if logits_scale is not None:
        s = s * part(logits_scale, "BN")
    if bias is not None:
        keep = keep & (oracle.spread(jnp.asarray(bias), "BNTS") > oracle.LEAST)
        s = s + part(bias, "BNTS")
    if alibi_slopes is not None:
        offset = np.broadcast_to(options.get("query_offset", 0), (B,)).reshape(B, 1, 1, 1)
        s = s - part(alibi_slopes, "BN") * abs(t + offset - u)
    if logits_soft_cap is not None:
        s = logits_soft_cap * jnp.tanh(s / logits_soft_cap)
    for function in score_functions:
        parts = [part(x, letters) for x, letters in zip(function.operands, function.axes, strict=True)]
        s, *_ = function.formula(jnp.where(keep, s, 0), b, n, t, u, *parts)
    keep = keep & (s != -jnp.inf)

    m = lax.stop_gradient(jnp.max(s, -1, keepdims=True, initial=-1e30, where=keep))
    p = jnp.where(keep, jnp.exp(jnp.where(keep, s - m, 0)), 0)
    l = jnp.sum(p, -1, keepdims=True)  # noqa: E741
    empty = l == 0
    if sinks is not None:
        l = l + jnp.exp(jnp.asarray(sinks, wide).reshape(N, 1, 1) - jnp.where(empty, 0, m))  # noqa: E741
    l = jnp.where(empty, 1, l)  # noqa: E741
    p = jnp.where(dropout_keep, p / l / (1 - dropout_rate), 0).astype(dtype)
    out = jnp.einsum(
        "bkgts,bskh->btkgh", p.reshape(B, K, N // K, T, S), v, precision=precision, preferred_element_type=wide
    )
    lse = jnp.where(empty, -jnp.inf, m + jnp.log(l))
    return out.reshape(B, T, N, -1).astype(dtype), jnp.moveaxis(lse[..., 0], 1, 2)


def _only(taking_part: np.ndarray, x: Array) -> Array:
    """[B, L, heads, width] with 0 in place of rows that take no part, which `taking_part` [B, heads, L] tells."""
    return jnp.where(np.swapaxes(taking_part, 1, 2)[..., None], x, 0)
