"""How tiles move in the forward pass, with TMA and wgmma: the softmax of one block runs under the products of others.

FlashAttention-3 (arXiv:2407.08608): consumers take turns, and each issues q·k of block t before p·v of block t - 1.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from pallas_flash import lists, softmax
from pallas_flash.cells import Span
from pallas_flash.kernels import clean
from pallas_flash.kernels.grid import Grid
from pallas_flash.kernels.mosaic_gpu import launch, operands, pipeline, where
from pallas_flash.kernels.mosaic_gpu.pipeline import GROUP_ROWS, Ring
from pallas_flash.plan import MosaicBlocks
from pallas_flash.problem import Problem
from pallas_flash.weights import Weigher


def flash_forward(
    q_ref, k_ref, v_ref, o_ref, lse_ref, *, q_ring: Ring, k_ring: Ring, v_ring: Ring, rings: list[Ring], o_tiles,
    l_rows, problem: Problem, grid: Grid, blocks: MosaicBlocks,
):  # fmt: skip
    """Kernel body: output and log-sum-exp of one tile of queries, 64 of them for each consumer."""
    block_q, block_k, consumers = blocks.block_q, blocks.block_k, blocks.block_q // GROUP_ROWS
    b, head, i = pipeline.place(grid)
    first = i * block_q
    mask = launch.bounded(problem, block_k)
    seen = lists.visit(mask, Span(first, first + block_q), Span(0, problem.S), block_k, (b, head, i))
    seen = pipeline.uniform(seen.at_least_one())
    c = softmax.base2(problem.any_scale)[1]
    turns = pipeline.Turns(consumers)
    ahead = where.Ahead(problem, (b, head), operands.streamed(problem, blocks), rings, consumers)

    def rows(w):
        return pl.ds(first + w * GROUP_ROWS, GROUP_ROWS)

    def produce():
        kv_head = lax.div(head, jnp.int32(problem.G))
        for w in range(consumers):
            q_ring.fill(w, q_ref.at[b, rows(w), head])

        def step(t, _):
            keys = pl.ds(seen.block(t) * block_k, block_k)
            k_ring.fill(t, k_ref.at[b, keys, kv_head])
            ahead.fill(t, first, seen.block(t) * block_k, block_k)
            v_ring.fill(t, v_ref.at[b, keys, kv_head])

        lax.fori_loop(0, seen.steps, step, None)

    def consume(w):
        (q,) = q_ring.wait(w)
        turns.open(w)
        run = pipeline.accumulate(lambda acc: attend(w, q, acc), (GROUP_ROWS, problem.Hv))
        turns.close(w)
        sink = None if problem.sinks is None else pipeline.row_vector(problem.sinks[0, head, 0, 0])
        o, lse = softmax.finish(run, sink, problem.gain, where.FAST)
        o_tile = q if o_tiles is None else o_tiles.at[w]
        o = o.astype(problem.dtype)
        pipeline.send((o, o_tile, o_ref.at[b, rows(w), head]), (lse, l_rows.at[w], lse_ref.at[b, head, rows(w)]))

    def attend(w, q, acc) -> softmax.Running:
        def step(t, carry: tuple[Array, Array, Array | None], edge: bool, overlap: bool = True):
            m, l, p = carry  # noqa: E741
            (k,) = k_ring.wait(t)
            turns.begin(w)

            def scored(scores):
                plgpu.wgmma(scores, q, k.transpose((1, 0)))
                if overlap:
                    plgpu.wgmma(acc, p, *v_ring.at(t - 1))
                turns.end(w)
                at = first + w * GROUP_ROWS, seen.block(t) * block_k
                tile = where.tile(scores.shape, (b, head), *at, ahead=functools.partial(ahead.read, w, t))
                weigher = Weigher.at(problem, mask, tile, edge)
                s = plgpu.wgmma_accumulator_load(scores, wait_n=int(overlap))
                k_ring.release(t)
                s, factor, _ = weigher.logits(s, c)
                return *softmax.advance(m, l, s, factor, where.FAST), weigher.drop

            m, l, p, alpha, drop = pipeline.accumulate(scored, (GROUP_ROWS, block_k))  # noqa: E741
            if overlap:
                l, alpha = pipeline.after(l_rows.at[w], l, alpha)  # noqa: E741
                o = plgpu.wgmma_accumulator_load(acc, wait_n=0)
                v_ring.release(t - 1)
                acc[...] = pipeline.rescaled(o, alpha)
            (v,) = v_ring.wait(t)
            if edge:
                pipeline.scrub(mask, seen, t, b, v)
            return m, l, drop(p.astype(problem.dtype))

        start = pipeline.row_vector(softmax.LOWEST), pipeline.no_sums(), None
        m, l, p = seen.walk_by_turn(step, step(0, start, seen.has_edges, overlap=False), skip=1)  # noqa: E741
        plgpu.wgmma(acc, p, *v_ring.at(seen.steps - 1))
        return softmax.Running(m, jnp.sum(l, -1), plgpu.wgmma_accumulator_load(acc))

    pipeline.roles(consumers, produce, consume)


def forward(
    problem: Problem, q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K Hv"]
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Output in q's dtype and natural log-sum-exp in float32."""
    blocks, dtype = problem.plan.forward, q.dtype
    # What q and k hold where they take no part reaches only scores that do not count, and outputs that are not stored.
    v = v if problem.mask.reads else clean.keys(problem, v)  # else the kernel does it
    q, k, v = map(operands.padded, (operands.with_sign(problem, q), k, v))
    seen = lists.listed(problem, blocks.block_q, blocks.block_k, by_query=True)
    seen = dataclasses.replace(seen, H=q.shape[-1], Hv=v.shape[-1])
    tiles, consumers = pl.cdiv(problem.T, blocks.block_q), blocks.block_q // GROUP_ROWS
    grid = Grid.of(problem.B, problem.N, tiles, blocks.head_group, problem.mask)

    def stream(width: int) -> Ring:
        shape = blocks.num_stages, blocks.block_k, width
        return Ring.of(blocks.num_stages, consumers, pipeline.tiles(*shape, dtype=dtype))

    def own(width: int, dtype=dtype):
        return pipeline.tiles(consumers, GROUP_ROWS, width, dtype=dtype)

    scratch = dict(
        q_ring=Ring.of(consumers, 1, own(seen.H)),
        k_ring=stream(seen.H),
        v_ring=stream(seen.Hv),
        rings=[Ring.of(consumers, 1, own(blocks.block_k, x.dtype)) for x in operands.streamed(seen, blocks)],
        o_tiles=None if seen.Hv == seen.H else own(seen.Hv),  # the query's tile is free when the output is there
        l_rows=pipeline.vectors(consumers, GROUP_ROWS),
    )
    outputs = (
        jax.ShapeDtypeStruct((*q.shape[:-1], seen.Hv), dtype),
        jax.ShapeDtypeStruct((problem.B, problem.N, tiles * blocks.block_q), jnp.float32),
    )
    o, lse = launch.call(flash_forward, "flash_forward", seen, grid, blocks, consumers, scratch, (q, k, v), outputs)
    return o[:, : problem.T, :, : problem.Hv], lse[..., : problem.T]
