"""How tiles move in the backward pass, with TMA and wgmma: one kernel, a tile of keys stays, queries stream past.

FlashAttention-3 (arXiv:2407.08608): the scores and their cotangents are computed transposed, so that they feed the
products for dv and dk from registers; for dq they pass through shared memory, and are added up in device memory.
"""

import dataclasses
import functools
from typing import Any

import jax
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

CONSUMERS = 2


def flash_backward(
    q_ref, k_ref, v_ref, do_ref, vectors_ref, dq_ref, *counters_and_outputs, q_ring: Ring, do_ring: Ring, kv_ring: Ring,
    dq_tiles, ds_tiles, words, problem: Problem, grid: Grid, blocks: MosaicBlocks,
):  # fmt: skip
    """Kernel body: dk and dv of one tile of keys, summed over part of a group of heads; dq is added to `dq_ref`."""
    *counters, dk_ref, dv_ref = counters_and_outputs
    block_q, block_k = blocks.block_q, blocks.block_k
    b, number, i = pipeline.place(grid)
    kv_head, heads = pipeline.part(problem, grid, number)
    first = i * block_k
    mask = launch.bounded(problem, block_k)
    sign, c = softmax.base2(problem.any_scale)
    order = pipeline.Order(*counters)

    def visit(head):
        rows, place = Span(first, first + block_k), (b, head, i)
        return pipeline.uniform(lists.visit(mask, rows, Span(0, problem.T), block_q, place, by_query=False))

    def load():
        keys = pl.ds(first, block_k)
        kv_ring.fill(0, k_ref.at[b, keys, kv_head], v_ref.at[b, keys, kv_head])

        def fill(head, turn, j):
            rows = pl.ds(j * block_q, block_q)
            q_ring.fill(turn, q_ref.at[b, rows, head], vectors_ref.at[b, head, :, rows])
            do_ring.fill(turn, do_ref.at[b, rows, head])

        pipeline.of_each_block(heads, visit, fill)

    def add(w):
        """Adds what consumer w computes of dq to device memory."""
        rows, columns = _of_dq(problem, block_q, w)

        def take(head, _, j):
            target = dq_ref.at[b, head, pl.ds(j * block_q + rows.start, rows.size), columns]
            place = ((b * problem.N + head) * pl.cdiv(problem.T, block_q) + j) * CONSUMERS + w
            queries = Span(j * block_q, (j + 1) * block_q)
            rank = lists.later(mask, queries, problem.S, block_k, (b, head, i), j) if counters else 0
            pipeline.Handover(dq_tiles, w).add(target, order, place, rank)

        pipeline.of_each_block(heads, visit, take)

    def consume(w):
        own = pipeline.share(w, GROUP_ROWS)
        k, v = kv_ring.wait(0)
        pipeline.scrub_rows(mask, b, i, first + w * GROUP_ROWS, k.at[own])
        sums = (GROUP_ROWS, problem.H), (GROUP_ROWS, problem.Hv)
        dk, dv = pipeline.accumulate(lambda dk, dv: stream(w, dk, dv), *sums)
        pipeline.meet()  # the other consumer's last product may still read all of k
        rows, copies = pl.ds(first + w * GROUP_ROWS, GROUP_ROWS), []
        for x, by, tile, out in ((dk, problem.any_scale * sign, k, dk_ref), (dv, problem.gain, v, dv_ref)):
            copies.append(((x * by).astype(out.dtype), tile.at[own], out.at[b, rows, number]))
        pipeline.send(*copies)

    def stream(w, dk, dv) -> tuple[Array, Array]:
        own, own_first = pipeline.share(w, GROUP_ROWS), first + w * GROUP_ROWS
        dq_rows, dq_columns = _of_dq(problem, block_q, w)

        def step(t, edge: bool, u, head, seen):
            (k, v), (q, vectors), (do,) = kv_ring.anew(0), q_ring.wait(u), do_ring.wait(u)

            def weighed(scores, d_weights):
                plgpu.wgmma(scores, k.at[own], q.transpose((1, 0)))
                plgpu.wgmma(d_weights, v.at[own], do.transpose((1, 0)))
                tile = where.tile(scores.shape, (b, head), own_first, seen.block(t) * block_q, words.at[w], True)
                weigher = Weigher.at(problem, mask, tile, edge)
                sT = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                lse2, delta = (pipeline.by_column(vectors.at[n], sT.shape) for n in range(2))
                pT, d_score = weigher.recompute(sT, c, lse2)
                dsT = d_score(plgpu.wgmma_accumulator_load(d_weights, wait_n=0), delta)
                return weigher.drop(pT.astype(problem.dtype)), dsT.astype(problem.dtype)

            pT, dsT = pipeline.accumulate(weighed, (GROUP_ROWS, block_q), (GROUP_ROWS, block_q))
            if edge:
                pipeline.scrub(mask, seen, t, b, q, do)
            ds_tile = ds_tiles.at[lax.rem(u, jnp.int32(2))]
            ds_tile[own, :] = dsT
            plgpu.wgmma(dv, pT, do)  # eq. 13
            pipeline.meet()

            def summed(dq):
                plgpu.wgmma(dq, ds_tile.at[:, dq_rows].transpose((1, 0)), k.at[:, dq_columns])  # eq. 17
                plgpu.wgmma(dk, dsT, q)  # eq. 18
                plgpu.wgmma_wait(2)
                do_ring.release(u)
                pipeline.Handover(dq_tiles, w).give(plgpu.wgmma_accumulator_load(dq, wait_n=1))

            pipeline.accumulate(summed, (dq_rows.size, dq_columns.size))
            plgpu.wgmma_wait(0)
            q_ring.release(u)

        pipeline.of_each_step(heads, visit, step)
        return dk[...], dv[...]

    def produce():
        pipeline.by_warp(load, *(functools.partial(add, w) for w in range(CONSUMERS)))

    pipeline.roles(CONSUMERS, produce, consume)


