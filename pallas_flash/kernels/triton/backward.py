"""How tiles move in the backward pass, with Triton: one kernel for dq, which walks keys, one for dk and dv, which walks queries.

Two passes, because adding dq up with atomics from one pass was three times slower (139 against 404 TFLOP/s on an H200).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from pallas_flash import masks, softmax
from pallas_flash.kernels.triton import launch
from pallas_flash.kernels.triton.launch import Grid, Sequence
from pallas_flash.masks import Span
from pallas_flash.plan import Blocks
from pallas_flash.problem import Problem
from pallas_flash.tile import Tile


def flash_dq(
    q_ref, k_ref, v_ref, do_ref, lse2_ref, delta_ref, dq_ref, *d_scale_ref, problem: Problem, grid: Grid, blocks: Blocks
):
    """Kernel body: dq of one tile of queries, and for a traced scale its gradient by query."""
    q_layout, k_layout, v_layout, do_layout, row_layout = _dq_layouts(problem, blocks)
    block_q, block_k = blocks.block_q, blocks.block_k
    first = grid.tile() * block_q
    mask = launch.bounded(problem, blocks)
    queries, keys = masks.used(mask, problem.T, problem.S)
    seen = masks.visit(mask, Span(first, first + block_q), Span(0, problem.S), block_k)
    sign, c = softmax.base2(problem.any_scale)
    fast = launch.elementary(problem)

    q = softmax.signed(sign, q_layout.load(q_ref, first, queries))
    do = do_layout.load(do_ref, first, queries)
    lse2 = row_layout.load(lse2_ref, first, queries)[:, None]
    delta = row_layout.load(delta_ref, first, queries)[:, None]

    def step(j, dq: Array, edge: bool) -> Array:
        inside = keys if edge else None
        k = k_layout.load(k_ref, j * block_k, inside)
        v = v_layout.load(v_ref, j * block_k, inside)
        keep = mask.keep(Tile.at(first, block_q, j * block_k, block_k)) if edge else None
        p = softmax.recompute(launch.dot(problem, q, k, trans_b=True), None, c, lse2, fast)  # ds alone needs keep
        ds = softmax.d_score(p, launch.dot(problem, do, v, trans_b=True), delta, keep)
        return dq + launch.dot(problem, ds.astype(k.dtype), k)  # eq. 17

    dq = seen.walk(step, jnp.zeros(q.shape, jnp.float32))
    q_layout.store(dq_ref, first, dq * problem.any_scale)
    for ref in d_scale_ref:
        row_layout.store(ref, first, jnp.sum(q * dq, -1) * sign)  # eq. 19


def flash_dkv(
    q_ref, k_ref, v_ref, do_ref, lse2_ref, delta_ref, dk_ref, dv_ref, *, problem: Problem, grid: Grid, blocks: Blocks
):
    """Kernel body: dk and dv of one tile of keys, summed over the query heads of its group (eq. 20); tiles are transposed."""
    q_layout, k_layout, v_layout, do_layout, row_layout = _dkv_layouts(problem, blocks)
    block_q, block_k = blocks.block_q, blocks.block_k
    first = grid.tile() * block_k
    mask = launch.bounded(problem, blocks)
    queries, keys = masks.used(mask, problem.T, problem.S)
    seen = masks.visit(mask.T, Span(first, first + block_k), Span(0, problem.T), block_q)
    sign, c = softmax.base2(problem.any_scale)
    fast = launch.elementary(problem)

    k = softmax.signed(sign, k_layout.load(k_ref, first, keys))
    v = v_layout.load(v_ref, first, keys)

    def step(i, grads: tuple[Array, Array], edge: bool, g) -> tuple[Array, Array]:
        dk, dv = grads
        inside = queries if edge else None
        q = q_layout.load(q_ref, i * block_q, inside, g)
        do = do_layout.load(do_ref, i * block_q, inside, g)
        lse2 = row_layout.load(lse2_ref, i * block_q, inside, g)[None, :]
        delta = row_layout.load(delta_ref, i * block_q, inside, g)[None, :]
        keep = mask.keep(Tile.at(i * block_q, block_q, first, block_k, transposed=True)) if edge else None
        pT = softmax.recompute(launch.dot(problem, k, q, trans_b=True), keep, c, lse2, fast)
        dv = dv + launch.dot(problem, pT.astype(do.dtype), do)  # eq. 13
        dsT = softmax.d_score(pT, launch.dot(problem, v, do, trans_b=True), delta, keep)
        return dk + launch.dot(problem, dsT.astype(q.dtype), q), dv  # eq. 18

    def head(g, grads):
        return seen.walk(lambda i, carry, edge: step(i, carry, edge, g), grads)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dk, dv = head(0, zeros) if problem.G == 1 else lax.fori_loop(0, problem.G, head, zeros)
    k_layout.store(dk_ref, first, dk * problem.any_scale)
    v_layout.store(dv_ref, first, dv)


def _dq_layouts(problem: Problem, blocks: Blocks) -> tuple[Sequence, ...]:
    """Of q, k, v, do and of lse2 and delta, for programs of one query head each."""
    queries, keys = (problem.T, blocks.block_q), (problem.S, blocks.block_k)
    return (
        Sequence(*queries, problem.H),
        Sequence(*keys, problem.H, shared=problem.G),
        Sequence(*keys, problem.Hv, shared=problem.G),
        Sequence(*queries, problem.Hv),
        Sequence(*queries),
    )


def _dkv_layouts(problem: Problem, blocks: Blocks) -> tuple[Sequence, ...]:
    """The same, for programs of one key/value head each, which see the query heads of its group."""
    queries, keys = (problem.T, blocks.block_q), (problem.S, blocks.block_k)
    group = problem.G if problem.G > 1 else None
    return (
        Sequence(*queries, problem.H, group=group),
        Sequence(*keys, problem.H),
        Sequence(*keys, problem.Hv),
        Sequence(*queries, problem.Hv, group=group),
        Sequence(*queries, group=group),
    )


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
    tensors = (q, k, v, do, lse * softmax.LOG2E, delta)
    dq, dkv = problem.plan.dq, problem.plan.dkv
    q_layouts, k_layouts = _dq_layouts(problem, dq), _dkv_layouts(problem, dkv)
    row = jax.ShapeDtypeStruct(lse.shape, lse.dtype)
    d_query, *d_scale = launch.call(
        flash_dq,
        problem,
        Grid.of(problem, problem.N, q_layouts[0].tiles, dq, problem.mask),
        dq,
        list(zip(tensors, (*q_layouts, q_layouts[-1]), strict=True)),
        [(jax.ShapeDtypeStruct(q.shape, q.dtype), q_layouts[0]), (row, q_layouts[-1])][: 1 if problem.scale is None else 2],
    )
    d_key, d_value = launch.call(
        flash_dkv,
        problem,
        Grid.of(problem, problem.K, k_layouts[1].tiles, dkv, problem.mask.T),
        dkv,
        list(zip(tensors, (*k_layouts, k_layouts[-1]), strict=True)),
        [(jax.ShapeDtypeStruct(x.shape, x.dtype), layout) for x, layout in zip((k, v), k_layouts[1:3], strict=True)],
    )
    return d_query, d_key, d_value, jnp.sum(d_scale[0], (1, 2)) if d_scale else None
