"""The one comparison of all tests: against the oracle, with a tolerance derived from the dense computation."""

import dataclasses
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


def row_error(values: np.ndarray, reference: np.ndarray) -> float:
    """Largest error of a row relative to its norm, among the rows that are not small beside the largest."""
    norms = np.linalg.norm(reference, axis=-1)
    counted = norms > 0.02 * np.max(norms, initial=0.0)
    return float(np.max(np.linalg.norm(values - reference, axis=-1)[counted] / norms[counted], initial=0.0))


@dataclasses.dataclass(frozen=True)
class Expected:
    """A tensor by the oracle, and what is tolerated: the largest error, and the largest of a row relative to its norm.

    The second sees what the first does not: in causal attention the first rows are much larger than the others.
    """

    values: np.ndarray
    absolute: float
    by_row: float


@functools.cache
def expected(case: Case, precision: str | None) -> dict[str, Expected]:
    """What is right, and tolerances from the error of the dense computation at that precision."""
    arrays = inputs(case)
    exact, options = [np.asarray(x, np.float64) for x in arrays], case.options(for_oracle=True)
    right = [*oracle.attend(*exact[:3], **options), *oracle.gradients(*exact, **options)[:3]]
    by_matrix = evaluate(functools.partial(dense.attend, dtype=case.dtype, precision=precision, **options), arrays)
    finite = np.isfinite(right[1])
    exponent = np.max(np.abs(right[1][finite]), initial=0.0)
    found = {}
    for name, ref, other in zip(NAMES, right, by_matrix, strict=True):
        if name == "residual":  # float32 whatever the inputs; and a row is one number
            limit = tolerance(error(other[finite], ref[finite]), ref[finite], "float32")
            found[name] = Expected(ref, limit, np.inf)
        else:
            limit = tolerance(error(other, ref), ref, case.dtype, exponent)
            # Eight times the rule for dq and dk: their terms cancel, so that the worst rows of two right computations
            # differ by chance. Measured up to 4.4 times the rule; a row that is missing is off by 1.
            by_row = tolerance(row_error(other, ref), np.ones(1), case.dtype, exponent)
            by_row *= 8 if name in ("dq", "dk") else 1
            found[name] = Expected(ref, limit, by_row)
    return found


def check(case: Case, attention: Callable, precision: str | None = "highest") -> None:
    """Compares all five tensors; a row that attends to nothing must give exactly 0 and -inf."""
    right = expected(case, precision)
    found = dict(zip(NAMES, evaluate(attention, inputs(case)), strict=True))
    empty = np.isneginf(right["residual"].values)
    assert np.array_equal(np.isneginf(found["residual"]), empty), "rows that attend to nothing"
    assert not found["out"][empty].any(), "outputs of rows that attend to nothing"
    for name, ours in found.items():
        ref = right[name]
        finite = np.isfinite(ref.values)
        off = error(ours[finite], ref.values[finite])
        assert off <= ref.absolute, f"{name}: error {off:.3g} exceeds {ref.absolute:.3g}"
        if name != "residual":
            off = row_error(ours, ref.values)
            assert off <= ref.by_row, f"{name}: a row is off by {off:.3g} of its norm, {ref.by_row:.3g} is tolerated"
