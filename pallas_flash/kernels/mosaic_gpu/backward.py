"""Which kernels compute the gradients, and of what? All together in one, or each alone, as the plan says."""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_flash import softmax
from pallas_flash.kernels import clean
from pallas_flash.kernels.mosaic_gpu import operands
from pallas_flash.kernels.mosaic_gpu.backward_alone import DK, DQ, DV, alone
from pallas_flash.kernels.mosaic_gpu.backward_together import CONSUMERS, together
from pallas_flash.kernels.mosaic_gpu.pipeline import GROUP_ROWS
from pallas_flash.problem import Problem


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
    plan = problem.plan
    # Of two consumers, each computes half of dq, by columns where the tile has no rows for both.
    boxes = CONSUMERS if plan.backward and plan.backward.block_q == GROUP_ROWS else 1
    vectors = operands.vectors(softmax.base2_lse(lse), clean.queries(problem, delta, axis=2))
    if not problem.mask.reads:  # else the kernels do it
        q, do, k, v = (*(clean.queries(problem, x) for x in (q, do)), *(clean.keys(problem, x) for x in (k, v)))
    q_seen, k_seen = (operands.padded(x, boxes) for x in (operands.with_sign(problem, q), k))
    v_seen, do_seen = map(operands.padded, (v, do))
    seen = dataclasses.replace(problem, H=q_seen.shape[-1], Hv=v_seen.shape[-1])
    tensors = q_seen, k_seen, v_seen, do_seen, vectors
    if plan.backward is None:
        dq, dk, dv = (
            alone(DQ, seen, plan.dq, tensors),
            alone(DK, seen, plan.dkv, tensors),
            alone(DV, seen, plan.dkv, tensors),
        )
        d_scale = None  # `refusal` sees to it that none is needed
    else:
        raw_dq, dk, dv = together(seen, plan.backward, tensors)
        raw_dq = raw_dq[:, : problem.T, :, : problem.H]
        d_scale = None
        if problem.scale is not None:
            d_scale = jnp.sum(raw_dq * clean.queries(problem, q).astype(jnp.float32), (1, 2, 3))  # eq. 19
        dq = raw_dq * jnp.reshape(problem.any_scale, (-1, 1, 1, 1))
    dq, dk, dv = (grad[:, : x.shape[1], :, : x.shape[3]].astype(x.dtype) for grad, x in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, d_scale
