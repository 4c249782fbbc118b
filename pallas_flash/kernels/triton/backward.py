"""How tiles move in the backward pass, with Triton: a kernel for dq walks keys, one for dk and dv walks queries.

Two passes, because adding dq up with atomics from one pass was three times slower (139 against 404 TFLOP/s on an H200).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from pallas_flash import lists, masks, softmax
from pallas_flash.cells import Span
from pallas_flash.kernels import clean
from pallas_flash.kernels.grid import Grid
from pallas_flash.kernels.triton import launch
from pallas_flash.kernels.triton.launch import Layouts
from pallas_flash.plan import Blocks
from pallas_flash.problem import Problem
from pallas_flash.weights import Weigher


def flash_dq(
    q_ref, k_ref, v_ref, do_ref, lse2_ref, delta_ref, dq_ref, *d_scale_ref, problem: Problem, grid: Grid, blocks: Blocks
):
    """Kernel body: dq of one tile of queries, and for a traced scale its gradient by query."""
    layouts = Layouts.of_query_heads(problem, blocks)
    block_q, block_k = blocks.block_q, blocks.block_k
    b, head, i = launch.place(grid)
    first = i * block_q
    mask = launch.bounded(problem, blocks)
    queries, keys = masks.used(mask, problem.T, problem.S)
    seen = lists.visit(mask, Span(first, first + block_q), Span(0, problem.S), block_k, (b, head, i))
    sign, c = softmax.base2(problem.any_scale)

    q = softmax.signed(sign, layouts.q.load(q_ref, first, queries))
    do = layouts.o.load(do_ref, first, queries)
    lse2 = layouts.row.load(lse2_ref, first, queries)[:, None]
    delta = layouts.row.load(delta_ref, first, queries)[:, None]

    def step(j, dq: Array, edge: bool) -> Array:
        inside = keys if edge else None
        k = layouts.k.load(k_ref, j * block_k, inside)
        v = layouts.v.load(v_ref, j * block_k, inside)
        tile = launch.tile(problem, blocks, b, head, first, j * block_k)
        s = launch.dot(problem, q, k, trans_b=True)
        _, d_score = Weigher.at(problem, mask, tile, edge).recompute(s, c, lse2)
        ds = d_score(launch.dot(problem, do, v, trans_b=True), delta)
        return dq + launch.dot(problem, ds.astype(k.dtype), k)  # eq. 17

    dq = seen.walk(step, jnp.zeros(q.shape, jnp.float32))
    layouts.q.store(dq_ref, first, dq * problem.any_scale)
    for ref in d_scale_ref:
        layouts.row.store(ref, first, jnp.sum(q * dq, -1) * sign)  # eq. 19


def flash_dkv(
    q_ref, k_ref, v_ref, do_ref, lse2_ref, delta_ref, dk_ref, dv_ref, *, problem: Problem, grid: Grid, blocks: Blocks
):
    """Kernel body: dk and dv of one tile of keys, summed over a group of query heads (eq. 20); transposed."""
    layouts = Layouts.of_key_heads(problem, blocks)
    block_q, block_k = blocks.block_q, blocks.block_k
    b, kv_head, j = launch.place(grid)
    first = j * block_k
    mask = launch.bounded(problem, blocks)
    queries, keys = masks.used(mask, problem.T, problem.S)
    sign, c = softmax.base2(problem.any_scale)

    k = softmax.signed(sign, layouts.k.load(k_ref, first, keys))
    v = layouts.v.load(v_ref, first, keys)

    def step(i, grads: tuple[Array, Array], edge: bool, g, head) -> tuple[Array, Array]:
        dk, dv = grads
        inside = queries if edge else None
        q = layouts.q.load(q_ref, i * block_q, inside, g)
        do = layouts.o.load(do_ref, i * block_q, inside, g)
        lse2 = layouts.row.load(lse2_ref, i * block_q, inside, g)[None, :]
        delta = layouts.row.load(delta_ref, i * block_q, inside, g)[None, :]
        tile = launch.tile(problem, blocks, b, head, i * block_q, first, transposed=True)
        sT = launch.dot(problem, k, q, trans_b=True)
        weigher = Weigher.at(problem, mask, tile, edge)
        pT, d_score = weigher.recompute(sT, c, lse2)
        dv = dv + launch.dot(problem, weigher.drop(pT.astype(do.dtype)), do)  # eq. 13
        dsT = d_score(launch.dot(problem, v, do, trans_b=True), delta)
        return dk + launch.dot(problem, dsT.astype(q.dtype), q), dv  # eq. 18

    def of_head(g, grads):
        head = kv_head * problem.G + g
        rows, place = Span(first, first + block_k), (b, head, j)
        seen = lists.visit(mask, rows, Span(0, problem.T), block_q, place, by_query=False)
        return seen.walk(lambda i, carry, edge: step(i, carry, edge, g, head), grads)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dk, dv = of_head(0, zeros) if problem.G == 1 else lax.fori_loop(0, problem.G, of_head, zeros)
    layouts.k.store(dk_ref, first, dk * problem.any_scale)
    layouts.v.store(dv_ref, first, dv * problem.gain)


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
    if problem.mask.reads:
        q, do, delta = (clean.queries(problem, x, axis) for x, axis in ((q, 1), (do, 1), (delta, 2)))
        k, v = clean.keys(problem, k), clean.keys(problem, v)
    tensors = (q, k, v, do, softmax.base2_lse(lse), delta)

    blocks = problem.plan.dq
    seen = lists.listed(problem, blocks.block_q, blocks.block_k, by_query=True)
    layouts = Layouts.of_query_heads(problem, blocks)
    grid = Grid.of(problem.B, problem.N, layouts.q.tiles, blocks.head_group, problem.mask)
    operands = list(zip(tensors, (*layouts, layouts.row), strict=True))
    outputs = [(_like(q), layouts.q)] + ([] if problem.scale is None else [(_like(lse), layouts.row)])
    dq, *d_scale = launch.call(flash_dq, "flash_dq", seen, grid, blocks, operands, outputs)

    blocks = problem.plan.dkv
    seen = lists.listed(problem, blocks.block_q, blocks.block_k, by_query=False)
    layouts = Layouts.of_key_heads(problem, blocks)
    grid = Grid.of(problem.B, problem.K, layouts.k.tiles, blocks.head_group, problem.mask.T)
    operands = list(zip(tensors, (*layouts, layouts.row), strict=True))
    outputs = [(_like(k), layouts.k), (_like(v), layouts.v)]
    dk, dv = launch.call(flash_dkv, "flash_dkv", seen, grid, blocks, operands, outputs)
    return dq, dk, dv, jnp.sum(d_scale[0], (1, 2)) if d_scale else None


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
