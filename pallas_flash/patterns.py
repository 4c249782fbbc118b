"""Keep or not, by arrays: segments, intervals, dense masks and the user's own functions; and what was found out before.

Their arrays are [B or 1, N or 1, T or 1, S or 1]; `keep` reads the part that belongs to a tile. Which cells to visit is
worked out in plain JAX, outside the kernels (`status`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_flash import varying
from pallas_flash.cells import ALL, NONE, SOME, Cells, Span
from pallas_flash.masks import Leaf, Lengths, Mask
from pallas_flash.tile import Tile

_LAST_ID = 2**31 - 1
CELL = 64
"""Queries and keys of a cell where it is free to choose: a divisor or a multiple of most kernels' blocks."""


class Pattern(Mask):
    """What the masks of this file share. Tiles carry indices, so that `keep` serves both orientations."""

    @property
    def reads(self) -> bool:
        return True

    @property
    def T(self) -> "Pattern":
        return self

    def narrow(self, rows: Span, columns: Span) -> tuple[Span, Span]:
        return rows, columns

    def every(self, rows: Span, columns: Span) -> Span:
        del rows
        return Span(columns.lo, columns.lo)

    def status(self, cells: Cells) -> Array:
        count = _counted(self, cells, (3, 5))[:, :, :, 0, :, 0]
        return jnp.where(count > 0, jnp.where(count == cells.block_q * cells.block_k, ALL, SOME), NONE)

    def participants(self, cells: Cells) -> tuple[Array | None, Array | None]:
        queries, keys = (_counted(self, cells, axes) > 0 for axes in ((1, 4, 5), (1, 2, 3)))

        def to(size: int, part: Array) -> Array:
            return jnp.broadcast_to(lax.collapse(part, 1)[:, :size], (len(part), size))

        return to(cells.T, queries), to(cells.S, keys)


def found(mask: Mask, cells: Cells) -> Array:
    """Status of the cells, broadcastable to [B, N, rows, columns], within the arrays' bounds."""
    per_batch = jax.tree.map(lambda leaf: leaf.reshape(-1, 1, 1, 1) if leaf.ndim == 1 else leaf, mask)
    status = (Lengths(*map(jnp.int32, (cells.T, cells.S))) & per_batch).status(cells)
    return jnp.broadcast_to(status, (*status.shape[:2], *cells.shape))


def _counted(mask: Mask, cells: Cells, axes: tuple[int, ...]) -> Array:
    """How many scores are kept along axes of [B, N, rows, block_q, columns, block_k], which become 1.

    XLA evaluates the mask inside the sum, on CPUs aside: there a row of cells at a time bounds what it stores.
    """
    of_rows = functools.partial(kept, mask.with_arrays(cells.padded), cells)
    rows = cells.shape[0]
    sizes = cells.B, cells.N, rows, cells.block_q, cells.shape[1], cells.block_k

    def sums(first: int | Array, rows: int) -> Array:
        x = of_rows(first, rows)
        repeats = math.prod(sizes[axis] for axis in axes if x.shape[axis] == 1 and axis != 2)
        return repeats * jnp.sum(x, axes, jnp.int32, keepdims=True)

    def by_row() -> Array:
        if 2 in axes:
            of_one = jax.eval_shape(lambda: sums(0, 1))
            start = varying.as_over(varying.over(of_one), jnp.zeros(of_one.shape, jnp.int32))
            return lax.fori_loop(0, rows, lambda i, total: total + sums(i, 1), start)
        return jnp.moveaxis(lax.map(lambda i: sums(i, 1)[:, :, 0], jnp.arange(rows, dtype=jnp.int32)), 0, 2)

    same_for_all_queries = jax.eval_shape(lambda: of_rows(0, rows)).shape[2:4] == (1, 1)
    if same_for_all_queries:
        return sums(0, rows)
    return lax.platform_dependent(cpu=by_row, default=lambda: sums(0, rows))


