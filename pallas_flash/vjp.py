"""How does a gradient flow? The only custom_vjp, its residuals and their checkpoint names."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from pallas_flash import dispatch, partitioning, softmax
from pallas_flash.problem import Problem

RESIDUAL_NAMES = ("flash_attention_out", "flash_attention_lse")
"""Names of the saved output and log-sum-exp, for `jax.checkpoint_policies.save_only_these_names`."""


def attend(problem: Problem, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Output and natural log-sum-exp of a resolved problem, differentiable in q, k, v and the floating leaves."""
    try:
        return attended(problem, q, k, v)
    except TypeError as error:  # of JAX, which does not know whose it is
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            f"flash_attention: the kernels of implementation {problem.implementation!r} have no forward-mode "
            "derivatives (jvp, jacfwd); use implementation='xla' for them"
        ) from error


@jax.jit
def attended(
    problem: Problem, q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K Hv"]
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    """The same, traced once for all problems of one structure."""
    if problem.is_empty:
        rows = (problem.B, problem.N, problem.T)
        state = jnp.promote_types(q.dtype, jnp.float32)
        return jnp.zeros((*q.shape[:-1], problem.Hv), q.dtype), jnp.full(rows, -jnp.inf, state)
    recomputes = dispatch.chosen(problem).backward is not None
    return (_recomputing if recomputes else _computed)(*partitioning.typed(problem, q, k, v))


def _computed(problem: Problem, q, k, v):
    o, lse = partitioning.split_up(partitioning.FORWARD, problem, q, k, v)
    return o, lse


_recomputing = jax.custom_vjp(_computed)


def _forward(problem: Problem, q, k, v):
    o, lse = _recomputing(problem, q, k, v)
    o, lse = (checkpoint_name(x, name) for x, name in zip((o, lse), RESIDUAL_NAMES, strict=True))
    return (o, lse), (problem, q, k, v, o, lse)


def _backward(residuals, cotangents):
    problem, q, k, v, o, lse = residuals
    do, dlse = cotangents
    rows = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), -1)
    delta = jnp.swapaxes(rows, 1, 2) - dlse  # eq. 15
    dq, dk, dv, d_scale, d_score = _gradients(problem, q, k, v, lse, do, delta)
    mask, dropout = jax.tree.map(_zero, (problem.mask, problem.dropout))  # have none, as `pose` said to JAX
    sinks = None if problem.sinks is None else softmax.d_sinks(problem.sinks, lse, delta)
    of_problem = dataclasses.replace(problem, mask=mask, score=d_score, sinks=sinks, dropout=dropout, scale=d_scale)
    return of_problem, dq, dk, dv


def _zero(leaf):
    """A cotangent of 0; JAX wants float0 for integers and booleans."""
    return jnp.zeros_like(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else np.zeros(leaf.shape, jax.dtypes.float0)


_recomputing.defvjp(_forward, _backward)


@jax.custom_vjp
def _gradients(problem: Problem, *tensors):
    dq, dk, dv, *d_scale = partitioning.split_up(partitioning.BACKWARD, problem, *tensors)
    leaves, structure = jax.tree.flatten(problem.score)
    d_score = [_zero(leaf) for leaf in leaves]
    if scored := [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]:
        # Kernels of their own, which XLA drops if they are not asked for.
        found = partitioning.split_up(partitioning.D_SCORE, problem, *tensors)
        for i, gradient in zip(scored, found, strict=True):
            d_score[i] = gradient
    return dq, dk, dv, d_scale[0] if d_scale else None, structure.unflatten(d_score)


def _refuse(problem: Problem, *tensors):
    del tensors
    raise NotImplementedError(
        f"flash_attention: the kernels of implementation {problem.implementation!r} have first derivatives only; "
        "use implementation='xla' for higher ones"
    )


_gradients.defvjp(_refuse, _refuse)  # the first always raises
