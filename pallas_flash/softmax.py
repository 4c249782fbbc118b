"""Online softmax (Milakov & Gimelshein, arXiv:1805.02867; equations of docs/algorithm.md).

Scores arrive raw, as products q·k; `c` = scale·log2(e) takes them to the base-2 domain inside the fused `fma_exp2`.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
MASKED = -1e30
"""Stands for -inf in scores and running maxima, as differences of it stay finite; real logits must be above it."""


class Elementary(NamedTuple):
    """Elementary functions that an implementation may have in hardware; the defaults are plain jnp.

    Attributes:
        exp2: 2^x.
        fma_exp2: 2^(a·b + c), fused.
    """

    exp2: Callable[[Array], Array] = jnp.exp2
    fma_exp2: Callable[[Array, ArrayLike, Array], Array] = lambda a, b, c: jnp.exp2(a * b + c)


PLAIN = Elementary()


def base2(scale: float | Array) -> tuple[float | Array, float | Array]:
    """A sign (1 or -1) for the query and the factor c >= 0 that takes the signed raw scores to base 2 (eq. 2).

    With c >= 0 the largest raw score of a row is its largest logit too.
    """
    traced = isinstance(scale, Array)
    sign = 1 - 2 * (scale < 0).astype(scale.dtype) if traced else math.copysign(1.0, scale)
    return sign, scale * sign * LOG2E


def signed(sign: float | Array, x: Array) -> Array:
    """`x` times a sign, exact in every dtype and free when the sign is statically 1."""
    return x if isinstance(sign, float) and sign == 1 else x * jnp.asarray(sign, x.dtype)


class Running(NamedTuple):
    """Softmax state: maximum `m`, sum `l` [..., rows] (base 2) and unnormalised output `acc` [..., rows, Hv]."""

    m: Array
    l: Array  # noqa: E741
    acc: Array


def start(rows: tuple[int, ...], width: int, dtype=jnp.float32) -> Running:
    """The state before the first block."""
    return Running(jnp.full(rows, MASKED, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, width), dtype))


def update(
    run: Running,
    s: Array,
    keep: Array | None,
    c: ArrayLike,
    weigh: Callable[[Array], Array],
    fast: Elementary = PLAIN,
) -> Running:
    """Takes in the raw scores `s` [..., rows, columns] of one more block (eqs. 5 to 9).

    Args:
        run: State so far.
        s: float32 [..., rows, columns], raw scores.
        keep: bool, broadcastable to `s`; None: all are kept.
        c: scale·log2(e), not negative.
        weigh: p ↦ p·v, [..., rows, Hv].
        fast: The implementation's elementary functions.
    """
    if keep is not None:
        s = jnp.where(keep, s, MASKED)
    # The result does not depend on m, so its derivative may be dropped.
    m = lax.stop_gradient(jnp.maximum(run.m, jnp.max(s, -1) * c))  # eq. 5
    p = fast.fma_exp2(s, c, -m[..., None])  # eq. 6
    if keep is not None:
        p = jnp.where(keep, p, 0.0)  # a row without keys so far has s = MASKED = m, and p would be 1
    alpha = fast.exp2(run.m - m)  # eq. 7
    l = run.l * alpha + jnp.sum(p, -1)  # noqa: E741  eq. 8
    return Running(m, l, run.acc * alpha[..., None] + weigh(p))  # eq. 9


def finish(run: Running) -> tuple[Array, Array]:
    """Output [..., rows, Hv] and natural log-sum-exp [..., rows] (eq. 10); 0 and -inf for a row that kept nothing."""
    empty = run.l == 0
    l = jnp.where(empty, 1.0, run.l)  # noqa: E741
    lse = jnp.where(empty, -jnp.inf, (run.m + jnp.log2(l)) * LN2)
    return jnp.where(empty[..., None], 0.0, run.acc * (1.0 / l)[..., None]), lse


def recompute(s: Array, keep: Array | None, c: ArrayLike, lse2: Array, fast: Elementary) -> Array:
    """The probabilities of raw scores `s`, given their rows' base-2 log-sum-exp, broadcastable to `s` (eq. 12)."""
    p = fast.fma_exp2(s, c, -lse2)
    return p if keep is None else jnp.where(keep, p, 0.0)


def d_score(p: Array, dp: Array, delta: Array, keep: Array | None) -> Array:
    """Cotangent of the logits from that of the probabilities (eq. 16)."""
    ds = p * (dp - delta)
    return ds if keep is None else jnp.where(keep, ds, 0.0)  # where nothing is kept, dp and delta may be NaN


def merge(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    """Combines attention over disjoint sets of keys into attention over their union (eq. 11).

    Args:
        *parts: Pairs of an output [*B, T, N, Hv], any floating dtype, and its log-sum-exp [*B, T, N], float32, natural
            logarithm, as returned by `flash_attention(..., return_residual=True)`. A log-sum-exp of -inf marks a row
            that attended to nothing.

    Returns:
        Output [*B, T, N, Hv] in the first output's dtype, and log-sum-exp [*B, T, N] in float32. Differentiable in all
        parts; associative and commutative up to rounding.

    Raises:
        ValueError: No parts were given.

    Source: FlashAttention-2 (arXiv:2307.08691), section 3.1, in log-sum-exp form.
    """
    if not parts:
        raise ValueError(
            "merge: expected at least one (output, log-sum-exp) pair, got none; pass e.g. merge((o1, lse1), (o2, lse2))"
        )
    outs, lses = zip(*parts, strict=True)
    stacked = jnp.stack(lses)
    top = lax.stop_gradient(jnp.max(stacked, 0))
    empty = top == -jnp.inf
    weights = jnp.where(stacked == -jnp.inf, 0.0, jnp.exp(stacked - jnp.where(empty, 0.0, top)))
    total = jnp.where(empty, 1.0, jnp.sum(weights, 0))
    out = functools.reduce(jnp.add, (o * (w / total)[..., None] for o, w in zip(outs, weights, strict=True)))
    return out.astype(outs[0].dtype), jnp.where(empty, -jnp.inf, top + jnp.log(total))
