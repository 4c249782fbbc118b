"""`flax_layers.linen.flash_attention_fn`: Flax's own layers give with it what they give without.

A named implementation never leaves a call to Flax's function, so that `XLA` and `TRITON` are what they say.
"""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_layers import attention_fn
from flax_layers.linen import flash_attention_fn
from pallas_flash import dropout_mask
from pallas_flash.testing import error, tolerance

B, T, S, FEATURES, N, H = 2, 21, 30, 12, 4, 8
EPS = np.finfo(np.float32).eps
XLA = functools.partial(flash_attention_fn, implementation="xla")
FLAX = nn.dot_product_attention
TRITON = functools.partial(flash_attention_fn, implementation="triton", interpret=True)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def keep(*shape: int) -> np.ndarray:
    """A random mask that leaves the first key to each query."""
    mask = np.random.default_rng(9).random(shape) < 0.6
    mask[..., 0] = True
    return mask


def build(attention_fn=FLAX, cls=nn.MultiHeadDotProductAttention, **options):
    return cls(**{"num_heads": N, "qkv_features": N * H, "out_features": 10, "attention_fn": attention_fn, **options})


def parameters(layer, *inputs):
    """Random ones, biases too, in place of initial values."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(layer.init, jax.random.key(0), *inputs)["params"])
    return jax.tree.unflatten(structure, [0.5 * draw(*p.shape, seed=n) for n, p in enumerate(leaves)])


def output_and_gradients(layer, params, inputs, **keywords) -> dict[str, np.ndarray]:
    """Output, and gradients by every input and parameter, of `vdot(cotangent, output)`, under jit."""

    @jax.jit
    def run(params, inputs, arrays):
        def pulled(params, inputs):
            out = layer.apply({"params": params}, *inputs, **arrays)
            return jnp.vdot(draw(*out.shape, seed=7), out), out

        (_, out), found = jax.value_and_grad(pulled, argnums=(0, 1), has_aux=True)(params, inputs)
        return {"output": out, "gradient": found}

    rows, _ = jax.tree_util.tree_flatten_with_path(run(params, inputs, keywords))
    return {jax.tree_util.keystr(path): np.asarray(array) for path, array in rows}


def assert_close(result: dict, expected: dict, scale=64):
    """Equal up to `scale` roundings of the largest value: sums over features, H, keys and tokens, 10 to 60 terms each.

    The gradient of the key's bias is 0 in exact arithmetic, a sum of terms as large as those of the query's bias.
    """
    assert result.keys() == expected.keys()
    for name, right in expected.items():
        largest = np.abs(expected[name.replace("['key']['bias']", "['query']['bias']")]).max()
        np.testing.assert_allclose(result[name], right, rtol=0, atol=scale * EPS * largest, err_msg=name)


CAUSAL = nn.make_causal_mask(jnp.ones((B, T)))  # float32, as Flax makes them
PADDING = np.arange(T) < np.reshape([T, 9], (B, 1, 1, 1))
NO_DROPOUT = {"dropout_rate": 0.3, "deterministic": True}
LAYERS = {
    "causal": ({"cls": nn.MultiHeadAttention}, [(B, T)], CAUSAL),
    "integer_mask": ({"cls": nn.SelfAttention, **NO_DROPOUT}, [(B, T)], np.asarray(CAUSAL, np.int32) * PADDING),
    "three_inputs": ({"normalize_qk": True, "use_bias": False}, [(B, T), (B, S), (B, S)], keep(B, 1, T, S)),
    "no_batch_axis": ({"force_fp32_for_softmax": True}, [(T,), (S,)], keep(N, T, S)),
}


@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_those_with_flax_function(name):
    options, shapes, mask = LAYERS[name]
    inputs = [draw(*shape, FEATURES, seed=n) for n, shape in enumerate(shapes)]
    keywords = {} if mask is None else {"mask": mask}
    ours, flax = build(XLA, **options), build(**options)
    params = parameters(flax, *inputs)
    result, expected = (output_and_gradients(layer, params, inputs, **keywords) for layer in (ours, flax))
    assert_close(result, expected)


def test_layer_with_interpreted_kernels():
    inputs, mask = [draw(B, T, FEATURES)], keep(B, 1, T, T)
    params = parameters(build(), *inputs)
    result, expected = (
        output_and_gradients(build(f), params, inputs, mask=mask) for f in (TRITON, build().attention_fn)
    )
    assert_close(result, expected)


def test_decoding_with_flax_cache():
    """Each of six steps in a cache of eight equals Flax's, and the causal layer's row."""
    x = draw(B, 8, FEATURES)
    params = parameters(build(), x)
    whole = build(XLA).apply({"params": params}, x, mask=nn.make_causal_mask(jnp.ones((B, 8))))
    caches = {f: build(f, decode=True).init(jax.random.key(0), x)["cache"] for f in (XLA, FLAX)}
    steps = {f: jax.jit(functools.partial(build(f, decode=True).apply, mutable=["cache"])) for f in caches}
    for t in range(6):
        rows = []
        for f, step in steps.items():
            row, updated = step({"params": params, "cache": caches[f]}, x[:, t : t + 1])
            caches[f] = updated["cache"]
            rows.append(np.asarray(row))
        assert_close({"step": rows[0]}, {"step": rows[1]})
        assert_close({"step": rows[0][:, 0]}, {"step": np.asarray(whole[:, t])})


def tensors(*batch: int, keys: int = S):
    return draw(*batch, T, N, H), draw(*batch, keys, N, H, seed=1), draw(*batch, keys, N, H, seed=2)


def with_gradients(f, arrays, **keywords):
    """Output of an attention function and its gradients by query, key, value and bias, as float64."""

    @jax.jit
    def run(arrays):
        out, pull = jax.vjp(lambda *arrays: f(*arrays, **keywords), *arrays)
        return out, *pull(jnp.asarray(draw(*out.shape, seed=7), out.dtype))

    return [np.asarray(x, np.float64) for x in run(arrays)]


def exact(arrays, **keywords):
    """Flax's function in float64 throughout."""
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in arrays]
        return with_gradients(FLAX, wide, **keywords)


