"""The right answer anywhere: blockwise attention in plain JAX, O(T) memory, differentiable to any order.

Queries go through one block at a time, and every block is rematerialised in the backward pass, so that neither pass
holds more than one block of scores per head (Rabe & Staats, arXiv:2112.05682).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from pallas_flash import lists, patterns, softmax, varying
from pallas_flash.cells import NONE, Cells
from pallas_flash.masks import Lengths
from pallas_flash.problem import Problem
from pallas_flash.score import wide
from pallas_flash.tile import Tile

BLOCK = 512
"""Rows and columns of a block of scores: large enough for the matrix units, 1 MiB of float32 per head."""


def refusal(problem: Problem) -> str | None:
    """Takes every problem; refuses only what is meant for kernels."""
    if problem.interpret:
        return "interpret=True runs Pallas kernels, and it has none"
    return "it has no block sizes to plan; leave plan=None" if problem.plan else None


def forward(
    problem: Problem, q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K Hv"]
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """Output in q's dtype and natural log-sum-exp, float32 (float64 for float64 inputs)."""
    B, T, K, G = problem.B, problem.T, problem.K, problem.G
    block_q, block_k = min(BLOCK, T), min(BLOCK, problem.S)
    cells = Cells(B, problem.N, T, problem.S, block_q, block_k)
    if problem.mask.reads:  # what is looked at is stored, a row of cells at a time: small ones
        small = dataclasses.replace(cells, block_q=patterns.CELL, block_k=patterns.CELL)
        found = patterns.found(problem.mask, small)
        status = patterns.regrouped(found, patterns.CELL, (block_q, block_k), cells.shape)
    else:
        status = patterns.found(problem.mask, cells)
    needed = jnp.any(status != NONE, (0, 1))  # by any batch entry and head
    queries, keys = lists.used(problem)  # what is stored elsewhere, NaN included, counts as 0
    q, k, v = (
        x if part is None else jnp.where(part[..., None, None], x, 0)
        for x, part in ((q, queries), (k, keys), (v, keys))
    )
    mask = problem.mask.with_arrays(cells.padded)
    score = jax.tree.map(lambda leaf: wide(cells.padded(leaf)), problem.score)  # its gradients are summed over blocks
    problem = dataclasses.replace(problem, mask=mask, score=score)
    # In float32 (tf32 on tensor cores, which holds bfloat16 and float16 exactly), so that gradients are summed in it.
    q, k, v = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (q, k, v))
    # [blocks, B, K, G, block_q, H] and [blocks, B, K, 1, block_k, H]
    q_blocks = jnp.moveaxis(_blocks(q, block_q).reshape(B, -1, block_q, K, G, problem.H), (1, 3, 4), (0, 2, 3))
    k_blocks, v_blocks = (jnp.moveaxis(_blocks(x, block_k)[..., None, :], (1, 3, 4), (0, 2, 3)) for x in (k, v))
    rows = _rematerialised_if(len(q_blocks) > 1, functools.partial(_rows, problem, k_blocks, v_blocks))
    numbered = (jnp.arange(len(q_blocks), dtype=jnp.int32), needed, q_blocks)
    _, (o, lse) = lax.scan(lambda _, block: (None, rows(*block)), None, numbered)
    # [blocks, B, K, G, block_q, ...] → [B, T, N, Hv] and [B, N, T]
    o = jnp.moveaxis(o, (0, 4), (1, 2)).reshape(B, -1, problem.N, problem.Hv)[:, :T]
    lse = jnp.moveaxis(lse, 0, 3).reshape(B, problem.N, -1)[..., :T]
    return o.astype(problem.dtype), lse


def _blocks(x: Float[Array, "B L n d"], block: int) -> Float[Array, "B blocks {block} n d"]:
    """The sequence axis padded and cut into blocks."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)))
    return padded.reshape(x.shape[0], -1, block, *x.shape[2:])


def _rematerialised_if(several: bool, f):
    """`f`, recomputed in the backward pass where it runs for several blocks and would keep something for each."""
    return jax.checkpoint(f, prevent_cse=False) if several else f


def _tile(problem: Problem, i: Array, block_q: int, j: Array, block_k: int) -> Tile:
    """The tile of all batch entries and heads, [B, K, G, block_q, block_k], of one block of queries and one of keys."""

    def read(array: Array) -> Array:
        for axis, start, block in ((2, i, block_q), (3, j, block_k)):
            if array.shape[axis] > 1:
                array = lax.dynamic_slice_in_dim(array, start * block, block, axis)
        B, N, *rest = array.shape
        return array.reshape(B, *((problem.K, problem.G) if N > 1 else (1, 1)), *rest)

    batch = jnp.arange(problem.B, dtype=jnp.int32).reshape(-1, 1, 1, 1, 1)
    head = jnp.arange(problem.N, dtype=jnp.int32).reshape(problem.K, problem.G, 1, 1)
    return Tile.at(i * block_q, block_q, j * block_k, block_k)._replace(batch=batch, head=head, read=read)


def _rows(problem: Problem, k_blocks: Array, v_blocks: Array, i: Array, needed: Array, q: Array) -> tuple[Array, Array]:
    """Output [B, K, G, block_q, Hv] and log-sum-exp [B, K, G, block_q] of one block of queries, from needed blocks."""
    block_q, block_k = q.shape[-2], k_blocks.shape[-2]
    problem = jax.tree.map(lambda leaf: leaf.reshape(-1, 1, 1, 1, 1) if leaf.ndim == 1 else leaf, problem)
    mask = Lengths(problem.T, problem.S) & problem.mask
    c = problem.any_scale * softmax.LOG2E
    dot = functools.partial(jnp.einsum, precision=problem.precision if problem.dtype == "float32" else None)

    def step(run: softmax.Running, j: Array, k: Array, v: Array) -> softmax.Running:
        k, v = k[:, :, 0], v[:, :, 0]
        tile = _tile(problem, i, block_q, j, block_k)
        keep, drop = mask.keep(tile), problem.drop(tile)
        s, factor = dot("bkgqh,bksh->bkgqs", q, k), c
        if problem.score.terms:
            score = problem.score.at(tile, problem.any_scale)
            s, factor = score.of(score.scaled(s), keep), score.gain * softmax.LOG2E
        s2 = softmax.masked(s * factor, keep)
        return softmax.update(run, s2, 1.0, lambda p: dot("bkgqs,bksh->bkgqh", drop(p), v))

    step = _rematerialised_if(len(k_blocks) > 1, step)

    def step_if_needed(run: softmax.Running, block) -> tuple[softmax.Running, None]:
        return lax.cond(needed[block[0]], lambda: step(run, *block), lambda: run), None

    columns = jnp.arange(len(k_blocks), dtype=jnp.int32)
    start = softmax.start(q.shape[:-1], problem.Hv, q.dtype)
    run = jax.tree.map(functools.partial(varying.as_over, varying.over(q)), start)
    run, _ = lax.scan(step_if_needed, run, (columns, k_blocks, v_blocks))
    sinks = None if problem.sinks is None else problem.sinks.reshape(problem.K, problem.G, 1)
    return softmax.finish(run, sinks, problem.gain)
