"""How is a Mosaic kernel launched, which mask does it see, and how many thread blocks share a group of heads?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import varying
from pallas_flash.kernels.grid import Grid
from pallas_flash.kernels.mosaic_gpu import pipeline
from pallas_flash.lists import Listed
from pallas_flash.masks import Lengths, Mask
from pallas_flash.plan import MosaicBlocks
from pallas_flash.problem import Problem

FILLED, BALANCED = 256, 512
"""Thread blocks that fill 132 multiprocessors, and that do so evenly where some take longer than others."""
TARGET = "mosaic_gpu_v2"
"""Name of the custom call that a kernel becomes."""


def bounded(problem: Problem, block_k: int) -> Mask:
    """The problem's mask and the end of the keys; queries beyond theirs are zeros, and are not stored."""
    if isinstance(problem.mask, Listed):
        return problem.mask
    return Lengths(None, problem.S if problem.S % block_k else None) & problem.mask


def parts(problem: Problem, tiles: int) -> int:
    """Into how many parts the query heads of a group are divided, a thread block for each: a divisor of the group.

    Thread blocks that are many take alike long, those side by side work on few heads, and what they read of queries is
    still in the L2 cache (docs/performance.md). Sums of too many parts cost more than that: of the divisors, the one
    that comes nearest to what is wanted.
    """
    is_uneven = problem.mask.grows or problem.mask.ends_alike
    filled = max(1, problem.B * problem.K * tiles) / (BALANCED if is_uneven else FILLED)
    divisors = (n for n in range(1, problem.G + 1) if problem.G % n == 0)
    return min(divisors, key=lambda n: max(filled * n, 1 / (filled * n)))


def partial_sum(like: Array, parts: int, rows: int) -> jax.ShapeDtypeStruct:
    """What a kernel computes of a gradient like `like`; if in parts, in float32, and to the end of the last tile."""
    B, S, K, width = like.shape
    if parts == 1:
        return jax.ShapeDtypeStruct(like.shape, like.dtype)
    return jax.ShapeDtypeStruct((B, -(-S // rows) * rows, K * parts, width), jnp.float32)


def total(sums: Array, parts: int) -> Array:
    """The sum of parts [B, S, K · parts, H]."""
    B, S, heads, width = sums.shape
    return sums if parts == 1 else jnp.sum(sums.reshape(B, S, heads // parts, parts, width), 3)


def call(
    kernel: Callable, name: str, problem: Problem, grid: Grid, blocks: MosaicBlocks, consumers: int,
    scratch: dict[str, Any], operands: tuple[Any, ...], outputs: tuple[jax.ShapeDtypeStruct, ...],
):  # fmt: skip
    """Launches `kernel(*operands, *outputs, problem=, grid=, blocks=, **scratch)`.

    In it, leaves of the problem are scalars, those of the batch entry, or references to what is no vector.
    """
    leaves, structure = jax.tree.flatten(problem)

    def body(*refs, **scratch):
        b = pipeline.place(grid)[0]
        seen = [ref[b] if len(ref.shape) == 1 else ref for ref in refs[: len(leaves)]]
        kernel(*refs[len(leaves) :], problem=structure.unflatten(seen), grid=grid, blocks=blocks, **scratch)

    body.__name__ = body.__qualname__ = name
    x, y, z = grid.shape
    launch = plgpu.kernel(
        body,
        out_type=tuple(varying.like(operands[0], shape) for shape in outputs),
        grid=(x * y * z,),
        grid_names=(pipeline.BLOCK,),
        num_threads=consumers + 1,
        thread_name=pipeline.GROUP,
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            # What its barriers around each store and copy would guard is guarded above, where it needs to be.
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=512,
        ),
    )
    with jax.enable_x64(False):  # Python's integers are int32 in a kernel, whatever they are around it
        return launch(*leaves, *operands)