@pytest.mark.parametrize(
    ("batch", "bias", "mask"),
    [
        ((B,), (N, 1, S), (B, 1, T, S)),
        ((B,), (1, N, T, 1), (T, S)),
        ((3, B), (B, 1, 1, S), (3, 1, N, T, S)),
    ],
    ids=str,
)
def test_function_with_bias_equals_that_of_flax(batch, bias, mask):
    """At most twice the error of Flax's function, plus a floor of roundings (`pallas_flash.testing.tolerance`)."""
    arrays = [*tensors(*batch), 2 * draw(*bias, seed=3)]
    keywords = {} if mask is None else {"mask": keep(*mask)}
    right, flax = exact(arrays, **keywords), with_gradients(FLAX, arrays, **keywords)
    for ours, theirs, reference in zip(with_gradients(XLA, arrays, **keywords), flax, right, strict=True):
        assert error(ours, reference) <= tolerance(error(theirs, reference), reference, np.float32)


def test_bfloat16_is_as_exact_as_flax():
    """Scores and softmax are float32 whichever softmax is asked for."""
    arrays, mask = [np.asarray(x, jnp.bfloat16) for x in tensors(B)], keep(B, 1, T, S)
    right, flax, ours = exact(arrays, mask=mask), *(with_gradients(f, arrays, mask=mask) for f in (FLAX, XLA))
    for mine, theirs, reference in zip(ours, flax, right, strict=True):
        assert error(mine, reference) <= tolerance(error(theirs, reference), reference, jnp.bfloat16)
    in_float32 = XLA(*arrays, mask=mask, force_fp32_for_softmax=True)
    np.testing.assert_array_equal(in_float32, XLA(*arrays, mask=mask))


