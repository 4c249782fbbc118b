"""Gradients beyond query, key and value: traced scale, residual, higher orders, and what has no derivative."""

import functools

import checks
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from test_attention import IMPLEMENTATIONS

from pallas_flash import flash_attention, merge
from pallas_flash.testing import error
from pallas_flash.tile import Tile

CASE = Case(
    "gradients", B=2, T=37, S=45, N=4, K=2, H=16, is_causal=True, query_offset=8, key_value_seq_lengths=(45, 30)
)


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.7])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_traced_scale(implementation, scale):
    """Exact at any scale, 0 included, together with the gradients of the tensors."""
    q, k, v, do, dlse = checks.inputs(CASE)
    options = IMPLEMENTATIONS[implementation] | CASE.options()

    @jax.jit
    def run(q, k, v, scale):
        attention = functools.partial(flash_attention, return_residual=True, **options)
        _, vjp = jax.vjp(lambda q, k, v, scale: attention(q, k, v, scale=scale), q, k, v, scale)
        return vjp((do, dlse))

    right = oracle.gradients(q, k, v, do, dlse, scale=scale, **CASE.options())[:4]
    for ours, ref in zip(run(q, k, v, jnp.float32(scale)), right, strict=True):
        assert error(ours, np.asarray(ref)) <= 2e-6 * max(1.0, np.max(np.abs(ref)))  # 16 float32 epsilons


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_traced_scale_in_float16_does_not_overflow(implementation):
    """Dq itself fits float16; dq without the factor of the scale would not."""
    case = Case("overflow", B=1, T=40, N=1, H=64, dtype="float16")
    q, k, v, do, _ = checks.inputs(case)

    def grads(scale):
        attention = functools.partial(flash_attention, **IMPLEMENTATIONS[implementation])
        return jax.vjp(lambda *qkv: attention(*qkv, scale=scale), q, 400 * k, v)[1](400 * do)

    for traced, static in zip(jax.jit(grads)(jnp.float32(0.01)), grads(0.01), strict=True):
        assert np.isfinite(traced).all()
        assert error(traced, np.asarray(static, np.float64)) <= 1e-3 * np.max(np.abs(static))  # one float16 epsilon


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_merge_of_halves_is_the_whole(implementation):
    """Attention over two halves of the keys, merged by their residuals, has the whole's output and gradients."""
    case = Case("halves", B=1, T=40, S=64, N=2, H=16)
    q, k, v, do, _ = checks.inputs(case)
    attend = functools.partial(flash_attention, return_residual=True, **IMPLEMENTATIONS[implementation])

    def merged(q, k, v):
        return merge(attend(q, k[:, :32], v[:, :32]), attend(q, k[:, 32:], v[:, 32:]))[0]

    right = [oracle.attend(q, k, v)[0], *oracle.gradients(q, k, v, do, np.zeros((1, 40, 2)))[:3]]
    out, vjp = jax.vjp(jax.jit(merged), q, k, v)
    for ours, ref in zip((out, *vjp(do)), right, strict=True):
        assert error(ours, ref) <= 2e-6 * max(1.0, np.max(np.abs(ref)))


@pytest.mark.parametrize("argument", [0, 1, 2])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_may_hold_nan_and_inf(implementation, argument):
    """What no query may attend to, and queries beyond their length, reach neither results nor gradients."""
    case = Case("padding", T=40, S=50, N=4, K=2, H=16, query_seq_lengths=(40, 21), key_value_seq_lengths=(17, 50))
    q, k, v, do, dlse = checks.inputs(case)
    options = IMPLEMENTATIONS[implementation] | case.options()
    attention = functools.partial(flash_attention, return_residual=True, **options)
    clean = checks.evaluate(attention, [q, k, v, do, dlse])
    poisoned = [q.at[1, 21:].set(jnp.nan), k.at[0, 17:].set(jnp.inf), v.at[0, 17:].set(jnp.nan)]
    arrays = [poisoned[i] if i == argument else x for i, x in enumerate((q, k, v))]
    found = checks.evaluate(attention, [*arrays, do.at[1, 21:].set(jnp.nan) if argument == 0 else do, dlse])
    for ours, ref in zip(found, clean, strict=True):
        assert np.array_equal(ours, ref)
    assert not found[2][1, 21:].any() and not found[3][0, 17:].any() and not found[4][0, 17:].any()


def test_keys_beyond_every_offset_may_hold_nan():
    """A cache larger than what is filled: the causal edge alone keeps the rest out."""
    case = Case("cache", B=2, T=4, S=40, N=2, H=16, is_causal=True, query_offset=(10, 21))
    q, k, v, do, dlse = checks.inputs(case)
    poisoned = [x.at[0, 14:].set(jnp.nan).at[1, 25:].set(jnp.nan) for x in (k, v)]
    for options in IMPLEMENTATIONS.values():
        run = checks.evaluator(functools.partial(flash_attention, return_residual=True, **options, **case.options()))
        clean = run(q, k, v, do, dlse)
        for keys, values in ((poisoned[0], v), (k, poisoned[1])):
            for ours, ref in zip(run(q, keys, values, do, dlse), clean, strict=True):
                assert np.array_equal(ours, ref)


