"""Where are the scores of a tile, and what do functions of them read? `Tile`s of values in Mosaic's registers."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.elementary import Elementary, differentiable
from pallas_flash.kernels.mosaic_gpu import ptx
from pallas_flash.kernels.mosaic_gpu.pipeline import COLUMN, ROW, TILE
from pallas_flash.tile import Tile

FAST = Elementary(constant=lambda x: x, tanh=differentiable(jnp.tanh), product=ptx.product)
"""The plain functions: with `approx_math` they become the GPU's, fused."""


def _ids(shape: tuple[int, int], axis: int, start) -> Array:
    """Indices from `start` on, along an axis of a tile."""
    vector = start + plgpu.broadcasted_iota(jnp.int32, (shape[axis],), 0, layout=(ROW, COLUMN)[axis])
    return lax.broadcast_in_dim(vector, shape, [axis])


class _Tile(Tile):
    """A tile whose indices are made when they are asked for: Mosaic searches long for a layout where nothing does.

    What is stored in their place are functions, of how they are made.
    """

    @property
    def q_ids(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._made(0, _ids)

    @property
    def k_ids(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._made(1, _ids)

    def sixteens(self) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        return self._made(0, ptx.sixteens), self._made(1, ptx.sixteens)

    def _made(self, axis: int, how: Callable) -> Any:
        make: Any = self[axis]
        return make(how)


def tile(shape: tuple[int, int], place: tuple[Any, Any], row, column, word=None, transposed: bool = False) -> Tile:
    """Indices of a tile of scores, which reads arrays where they are for it.

    `place` is its batch entry and query head, `row` and `column` are the indices of its first ones, of queries and
    keys, or transposed. With a `word` of shared memory, this warp group's, it has registers for what is computed early.
    """
    b, head = place
    fast = FAST if word is None else FAST._replace(early=functools.partial(ptx.early, word))

    def along_axis(axis: int) -> Any:
        return lambda how: how(shape, axis, (row, column)[axis])

    def read(ref) -> Array:
        B, N, *lengths = ref.shape
        vector = 1 in lengths
        if transposed and vector:  # arrays over both come with keys before queries
            lengths.reverse()
        along = [n > 1 for n in lengths]
        slices = [
            pl.ds(first, n) if is_along else 0 for first, n, is_along in zip((row, column), shape, along, strict=True)
        ]
        if transposed and vector:
            slices.reverse()
        part = ref.at[b if B > 1 else 0, head if N > 1 else 0, *slices]
        if not any(along):
            return part[...]
        if all(along):
            values = plgpu.load(part, layout=TILE, optimized=False)
            return fast.early(values)[0] if jnp.issubdtype(values.dtype, jnp.floating) else values
        axis = along.index(True)
        vector = plgpu.load(part, layout=(ROW, COLUMN)[axis], optimized=False)
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [axis]), TILE)

    q_axis = int(transposed)
    return _Tile(along_axis(q_axis), along_axis(1 - q_axis), b, head, read, fast)