def kept(mask: Mask, cells: Cells, first: int | Array, rows: int) -> Array:
    """`keep` of some rows of cells. Where it differs along T or S, nothing beyond them is kept."""
    q_ids = first * cells.block_q + jnp.arange(rows * cells.block_q, dtype=jnp.int32)
    k_ids = jnp.arange(cells.shape[1] * cells.block_k, dtype=jnp.int32)
    q_ids, k_ids = q_ids.reshape(rows, cells.block_q, 1, 1), k_ids.reshape(cells.shape[1], cells.block_k)

    def read(array: Array) -> Array:
        B, N, T, S = array.shape
        if T > 1:
            array = lax.dynamic_slice_in_dim(array, first * cells.block_q, rows * cells.block_q, 2)
        split = (*((rows, cells.block_q) if T > 1 else (1, 1)), *(k_ids.shape if S > 1 else (1, 1)))
        return array.reshape(B, N, *split)

    batch = jnp.arange(cells.B, dtype=jnp.int32).reshape(-1, 1, 1, 1, 1, 1)
    head = jnp.arange(cells.N, dtype=jnp.int32).reshape(-1, 1, 1, 1, 1)
    keep = mask.keep(Tile(q_ids, k_ids, batch, head, read))
    keep = jnp.asarray(True if keep is None else keep)
    keep = keep[(None,) * (6 - keep.ndim)]
    for axes, inside in (((2, 3), q_ids < cells.T), ((4, 5), k_ids < cells.S)):
        if any(keep.shape[axis] > 1 for axis in axes):
            keep = keep & inside
    return keep


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments(Pattern):
    """Keeps a score when query and key have the same id, which is not negative.

    Attributes:
        q_ids: int32 [B or 1, 1, T, 1].
        k_ids: int32 [B or 1, 1, 1, S].
        shared: Whether both are the same ids.
    """

    q_ids: Leaf
    k_ids: Leaf
    shared: bool = dataclasses.field(metadata={"static": True})

    def keep(self, tile: Tile) -> Array:
        q_ids, k_ids = tile.read(self.q_ids), tile.read(self.k_ids)
        return (q_ids == k_ids) & (q_ids >= 0)

    def status(self, cells: Cells) -> Array:
        q_first, q_last, q_whole = (x[..., None] for x in _extremes(self.q_ids[:, :, :, 0], cells.block_q))
        k_first, k_last, k_whole = (x[..., None, :] for x in _extremes(self.k_ids[:, :, 0], cells.block_k))
        some = (q_first <= k_last) & (k_first <= q_last)
        every = (q_first == q_last) & (k_first == k_last) & (q_first == k_first) & q_whole & k_whole
        return jnp.where(some, jnp.where(every, ALL, SOME), NONE)

    def participants(self, cells: Cells) -> tuple[Array | None, Array | None]:
        del cells
        q_ids, k_ids = self.q_ids[:, 0, :, 0], self.k_ids[:, 0, 0]
        if self.shared:
            return q_ids >= 0, k_ids >= 0
        q_ids, k_ids = (jnp.broadcast_to(x, (max(len(q_ids), len(k_ids)), x.shape[1])) for x in (q_ids, k_ids))
        among = jax.vmap(functools.partial(jnp.isin, method="sort"))
        return (q_ids >= 0) & among(q_ids, k_ids), (k_ids >= 0) & among(k_ids, q_ids)