SIDES = ("query", "key_value")
HALVES = np.arange(40) < 20
PADDED = {
    "keys": {"mask": np.arange(40) % 7 > 1},
    "queries": {"mask": (np.arange(40) % 7 > 1)[:, None]},
    "both": {"mask": np.outer(HALVES, np.arange(40) % 3 > 0)[None, None]},
    "whole_blocks": {"mask": np.outer(np.arange(40) % 32 < 16, HALVES)},
    "entries": {"mask": np.array([False, True])[:, None, None, None]},
    "segments": {f"{side}_segment_ids": np.where(np.arange(40) % 11 > 2, np.arange(40) // 15, -1) for side in SIDES},
    "ids_of_one_side": {"query_segment_ids": np.arange(40) // 10, "key_value_segment_ids": 6 - np.arange(40) // 10},
    "function": {"mask_modifiers": (lambda tile: (tile.q_ids > 5) & (tile.k_ids % 5 > 0),)},
    "causal": {"mask": np.arange(40)[:, None] >= 30, "is_causal": True, "query_offset": -5},
}
"""Masks that leave out some queries or keys, each of them by itself."""


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_no_mask_lets_take_part_may_hold_nan_and_inf(implementation, name):
    """Results and gradients are those without it, and its gradients exactly 0."""
    case = Case(f"padded_{name}", T=40, N=4, K=2, H=16)
    options = {n: np.asarray(x) if "ids" in n or n == "mask" else x for n, x in PADDED[name].items()}
    functions = [
        lambda b, n, t, s, keep=keep: np.asarray(keep(Tile(t, s, b, n))) for keep in options.get("mask_modifiers", ())
    ]
    known = {n: x for n, x in options.items() if n != "mask_modifiers"}
    keep = oracle.kept(2, 4, 40, 40, mask_functions=functions, **known)
    q, k, v, do, dlse = checks.inputs(case)
    rows = np.swapaxes(~keep.any(3), 1, 2)
    columns = np.swapaxes(~keep.reshape(2, 2, 2, 40, 40).any((2, 3)), 1, 2)
    assert rows.any() or columns.any()
    attention = functools.partial(flash_attention, return_residual=True, **IMPLEMENTATIONS[implementation], **options)
    run = checks.evaluator(attention)
    clean = run(q, k, v, do, dlse)
    assert all(np.isfinite(x).all() for x in (clean[0], *clean[2:]))
    for fill in (jnp.nan, jnp.inf):
        spoiled = [jnp.where(part[..., None], fill, x) for x, part in
                   zip((q, k, v, do), (rows, columns, columns, rows), strict=True)]  # fmt: skip
        found = run(*spoiled, dlse)
        for ours, right in zip(found, clean, strict=True):
            assert np.array_equal(ours, right)
        assert not found[2][rows].any() and not found[3][columns].any() and not found[4][columns].any()


def test_xla_has_forward_mode_and_second_order():
    """jvp, and a Hessian-vector product, against finite differences in float64."""
    with jax.enable_x64(True):
        case = Case("orders", B=1, T=12, N=2, K=1, H=8, dtype="float64", is_causal=True)
        q, k, v, do, dlse = checks.inputs(case)
        direction = jnp.cos(jnp.arange(q.size, dtype=q.dtype)).reshape(q.shape)

        def loss(q):
            out, residual = flash_attention(q, k, v, is_causal=True, return_residual=True, implementation="xla")
            return jnp.sum(out * do) + jnp.sum(residual * dlse)

        step = 1e-5 * direction
        _, slope = jax.jvp(loss, (q,), (direction,))
        assert np.isclose(slope, (loss(q + step) - loss(q - step)) / 2e-5, rtol=1e-7)
        _, curvature = jax.jvp(jax.grad(loss), (q,), (direction,))
        difference = (jax.grad(loss)(q + step) - jax.grad(loss)(q - step)) / 2e-5
        assert np.allclose(curvature, difference, rtol=1e-6, atol=1e-8)
        reverse = jax.grad(lambda q: jnp.vdot(jax.grad(loss)(q), direction))(q)
        assert np.allclose(reverse, curvature, rtol=1e-10, atol=1e-12)


def test_kernels_refuse_what_they_cannot_differentiate():
    """An error at trace time, never a wrong or a zero derivative."""
    q = jnp.ones((1, 16, 1, 16))

    def loss(x):
        return jnp.sum(flash_attention(x, q, q, interpret=True))

    gradient = jax.grad(loss)
    for forward_mode in (lambda: jax.jvp(loss, (q,), (q,)), lambda: jax.jacfwd(loss)(q)):
        with pytest.raises(TypeError, match=r"no forward-mode .* use implementation='xla'"):
            forward_mode()
    for out_of_reach in (jax.jit(lambda q: jax.jvp(loss, (q,), (q,))), jax.jacfwd(gradient)):  # JAX's own error
        with pytest.raises(TypeError, match="forward-mode"):
            out_of_reach(q)
    for second_order in (
        lambda: jax.grad(lambda x: jnp.sum(gradient(x)))(q),
        lambda: jax.jacrev(gradient)(q),
        lambda: jax.grad(lambda d_loss: jnp.sum(jax.vjp(loss, q)[1](d_loss)[0]))(1.0),
    ):
        with pytest.raises(NotImplementedError, match="have first derivatives only; use implementation='xla'"):
            second_order()


def test_float64_makes_no_infinities():
    """Masks in float64 under `jax_debug_infs`."""
    with jax.enable_x64(True), jax.debug_infs(True):
        q = jnp.ones((1, 16, 1, 8), jnp.float64)
        out = flash_attention(q, q, q, is_causal=True, key_value_seq_lengths=jnp.array([7]))
        assert out.dtype == jnp.float64 and (out == 1).all()
