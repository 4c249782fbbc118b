"""Is it right? Comparison with `jax.nn.dot_product_attention`, with tolerances that are derived, not chosen."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_flash.api import flash_attention


class Comparison(NamedTuple):
    """Error of one tensor.

    Attributes:
        name: "out", "dq", "dk" or "dv".
        error: Largest absolute difference from the float64 reference.
        tolerance: What `error` may be; see `tolerance`.
    """

    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


def tolerance(dense_error: float, reference: np.ndarray, dtype, exponent: float = 0.0) -> float:
    """Twice the error of the dense computation in the same dtype, plus a rounding floor.

    The floor is 4 epsilons of `dtype`, relative to the largest right value. Large logits add to it: probabilities are
    powers whose float32 exponents, and the log-sum-exp saved for the backward pass, are rounded to `exponent` epsilons.

    Args:
        dense_error: Largest absolute error of the dense computation.
        reference: float64, the right values.
        dtype: Of the inputs.
        exponent: Largest magnitude of the log-sum-exp.
    """
    relative = 4 * float(jnp.finfo(dtype).eps) + exponent * float(jnp.finfo(jnp.float32).eps)
    return 2 * dense_error + relative * float(np.max(np.abs(reference), initial=0.0))


def error(value: ArrayLike, reference: np.ndarray) -> float:
    """Largest absolute difference; NaN if there is a NaN."""
    return float(np.max(np.abs(np.asarray(value, np.float64) - reference), initial=0.0))


def compare(
    query, key, value, d_out, *, implementation=None, plan=None, interpret=False, **options
) -> list[Comparison]:
    """Compares `flash_attention` with `jax.nn.dot_product_attention`, output and gradients.

    The reference is jax.nn in float64 (whose softmax stays float32, so that against float32 inputs it has some rounding
    of its own); the tolerance comes from the error of jax.nn in the inputs' dtype. Every row must have a key to attend
    to: otherwise the two differ by design.

    Args:
        query, key, value: As for `flash_attention`, with one batch axis and Hv = H.
        d_out: [B, T, N, H], cotangent of the output.
        implementation, plan, interpret: As for `flash_attention`.
        **options: Keywords that both functions take, for example `is_causal`.

    Returns:
        A `Comparison` for each of out, dq, dk and dv.
    """

    def flash(q, k, v):
        return flash_attention(q, k, v, implementation=implementation, plan=plan, interpret=interpret, **options)

    def dense(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, **options)

    arrays = query, key, value, d_out
    ours, theirs = ([np.asarray(x, np.float64) for x in _with_gradients(f, *arrays)] for f in (flash, dense))
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        right = [np.asarray(x) for x in _with_gradients(dense, *exact)]
        _, lse = jax.nn.dot_product_attention(*exact[:3], return_residual=True, **options)
        exponent = float(jnp.max(jnp.abs(lse), initial=0.0))
    return [
        Comparison(name, error(our, ref), tolerance(error(their, ref), ref, query.dtype, exponent))
        for name, our, their, ref in zip(("out", "dq", "dk", "dv"), ours, theirs, right, strict=True)
    ]


def _with_gradients(f: Callable, query, key, value, d_out):
    @jax.jit
    def run(query, key, value, d_out):
        out, vjp = jax.vjp(f, query, key, value)
        return out, *vjp(d_out)

    return run(query, key, value, d_out)
