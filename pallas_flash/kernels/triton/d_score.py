"""How tiles move for the gradients of what scores depend on: bias, slopes and the operands of users' functions.

A kernel for each operand, which recomputes scores and their cotangents and sums what the operand shares (eq. 33): over
keys if it has no axis of theirs, over queries if it has none of theirs, and if it has both, over batch entries and
heads. No program adds to what another computes, so that the sums are reproducible; XLA sums what is left, vectors over
queries or keys.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from pallas_flash import lists, softmax
from pallas_flash.cells import Span
from pallas_flash.kernels import clean
from pallas_flash.kernels.grid import Grid
from pallas_flash.kernels.triton import launch
from pallas_flash.kernels.triton.launch import Layouts, Whole
from pallas_flash.plan import Blocks
from pallas_flash.problem import Problem
from pallas_flash.score import Score
from pallas_flash.weights import Weigher


class Operand(NamedTuple):
    """One operand: number of its term, its number there, and its shape [B or 1, N or 1, T or 1, S or 1]."""

    term: int
    number: int
    shape: tuple[int, ...]


def flash_d_rows(*refs, operand: Operand, problem: Problem, grid: Grid, blocks: Blocks):
    """Kernel body: of an operand without the keys' axis, the sum over keys for each query of one tile."""
    b, head, i = launch.place(grid)
    layouts, step = Layouts.of_everything(problem, blocks), _step(refs, operand, problem, blocks, (blocks.block_q, 1))
    mask = launch.bounded(launch.of_entry(problem, b), blocks)
    rows = Span(i * blocks.block_q, (i + 1) * blocks.block_q)
    seen = lists.visit(mask, rows, Span(0, problem.S), blocks.block_k, (b, head, i))
    total = seen.walk(
        lambda j, total, edge: total + step(b, head, i, j, edge), jnp.zeros((blocks.block_q, 1), jnp.float32)
    )
    layouts.row.store(refs[-1], rows.lo, total[:, 0], head, b)


def flash_d_columns(*refs, operand: Operand, problem: Problem, grid: Grid, blocks: Blocks):
    """Kernel body: of an operand without the queries' axis, the sum over queries for each key of one tile."""
    b, head, j = launch.place(grid)
    layouts, step = Layouts.of_everything(problem, blocks), _step(refs, operand, problem, blocks, (1, blocks.block_k))
    mask = launch.bounded(launch.of_entry(problem, b), blocks)
    columns = Span(j * blocks.block_k, (j + 1) * blocks.block_k)
    seen = lists.visit(mask, columns, Span(0, problem.T), blocks.block_q, (b, head, j), by_query=False)
    total = seen.walk(
        lambda i, total, edge: total + step(b, head, i, j, edge), jnp.zeros((1, blocks.block_k), jnp.float32)
    )
    layouts.column.store(refs[-1], columns.lo, total[0], head, b)


def flash_d_cells(*refs, operand: Operand, problem: Problem, grid: Grid, blocks: Blocks):
    """Kernel body: of an operand with both axes, one cell, summed over the batch entries and heads that share it."""
    own_b, own_head, number = launch.place(grid)
    layouts = Layouts.of_everything(problem, blocks)
    cell = blocks.block_q, blocks.block_k
    step = _step(refs, operand, problem, blocks, cell)
    i, j = lax.div(number, jnp.int32(layouts.k.tiles)), lax.rem(number, jnp.int32(layouts.k.tiles))
    entries, heads = (n if own == 1 else 1 for n, own in zip((problem.B, problem.N), operand.shape[:2], strict=True))

    def of_pair(n, total: Array) -> Array:
        b, head = own_b + lax.div(n, jnp.int32(heads)), own_head + lax.rem(n, jnp.int32(heads))
        mask = launch.bounded(launch.of_entry(problem, b), blocks)
        needed = lists.visits(mask, Span(i * cell[0], (i + 1) * cell[0]), Span(0, problem.S), cell[1], j)
        return lax.cond(needed, lambda: total + step(b, head, i, j, True), lambda: total)

    total = lax.fori_loop(0, entries * heads, of_pair, jnp.zeros(cell, jnp.float32))
    rows, columns = pl.ds(i * cell[0], cell[0]), pl.ds(j * cell[1], cell[1])
    refs[-1][own_b, own_head, rows, columns] = total.astype(refs[-1].dtype)


