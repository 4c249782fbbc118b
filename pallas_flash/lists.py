"""Which blocks to visit, where arrays decide: lists made in plain JAX before a kernel starts, and walked inside it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_flash import masks, patterns
from pallas_flash.cells import ALL, NONE, SOME, Cells, Index, Span
from pallas_flash.masks import Carry, Leaf, Lengths, Mask, Visit
from pallas_flash.problem import Problem


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Listed(Mask):
    """A mask with the blocks to visit for each block of the rows of one kernel, which may be queries or keys.

    Attributes:
        mask: The mask, within the arrays' bounds if need be.
        edges, steps: int32 [B or 1, N or 1, rows, 1]: how many blocks need `keep`, and how many there are to visit.
        order: int32 [B or 1, N or 1, rows, columns]: the blocks to visit, those that need `keep` first; twice their
            number, and one more where a block of columns holds some that take no part.
        used: int8 [B or 1, 1, 1, columns · block] and [B or 1, 1, 1, rows · block]: which columns and rows take part.
            A pair, of which None is all.
        unused: int32 [B or 1, 1, 1, rows]: whether a block of rows holds some that take no part.
        later: int32 [B or 1, N or 1, rows, columns]: how many later blocks of rows visit a column; None: not asked for.
        q_len, k_len: Bounds of the arrays; None: blocks end where they do.
    """

    mask: Any
    edges: Leaf
    steps: Leaf
    order: Leaf
    used: tuple[Leaf, Leaf]
    unused: Leaf
    later: Leaf
    q_len: int | None = dataclasses.field(metadata={"static": True})
    k_len: int | None = dataclasses.field(metadata={"static": True})

    @property
    def _bounded(self) -> Mask:
        return Lengths(self.q_len, self.k_len) & self.mask

    @property
    def T(self) -> "Listed":
        return self

    @property
    def grows(self) -> bool:
        return self.mask.grows

    @property
    def reads(self) -> bool:
        return True

    def keep(self, tile) -> Array | None:
        return self._bounded.keep(tile)

    def narrow(self, rows: Span, columns: Span) -> tuple[Span, Span]:
        return self._bounded.narrow(rows, columns)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ListedVisit:
    """The blocks to visit for a block of rows, as `masks.Visit`.

    Attributes:
        edges: How many need `keep`; they come first.
        steps: How many there are.
        entry: t → the t-th of them, as in `Listed.order`.
    """

    edges: Index
    steps: Index
    entry: Callable[[Index], Index] = dataclasses.field(metadata={"static": True})

    has_edges = True

    def block(self, t: Index) -> Index:
        """The t-th block."""
        return self.entry(t) >> 1

    def holds_unused(self, t: Index) -> Any:
        """Whether the t-th block holds columns that take no part."""
        return (self.entry(t) & 1) == 1

    def at_least_one(self) -> "ListedVisit":
        """With one block where there is none, of which nothing is kept."""
        empty = jnp.int32(self.steps == 0)
        return dataclasses.replace(self, edges=self.edges + empty, steps=self.steps + empty)

    def walk(self, step: Callable[[Index, Carry, bool], Carry], carry: Carry) -> Carry:
        return self.walk_by_turn(lambda t, c, edge: step(self.block(t), c, edge), carry)

    def walk_by_turn(self, step: Callable[[Index, Carry, bool], Carry], carry: Carry, skip: int = 0) -> Carry:
        return masks.walk_by_turn(self, step, carry, skip)


def listed(problem: Problem, block_q: int, block_k: int, by_query: bool, swapped: bool = False) -> Problem:
    """The problem as a kernel takes it whose rows are queries (or keys): its mask is `Listed`, if it reads arrays.

    Its arrays reach to the end of the last block, and booleans are bytes; if `swapped`, keys come before queries.
    """
    cells = Cells(problem.B, problem.N, problem.T, problem.S, block_q, block_k)

    def prepared(leaf: Array) -> Array:
        leaf = cells.padded(leaf.astype(jnp.int8) if leaf.dtype == bool else leaf)
        return jnp.swapaxes(leaf, 2, 3) if swapped and 1 not in leaf.shape[2:] else leaf

    problem = dataclasses.replace(problem, score=jax.tree.map(prepared, problem.score))
    if not problem.mask.reads:
        return problem
    bounds = [n if n % block else None for n, block in ((cells.T, block_q), (cells.S, block_k))]
    status = patterns.found(problem.mask, cells)
    status = status if by_query else jnp.swapaxes(status, 2, 3)
    parts = zip(used(problem, cells), (block_q, block_k), cells.shape, strict=True)
    queries, keys = (_by_block(*part) for part in parts)
    (rows_used, rows_unused), (columns_used, columns_unused) = (queries, keys) if by_query else (keys, queries)
    entries = 2 * lax.broadcasted_iota(jnp.int32, status.shape, 3) + columns_unused
    unsorted = jnp.broadcast_arrays(jnp.where(status == NONE, ALL + 1, status), entries)
    _, order = lax.sort(unsorted, num_keys=1, is_stable=True)
    visited = (status != NONE).astype(jnp.int32)
    edges, steps = (jnp.sum(x, -1, jnp.int32, keepdims=True) for x in (status == SOME, visited))
    later = lax.cumsum(visited, 2, reverse=True) - visited if problem.deterministic and not by_query else None

    mask = problem.mask.with_arrays(prepared)
    mask = Listed(mask, edges, steps, order, (columns_used, rows_used), rows_unused, later, *bounds)
    return dataclasses.replace(problem, mask=mask)


def used(problem: Problem, cells: Cells | None = None) -> tuple[Array | None, Array | None]:
    """Booleans [B or 1, T] and [B or 1, S]: queries and keys that take part at all, by way of `cells`. None: all."""
    cells = cells or Cells(problem.B, problem.N, problem.T, problem.S, *[patterns.CELL] * 2)
    per_batch = jax.tree.map(lambda leaf: leaf[:, None] if leaf.ndim == 1 else leaf, problem.mask)
    spans = masks.used(per_batch, problem.T, problem.S)
    found = []
    for part, span, size in zip(problem.mask.participants(cells), spans, (problem.T, problem.S), strict=True):
        inside = None if span.is_whole(size) else span.holds(jnp.arange(size, dtype=jnp.int32)[None])
        found.append(inside if part is None else part if inside is None else part & inside)
    return found[0], found[1]


def _by_block(part: Array | None, block: int, blocks: int) -> tuple[Array | None, Array]:
    """What takes part, as bytes to the end of the last block, and whether a block holds something that does not."""
    if part is None:
        return None, jnp.zeros((1, 1, 1, blocks), jnp.int32)
    ends = ((0, 0), (0, blocks * block - part.shape[1]))
    unused = ~jnp.pad(part, ends, constant_values=True).reshape(len(part), 1, 1, blocks, block)
    return jnp.pad(part, ends).astype(jnp.int8)[:, None, None], jnp.any(unused, -1).astype(jnp.int32)


def visit(
    mask: Mask, rows: Span, columns: Span, block: int, place: tuple[Index, Index, Index], by_query: bool = True
) -> Visit | ListedVisit:
    """As `masks.visit`, for rows that are queries or keys; `place` is batch entry, query head and number of the block.

    Kernels have the mask of queries × keys whatever their rows are, since that is the one whose `keep` is right.
    """
    if not isinstance(mask, Listed):
        return masks.visit(mask if by_query else mask.T, rows, columns, block)
    edges, steps = (x[_at(x, place, 0)] for x in (mask.edges, mask.steps))
    return ListedVisit(edges, steps, lambda t: mask.order[_at(mask.order, place, t)])


def visits(mask: Mask, rows: Span, columns: Span, block: int, j: Index) -> Index:
    """Whether the j-th block of keys holds something kept for these queries; True where only lists would tell."""
    if isinstance(mask, Listed):
        return j >= 0
    seen = masks.visit(mask, rows, columns, block)
    return (j >= seen.start) & (j < seen.end)


def later(mask: Mask, rows: Span, S: int, block_k: int, place: tuple[Index, Index, Index], j: Index) -> Index:
    """How many blocks of keys after the one at `place` visit the j-th block of queries, which are `rows`."""
    if isinstance(mask, Listed):
        return mask.later[_at(mask.later, place, j)]
    return masks.visit(mask, rows, Span(0, S), block_k).end - 1 - place[2]


def _at(array, place: tuple[Index, Index, Index], column: Index) -> tuple[Index, ...]:
    """Index of an entry of [B or 1, N or 1, rows, columns]."""
    b, n, i = place
    return b if array.shape[0] > 1 else 0, n if array.shape[1] > 1 else 0, i, column
