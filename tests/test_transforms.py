"""The call inside JAX's transformations gives what it gives outside."""

import functools

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from test_attention import IMPLEMENTATIONS

from pallas_flash import MaskModifier, flash_attention
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


MASK = np.random.default_rng(0).random((3, 1, 20, 24)) < 0.6
OPERAND = np.random.default_rng(1).integers(0, 20, (3, 24))


def beyond(tile, first):
    return (tile.k_ids >= first) | (tile.q_ids == tile.k_ids)


@pytest.mark.parametrize("mapped", ["nothing", "masks", "all"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_over_masks(implementation, mapped):
    """jax#38495: a shared mask under mapped queries, mapped masks, ids and operands under shared queries, and all."""
    q, k, v, do, _ = checks.inputs(CASE)
    k, v = k[0], v[0]
    q = q if mapped != "masks" else jnp.broadcast_to(q[:1], q.shape)
    ids = OPERAND // 7
    masks = [MASK, ids[:, :20], ids, OPERAND]
    masks = masks if mapped != "nothing" else [np.broadcast_to(x[:1], x.shape) for x in masks]

    def attention(q, k, v, mask, q_ids, k_ids, operand):
        return flash_attention(
            q, k, v, mask=mask, query_segment_ids=q_ids, key_value_segment_ids=k_ids, return_residual=True,
            mask_modifiers=(MaskModifier(beyond, (operand,), ("BS" if operand.ndim > 1 else "S",)),),
            **IMPLEMENTATIONS[implementation],
        )[0]  # fmt: skip

    def together(q, k, v):
        k, v = (jnp.broadcast_to(x, (3, *x.shape)) for x in (k, v))
        return attention(q, k, v, *masks)

    def in_vmap(q, k, v):
        axes = (0 if mapped != "masks" else None, None, None, *[0 if mapped != "nothing" else None] * 4)
        arguments = [q if mapped != "masks" else q[0], k, v, *(x if mapped != "nothing" else x[0] for x in masks)]
        return jax.vmap(attention, axes)(*arguments)

    if mapped == "masks":  # the gradient of a query is the sum of those of the copies
        *found, dk, dv = with_gradients(in_vmap, do)(q, k, v)
        right = with_gradients(together, do)(q, k, v)
        assert_close((found[0], found[1][0], dk, dv), (right[0], right[1].sum(0), *right[2:]))
    else:
        assert_close(with_gradients(in_vmap, do)(q, k, v), with_gradients(together, do)(q, k, v))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_remat_and_scan_of_masked_layers(implementation):
    """Traced masks in a scan, a different one for each layer, under `jax.checkpoint`."""
    q, k, v, do, _ = checks.inputs(CASE)
    options = IMPLEMENTATIONS[implementation]

    def scanned(q):
        def layer(q, mask):
            return flash_attention(q, k, v, mask=mask, **options) + q, None

        return jax.lax.scan(jax.checkpoint(layer), q, MASK)[0]

    def looped(q):
        for mask in MASK:
            q = flash_attention(q, k, v, mask=mask, **options) + q
        return q

    assert_close(with_gradients(scanned, do)(q), with_gradients(looped, do)(q))


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