def _step(refs, operand: Operand, every: Problem, blocks: Blocks, shape: tuple[int, int]) -> Callable[..., Array]:
    """(b, head, i, j, edge) → the gradient of the operand's part of that tile, as if the part had this shape."""
    q_ref, k_ref, v_ref, do_ref, lse2_ref, delta_ref, _ = refs
    layouts = Layouts.of_everything(every, blocks)

    def step(b, head, i, j, edge: bool) -> Array:
        problem = launch.of_entry(every, b)
        mask, sign = launch.bounded(problem, blocks), softmax.base2(problem.any_scale)[0]
        at_row = i * blocks.block_q, Span(0, problem.T) if edge else None, head, b
        at_column = j * blocks.block_k, Span(0, problem.S) if edge else None, lax.div(head, jnp.int32(problem.G)), b
        q, k = layouts.q.load(q_ref, *at_row), layouts.k.load(k_ref, *at_column)
        do, v = layouts.o.load(do_ref, *at_row), layouts.v.load(v_ref, *at_column)
        lse2, delta = (layouts.row.load(ref, *at_row)[:, None] for ref in (lse2_ref, delta_ref))
        tile = launch.tile(problem, blocks, b, head, i * blocks.block_q, j * blocks.block_k)
        weigher = Weigher.at(problem, mask, tile, edge)
        score, keep = weigher.score, weigher.keep
        assert score is not None
        z = score.scaled(launch.dot(problem, softmax.signed(sign, q), k, trans_b=True))

        own = score.parts[operand.term][operand.number]

        def value(own: Array) -> Array:
            return score.replaced(operand.term, operand.number, own).of(z, keep)

        found, pull = jax.vjp(value, jnp.broadcast_to(own, shape))
        p = softmax.recompute(softmax.masked(found, keep), score.gain * softmax.LOG2E, lse2, tile.fast)
        ds = weigher.d_logit(p, launch.dot(problem, do, v, trans_b=True), delta)
        return pull(ds * score.gain)[0]

    return step


def d_score(
    problem: Problem,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    lse: Float[Array, "B N T"],
    do: Float[Array, "B T N Hv"],
    delta: Float[Array, "B N T"],
) -> Score:
    """Gradients of the operands of the score's terms, in their places; those that are no numbers have none."""
    q, do, delta = (clean.queries(problem, x, axis) for x, axis in ((q, 1), (do, 1), (delta, 2)))
    tensors = q, clean.keys(problem, k), clean.keys(problem, v), do, softmax.base2_lse(lse), delta

    def gradient(term: int, number: int, x: Array):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return np.zeros(x.shape, jax.dtypes.float0)
        found = _gradient(problem, Operand(term, number, x.shape), tensors, x.dtype)
        shared = [axis for axis, n in enumerate(x.shape) if n == 1 and found.shape[axis] > 1]
        return jnp.sum(found, shared, keepdims=True).astype(x.dtype)

    terms = [
        dataclasses.replace(term, operands=tuple(gradient(m, n, x) for n, x in enumerate(term.operands)))
        for m, term in enumerate(problem.score.terms)
    ]
    return Score(tuple(terms))


def _gradient(problem: Problem, operand: Operand, tensors: tuple[Array, ...], dtype) -> Array:
    """[B, N, T, 1] or [B, N, 1, S] in float32, or in `dtype` the operand's shape, of both axes."""
    # All four tensors stream past: with more stages they would not fit shared memory.
    blocks = dataclasses.replace(launch.planned(problem).plan.dkv, num_stages=1)
    layouts = Layouts.of_everything(problem, blocks)
    inputs = list(zip(tensors, (*layouts[:4], layouts.row, layouts.row), strict=True))
    B, N, T, S = operand.shape
    by_query = S == 1
    seen = lists.listed(problem, blocks.block_q, blocks.block_k, by_query)

    def launched(kernel: Callable, grid: Grid, shape: tuple[int, ...], dtype, layout) -> Array:
        body, out = functools.partial(kernel, operand=operand), jax.ShapeDtypeStruct(shape, dtype)
        return launch.call(body, kernel.__name__, seen, grid, blocks, inputs, [(out, layout)], whole=True)[0]

    if T > 1 and S > 1:
        tiles = layouts.q.tiles, layouts.k.tiles
        grid = Grid(B, N, tiles[0] * tiles[1], group=1, last_first=False)
        shape = B, N, layouts.q.rows, layouts.k.rows
        return launched(flash_d_cells, grid, shape, dtype, Whole(shape))[:, :, :T, :S]
    kernel, layout = (flash_d_rows, layouts.row) if by_query else (flash_d_columns, layouts.column)
    grid = Grid.of(problem.B, problem.N, layout.tiles, blocks.head_group, problem.mask)
    vector = launched(kernel, grid, (problem.B, problem.N, layout.length), jnp.float32, layout)
    return vector[..., None] if by_query else vector[:, :, None]