@pytest.mark.parametrize(
    ("dtypes", "dtype"),
    [
        ((jnp.bfloat16, jnp.float32, jnp.bfloat16), None),
        ((jnp.float32,) * 3, jnp.bfloat16),
        ((jnp.bfloat16, jnp.float16, jnp.float16), None),
        ((jnp.int32,) * 3, None),
    ],
)
def test_dtypes_are_promoted_as_by_flax(dtypes, dtype):
    arrays = [jnp.asarray(x, d) for x, d in zip(tensors(B), dtypes, strict=True)]
    ours, flax = (f(*arrays, dtype=dtype) for f in (XLA, FLAX))
    assert ours.dtype == flax.dtype
    eps = float(jnp.finfo(flax.dtype).eps)
    np.testing.assert_allclose(np.asarray(ours, float), np.asarray(flax, float), atol=8 * eps, rtol=8 * eps)


def test_signature_is_that_of_flax():
    """Flax's layer passes what it finds here by name; code that calls the function may pass by position."""
    ours, flax = (inspect.signature(f).parameters for f in (flash_attention_fn, FLAX))
    assert [(p.name, p.default) for p in ours.values()][:-1] == [(p.name, p.default) for p in flax.values()]


def test_query_without_keys_gives_0_where_flax_gives_the_mean():
    query, key, value = tensors(B)
    mask = keep(B, 1, T, S)
    mask[1, :, 3] = False
    ours, flax = (np.asarray(f(query, key, value, mask=mask)) for f in (XLA, FLAX))
    assert not ours[1, 3].any()
    np.testing.assert_allclose(flax[1, 3], value[1].mean(0), atol=8 * EPS)
    others = np.arange(T) != 3
    np.testing.assert_allclose(ours[1, others], flax[1, others], atol=16 * EPS)
    d_value = jax.grad(lambda value: XLA(query, key, value, mask=mask)[1, 3].sum())(value)
    assert not np.asarray(d_value).any()


DROPS = {"dropout_rate": 0.25, "broadcast_dropout": False, "deterministic": False}


def dropped_by_matrix(query, key, value, *, mask, dropout_rng, dropout_rate, broadcast_dropout, deterministic):
    """Flax's weights, of which those are dropped that `dropout_mask` names."""
    assert not (broadcast_dropout or deterministic)
    weights = nn.dot_product_attention_weights(query, key, mask=mask)
    kept = dropout_mask(dropout_rng, dropout_rate, T, T, batch=(B,), heads=N)
    return jnp.einsum("...hqk,...khd->...qhd", jnp.where(kept, weights / (1 - dropout_rate), 0), value)


def test_fused_dropout_is_that_of_dropout_mask():
    x, layers = draw(B, T, FEATURES), [build(f, **DROPS) for f in (XLA, dropped_by_matrix)]
    params, keywords = parameters(build(), x), {"mask": CAUSAL, "dropout_rng": jax.random.key(5)}
    assert abs(dropout_mask(keywords["dropout_rng"], 0.25, T, T, batch=(B,), heads=N).mean() - 0.75) < 0.03  # 4 sigma
    assert_close(*(output_and_gradients(layer, params, [x], **keywords) for layer in layers))


