"""How tiles move in the forward pass, with Triton: one program per tile of queries walks the keys it attends to."""

import jax
import jax.numpy as jnp
from jax import Array
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


def flash_forward(q_ref, k_ref, v_ref, o_ref, lse_ref, *, problem: Problem, grid: Grid, blocks: Blocks):
    """Kernel body: output and log-sum-exp of one tile of queries (FlashAttention-2, algorithm 1)."""
    layouts = Layouts.of_query_heads(problem, blocks)
    block_q, block_k = blocks.block_q, blocks.block_k
    b, head, i = launch.place(grid)
    first = i * block_q
    mask = launch.bounded(problem, blocks)
    queries, keys = masks.used(mask, problem.T, problem.S)
    seen = lists.visit(mask, Span(first, first + block_q), Span(0, problem.S), block_k, (b, head, i))
    sign, c = softmax.base2(problem.any_scale)
    fast = launch.elementary(problem)

    q = softmax.signed(sign, layouts.q.load(q_ref, first, queries))

    def step(j, run: softmax.Running, edge: bool) -> softmax.Running:
        inside = keys if edge else None
        k = layouts.k.load(k_ref, j * block_k, inside)
        v = layouts.v.load(v_ref, j * block_k, inside)
        tile = launch.tile(problem, blocks, b, head, first, j * block_k)
        s = launch.dot(problem, q, k, trans_b=True)
        weigher = Weigher.at(problem, mask, tile, edge)  # a bias read before the dot costs a quarter more
        s, factor, _ = weigher.logits(s, c)
        return softmax.update(run, s, factor, lambda p: launch.dot(problem, weigher.drop(p.astype(v.dtype)), v), fast)

    run = seen.walk(step, softmax.start((block_q,), layouts.v.tile[1]))
    sink = None if problem.sinks is None else launch.tile(problem, blocks, b, head, first, 0).read(problem.sinks)
    o, lse = softmax.finish(run, sink, problem.gain, fast)
    layouts.o.store(o_ref, first, o)
    layouts.row.store(lse_ref, first, lse)


def forward(
    problem: Problem, q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K Hv"]
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Output in q's dtype and natural log-sum-exp in float32."""
    blocks = problem.plan.forward
    if problem.mask.reads:
        v = clean.keys(problem, v)
    problem = lists.listed(problem, blocks.block_q, blocks.block_k, by_query=True)
    layouts = Layouts.of_query_heads(problem, blocks)
    grid = Grid.of(problem.B, problem.N, layouts.q.tiles, blocks.head_group, problem.mask)
    o = jax.ShapeDtypeStruct((*q.shape[:-1], problem.Hv), q.dtype)
    lse = jax.ShapeDtypeStruct((problem.B, problem.N, problem.T), jnp.float32)
    operands = [(q, layouts.q), (k, layouts.k), (v, layouts.v)]
    return tuple(
        launch.call(
            flash_forward, "flash_forward", problem, grid, blocks, operands, [(o, layouts.o), (lse, layouts.row)]
        )
    )
