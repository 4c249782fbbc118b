"""Which problems do these kernels take, and what do they see of the arrays? Plain JAX around the kernels."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from pallas_flash import masks, softmax
from pallas_flash import plan as plans
from pallas_flash.kernels import device
from pallas_flash.masks import Span
from pallas_flash.plan import MosaicPlan, Plan
from pallas_flash.problem import Problem

WIDTH, LENGTH = 64, 8
"""TMA moves boxes of 8 rows and 64 columns: head dims and lengths of what it sees are multiples of these."""


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
    if max(problem.H, problem.Hv) > 128 or problem.deterministic:
        return "todo"
    capability = device.capability(problem)
    if isinstance(capability, str):
        return capability
    if capability != 90:
        found = f"the GPU has compute capability {capability // 10}.{capability % 10}"
        return f"{found}, 9.0 (Hopper) is required; use implementation='triton'"
    return None


def plan(problem: Problem) -> MosaicPlan:
    """The user's plan, or the one for a Hopper GPU."""
    return problem.plan or plans.choose_mosaic(problem.T, problem.H, problem.Hv)


def padded(problem: Problem) -> Problem:
    """The problem with the head dims that the kernels see."""
    return dataclasses.replace(problem, H=_up(problem.H, WIDTH), Hv=_up(problem.Hv, WIDTH))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def of_queries(problem: Problem, x: Array, by: float | Array = 1.0, clean: bool = True) -> Array:
    """An array [B, T, N, *] as the kernels see it: times the sign `by` (or [B] of them), padded, 0 where a query takes no part."""
    by = by if isinstance(by, float) else by[:, None, None, None]
    return _seen(problem, softmax.signed(by, x), 0, clean)


def of_keys(problem: Problem, x: Array, clean: bool = True) -> Array:
    """An array [B, S, K, *] as the kernels see it: padded, and 0 where a key takes no part, which may hold NaN."""
    return _seen(problem, x, 1, clean)


def _seen(problem: Problem, x: Array, side: int, clean: bool) -> Array:
    per_batch = jax.tree.map(lambda leaf: leaf.reshape(-1, 1, 1, 1), problem.mask)
    inside: Span = masks.used(per_batch, problem.T, problem.S)[side]
    length, width = x.shape[1], x.shape[3]
    if clean and not inside.is_whole(length):
        x = jnp.where(inside.holds(jnp.arange(length, dtype=jnp.int32)[:, None, None]), x, 0)
    return jnp.pad(x, ((0, 0), (0, -length % LENGTH), (0, 0), (0, -width % WIDTH)))


def of_rows(x: Array, block_q: int) -> Array:
    """A float32 vector [B, N, T] over queries, padded with zeros to whole tiles."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block_q)))
