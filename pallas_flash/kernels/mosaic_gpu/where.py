"""Where are the scores of a tile, and what do functions of them read? `Tile`s of values in Mosaic's registers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.elementary import Elementary, differentiable, margin
from pallas_flash.kernels.mosaic_gpu import ptx
from pallas_flash.kernels.mosaic_gpu.pipeline import COLUMN, GROUP_ROWS, ROW, TILE, Ring
from pallas_flash.problem import Problem
from pallas_flash.tile import Tile

FAST = Elementary(sums=ptx.sums, constant=lambda x: x, tanh=differentiable(jnp.tanh), product=ptx.product)
"""The plain functions: with `approx_math` they become the GPU's, fused."""


class _Tile(Tile):
    """A tile whose indices are made as they are asked for; functions of how that is done are stored in their place."""

    @property
    def q_ids(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._made(0, ptx.indices)

    @property
    def k_ids(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._made(1, ptx.indices)

    def groups(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Without the bits by which scores of a group differ: they decide on registers, not on numbers."""
        q, k = (self._made(axis, functools.partial(ptx.groups, size)) for axis, size in ((0, 16), (1, 32)))
        return (*q, None), (*k, None, None)

    def distances(self) -> Array:
        return self._made(1, ptx.distances)

    def _made(self, axis: int, how: Callable) -> Any:
        make: Any = self[axis]
        return make(how)


class Ahead:
    """What a kernel for one batch entry and head need not read for each tile of scores.

    Attributes:
        place: Batch entry and query head.
        scalars: References to what is one number for them, with the number. A load in each step would be waited for.
        streams: References to arrays over queries and keys, with rings of a slot for each consumer, to which the
            producer brings its part of every block.
        consumers: Number of consumers.
    """

    def __init__(self, problem: Problem, place: tuple[Any, Any], streams: list, rings: list[Ring], consumers: int):
        leaves = jax.tree.leaves((problem.score, problem.dropout))
        self.place, self.consumers = place, consumers
        self.scalars = [(ref, _of_place(ref, place)[0, 0]) for ref in leaves if ref.shape[2:] == (1, 1)]
        self.streams = list(zip(streams, rings, strict=True))

    def fill(self, t, row, column, columns: int) -> None:
        """Brings the parts of block t, from `row` and `column` on."""
        for ref, ring in self.streams:
            for w in range(self.consumers):
                part = pl.ds(row + w * GROUP_ROWS, GROUP_ROWS), pl.ds(column, columns)
                ring.fill(t * self.consumers + w, _of_place(ref, self.place).at[part])

    def read(self, w, t, ref) -> Any:
        """Consumer w's part of block t; None: it is nothing of these."""
        for each, value in self.scalars:
            if each is ref:
                return value
        for each, ring in self.streams:
            if each is ref:
                (part,) = ring.wait(t * self.consumers + w)
                values = plgpu.load(part, layout=TILE)
                ring.release(t * self.consumers + w)
                return values


def _of_place(ref, place: tuple[Any, Any]):
    """Of a reference to [B or 1, N or 1, ...], what it has for a batch entry and a head."""
    return ref.at[tuple(at if n > 1 else 0 for at, n in zip(place, ref.shape[:2], strict=True))]


def tile(
    shape: tuple[int, int], place: tuple[Any, Any], row, column, word=None, transposed: bool = False,
    ahead: Callable[[Any], Any] = lambda ref: None,
) -> Tile:  # fmt: skip
    """Indices of a tile of scores, which reads arrays where they are for it.

    `place` is its batch entry and query head, `row` and `column` are the indices of its first ones, of queries and
    keys, or transposed. What is read `ahead` it gets from there. With a `word` of shared memory, this warp group's,
    what is dropped is decided under the products: faster in backward kernels, but not in the forward kernel, where
    warps wait as they issue products (docs/performance.md).
    """
    b, head = place

    def sieve(words, _, bound: Array):
        return ptx.sieve(word, transposed, words, margin(bound))

    def along_axis(axis: int) -> Any:
        return lambda how: how(shape, axis, (row, column))

    def read(ref) -> Array:
        if (part := ahead(ref)) is not None:
            return part
        lengths = list(ref.shape[2:])
        vector = 1 in lengths
        if transposed and vector:  # arrays over both come with keys before queries
            lengths.reverse()
        along = [n > 1 for n in lengths]
        slices = [
            pl.ds(first, n) if is_along else 0 for first, n, is_along in zip((row, column), shape, along, strict=True)
        ]
        if transposed and vector:
            slices.reverse()
        part = _of_place(ref, place).at[*slices]
        if not any(along):
            return part[...]
        if all(along):
            return plgpu.load(part, layout=TILE, optimized=False)
        axis = along.index(True)
        vector = plgpu.load(part, layout=(ROW, COLUMN)[axis], optimized=False)
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [axis]), TILE)

    q_axis = int(transposed)
    return _Tile(along_axis(q_axis), along_axis(1 - q_axis), b, head, read, FAST._replace(sieve=sieve))
