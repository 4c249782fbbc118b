"""The call inside JAX's transformations gives what it gives outside."""

import functools
import re

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from test_attention import IMPLEMENTATIONS

from pallas_flash import MaskModifier, export, flash_attention
from pallas_flash.export import checks as checks_of_export
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


def dropped(q, k, v, bias, slopes, sinks, key, **options):
    return flash_attention(
        q, k, v, bias, is_causal=True, query_offset=4, alibi_slopes=slopes, sinks=sinks, dropout_rate=0.3,
        dropout_key=key, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "mapped", [(1, None, None, 2, None, 1, 0), (None, 0, 3, None, 0, None, 0)], ids=["some", "others"]
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_over_any_arguments(implementation, mapped):
    """Along any axes, dropout keys too: the same as a loop, and so are gradients, summed if in common."""
    rng, size = np.random.default_rng(2), 3
    shapes = [(2, 20, 4, 16), (2, 24, 2, 16), (2, 24, 2, 16), (4, 1, 24), (4,), (4,)]
    *arrays, do = (rng.standard_normal(shape, np.float32) for shape in (*shapes, (size, 2, 20, 4, 16)))
    arrays[4] *= 0.1  # else its logits exceed a hundred, and their rounding the floor
    keys = jax.random.split(jax.random.key(5), size)
    weights = [1 + np.arange(size, dtype=np.float32).reshape(-1, *[1] * x.ndim) for x in arrays]
    given = [
        x if axis is None else np.moveaxis(w * x, 0, axis) for x, w, axis in zip(arrays, weights, mapped, strict=False)
    ]
    call = functools.partial(dropped, **IMPLEMENTATIONS[implementation])
    given, further = given[:4], given[4:]

    def together(*x):
        return jax.vmap(call, mapped)(*x, *further, keys)

    def looped(*x):
        def entry(i):
            return [
                a if axis is None else jnp.take(a, i, axis) for a, axis in zip((*x, *further), mapped, strict=False)
            ]

        return jnp.stack([call(*entry(i), keys[i]) for i in range(size)])

    assert_close(with_gradients(together, do)(*given), with_gradients(looped, do)(*given))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_of_each_entry_and_of_each_output(implementation):
    """vmap(grad) gives the rows of grad of a sum; a Jacobian, jax#38495, those of single outputs."""
    q, k, v, do, _ = checks.inputs(CASE)
    call = functools.partial(flash_attention, is_causal=True, query_offset=4, **IMPLEMENTATIONS[implementation])

    def loss(q, k, v, do):
        return jnp.vdot(call(q, k, v), do)

    each = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2))))(q, k, v, do)
    assert_close(each, jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v, do))

    q, k, v = (x[:1, :2, :2, :4] for x in (q, k, v))
    jacobian = jax.jit(jax.jacrev(call))(q, k, v)
    _, pull = jax.vjp(call, q, k, v)
    rows = [pull(row.reshape(q.shape))[0] for row in jnp.eye(q.size)]
    assert_close([jacobian], [jnp.stack(rows).reshape(q.shape * 2)])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_jit_of_donated_and_traced_arguments(implementation):
    """All that can be traced is, the tensors are given away, and `eval_shape` knows what comes out."""
    q, k, v, _, _ = checks.inputs(CASE)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(q, k, v, scale, lengths, offset, key):
        return flash_attention(
            q, k, v, scale=scale, is_causal=True, key_value_seq_lengths=lengths, query_offset=offset,
            dropout_rate=0.1, dropout_key=key, return_residual=True, **IMPLEMENTATIONS[implementation],
        )  # fmt: skip

    rest = k, v, jnp.float32(0.3), jnp.array([24, 3, 9]), jnp.int32(4), jax.random.key(1)
    expected = jax.eval_shape(run, q, *rest)
    right = run.__wrapped__(q, *rest)
    given = q.copy()
    found = run(given, *rest)
    assert given.is_deleted()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (found, right)) == (
        *[tuple((x.shape, x.dtype) for x in expected)] * 2,
    )
    assert_close(found, right)


@pytest.mark.parametrize("dtype, target", [("bfloat16", "mosaic_gpu_v2"), ("float32", "__gpu$xla.gpu.triton")])
def test_export_for_a_gpu_from_a_cpu(dtype, target):
    """jax#25196: forward and backward kernels are in the exported program, which JAX by itself refuses to export."""
    x = jax.ShapeDtypeStruct((2, 1024, 4, 64), dtype)

    def loss(q, k, v):
        return jnp.sum(flash_attention(q, k, v, is_causal=True).astype(jnp.float32))

    exported = export(jax.value_and_grad(loss), "NVIDIA H200")(x, x, x)
    assert exported.platforms == ("cuda",)
    assert [x.shape for x in exported.out_avals] == [(), x.shape]
    assert set(re.findall(r"custom_call @([\w$.]+)", exported.mlir_module())) == {target}
    named = jax.export.DisabledSafetyCheck.custom_call(target)
    assert named in checks_of_export()


def test_export_of_what_runs_here():
    """A program in interpret mode is exported, called, and gives the same."""
    q, k, v, do, _ = checks.inputs(CASE)
    run = with_gradients(functools.partial(flash_attention, is_causal=True, **IMPLEMENTATIONS["triton"]), do)
    exported = jax.export.export(run)(q, k, v)
    assert_close(exported.call(q, k, v), run(q, k, v))
