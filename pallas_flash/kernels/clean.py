"""What takes part at all? What is stored elsewhere, NaN included, counts as 0 and never reaches a result."""

import jax.numpy as jnp
from jax import Array

from pallas_flash import lists
from pallas_flash.problem import Problem


def queries(problem: Problem, x: Array, axis: int = 1) -> Array:
    """An array over queries along `axis`, and the batch, with 0 where one takes no part, whatever it holds there."""
    return _clean(lists.used(problem)[0], x, axis)


def keys(problem: Problem, x: Array) -> Array:
    """[B, S, K, *] with 0 where a key takes no part, whatever it holds there."""
    return _clean(lists.used(problem)[1], x, 1)


def _clean(part: Array | None, x: Array, axis: int) -> Array:
    if part is None:
        return x
    shape = [1] * x.ndim
    shape[0], shape[axis] = part.shape
    return jnp.where(part.reshape(shape), x, 0)
