"""Keep or not, and which blocks to visit: causal, window, offset and lengths, for both orientations.

A mask is a frozen value, composed with `&`. Those of this file answer three questions, each with one formula; those
that depend on arrays are in `patterns.py`.

- `keep(tile)`: which scores of a tile count?
- `narrow(rows, columns)`: the smallest rectangle inside rows × columns that holds everything kept there (eq. 23).
- `every(rows, columns)`: the columns that every one of the rows keeps (eq. 24).

From the last two, `visit` derives the blocks to walk. Rows are queries and columns are keys; the transpose `.T` swaps
them, so that `visit(mask.T, ...)` is the walk for rows of keys. `keep` needs none: a tile carries indices.

Bounds may be Python ints or traced int32 scalars. What is static stays static, so that a kernel without ragged edges
compiles no code for them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_flash.cells import ALL, NONE, SOME, Cells, Index, Span
from pallas_flash.tile import Tile

Leaf = Any  # of a pytree: an int32 array, or what JAX's transformations put in its place
Carry = TypeVar("Carry")


class Mask:
    """What all masks share. Subclasses define `keep`, `narrow`, `every` and `T`."""

    def __and__(self, other: "Mask") -> "Mask":
        return Both(self, other)

    @property
    def grows(self) -> bool:
        """Whether later rows keep more columns, so that visiting them first balances a grid."""
        return False

    @property
    def ends_alike(self) -> bool:
        """Whether rows keep columns from somewhere to the last, so that those walk together that begin there."""
        return False

    def keep(self, tile: Tile) -> Array | None:
        """bool, the tile's shape: which scores count. None: all of them."""
        raise NotImplementedError

    def narrow(self, rows: Span, columns: Span) -> tuple[Span, Span]:
        """The bounding rectangle of what is kept in rows × columns."""
        raise NotImplementedError

    def every(self, rows: Span, columns: Span) -> Span:
        """The columns, among `columns`, that every row of `rows` keeps."""
        raise NotImplementedError

    @property
    def T(self) -> "Mask":
        """The same mask with rows and columns swapped."""
        raise NotImplementedError

    @property
    def reads(self) -> bool:
        """Whether `keep` reads arrays, so that which blocks to visit must be listed before a kernel starts."""
        return False

    def with_arrays(self, change: Callable[[Array], Array]) -> "Mask":
        """What `keep` needs of the mask, with each array over scores, [B or 1, N or 1, T or 1, S or 1], changed."""
        return jax.tree.map(lambda leaf: change(leaf) if leaf.ndim == 4 else leaf, self)

    def status(self, cells: Cells) -> Array:
        """int32, broadcastable to [B, N, rows, columns] of the cells: `NONE`, `SOME` or `ALL` of a cell is kept."""
        rows, columns = self.narrow(cells.rows, cells.columns)
        full = self.every(cells.rows, cells.columns)
        some = (rows.lo < rows.hi) & (columns.lo < columns.hi)
        every = (full.lo <= cells.columns.lo) & (full.hi >= cells.columns.hi)
        return jnp.where(some, jnp.where(every, ALL, SOME), NONE)

    def participants(self, cells: Cells) -> tuple[Array | None, Array | None]:
        """bool, broadcastable to [B, T] and [B, S]: queries and keys that take part in some score. None: as `used`."""
        del cells
        return None, None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Band(Mask):
    """Keeps a score when `lo <= k - q - offset <= hi` (eq. 21).

    Causal is `Band(None, 0)`, a window of `left` keys before and `right` after is `Band(-left, right)`; `offset` is the
    position of query 0 among the keys.

    Attributes:
        lo: Smallest distance kept; None: unbounded.
        hi: Largest distance kept; None: unbounded.
        offset: int32, scalar (of one batch entry) or array over the batch; None: 0.
    """

    lo: int | None = dataclasses.field(metadata={"static": True})
    hi: int | None = dataclasses.field(metadata={"static": True})
    offset: Leaf = None

    @property
    def _edges(self) -> tuple[Index | None, Index | None]:
        """`lo` and `hi` as bounds on k - q."""
        shift = 0 if self.offset is None else self.offset
        return None if self.lo is None else self.lo + shift, None if self.hi is None else self.hi + shift

    @property
    def T(self) -> "Band":
        def minus(edge):
            return None if edge is None else 0 - edge  # Mosaic has no negation for a single warp

        return Band(minus(self.hi), minus(self.lo), minus(self.offset))

    @property
    def grows(self) -> bool:
        return self.hi is not None and self.lo is None

    @property
    def ends_alike(self) -> bool:
        return self.lo is not None and self.hi is None

    def keep(self, tile: Tile) -> Array | None:
        lo, hi = self._edges
        if lo is None and hi is None:
            return None
        # Sums of one index, not a difference for each score.
        above = None if lo is None else tile.k_ids >= tile.q_ids + lo
        below = None if hi is None else tile.k_ids <= tile.q_ids + hi
        return _and(above, below)

    def narrow(self, rows: Span, columns: Span) -> tuple[Span, Span]:
        lo, hi = self._edges
        rows = Span(
            rows.lo if hi is None else _max(rows.lo, columns.lo - hi),
            rows.hi if lo is None else _min(rows.hi, columns.hi - lo),
        )
        columns = Span(
            columns.lo if lo is None else _max(columns.lo, rows.lo + lo),
            columns.hi if hi is None else _min(columns.hi, rows.hi + hi),
        )
        return rows, columns

    def every(self, rows: Span, columns: Span) -> Span:
        lo, hi = self._edges
        return Span(
            columns.lo if lo is None else _max(columns.lo, rows.hi - 1 + lo),
            columns.hi if hi is None else _min(columns.hi, rows.lo + hi + 1),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lengths(Mask):
    """Keeps a score when `q < q_len` and `k < k_len` (eq. 22); None: no bound on that side.

    Attributes:
        q_len: Number of queries: int, or int32, scalar (of one batch entry) or array over the batch.
        k_len: Number of keys, likewise.
    """

    q_len: Leaf = None
    k_len: Leaf = None

    @property
    def T(self) -> "Lengths":
        return Lengths(self.k_len, self.q_len)

    def keep(self, tile: Tile) -> Array | None:
        row = None if self.q_len is None else tile.q_ids < self.q_len
        column = None if self.k_len is None else tile.k_ids < self.k_len
        return _and(row, column)

    def narrow(self, rows: Span, columns: Span) -> tuple[Span, Span]:
        if self.q_len is not None:
            rows = Span(rows.lo, _min(rows.hi, self.q_len))
        if self.k_len is not None:
            columns = Span(columns.lo, _min(columns.hi, self.k_len))
        return rows, columns

    def every(self, rows: Span, columns: Span) -> Span:
        _, (lo, hi) = self.narrow(rows, columns)
        return Span(lo, hi if self.q_len is None else _where(rows.hi <= self.q_len, hi, lo))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Both(Mask):
    """Keeps what both masks keep. `narrow` is exact when `first` clips whole rows and columns (Lengths do)."""

    first: Any
    second: Any

    @property
    def T(self) -> "Both":
        return Both(self.first.T, self.second.T)

    @property
    def grows(self) -> bool:
        return self.first.grows or self.second.grows

    @property
    def ends_alike(self) -> bool:
        return self.first.ends_alike or self.second.ends_alike

    def keep(self, tile: Tile) -> Array | None:
        return _and(self.first.keep(tile), self.second.keep(tile))

    def narrow(self, rows: Span, columns: Span) -> tuple[Span, Span]:
        return self.second.narrow(*self.first.narrow(rows, columns))

    def every(self, rows: Span, columns: Span) -> Span:
        return self.second.every(rows, self.first.every(rows, columns))

    @property
    def reads(self) -> bool:
        return self.first.reads or self.second.reads

    def with_arrays(self, change: Callable[[Array], Array]) -> "Both":
        return Both(self.first.with_arrays(change), self.second.with_arrays(change))

    def status(self, cells: Cells) -> Array:
        if not self.reads:  # `narrow` of both together sees more than each alone
            return super().status(cells)
        return jnp.minimum(self.first.status(cells), self.second.status(cells))

    def participants(self, cells: Cells) -> tuple[Array | None, Array | None]:
        pairs = zip(self.first.participants(cells), self.second.participants(cells), strict=True)
        queries, keys = (_and(*pair) for pair in pairs)
        return queries, keys


class Visit(NamedTuple):
    """The column blocks to walk for a block of rows (eq. 25).

    Blocks `start … end-1` hold something kept; of these `full_start … full_end-1` are kept whole and need no `keep`.
    """

    start: Index
    full_start: Index
    full_end: Index
    end: Index

    @property
    def _left(self) -> Index:
        """How many of the blocks that need `keep` come before the full ones."""
        return self.full_start - self.start

    @property
    def edges(self) -> Index:
        """How many blocks need `keep`."""
        return self._left + self.end - self.full_end

    @property
    def has_edges(self) -> bool:
        """Whether some block may need `keep`."""
        return not _is(self.edges, 0)

    @property
    def steps(self) -> Index:
        """How many blocks there are to walk."""
        return self.end - self.start

    def block(self, t: Index) -> Index:
        """The t-th block of the walk."""
        full = self._full(t - self.edges)
        return full if _is(self.edges, 0) else _where(t < self.edges, self._edge(t), full)

    def _full(self, t: Index) -> Index:
        """The t-th block that is kept whole."""
        return self.full_start + t

    def _edge(self, t: Index) -> Index:
        """The t-th block that needs `keep`."""
        right = self.full_end + t - self._left
        return right if _is(self._left, 0) else _where(t < self._left, self.start + t, right)

    def at_least_one(self) -> "Visit":
        """With block 0, of which nothing is kept, where there is no block: for kernels that must start with one."""
        if _static(*self):
            return self if self.start < self.end else type(self)(0, 0, 0, 1)
        empty = self.start >= self.end
        start, full_start, full_end = (_where(empty, 0, x) for x in self[:3])
        return type(self)(start, full_start, full_end, _where(empty, 1, self.end))

    def walk(self, step: Callable[[Index, Carry, bool], Carry], carry: Carry) -> Carry:
        """Runs `step(block, carry, edge)` over the blocks: those that need `keep` (edge=True), then the full ones.

        In this order ptxas keeps the tensor-core pipeline of the full loop; the other way round it serialises wgmma.
        """
        if self.has_edges:
            carry = lax.fori_loop(0, self.edges, lambda t, c: step(self._edge(t), c, True), carry)
        if not _is(self.full_end - self.full_start, 0):
            carry = lax.fori_loop(self.full_start, self.full_end, lambda j, c: step(j, c, False), carry)
        return carry

    def walk_by_turn(self, step: Callable[[Index, Carry, bool], Carry], carry: Carry, skip: int = 0) -> Carry:
        """As `walk`, but with `step(t, carry, edge)` for the t-th block, and from the one after `skip` on."""
        return walk_by_turn(self, step, carry, skip)


class LastFirst(Visit):
    """The same, by turn from the last of those on that are kept whole."""

    def _full(self, t: Index) -> Index:
        return self.full_end - 1 - t


def walk_by_turn[Carry](seen: Any, step: Callable[[Index, Carry, bool], Carry], carry: Carry, skip: int = 0) -> Carry:
    """`Visit.walk_by_turn` of anything that has `edges`, `has_edges` and `steps`."""
    if seen.has_edges:
        carry = lax.fori_loop(skip, seen.edges, lambda t, c: step(t, c, True), carry)
    return lax.fori_loop(_max(seen.edges, skip), seen.steps, lambda t, c: step(t, c, False), carry)


def visit(mask: Mask, rows: Span, columns: Span, block: int) -> Visit:
    """Which blocks of `block` columns to visit for `rows`; `columns` must be all columns, from 0."""
    full = mask.every(rows, columns)
    whole = rows, columns
    rows, columns = mask.narrow(*whole)
    unchanged = all(
        a is b for span, was in zip((rows, columns), whole, strict=True) for a, b in zip(span, was, strict=True)
    )
    occupied = True if unchanged else _and(rows.lo < rows.hi, columns.lo < columns.hi)
    start = _div(columns.lo, block)
    end = _where(occupied, _div(columns.hi + block - 1, block), start)
    full_start = _clip(_div(full.lo + block - 1, block), start, end)
    full_end = _clip(_div(full.hi, block), full_start, end)
    return (LastFirst if mask.ends_alike else Visit)(start, full_start, full_end, end)


def used(mask: Mask, T: int, S: int) -> tuple[Span, Span]:
    """The queries and keys that take part at all. What is stored elsewhere, NaN included, must never reach a result."""
    return mask.narrow(Span(0, T), Span(0, S))


def _is(x: Index, value: int) -> bool:
    """Whether `x` is statically known to be `value`."""
    return isinstance(x, int) and x == value


def _static(*xs) -> bool:
    return all(isinstance(x, int) for x in xs)


def _and(a, b):
    if a is None or b is None:
        return b if a is None else a
    return (a and b) if _static(a, b) else jnp.logical_and(a, b)


def _min(a: Index, b: Index) -> Index:
    return min(a, b) if _static(a, b) else jnp.minimum(a, b)


def _max(a: Index, b: Index) -> Index:
    return max(a, b) if _static(a, b) else jnp.maximum(a, b)


def _where(condition, a: Index, b: Index) -> Index:
    """A select by arithmetic: JAX's Triton lowering gives literal branches of a scalar select the predicate's type."""
    return (a if condition else b) if _static(condition) else b + (a - b) * condition.astype(jnp.int32)


def _clip(x: Index, lo: Index, hi: Index) -> Index:
    """`x` in [lo, hi], given lo <= hi."""
    if _static(x, lo) and x <= lo:
        return lo
    return _min(_max(x, lo), hi)


def _div(x: Index, by: int) -> Index:
    """Quotient; a negative `x` may round either way, since every use is clipped to 0 and above."""
    return x // by if _static(x) else lax.div(x, jnp.int32(by))
