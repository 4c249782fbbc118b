"""Which problems do these kernels take, and what do they see of the arrays? Plain JAX around the kernels."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_flash import choice, softmax
from pallas_flash import plan as plans
from pallas_flash.choice import Choice
from pallas_flash.kernels import device
from pallas_flash.kernels.mosaic_gpu import primitives
from pallas_flash.plan import MosaicBlocks, Plan
from pallas_flash.problem import Problem

LENGTH = 8
"""Of what TMA sees, lengths are a multiple of this: it moves boxes of 8 rows and 64 columns (`plan.whole`)."""

WORTH_PADDING = 1024
"""From this length on, these kernels with padding are faster than Triton's without, on an H200."""


def refusal(problem: Problem) -> str | None:
    """Why these kernels cannot serve the problem on the current device; None: they can."""
    if problem.interpret:
        return "its kernels do not run in interpret mode; use implementation='triton'"
    if isinstance(problem.plan, Plan):
        return "the plan is one of Triton kernels; give a pallas_flash.MosaicPlan, or plan=None"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"{problem.dtype} is not supported, only bfloat16 and float16; use implementation='triton' or 'xla'"
    for name, width in (("query", problem.H), ("value", problem.Hv)):
        if width > 256:
            return f"the head dim of {name} is {width}, at most 256 is supported; use more heads"
    capability = device.capability(problem)
    if isinstance(capability, str):
        return capability
    if capability != 90:
        found = f"the GPU has compute capability {capability // 10}.{capability % 10}"
        return f"{found}, 9.0 (Hopper) is required; use implementation='triton'"
    if lacking := primitives.lacking(problem):
        return f"Mosaic GPU cannot lower all users' functions: {lacking}; use implementation='triton'"
    plan = planned(problem).plan
    if problem.scale is not None and plan.backward is None:
        return "its kernels of single gradients have none for a traced scale; use implementation='triton'"
    return plans.mosaic_shortage(plan, problem.H, problem.Hv)


def deferral(problem: Problem) -> str | None:
    """Why Triton's kernels are faster: to pad short sequences costs more than these kernels gain."""
    for name, length in (("query", problem.T), ("key", problem.S)):
        if length % LENGTH and length < WORTH_PADDING:
            return (
                f"the {name} length {length} is no multiple of {LENGTH}, and below {WORTH_PADDING} padding costs more "
                "than these kernels gain; pad the sequences, or use implementation='mosaic_gpu'"
            )


def planned(problem: Problem) -> Choice:
    """The user's plan, or the one chosen for the current device, which there must be."""
    return choice.of("mosaic_gpu", problem, device.current(problem), "half")


def padded(x: Array, boxes: int = 1) -> Array:
    """[B, L, n, d] with zeros up to a length and a width that TMA can move; the latter whole `boxes` at a time."""
    length, width = x.shape[1], x.shape[3]
    return jnp.pad(x, ((0, 0), (0, -length % LENGTH), (0, 0), (0, plans.whole(width, boxes) - width)))


def streamed(problem: Problem, blocks: MosaicBlocks) -> list:
    """Of what scores depend on, the arrays over queries and keys that the forward kernel's producer brings by TMA.

    They are as long as TMA can move, and as many as shared memory holds beside the rest.
    """
    spare = plans.mosaic_spare("forward", blocks, problem.H, problem.Hv)
    arrays = [x for x in jax.tree.leaves(problem.score) if _is_movable(x)]
    return arrays[: spare // (2 * blocks.block_q * blocks.block_k)]


def _is_movable(x) -> bool:
    queries, keys = x.shape[2:] if len(x.shape) == 4 else (1, 1)
    return keys > 1 and queries > 1 and x.dtype.itemsize == 2 and queries % LENGTH == 0 and plans.whole(keys) == keys


def with_sign(problem: Problem, q: Array) -> Array:
    """The queries with the sign of the scale."""
    sign = softmax.base2(problem.any_scale)[0]
    return softmax.signed(sign if isinstance(sign, int | float) else sign[:, None, None, None], q)


def vectors(lse2: Array, delta: Array) -> Array:
    """[B, N, 2, T] float32 of two vectors [B, N, T] over queries, with zeros up to a length that TMA can move."""
    # Without the barrier XLA takes the sum that delta is into the loop that stacks: 260 µs more at 16k tokens.
    lse2, delta = lax.optimization_barrier((lse2, delta))
    return jnp.pad(jnp.stack((lse2, delta), 2), ((0, 0), (0, 0), (0, 0), (0, -lse2.shape[2] % LENGTH)))
