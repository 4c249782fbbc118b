"""How is a Mosaic kernel launched, and which mask does it see?"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import varying
from pallas_flash.kernels.grid import Grid
from pallas_flash.kernels.mosaic_gpu import pipeline
from pallas_flash.lists import Listed
from pallas_flash.masks import Lengths, Mask
from pallas_flash.plan import MosaicBlocks
from pallas_flash.problem import Problem

TARGET = "mosaic_gpu_v2"
"""Name of the custom call that a kernel becomes."""


def bounded(problem: Problem, block_k: int) -> Mask:
    """The problem's mask and the end of the keys; queries beyond theirs are zeros, and are not stored."""
    if isinstance(problem.mask, Listed):
        return problem.mask
    return Lengths(None, problem.S if problem.S % block_k else None) & problem.mask


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
        parts = [ref[b] if len(ref.shape) == 1 else ref for ref in refs[: len(leaves)]]
        kernel(*refs[len(leaves) :], problem=structure.unflatten(parts), grid=grid, blocks=blocks, **scratch)

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