def together(problem: Problem, blocks: MosaicBlocks, tensors: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    """All gradients: dq (float32, without the scale), dk and dv.

    `tensors` are q, k, v, do and the queries' vectors as the kernel sees them.
    """
    block_q, block_k, stages = blocks.block_q, blocks.block_k, blocks.num_stages
    problem = lists.listed(problem, block_q, block_k, by_query=False, swapped=True)
    H, Hv, dtype = problem.H, problem.Hv, tensors[0].dtype
    tiles_k = pl.cdiv(problem.S, block_k)
    parts = launch.parts(problem, tiles_k)
    grid = Grid.of(problem.B, problem.K * parts, tiles_k, blocks.head_group, problem.mask.T)
    if problem.deterministic:  # of two tiles, the later one comes to a query first: then it need not wait
        grid = dataclasses.replace(grid, last_first=True)
    tiles_q = pl.cdiv(problem.T, block_q)
    sums = [jax.new_ref(jnp.zeros((problem.B, problem.N, tiles_q * block_q, H), jnp.float32))]
    if problem.deterministic:
        sums.append(jax.new_ref(jnp.zeros(problem.B * problem.N * tiles_q * CONSUMERS, jnp.int32)))
    rows, columns = _of_dq(problem, block_q, 0)
    scratch = dict(
        q_ring=Ring.of(
            stages, CONSUMERS, pipeline.tiles(stages, block_q, H, dtype=dtype), pipeline.vectors(stages, 2, block_q)
        ),
        do_ring=Ring.of(stages, CONSUMERS, pipeline.tiles(stages, block_q, Hv, dtype=dtype)),
        kv_ring=Ring.of(1, CONSUMERS, *(pipeline.tiles(1, block_k, width, dtype=dtype) for width in (H, Hv))),
        dq_tiles=pipeline.tiles(CONSUMERS, rows.size, columns.size, dtype=jnp.float32),
        ds_tiles=pipeline.tiles(2, block_k, block_q, dtype=dtype),
        words=pipeline.vectors(CONSUMERS, 4),
    )
    outputs = tuple(launch.partial_sum(x, parts, block_k) for x in tensors[1:3])
    operands = (*tensors, *sums)
    found = launch.call(flash_backward, "flash_backward", problem, grid, blocks, CONSUMERS, scratch, operands, outputs)
    dk, dv = (launch.total(x, parts) for x in found)
    return jnp.swapaxes(pipeline.Handover.in_order(sums[0][...]), 1, 2), dk, dv


def _of_dq(problem: Problem, block_q: int, w) -> tuple[Any, Any]:
    """What consumer w computes of a block of dq: of 128 queries half the rows, else half the columns."""
    if block_q > GROUP_ROWS:
        return pipeline.share(w, GROUP_ROWS), pl.ds(0, problem.H)
    return pl.ds(0, block_q), pipeline.share(w, problem.H // CONSUMERS)
