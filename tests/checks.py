"""The one comparison of all tests: against the oracle, with a tolerance derived from the dense computation."""

import functools
from collections.abc import Callable

import dense
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cases import Case

from pallas_flash.testing import error, tolerance

NAMES = ("out", "residual", "dq", "dk", "dv")


def inputs(case: Case) -> list[jax.Array]:
    """query, key, value, d_out in the case's dtype, and d_residual in float32 (0 where the oracle's row is empty)."""
    arrays = case.arrays()
    rounded = [jnp.asarray(arrays[name], case.dtype) for name in ("query", "key", "value", "d_out")]
    return [*rounded, jnp.asarray(arrays["d_residual"])]


def evaluator(attention: Callable) -> Callable[..., tuple[jax.Array, ...]]:
    """Of `inputs`: out, residual, dq, dk and dv of `attention(query, key, value) -> out, residual`, in one trace."""

    @jax.jit
    def run(query, key, value, d_out, d_residual):
        (out, residual), vjp = jax.vjp(attention, query, key, value)
        return out, residual, *vjp((d_out, jnp.where(jnp.isfinite(residual), d_residual, 0)))

    return run


def evaluate(attention: Callable, arrays: list[jax.Array]) -> list[np.ndarray]:
    """The results of `evaluator`, in float64."""
    return [np.asarray(x, np.float64) for x in evaluator(attention)(*arrays)]


@functools.cache
def expected(case: Case, precision: str | None = "highest") -> tuple[list[np.ndarray], list[float]]:
    """What is right by the oracle, and the errors that are tolerated."""
    arrays = inputs(case)
    exact = [np.asarray(x, np.float64) for x in arrays]
    options = case.options()
    right = [*oracle.attend(*exact[:3], **options), *oracle.gradients(*exact, **options)[:3]]
    attention = functools.partial(dense.attend, dtype=case.dtype, precision=precision, **options)
    finite = [np.where(np.isfinite(x), x, 0) for x in right]
    errors = [
        error(np.where(np.isfinite(x), x, 0), ref) for x, ref in zip(evaluate(attention, arrays), finite, strict=True)
    ]
    # The residual is float32 whatever the inputs, so its floor is too.
    dtypes = [case.dtype, "float32", *[case.dtype] * 3]
    largest = np.max(np.abs(finite[1]), initial=0.0)
    exponents = [largest, 0.0, *[largest] * 3]
    return right, [tolerance(*each) for each in zip(errors, finite, dtypes, exponents, strict=True)]


def check(case: Case, attention: Callable, precision: str | None = "highest") -> None:
    """Compares all five tensors; a row that attends to nothing must give exactly 0 and -inf."""
    right, tolerated = expected(case, precision)
    found = evaluate(attention, inputs(case))
    assert np.array_equal(np.isneginf(found[1]), np.isneginf(right[1])), "rows that attend to nothing"
    assert not found[0][np.isneginf(right[1])].any(), "outputs of rows that attend to nothing"
    for name, ours, ref, limit in zip(NAMES, found, right, tolerated, strict=True):
        finite = np.isfinite(ref)
        off = error(ours[finite], ref[finite])
        assert off <= limit, (
            f"{name}: error {off:.3g} exceeds {limit:.3g}, largest value {np.max(np.abs(ref[finite])):.3g}"
        )
