"""Where am I? The global indices of the scores that a piece of code holds."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_flash.elementary import PLAIN, Elementary


class Tile(NamedTuple):
    """Query and key index of each score of a tile, as two arrays that broadcast to the tile's shape.

    Because a tile carries its indices, one formula for a mask or a score serves any block size and both orientations.

    Attributes:
        q_ids: int32, [block_q, 1], or [1, block_q] in a transposed tile. Index of the query in its sequence.
        k_ids: int32, [1, block_k], or [block_k, 1] in a transposed tile. Index of the key in its sequence.
        batch: int32, broadcastable to the tile: batch entry, the batch axes folded into one.
        head: int32, broadcastable to the tile: query head.
        read: Of an array, [B or 1, N or 1, T or 1, S or 1] or a reference to one: its part for this tile, broadcastable
            to it. Inside a kernel it loads.
        fast: The implementation's elementary functions, for example `tile.fast.tanh`.
    """

    q_ids: Array
    k_ids: Array
    batch: Any = 0
    head: Any = 0
    read: Callable[[Any], Array] = lambda array: array
    fast: Elementary = PLAIN

    @classmethod
    def at(cls, q_start, block_q: int, k_start, block_k: int, transposed: bool = False) -> "Tile":
        """The tile of `block_q` queries from `q_start` and `block_k` keys from `k_start`."""
        q_axis = int(transposed)
        return cls(q_start + indices(block_q, q_axis), k_start + indices(block_k, 1 - q_axis))

    def distances(self) -> Array:
        """Index of the key minus that of the query, of each score: float32, exact below 2²⁴."""
        return self.k_ids.astype(jnp.float32) - self.q_ids.astype(jnp.float32)

    def groups(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """uint32: which 16 queries an index lies in, its three lowest bits and bit 3; which 32 keys, … bits 3 and 4."""
        q, k = (ids.astype(jnp.uint32) for ids in (self.q_ids, self.k_ids))
        eight = np.uint32(8)
        return (q >> np.uint32(4), q % eight, q & eight), (k >> np.uint32(5), k % eight, k & eight, k & np.uint32(16))


EXAMPLE = 16
"""Queries and keys of an example."""


def example() -> Tile:
    """A tile to try functions on, which reads zeros."""

    def read(array) -> Array:
        return jnp.zeros([EXAMPLE if n > 1 else 1 for n in array.shape[2:]], array.dtype)

    zero = jnp.int32(0)
    return Tile.at(0, EXAMPLE, 0, EXAMPLE)._replace(batch=zero, head=zero, read=read)


def indices(size: int, axis: int) -> Array:
    """int32 0 … size-1 along `axis` of a 2-D array, the other axis being 1."""
    shape = (size, 1) if axis == 0 else (1, size)
    return lax.broadcasted_iota(jnp.int32, shape, axis)
