"""How tiles move when each gradient has a kernel of its own: for head dims above 128.

A tile of rows of the gradient stays and is summed in registers, what it attends to streams past. Consumers take turns:
one's probabilities are computed under the others' products.
"""

import dataclasses
import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_flash import lists, softmax
from pallas_flash.cells import Span
from pallas_flash.kernels.grid import Grid
from pallas_flash.kernels.mosaic_gpu import launch, pipeline, where
from pallas_flash.kernels.mosaic_gpu.pipeline import GROUP_ROWS, Ring
from pallas_flash.plan import MosaicBlocks
from pallas_flash.problem import Problem
from pallas_flash.weights import Weigher


@dataclasses.dataclass(frozen=True)
class Gradient:
    """Which gradient a kernel computes.

    Attributes:
        name: Of the kernel.
        by_query: Whether its rows are queries, else keys.
        of_scores: Whether it sums cotangents of scores (times what was scored against), else probabilities times do.
    """

    name: str
    by_query: bool
    of_scores: bool


DQ = Gradient("flash_dq", by_query=True, of_scores=True)
DK = Gradient("flash_dk", by_query=False, of_scores=True)
DV = Gradient("flash_dv", by_query=False, of_scores=False)


def flash_alone(
    q_ref, k_ref, v_ref, do_ref, vectors_ref, out_ref, *, q_ring: Ring, k_ring: Ring, v_ring: Ring, do_ring: Ring,
    words, gradient: Gradient, problem: Problem, grid: Grid, blocks: MosaicBlocks,
):  # fmt: skip
    """Kernel body: a tile of rows of one gradient. a·cᵀ are scores, b·dᵀ cotangents of probabilities; a and b stay."""
    by_query, of_scores = gradient.by_query, gradient.of_scores
    q, k, v, do = (q_ref, q_ring), (k_ref, k_ring), (v_ref, v_ring), (do_ref, do_ring)
    a, b, c, d = (q, do, k, v) if by_query else (k, v, q, do)
    rows, columns = _sides(gradient, blocks)
    consumers = rows // GROUP_ROWS
    batch, number, i = pipeline.place(grid)
    head, heads = (number, (number, 1)) if by_query else pipeline.part(problem, grid, number)
    first = i * rows
    mask = launch.bounded(problem, blocks.block_k)
    size = problem.S if by_query else problem.T
    sign, scale2 = softmax.base2(problem.any_scale)
    turns = pipeline.Turns(consumers)

    def visit(query_head):
        own, place = Span(first, first + rows), (batch, query_head, i)
        return pipeline.uniform(lists.visit(mask, own, Span(0, size), columns, place, by_query))

    def fill(operand, turn, h, at, length: int):
        (ref, ring), tile = operand, pl.ds(at, length)
        vectors = [vectors_ref.at[batch, h, :, tile]] if operand is q else []
        ring.fill(turn, ref.at[batch, tile, h], *vectors)

    def produce():
        for w in range(consumers):
            for operand in (a, b) if of_scores else (a,):
                fill(operand, w, head, first + w * GROUP_ROWS, GROUP_ROWS)

        def past(query_head, turn, j):
            h = lax.div(head, jnp.int32(problem.G)) if by_query else query_head
            for operand in (c, d):
                fill(operand, turn, h, j * columns, columns)

        pipeline.of_each_block(heads, visit, past)

    def consume(w):
        _, *of_rows = a[1].wait(w)
        if of_scores:
            b[1].wait(w)
        turns.open(w)
        turns.begin(w)
        total = pipeline.accumulate(lambda total: stream(w, of_rows, total), (GROUP_ROWS, out_ref.shape[-1]))
        turns.end(w)
        turns.close(w)
        by = problem.any_scale * (1 if by_query else sign) if of_scores else problem.gain
        tile, *_ = {DQ: q_ring, DK: k_ring, DV: v_ring}[gradient].at(w)
        own = out_ref.at[batch, pl.ds(first + w * GROUP_ROWS, GROUP_ROWS), number]
        pipeline.send(((total * by).astype(out_ref.dtype), tile, own))

    def stream(w, of_rows, total) -> Array:
        of_row = [pipeline.by_row(of_rows[0].at[n], (GROUP_ROWS, columns)) for n in range(2)] if of_rows else None

        def step(t, edge: bool, u, query_head, seen):
            a_tile, (c_tile, *of_columns) = a[1].anew(w)[0], c[1].wait(u)

            def weighed(scores, *d_weights):
                plgpu.wgmma(scores, a_tile, c_tile.transpose((1, 0)))
                for d_weight in d_weights:
                    plgpu.wgmma(d_weight, b[1].anew(w)[0], d[1].wait(u)[0].transpose((1, 0)))
                turns.end(w)
                at = first + w * GROUP_ROWS, seen.block(t) * columns
                tile = where.tile(scores.shape, (batch, query_head), *at, words.at[w], transposed=not by_query)
                weigher = Weigher.at(problem, mask, tile, edge)
                s = plgpu.wgmma_accumulator_load(scores, wait_n=len(d_weights))
                lse2, delta = of_row or (pipeline.by_column(of_columns[0].at[n], s.shape) for n in range(2))
                p, d_score = weigher.recompute(s, scale2, lse2)
                if not of_scores:
                    return weigher.drop(p.astype(problem.dtype))
                return d_score(plgpu.wgmma_accumulator_load(*d_weights, wait_n=0), delta).astype(problem.dtype)

            weights = pipeline.accumulate(weighed, *[(GROUP_ROWS, columns)] * (1 + of_scores))
            (d if of_scores else c)[1].release(u)
            tile = c_tile if of_scores else d[1].wait(u)[0]
            if edge:
                pipeline.scrub(mask, seen, t, batch, tile)
            turns.begin(w)
            plgpu.wgmma(total, weights, tile)
            plgpu.wgmma_wait(0)
            (c if of_scores else d)[1].release(u)

        pipeline.of_each_step(heads, visit, step)
        return plgpu.wgmma_accumulator_load(total)

    pipeline.roles(consumers, produce, consume)


