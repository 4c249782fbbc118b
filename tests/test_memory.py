"""Memory grows with T, not with T²: compiled forward and backward of the XLA path (the kernels: test_lowering.py)."""

import itertools

import jax
import jax.numpy as jnp

from pallas_flash import flash_attention


def temporary_bytes(T: int) -> int:
    """What a compiled forward and backward takes beside its arguments and results."""

    def run(q, k, v):
        out, vjp = jax.vjp(lambda *x: flash_attention(*x, is_causal=True, implementation="xla"), q, k, v)
        return out, vjp(out)

    x = jax.ShapeDtypeStruct((1, T, 2, 32), jnp.float32)
    return jax.jit(run).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


def test_temporaries_of_xla_grow_linearly():
    """Each doubling of T adds what the one before added, times 2; a T×S buffer would make it times 4."""
    sizes = [temporary_bytes(T) for T in (2048, 4096, 8192, 16_384)]
    steps = [b - a for a, b in itertools.pairwise(sizes)]
    assert all(later <= 2.2 * earlier for earlier, later in itertools.pairwise(steps))
    assert sizes[-1] < 4 * 2 * 16_384**2 / 8