def test_key_of_the_stream_is_used():
    """`rngs={"dropout": key}` draws anew for another key, and the same for the same."""
    x, layer = draw(B, T, FEATURES), build(XLA, **DROPS)
    params = parameters(build(), x)
    first, again, other = (layer.apply({"params": params}, x, rngs={"dropout": jax.random.key(n)}) for n in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01


def test_broadcast_dropout_is_left_to_flax_with_a_warning():
    x = draw(B, T, FEATURES)
    params = parameters(build(), x)
    options = {"dropout_rate": 0.25, "deterministic": False}
    rngs = {"dropout": jax.random.key(0)}
    expected = build(**options).apply({"params": params}, x, rngs=rngs)
    with pytest.warns(UserWarning, match=r"T×S weights are stored\. broadcast_dropout=True.*broadcast_dropout=False"):
        result = build(flash_attention_fn, **options).apply({"params": params}, x, rngs=rngs)
    np.testing.assert_array_equal(result, expected)
    with pytest.raises(NotImplementedError, match=r"broadcast_dropout=True: .*got implementation; build"):
        build(XLA, **options).apply({"params": params}, x, rngs=rngs)


def test_weights_are_sown_by_flax():
    x = draw(B, T, FEATURES)
    params = parameters(build(), x)
    sow = {"sow_weights": True, "mutable": ["intermediates"]}
    both_functions = flash_attention_fn, FLAX
    found = [build(f).apply({"params": params}, x, mask=CAUSAL, **sow) for f in both_functions]
    (ours, sown), (flax, expected) = found
    assert sown["intermediates"]["attention_weights"][0].shape == (B, N, T, T)
    jax.tree.map(np.testing.assert_array_equal, (ours, sown), (flax, expected))
    windowed = build(functools.partial(flash_attention_fn, local_window_size=4))
    with pytest.raises(NotImplementedError, match=r"module: .*got local_window_size; call without sow_weights"):
        windowed.apply({"params": params}, x, **sow)


def test_products_of_the_caller_are_left_to_flax():
    query, key, value = tensors(B)

    def doubled(*args, **kwargs):
        return 2 * jax.lax.dot_general(*args, **kwargs)

    with pytest.warns(UserWarning, match="einsum: products by a function of the caller"):
        result = flash_attention_fn(query, key, value, einsum_dot_general=doubled)
    np.testing.assert_array_equal(result, FLAX(query, key, value, einsum_dot_general=doubled))
    x, made = draw(B, T, FEATURES), []
    names = "qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"
    layer = build(flash_attention_fn, **{name: lambda: made.append(1) or jnp.einsum for name in names})
    with pytest.warns(UserWarning, match="einsum: "):
        layer.apply({"params": parameters(build(), x)}, x)
    assert len(made) == 2


def test_options_and_precision_reach_flash_attention(monkeypatch):
    got = {}
    monkeypatch.setattr(attention_fn, "flash_attention", lambda query, *_, **keywords: got.update(keywords) or query)
    flash_attention_fn(*tensors(B), precision="highest", logits_soft_cap=5.0, plan=None)
    assert got == {"precision": "highest", "logits_soft_cap": 5.0, "plan": None}


def test_causal_by_option_equals_the_mask():
    query, key, value = tensors(B, keys=T)
    expected = XLA(query, key, value, mask=CAUSAL)
    np.testing.assert_allclose(XLA(query, key, value, is_causal=True), expected, atol=16 * EPS)
    moved = XLA(query[:, -5:], key, value, is_causal=True, query_offset=T - 5)
    np.testing.assert_allclose(moved, expected[:, -5:], atol=16 * EPS)


@pytest.mark.parametrize(
    ("keywords", "kind", "message"),
    [
        ({"dropout_rate": 0.1, "broadcast_dropout": False}, ValueError, "dropout_rng: expected a key .*got None; pass"),
        ({"dropout_key": None}, TypeError, "dropout_key: expected options .*dropout_rng"),
        ({"return_residual": False}, TypeError, "return_residual: expected options .*pallas_flash.flash_attention"),
        (
            {"is_causal": True},
            ValueError,
            "is_causal: expected as many queries as keys.*got 21 queries and 30 keys; to",
        ),
        ({"local_window_size": 4}, ValueError, "local_window_size: expected as many"),
        ({"alibi_slopes": np.ones(N)}, ValueError, "alibi_slopes: expected as many"),
        ({"precision": ("high", "high")}, ValueError, "precision: expected None or a jax.lax.Precision"),
        ({"no_such": 1}, TypeError, "no_such"),
    ],
)
def test_misuse(keywords, kind, message):
    with pytest.raises(kind, match=message):
        flash_attention_fn(*tensors(B), **keywords)


def test_causal_by_option_refuses_a_step_of_the_cache():
    """It would leave the step key 0 alone."""
    x = draw(B, 8, FEATURES)
    layer = build(functools.partial(flash_attention_fn, is_causal=True), decode=True)
    variables = layer.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"is_causal: .*got 1 queries and 8 keys; to decode .*leave it out"):
        layer.apply(variables, x[:, :1], mutable=["cache"])
