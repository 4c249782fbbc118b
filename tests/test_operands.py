"""What the Mosaic-GPU kernels see of the arrays: sizes that TMA can move, and nothing of what takes no part.

On a CPU, with the kernels replaced by functions that look at their operands.
"""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import choice, masks, problem
from pallas_flash.kernels.mosaic_gpu import launch, operands

forward, backward = (importlib.import_module(f"{operands.__package__}.{name}") for name in ("forward", "backward"))

T, S, N, K, H, HV = 21, 30, 4, 2, 40, 72
Q_USED, K_USED = (21, 13), (17, 30)
"""Lengths of the two batch entries' queries and keys; beyond them the arrays hold NaN."""


def until(used: tuple[int, int], length: int, *rest: int) -> jax.Array:
    """bfloat16 [2, length, *rest]: 1, and NaN from where a batch entry's use ends."""
    ones = np.ones((2, length, *rest), np.float32)
    for entry, end in zip(ones, used, strict=True):
        entry[end:] = np.nan
    return jnp.asarray(ones, jnp.bfloat16)


QUERY, D_OUT = until(Q_USED, T, N, H), until(Q_USED, T, N, HV)
KEY, VALUE = until(K_USED, S, K, H), until(K_USED, S, K, HV)
DELTA = jnp.swapaxes(until(Q_USED, T, N), 1, 2).astype(jnp.float32)


def posed(scale=None, together: bool = True) -> problem.Problem:
    """The problem of these arrays with a plan, as `dispatch.resolve` gives it."""
    posed, _ = problem.pose(
        QUERY, KEY, VALUE, bias=None, mask=None, scale=scale, is_causal=False, query_seq_lengths=np.array(Q_USED),
        key_value_seq_lengths=np.array(K_USED), local_window_size=None, return_residual=False, implementation=None,
        query_offset=0, query_segment_ids=None, key_value_segment_ids=None, mask_modifiers=(), block_mask=None,
        logits_scale=None, logits_soft_cap=None, alibi_slopes=None, sinks=None, score_modifiers=(), dropout_rate=0.0,
        dropout_key=None, deterministic=False, precision=None, plan=None, interpret=False,
    )  # fmt: skip
    chosen = choice.of("mosaic_gpu", posed, choice.Device("NVIDIA H200", 90), "half").plan
    return dataclasses.replace(posed, plan=chosen if together else dataclasses.replace(chosen, backward=None))


@pytest.mark.parametrize(
    ("B", "K", "G", "tiles", "mask", "parts"),
    [
        (2, 2, 8, 64, masks.Band(None, 0), 2),
        (2, 2, 8, 64, masks.Band(0, None), 2),
        (2, 2, 8, 64, masks.Band(None, None), 1),
        (2, 1, 8, 64, masks.Band(None, 0), 4),
        (2, 16, 1, 64, masks.Band(None, 0), 1),
        (1, 4, 7, 64, masks.Band(None, 0), 1),  # 7 would be further from 512 than 1 is
        (1, 1, 71, 3, masks.Band(None, None), 71),
        (1, 1, 2, 0, masks.Band(None, None), 2),
    ],
)
def test_groups_are_divided(B, K, G, tiles, mask, parts):
    asked = dataclasses.replace(posed(), B=B, K=K, N=K * G, mask=mask)
    assert launch.parts(asked, tiles) == parts


def is_movable(x: jax.Array) -> bool:
    """Whether TMA can move it: a tensor [B, L, n, d], or vectors [B, N, 2, T]."""
    return x.shape[1] % 8 == 0 and x.shape[3] % 64 == 0 if x.dtype == jnp.bfloat16 else x.shape[3] % 8 == 0


@pytest.mark.parametrize(
    "asked", [posed(), posed(jnp.float32(-0.3)), posed(together=False)], ids=["together", "scale", "alone"]
)
def test_backward(monkeypatch, asked):
    seen = []

    def look(tensors):
        seen.extend(tensors)
        return [jnp.ones(x.shape, jnp.float32) for x in tensors[:3]]

    kinds = (backward.DQ, backward.DK, backward.DV)
    monkeypatch.setattr(backward, "together", lambda problem, blocks, tensors: look(tensors))
    monkeypatch.setattr(backward, "alone", lambda kind, problem, blocks, tensors: look(tensors)[kinds.index(kind)])
    *gradients, d_scale = backward.backward(asked, QUERY, KEY, VALUE, jnp.zeros_like(DELTA), D_OUT, DELTA)
    assert seen and all(is_movable(x) and jnp.isfinite(x).all() for x in seen)
    assert [x.shape for x in gradients] == [x.shape for x in (QUERY, KEY, VALUE)]
    assert (d_scale is None) == (asked.scale is None)
    if d_scale is not None:
        assert np.array_equal(d_scale, np.array(Q_USED) * N * H)  # ones times the queries that take part


def test_forward(monkeypatch):
    """The values reach every output of a tile; what queries and keys hold does not."""

    def look(*arguments):
        tensors, outputs = arguments[-2:]
        assert all(map(is_movable, tensors)) and jnp.isfinite(tensors[2]).all()
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]

    monkeypatch.setattr(launch, "call", look)
    out, lse = forward.forward(posed(), QUERY, KEY, VALUE)
    assert (out.shape, lse.shape) == ((2, T, N, HV), (2, N, T))


@pytest.mark.parametrize(
    ("flags", "deterministic"),
    [
        ("", False),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0", True),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops_other=true", False),
    ],
)
def test_deterministic_by_the_flags_of_xla(monkeypatch, flags, deterministic):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert posed().deterministic == deterministic
