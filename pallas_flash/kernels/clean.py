"""What takes part at all? What is stored elsewhere, NaN included, counts as 0 and never reaches a result."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_flash import masks
from pallas_flash.masks import Cells
from pallas_flash.problem import Problem


def queries(problem: Problem, x: Array, axis: int = 1) -> Array:
    """An array over queries along `axis`, and the batch, with 0 where one takes no part, whatever it holds there."""
    return _clean(problem, x, 0, axis)


def keys(problem: Problem, x: Array) -> Array:
    """[B, S, K, *] with 0 where a key takes no part, whatever it holds there."""
    return _clean(problem, x, 1, 1)


def _clean(problem: Problem, x: Array, side: int, axis: int) -> Array:
    def per_batch(leaf: Array) -> Array:
        return leaf.reshape(-1, *[1] * (x.ndim - 1)) if leaf.ndim == 1 else leaf

    inside = masks.used(jax.tree.map(per_batch, problem.mask), problem.T, problem.S)[side]
    part = problem.mask.participants(Cells(problem.B, problem.N, problem.T, problem.S, 128, 128))[side]
    if not inside.is_whole(x.shape[axis]):
        x = jnp.where(inside.holds(lax.broadcasted_iota(jnp.int32, (1, *x.shape[1:]), axis)), x, 0)
    if part is not None:
        shape = [1] * x.ndim
        shape[0], shape[axis] = part.shape
        x = jnp.where(part.reshape(shape), x, 0)
    return x
