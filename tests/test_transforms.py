"""The call inside JAX's transformations gives what it gives outside."""

import functools

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from test_attention import IMPLEMENTATIONS

from pallas_flash import flash_attention
from pallas_flash.testing import error, tolerance

CASE = Case("transforms", B=3, T=20, S=24, N=4, K=2, H=16, is_causal=True, query_offset=4)


def with_gradients(f, cotangent):
    """X → f(x) and the gradients by x, jitted."""

    @jax.jit
    def run(*x):
        out, vjp = jax.vjp(f, *x)
        return out, *vjp(cotangent)

    return run


def assert_close(results, references):
    """Both may be off by the rounding floor."""
    for ours, ref in zip(results, references, strict=True):
        assert error(ours, np.asarray(ref)) <= 2 * tolerance(0.0, np.asarray(ref), "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_with_shared_keys_and_mapped_lengths(implementation):
    """Vmap over queries and lengths with keys and values in common, and the gradient through it."""
    q, k, v, do, _ = checks.inputs(CASE)
    lengths = jnp.array([24, 7, 15], jnp.int32)
    attention = functools.partial(flash_attention, is_causal=True, query_offset=4, **IMPLEMENTATIONS[implementation])

    def mapped(q, k, v):
        return jax.vmap(lambda q, length: attention(q, k[0], v[0], key_value_seq_lengths=length))(q, lengths)

    def batched(q, k, v):
        k, v = (jnp.broadcast_to(x[:1], x.shape) for x in (k, v))
        return attention(q, k, v, key_value_seq_lengths=lengths)

    assert_close(with_gradients(mapped, do)(q, k, v), with_gradients(batched, do)(q, k, v))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scan_over_rematerialised_layers(implementation):
    """Three layers in a scan, each under `jax.checkpoint`, equal three calls."""
    q, k, v, do, _ = checks.inputs(CASE)
    attention = functools.partial(flash_attention, is_causal=True, query_offset=4, **IMPLEMENTATIONS[implementation])

    def scanned(q):
        layer = jax.checkpoint(lambda q, _: (attention(q, k, v) + q, None))
        return jax.lax.scan(layer, q, length=3)[0]

    def looped(q):
        for _ in range(3):
            q = attention(q, k, v) + q
        return q

    assert_close(with_gradients(scanned, do)(q), with_gradients(looped, do)(q))