def _sides(gradient: Gradient, blocks: MosaicBlocks) -> tuple[int, int]:
    """Rows of a tile of the gradient, and of the tiles that stream past."""
    return (blocks.block_q, blocks.block_k) if gradient.by_query else (blocks.block_k, blocks.block_q)


def alone(gradient: Gradient, problem: Problem, blocks: MosaicBlocks, tensors: tuple[Array, ...]) -> Array:
    """One gradient, of tensors q, k, v, do and the queries' vectors as the kernels see them."""
    like = tensors[(DQ, DK, DV).index(gradient)]
    rows, columns = _sides(gradient, blocks)
    by_query = gradient.by_query
    tiles = pl.cdiv(like.shape[1], rows)
    parts = 1 if by_query else launch.parts(problem, tiles)
    out = launch.partial_sum(like, parts, rows)
    problem = lists.listed(problem, blocks.block_q, blocks.block_k, by_query, swapped=not by_query)
    consumers, dtype = rows // GROUP_ROWS, tensors[0].dtype
    mask = problem.mask if by_query else problem.mask.T
    grid = Grid.of(problem.B, out.shape[2], tiles, blocks.head_group, mask)

    def ring(width: int, stays: bool, stages: int, vectors: bool = False) -> Ring:
        slots, length = (consumers, GROUP_ROWS) if stays else (stages, columns)
        buffers = [pipeline.tiles(slots, length, width, dtype=dtype)]
        return Ring.of(slots, consumers, *buffers, *[pipeline.vectors(slots, 2, length)] * vectors)

    scratch = dict(
        q_ring=ring(problem.H, by_query, 2, vectors=True),
        k_ring=ring(problem.H, not by_query, 2),
        v_ring=ring(problem.Hv, not by_query, blocks.num_stages),
        do_ring=ring(problem.Hv, by_query, blocks.num_stages),
        words=pipeline.vectors(consumers, 4),
    )
    kernel = functools.partial(flash_alone, gradient=gradient)
    (found,) = launch.call(kernel, gradient.name, problem, grid, blocks, consumers, scratch, tensors, (out,))
    return launch.total(found, parts)
