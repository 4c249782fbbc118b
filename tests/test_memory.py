"""Memory grows with T, not with T²: compiled forward and backward of the XLA path (the kernels: test_lowering.py)."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from pallas_flash import flash_attention, flash_attention_varlen

MASKS = {
    "causal": (lambda q, k, v: flash_attention(q, k, v, is_causal=True, implementation="xla"), ()),
    "segments": (
        lambda q, k, v, ids: flash_attention(
            q, k, v, query_segment_ids=ids, key_value_segment_ids=ids, is_causal=True, implementation="xla"
        ),
        (jnp.int32,),
    ),
    "mask_of_keys": (
        lambda q, k, v, mask: flash_attention(q, k, v, mask=mask[:, None, None], implementation="xla"),
        (jnp.bool,),
    ),
    "mask_of_queries": (
        lambda q, k, v, mask: flash_attention(q, k, v, mask=mask[:, None, :, None], implementation="xla"),
        (jnp.bool,),
    ),
    "packed": (
        lambda q, k, v, starts: flash_attention_varlen(
            q[0], k[0], v[0], starts[0, :9], starts[0, :9], implementation="xla"
        ),
        (jnp.int32,),
    ),
    "function": (
        lambda q, k, v: flash_attention(q, k, v, mask_modifiers=(diagonals,), implementation="xla"),
        (),
    ),
}
"""Attention with masks that are vectors over queries or keys: jax#28974, TransformerEngine#2522 and others."""


def diagonals(tile):
    return (tile.q_ids - tile.k_ids) % 100 == 0


def temporary_bytes(T: int, attention, dtypes) -> int:
    """What a compiled forward and backward takes beside its arguments and results."""

    def run(q, k, v, *masks):
        out, vjp = jax.vjp(lambda *x: attention(*x, *masks), q, k, v)
        return out, vjp(out)

    x = jax.ShapeDtypeStruct((1, T, 2, 32), jnp.float32)
    masks = [jax.ShapeDtypeStruct((1, T), dtype) for dtype in dtypes]
    return jax.jit(run).lower(x, x, x, *masks).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", MASKS)
def test_temporaries_of_xla_grow_linearly(name):
    """Each doubling of T adds what the one before added, times 2; a T×S buffer would make it times 4."""
    sizes = [temporary_bytes(T, *MASKS[name]) for T in (2048, 4096, 8192, 16_384)]
    steps = [b - a for a, b in itertools.pairwise(sizes)]
    assert all(later <= 2.2 * earlier for earlier, later in itertools.pairwise(steps))
    assert sizes[-1] < 4 * 2 * 16_384**2 / 8
