"""Which bias do positions give? T5's, bucketed and learnable, as an array for `flash_attention(bias=...)`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from pallas_flash import arguments


def relative_position_bias(
    table: ArrayLike, queries: int, keys: int, *, bidirectional: bool = True, max_distance: int = 128, offset: int = 0
) -> Array:
    """A learned number for each head and bucket of distances between key and query.

    Args:
        table: [buckets, N], floating: one number for each bucket and head. Differentiable in reverse mode,
            reproducibly.
        queries: T, the number of queries.
        keys: S, the number of keys.
        bidirectional: Whether keys before and after a query have buckets of their own; else all keys after it share
            that of distance 0, for causal attention. Half of the buckets of a side are for single distances.
        max_distance: Distance from which on all keys of a side share the last bucket; between, buckets grow as powers.
        offset: Position of query 0 among the keys.

    Returns:
        [N, T, S], the dtype of `table`, to be passed as `bias`. It is as large as it looks; its gradient is summed over
        the batch inside the kernels.

    Raises:
        TypeError, ValueError: An argument is not as described.

    Source: Raffel et al., T5 (arXiv:1910.10683), section 2.1, and its published bucket function.
    """
    table = arguments.array("table", table, "floating")
    if table.ndim != 2 or table.shape[0] < 4 or table.shape[0] % 4:
        raise ValueError(
            f"table: expected shape [buckets, N] of a multiple of 4 buckets, got {table.shape}; T5 has 32 buckets"
        )
    for name, n in (("queries", queries), ("keys", keys)):
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"{name}: expected an int >= 1, got {n!r}; pass the number of them")
    for name, n in (("max_distance", max_distance), ("offset", offset)):
        if not isinstance(n, int) or isinstance(n, bool):
            raise TypeError(f"{name}: expected an int, got {arguments.describe(n)}; mark it static under jit")
    if max_distance <= table.shape[0]:
        raise ValueError(
            f"max_distance: expected more than {table.shape[0]} buckets, got {max_distance}; T5 takes 128 with 32"
        )
    distances = np.arange(1 - queries, keys) - offset  # of key and query, from the last query and the first key on
    buckets = _bucket(distances, table.shape[0], bidirectional, max_distance)
    one_hot = jax.nn.one_hot(buckets, table.shape[0], dtype=table.dtype)
    by_distance = jnp.einsum("db,bn->nd", one_hot, table, precision="highest")
    return _diagonals(queries, keys, by_distance)


def _bucket(distance: np.ndarray, buckets: int, bidirectional: bool, max_distance: int) -> np.ndarray:
    """T5's number of a bucket."""
    first = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first, distance = np.where(distance > 0, buckets, 0), np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    grown = np.log(np.maximum(distance, 1) / exact) / np.log(max_distance / exact) * (buckets - exact)
    return first + np.where(distance < exact, distance, np.minimum(exact + grown.astype(int), buckets - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _diagonals(T: int, S: int, x: Array) -> Array:
    """[N, T, S] whose diagonals are the entries of [N, T + S - 1]."""
    return x[:, np.arange(S) - np.arange(T)[:, None] + T - 1]


def _forward(T: int, S: int, x: Array):
    return _diagonals(T, S, x), None


def _backward(T: int, S: int, _, d: Array) -> tuple[Array]:
    """Sums of the diagonals: in rows of T + S that are read as rows of one more, they are columns."""
    rows = jnp.pad(d, ((0, 0), (0, 0), (T, 0))).reshape(len(d), -1)
    rows = jnp.pad(rows, ((0, 0), (0, T))).reshape(len(d), T, T + S + 1)
    return (jnp.sum(rows.astype(jnp.promote_types(d.dtype, jnp.float32)), 1)[:, 1 : T + S].astype(d.dtype),)


_diagonals.defvjp(_forward, _backward)