def _extremes(ids: Array, block: int) -> tuple[Array, Array, Array]:
    """Smallest and largest id of each block of the last axis, padding aside, and whether there is none of it."""
    ids = jnp.pad(ids, [(0, 0)] * (ids.ndim - 1) + [(0, -ids.shape[-1] % block)], constant_values=-1)
    ids = ids.reshape(*ids.shape[:-1], ids.shape[-1] // block, block)
    return jnp.min(jnp.where(ids < 0, _LAST_ID, ids), -1), jnp.max(ids, -1), jnp.all(ids >= 0, -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Intervals(Pattern):
    """Keeps a score when the key lies in the query's interval, `lo <= k < hi`.

    Attributes:
        lo, hi: int32 [B or 1, 1, T, 1].
        keys: bool [B or 1, S]: whether a key lies in some interval.
    """

    lo: Leaf
    hi: Leaf
    keys: Leaf

    def keep(self, tile: Tile) -> Array:
        return (tile.k_ids >= tile.read(self.lo)) & (tile.k_ids < tile.read(self.hi))

    def with_arrays(self, change: Callable[[Array], Array]) -> Mask:
        return Intervals(change(self.lo), change(self.hi), None)

    def status(self, cells: Cells) -> Array:
        lo, hi = (cells.padded(x).reshape(len(x), 1, cells.shape[0], cells.block_q, 1) for x in (self.lo, self.hi))
        some = jnp.any(jnp.maximum(lo, cells.columns.lo) < jnp.minimum(hi, cells.columns.hi), 3)
        every = jnp.all((lo <= cells.columns.lo) & (hi >= cells.columns.hi), 3)
        return jnp.where(some, jnp.where(every, ALL, SOME), NONE)

    def participants(self, cells: Cells) -> tuple[Array | None, Array | None]:
        del cells
        return (self.lo < self.hi)[:, 0, :, 0], self.keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense(Pattern):
    """Keeps a score where the mask is not 0.

    Attributes:
        mask: bool or int8 [B or 1, N or 1, T or 1, S or 1].
    """

    mask: Leaf

    def keep(self, tile: Tile) -> Array:
        return tile.read(self.mask) != 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Modified(Pattern):
    """Keeps a score where the user's function says so.

    Attributes:
        function: `function(tile, *operands)`: bool, broadcastable to the tile.
        operands: Arrays [B or 1, N or 1, T or 1, S or 1], which the function gets the tile's part of.
        booleans: Which of them are bool, or stand for it.
    """

    function: Callable[..., Array] = dataclasses.field(metadata={"static": True})
    operands: tuple[Leaf, ...]
    booleans: tuple[bool, ...] = dataclasses.field(metadata={"static": True})

    def keep(self, tile: Tile) -> Array:
        parts = (tile.read(operand) for operand in self.operands)
        return self.function(tile, *(x != 0 if is_bool else x for x, is_bool in zip(parts, self.booleans, strict=True)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Surveyed(Pattern):
    """A mask of which the cells to visit were worked out before.

    Attributes:
        mask: The mask.
        survey: int8 [B or 1, N or 1, rows, columns] of cells of `block` squared.
        queries, keys: bool [B or 1, T] and [B or 1, S]: what takes part.
        block: Queries and keys of a cell.
    """

    mask: Any
    survey: Leaf
    queries: Leaf
    keys: Leaf
    block: int = dataclasses.field(metadata={"static": True})

    def keep(self, tile: Tile) -> Array | None:
        return self.mask.keep(tile)

    def with_arrays(self, change: Callable[[Array], Array]) -> Mask:
        return self.mask.with_arrays(change)

    def status(self, cells: Cells) -> Array:
        blocks = cells.block_q, cells.block_k
        return regrouped(self.survey.astype(jnp.int32), self.block, blocks, cells.shape)

    def participants(self, cells: Cells) -> tuple[Array | None, Array | None]:
        del cells
        return self.queries, self.keys


def regrouped(status: Array, old: int, blocks: tuple[int, int], shape: tuple[int, int]) -> Array:
    """The status of cells of `blocks` from that of cells of `old` squared, of which they lie in one or several."""
    for axis, new, count in zip((2, 3), blocks, shape, strict=True):
        starts = new * jnp.arange(count, dtype=jnp.int32)  # NumPy's would be a constant, which cannot be partitioned
        lo, hi = starts // old, jnp.minimum(-(-(starts + new) // old), status.shape[axis])
        sizes = (hi - lo).reshape([-1 if axis == other else 1 for other in range(4)])

        def all_are(value: int, status=status, axis=axis, lo=lo, hi=hi, sizes=sizes) -> Array:
            sums = jnp.cumsum(status == value, axis, dtype=jnp.int32)
            sums = jnp.pad(sums, [(int(axis == other), 0) for other in range(4)])
            return jnp.take(sums, hi, axis) - jnp.take(sums, lo, axis) == sizes

        status = jnp.where(all_are(ALL), ALL, jnp.where(all_are(NONE), NONE, SOME))
    return status
