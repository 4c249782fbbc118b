"""How tiles move in the backward pass, with TMA and wgmma: one kernel, a tile of keys stays, queries stream past.

FlashAttention-3 (arXiv:2407.08608): the scores and their cotangents are computed transposed, so that they feed the
products for dv and dk from registers; for dq they pass through shared memory, and are added up in device memory.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from pallas_flash import masks, softmax
from pallas_flash.kernels.grid import Grid
from pallas_flash.kernels.mosaic_gpu import operands, pipeline
from pallas_flash.kernels.mosaic_gpu.pipeline import FAST, GROUP_ROWS, Ring
from pallas_flash.masks import Span
from pallas_flash.plan import MosaicBlocks
from pallas_flash.problem import Problem

CONSUMERS = 2


def flash_backward(
    q_ref, k_ref, v_ref, do_ref, lse2_ref, delta_ref, dq_ref, dk_ref, dv_ref, *, q_ring: Ring, do_ring: Ring,
    kv_ring: Ring, ds_tiles, dq_tiles, problem: Problem, grid: Grid, blocks: MosaicBlocks,
):  # fmt: skip
    """Kernel body: dk and dv of one tile of keys, summed over a group of query heads; dq is added to `dq_ref`."""
    block_q, block_k = blocks.block_q, blocks.block_k
    b, kv_head, i = pipeline.place(grid)
    first = i * block_k
    mask = pipeline.bounded(problem, block_k)
    seen = pipeline.uniform(masks.visit(mask.T, Span(first, first + block_k), Span(0, problem.T), block_q))
    sign, c = softmax.base2(problem.any_scale)

    def of_each_head(walk):
        """`walk(head, turn)` for each query head of the group, `turn` being that of its first block."""

        def one(g, _=None):
            walk(kv_head * problem.G + g, g * seen.count)

        return one(0) if problem.G == 1 else lax.fori_loop(0, problem.G, one, None)

    def produce():
        keys = pl.ds(first, block_k)
        kv_ring.fill(0, k_ref.at[b, keys, kv_head], v_ref.at[b, keys, kv_head])

        def walk(head, turn):
            def step(t, _):
                rows = pl.ds(seen.block(t) * block_q, block_q)
                q_ring.fill(turn + t, q_ref.at[b, rows, head], lse2_ref.at[b, head, rows])
                do_ring.fill(turn + t, do_ref.at[b, rows, head], delta_ref.at[b, head, rows])

            lax.fori_loop(0, seen.count, step, None)

        of_each_head(walk)

    def consume(w: int):
        own = pl.ds(w * GROUP_ROWS, GROUP_ROWS)
        k, v = kv_ring.wait(0)
        sums = (GROUP_ROWS, problem.H), (GROUP_ROWS, problem.Hv)
        dk, dv = pipeline.accumulate(lambda dk, dv: stream(w, k, v, dk, dv), *sums)
        pipeline.meet()  # the other consumer's last product may still read all of k
        dk_tile, dv_tile = k.at[own], v.at[own]
        dk_tile[...] = (dk * (problem.any_scale * sign)).astype(problem.dtype)
        dv_tile[...] = dv.astype(problem.dtype)
        rows = pl.ds(first + w * GROUP_ROWS, GROUP_ROWS)
        pipeline.send((dk_tile, dk_ref.at[b, rows, kv_head]), (dv_tile, dv_ref.at[b, rows, kv_head]))

    def stream(w: int, k, v, dk, dv) -> tuple[Array, Array]:
        own = pl.ds(w * GROUP_ROWS, GROUP_ROWS)
        # This consumer's part of dq: rows of a tile of 128, else columns.
        rows, columns = (GROUP_ROWS, problem.H) if block_q == 2 * GROUP_ROWS else (block_q, problem.H // 2)
        part = (own, slice(None)) if rows < block_q else (slice(None), pl.ds(w * columns, columns))

        def step(t, edge: bool, head, turn):
            u, j = turn + t, seen.block(t)
            q, lse2 = q_ring.wait(u)

            def scored(scores, d_weights):
                plgpu.wgmma(scores, k.at[own], q.transpose((1, 0)))
                do, delta = do_ring.wait(u)
                plgpu.wgmma(d_weights, v.at[own], do.transpose((1, 0)))
                sT = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                at = pipeline.tile(j * block_q, first + w * GROUP_ROWS, sT.shape, transposed=True)
                sT = softmax.masked(sT, mask.keep(at) if edge else None)
                pT = softmax.recompute(sT, c, pipeline.by_column(lse2, sT.shape), FAST)
                dpT = plgpu.wgmma_accumulator_load(d_weights, wait_n=0)
                dsT = softmax.d_score(pT, dpT, pipeline.by_column(delta, sT.shape))
                return pT.astype(problem.dtype), dsT.astype(problem.dtype)

            pT, dsT = pipeline.accumulate(scored, (GROUP_ROWS, block_q), (GROUP_ROWS, block_q))
            ds_tile = ds_tiles.at[lax.rem(u, jnp.int32(2))]
            ds_tile[own, :] = dsT
            plgpu.wgmma(dv, pT, do_ring.at(u)[0])  # eq. 13
            pipeline.meet()

            def summed(dq):
                plgpu.wgmma(dq, ds_tile.at[:, part[0]].transpose((1, 0)), k.at[:, part[1]])  # eq. 17
                plgpu.wgmma(dk, dsT, q)  # eq. 18
                plgpu.wgmma_wait(2)
                do_ring.release(u)
                target = pl.ds(j * block_q + (w * rows if rows < block_q else 0), rows)
                pipeline.add(plgpu.wgmma_accumulator_load(dq, wait_n=1), dq_tiles.at[w], dq_ref.at[b, target, head, part[1]])

            pipeline.accumulate(summed, (rows, columns))
            plgpu.wgmma_wait(0)
            q_ring.release(u)

        def walk(head, turn):
            seen.walk_by_turn(lambda t, _, edge: step(t, edge, head, turn), None)

        of_each_head(walk)
        return dk[...], dv[...]

    pipeline.roles(CONSUMERS, produce, consume)


def backward(
    problem: Problem,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    lse: Float[Array, "B N T"],
    do: Float[Array, "B T N Hv"],
    delta: Float[Array, "B N T"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K Hv"], Float[Array, " B"] | None]:
    """dq, dk, dv and the gradient of a traced scale."""
    blocks, sign = problem.plan.backward, softmax.base2(problem.any_scale)[0]
    block_q, block_k, stages = blocks.block_q, blocks.block_k, blocks.num_stages
    tensors = (
        operands.of_queries(problem, q, sign),
        operands.of_keys(problem, k),
        operands.of_keys(problem, v),
        operands.of_queries(problem, do),
        operands.of_rows(softmax.base2_lse(lse), block_q),
        operands.of_rows(delta, block_q),
    )
    seen, dtype = operands.padded(problem), q.dtype
    grid = Grid.of(problem.B, problem.K, pl.cdiv(problem.S, block_k), blocks.head_group, problem.mask.T)
    rows = pl.cdiv(problem.T, block_q) * block_q
    dq_ref = jax.new_ref(jnp.zeros((problem.B, rows, problem.N, seen.H), jnp.float32))

    def stream(width: int) -> Ring:
        return Ring.of(
            stages, CONSUMERS, pipeline.tiles(stages, block_q, width, dtype=dtype), pipeline.vectors(stages, block_q)
        )

    part = (GROUP_ROWS, seen.H if block_q > GROUP_ROWS else seen.H // 2)
    scratch = dict(
        q_ring=stream(seen.H),
        do_ring=stream(seen.Hv),
        kv_ring=Ring.of(1, CONSUMERS, *(pipeline.tiles(1, block_k, width, dtype=dtype) for width in (seen.H, seen.Hv))),
        ds_tiles=pipeline.tiles(2, block_k, block_q, dtype=dtype),
        dq_tiles=pipeline.tiles(CONSUMERS, *part, dtype=jnp.float32),
    )
    outputs = tuple(jax.ShapeDtypeStruct(x.shape, dtype) for x in tensors[1:3])
    dk, dv = pipeline.call(flash_backward, seen, grid, blocks, CONSUMERS, scratch, (*tensors, dq_ref), outputs)
    raw = dq_ref[...][:, : problem.T, :, : problem.H]
    d_scale = None if problem.scale is None else jnp.sum(raw * q.astype(jnp.float32), (1, 2, 3))  # eq. 19
    by = jnp.reshape(problem.any_scale, (-1, 1, 1, 1))
    return (raw * by).astype(dtype), dk[:, : problem.S, :, : problem.H], dv[:, : problem.S, :, : problem.Hv], d_scale
