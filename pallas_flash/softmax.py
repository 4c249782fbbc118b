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

from pallas_flash.elementary import PLAIN, Elementary

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
LOWEST = -(2.0**27)
"""Where running maxima start, base 2: a row whose logits are all far below it counts as one that kept nothing.

Products near it are rounded to multiples of 8, so that a maximum and the fused exponent, which is not rounded, differ
by at most 4 from LOWEST up to -LOWEST: weights stay below 2¹², finite in float16 too.
"""
SLACK = 8.0
"""How far, in base 2, scores may pass a running maximum before it follows them: weights stay below 2⁸, and where no
maximum of a tile moved its output need not be rescaled (FlashAttention-4)."""
TINY = 1e-37
"""Stands for a scale of 0: the products with it vanish beside any other logit, and its product with -inf is -inf."""


def base2(scale: float | Array) -> tuple[float | Array, float | Array]:
    """A sign (1 or -1) for the query and the factor c > 0 that takes the signed raw scores to base 2 (eq. 2).

    With c > 0 the largest raw score of a row is its largest logit too.
    """
    if isinstance(scale, Array):
        sign = 1 - 2 * (scale < 0).astype(scale.dtype)
        return sign, jnp.maximum(scale * sign * LOG2E, TINY)
    sign = math.copysign(1.0, scale)
    return sign, max(scale * sign * LOG2E, TINY)


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
    return Running(jnp.full(rows, LOWEST, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, width), dtype))


def by_row(x: Array, like: Array) -> Array:
    """`x` [..., rows], repeated to the shape of `like` [..., rows, columns]."""
    return lax.broadcast_in_dim(x, like.shape, range(x.ndim))


def masked(s: Array, keep: Array | None) -> Array:
    """The scores with -inf where they do not count, whose weight is exactly 0; `keep` None: all count."""
    return s if keep is None else jnp.where(keep, s, -jnp.inf)


def advance(
    m: Array,
    l: Array,  # noqa: E741
    s: Array,
    c: ArrayLike,
    fast: Elementary = PLAIN,
) -> tuple[Array, Array, Array, Array]:
    """Takes in the raw scores of one more block (eqs. 5 to 8): all of `update` but the output.

    Args:
        m: float32 [..., rows], maximum so far, base 2, finite.
        l: float32 [..., rows], sum so far.
        s: float32 [..., rows, columns], raw scores, -inf where they do not count.
        c: scale·log2(e), positive.
        fast: The implementation's elementary functions.

    Returns:
        m, l, the weights p [..., rows, columns], and alpha [..., rows] by which the output so far shrinks.
    """
    # The result does not depend on m, so its derivative may be dropped.
    highest = jnp.max(s, -1) * c
    top = fast.constant(jnp.where(highest > m + SLACK, highest, m))  # eq. 5
    p = fast.fma_exp2(s, c, -by_row(top, s))  # eq. 6
    alpha = fast.exp2(m - top)  # eq. 7
    return top, l * by_row(alpha, l) + fast.sums(p), p, alpha  # eq. 8


def update(run: Running, s: Array, c: ArrayLike, weigh: Callable[[Array], Array], fast: Elementary = PLAIN) -> Running:
    """`advance`, and the output with it (eq. 9); `weigh` is p ↦ p·v, [..., rows, Hv]."""
    m, l, p, alpha = advance(run.m, run.l, s, c, fast)  # noqa: E741
    return Running(m, l, run.acc * by_row(alpha, run.acc) + weigh(p))  # eq. 9


def finish(run: Running, sink: Array | None = None, gain: float = 1.0, fast: Elementary = PLAIN) -> tuple[Array, Array]:
    """Output [..., rows, Hv] and natural log-sum-exp [..., rows] (eq. 10); 0 and -inf for a row that kept nothing.

    `sink` is a logit that joins the denominator of rows that kept something (eq. 30), `gain` what weights that were not
    dropped count for (eq. 32).
    """
    m, l, acc = run  # noqa: E741
    lost = l == 0  # rows that kept nothing, or whose logits are too large for float32, of which the result is NaN
    empty = lost & (m == LOWEST)
    if sink is not None:
        top = fast.constant(jnp.maximum(m, sink * LOG2E))
        shrink = fast.exp2(m - top)
        m, l, acc = top, l * shrink + fast.exp2(sink * LOG2E - top), acc * by_row(shrink, acc)  # noqa: E741
    l = jnp.where(empty, 1.0, jnp.where(lost, jnp.nan, l))  # noqa: E741
    lse = jnp.where(empty, -jnp.inf, (m + jnp.log2(l)) * LN2)
    return jnp.where(by_row(empty, acc), 0.0, acc * by_row(gain / l, acc)), lse


def d_sinks(sinks: Array, lse: Array, delta: Array) -> Array:
    """Gradient of the sinks [1, N, 1, 1] from log-sum-exp and delta [B, N, T] (eq. 31)."""
    p = jnp.exp(sinks[..., 0] - jnp.where(lse == -jnp.inf, jnp.inf, lse))
    return -jnp.sum(jnp.where(p > 0, p * delta, 0.0), (0, 2)).reshape(sinks.shape)


def base2_lse(lse: Array) -> Array:
    """The log-sum-exp in base 2, finite: 0 for a row that kept nothing, whose weights are 0 whatever it is."""
    return jnp.where(lse == -jnp.inf, 0.0, lse * LOG2E)


def recompute(s: Array, c: ArrayLike, lse2: Array, fast: Elementary = PLAIN) -> Array:
    """The probabilities of raw scores `s`, given their rows' base-2 log-sum-exp, broadcastable to `s` (eq. 12)."""
    return fast.fma_exp2(s, c, -lse2)


def d_score(p: Array, dp: Array, delta: Array, guarded: bool = False) -> Array:
    """Cotangent of the logits from that of the probabilities (eq. 16); `guarded` if it may be NaN where p is 0."""
    ds = p * (dp - delta)
    return jnp.where(p > 0, ds, 0.0) if guarded else ds


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
