"""`flax_layers.nnx`: number for number as Flax's own. What the layer shares with linen's is in test_flax_layers.py."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers import attention_fn
from flax_layers.nnx import FlashMultiHeadAttention, flash_attention_fn
from pallas_flash import dropout_mask

B, T, FEATURES, N = 2, 21, 12, 4
SIZES = dict(num_heads=N, in_features=FEATURES, qkv_features=32, out_features=10)
EPS = np.finfo(np.float32).eps


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def build(cls, params=None, **options):
    """A layer made without computing anything, with `params`, or drawn ones, biases too, in place of initial values."""
    layer = nnx.eval_shape(lambda: cls(**{**SIZES, "rngs": nnx.Rngs(0), **options}))
    leaves, structure = jax.tree.flatten(nnx.state(layer, nnx.Param))
    if params is None:
        params = [0.5 * draw(*p.shape, seed=n) for n, p in enumerate(leaves)]
    values = [np.asarray(value).astype(p.dtype) for value, p in zip(jax.tree.leaves(params), leaves, strict=True)]
    nnx.update(layer, jax.tree.unflatten(structure, [jnp.asarray(value) for value in values]))
    return layer


@nnx.jit
def _output_and_gradients(layer, x, cotangent, mask=None):
    def pulled(layer, x):
        out = layer(x) if mask is None else layer(x, mask=mask)
        return jnp.vdot(cotangent, out), out

    (_, out), (d_params, dx) = nnx.value_and_grad(pulled, argnums=(0, 1), has_aux=True)(layer, x)
    rows = {".".join(map(str, path)): p[...] for path, p in nnx.to_flat_state(d_params)}
    return {"output": out, "inputs": dx, **rows}


def output_and_gradients(*args) -> dict[str, np.ndarray]:
    """Output, and gradients by the inputs and by every parameter, of `vdot(cotangent, output)`."""
    return {name: np.asarray(array) for name, array in _output_and_gradients(*args).items()}


_call = nnx.jit(lambda layer, *arrays, **lengths: layer(*arrays, **lengths))


def call(layer, *arrays, **lengths) -> np.ndarray:
    """The layer's output under jit."""
    return np.asarray(_call(layer, *arrays, **lengths))


def float64_attention(query, key, value, *, mask, **_):
    """Attention in float64 throughout; jax.nn's, which Flax uses, has a softmax in float32 whatever its inputs are."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), value)


def assert_close(result, expected, scale=64):
    """Equal up to `scale` roundings of the largest value: sums over features, H, T and heads, 10 to 40 terms each."""
    np.testing.assert_allclose(result, expected, rtol=0, atol=scale * EPS * np.abs(expected).max())


def test_causal_output_and_gradients_equal_those_of_flax():
    x, cotangent = draw(B, T, FEATURES), draw(B, T, SIZES["out_features"], seed=1)
    causal = np.asarray(nnx.make_causal_mask(jnp.ones((B, T))))
    layer = build(FlashMultiHeadAttention, is_causal=True)
    flax_layer = build(nnx.MultiHeadAttention, nnx.state(layer, nnx.Param), decode=False)
    result, dense = output_and_gradients(layer, x, cotangent), output_and_gradients(flax_layer, x, cotangent, causal)
    with jax.enable_x64(True):
        options = dict(decode=False, dtype=float, param_dtype=float, attention_fn=float64_attention)
        wide = build(nnx.MultiHeadAttention, nnx.state(layer, nnx.Param), **options)
        exact = output_and_gradients(wide, x.astype(float), cotangent.astype(float), causal)

    assert result.keys() == dense.keys() == exact.keys()
    largest = max(np.abs(array).max() for array in exact.values())
    for name, expected in exact.items():
        assert result[name].dtype == np.float32 and expected.dtype == np.float64
        # The floor is in `largest`: d(key.bias) is 0 in exact arithmetic, a sum of terms as large as other gradients.
        tolerance = 2 * np.abs(dense[name] - expected).max() + 4 * EPS * largest
        np.testing.assert_allclose(result[name], expected, rtol=0, atol=tolerance, err_msg=name)


def test_jit_equals_eager_and_inputs_default_to_queries():
    layer, x = build(FlashMultiHeadAttention, is_causal=True), draw(B, T, FEATURES)
    assert_close(call(layer, x, x, x), layer(x))


@pytest.mark.parametrize(
    "options",
    [{"num_kv_heads": 2, "local_window_size": (5, 2)}, {"num_kv_heads": 1, "is_causal": True}],
    ids=["window_gqa", "causal_mqa"],
)
def test_grouped_heads_and_lengths_equal_those_of_jax_nn(options):
    layer = build(FlashMultiHeadAttention, **options)
    assert layer.key.kernel.shape == (FEATURES, options["num_kv_heads"], 8)
    options = {**options, "attention_fn": jax.nn.dot_product_attention}
    dense = build(FlashMultiHeadAttention, nnx.state(layer, nnx.Param), **options)
    x, queries, keys = draw(B, T, FEATURES), np.array([T, 9], np.int32), np.array([T, 12], np.int32)
    result, expected = (call(y, x, query_seq_lengths=queries, key_value_seq_lengths=keys) for y in (layer, dense))
    assert_close(result, expected)
    assert_close(result[1, 9:], np.tile(np.asarray(layer.out.bias[...]), (T - 9, 1)))


def test_any_number_of_batch_dimensions():
    layer = build(FlashMultiHeadAttention, is_causal=True)
    x, lengths = draw(3, B, T, FEATURES), np.arange(1, 7, dtype=np.int32).reshape(3, B)
    result = call(layer, x, key_value_seq_lengths=lengths)
    flat = call(layer, x.reshape(-1, T, FEATURES), key_value_seq_lengths=lengths.reshape(-1))
    assert_close(result.reshape(flat.shape), flat)
    assert_close(call(layer, x[0, 0], key_value_seq_lengths=lengths[0, 0]), result[0, 0])


@pytest.mark.parametrize(
    ("options", "dtypes", "expected"),
    [
        ({"dtype": jnp.bfloat16}, (jnp.float32,), jnp.bfloat16),
        ({"param_dtype": jnp.bfloat16}, (jnp.float32,), jnp.float32),
        ({"param_dtype": jnp.bfloat16}, (jnp.bfloat16, jnp.float32), jnp.float32),  # of query and key
    ],
)
def test_dtypes(options, dtypes, expected):
    arrays = [jax.ShapeDtypeStruct((B, T, FEATURES), dtype) for dtype in dtypes]
    layer = nnx.eval_shape(lambda: FlashMultiHeadAttention(**SIZES, **options, rngs=nnx.Rngs(0)))
    assert layer.query.kernel.dtype == options.get("param_dtype", jnp.float32)
    assert nnx.eval_shape(lambda layer, *arrays: layer(*arrays), layer, *arrays).dtype == expected


def test_inputs_that_do_not_fit():
    layer, x = build(FlashMultiHeadAttention), draw(B, T, FEATURES)
    with pytest.raises(ValueError, match=r"inputs_q: expected shape \[\*B, length, 12\].*got \(2, 21, 5\)\. Pass"):
        layer(x[..., :5])
    with pytest.raises(ValueError, match=r"inputs_v: expected shape .*got \(2, 21, 7\)"):
        layer(x, x, x[..., :7])
    with pytest.raises(ValueError, match="inputs_k: expected an array beside inputs_v, got None"):
        layer(x, inputs_v=x)


# `flash_attention_fn` in Flax's own layer

XLA = functools.partial(flash_attention_fn, implementation="xla")  # a named implementation leaves nothing to Flax
TRITON = functools.partial(flash_attention_fn, implementation="triton", interpret=True)
CAUSAL = nnx.make_causal_mask(jnp.ones((B, T)))  # float32, as Flax makes them
build_flax = functools.partial(build, nnx.MultiHeadAttention, decode=False)


def keep(*shape: int) -> np.ndarray:
    """A random mask that leaves the first key to each query."""
    mask = np.random.default_rng(9).random(shape) < 0.6
    mask[..., 0] = True
    return mask


@nnx.jit(static_argnames="is_causal")
def _all_gradients(layer, inputs, mask, is_causal=False):
    def pulled(layer, inputs):
        out = layer(*inputs, mask=mask, is_causal=is_causal)
        return jnp.vdot(draw(*out.shape, seed=7), out), out

    (_, out), (d_params, d_inputs) = nnx.value_and_grad(pulled, argnums=(0, 1), has_aux=True)(layer, inputs)
    rows = {".".join(map(str, path)): p[...] for path, p in nnx.to_flat_state(d_params)}
    return {"output": out, **{str(n): dx for n, dx in enumerate(d_inputs)}, **rows}


def assert_all_close(result, expected):
    """As `assert_close`; d(key.bias) is 0 in exact arithmetic, a sum of terms as large as those of d(query.bias)."""
    assert result.keys() == expected.keys()
    for name, right in expected.items():
        largest = np.abs(expected[name.replace("key.bias", "query.bias")]).max()
        np.testing.assert_allclose(result[name], right, rtol=0, atol=64 * EPS * largest, err_msg=name)


NO_DROPOUT = {"dropout_rate": 0.3, "deterministic": True, "keep_rngs": False}
LAYERS = {
    "causal_cross": ({"in_kv_features": FEATURES}, [(B, T), (B, 30)], None, True),
    "grouped": ({"num_kv_heads": 2}, [(B, T)], CAUSAL, False),
    "grouped_to_one": ({"num_kv_heads": 1}, [(B, T)], keep(B, 1, T, T), True),
    "three_inputs": ({"normalize_qk": True}, [(B, T), (B, 30), (B, 30)], keep(B, N, T, 30), False),
    "two_batch_axes": (NO_DROPOUT, [(3, B, T)], keep(3, B, 1, T, T), False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_flax_layers_equal_those_with_flax_function(name):
    options, shapes, mask, is_causal = LAYERS[name]
    inputs = [draw(*shape, FEATURES, seed=n) for n, shape in enumerate(shapes)]
    layers = [build_flax(**options, **given) for given in ({"attention_fn": XLA}, {})]
    assert_all_close(*(_all_gradients(layer, inputs, mask, is_causal=is_causal) for layer in layers))


def test_flax_layer_with_interpreted_kernels():
    layers = [build_flax(num_kv_heads=2, **given) for given in ({"attention_fn": TRITON}, {})]
    assert_all_close(*(_all_gradients(layer, [draw(B, T, FEATURES)], None, is_causal=True) for layer in layers))


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}], ids=["all_heads", "grouped"])
def test_decoding_with_flax_cache(options):
    """Each of six steps in a cache of eight equals Flax's, and the causal layer's row, also if `is_causal` is on."""
    x, step = draw(B, 8, FEATURES), nnx.jit(lambda layer, x: layer(x, decode=True, is_causal=True))
    layers = [build_flax(**options, **given) for given in ({"attention_fn": XLA}, {})]
    whole = np.asarray(layers[0](x, is_causal=True))
    for layer in layers:
        layer.init_cache(x.shape)
    for t in range(6):
        ours, flax = (np.asarray(step(layer, x[:, t : t + 1])) for layer in layers)
        assert_close(ours, flax)
        assert_close(ours[:, 0], whole[:, t])


@pytest.mark.parametrize("function", [XLA, TRITON], ids=["xla", "triton"])
def test_fused_dropout_is_that_of_dropout_mask(function):
    query, key, value = draw(B, T, N, 8), draw(B, T, N, 8, seed=1), draw(B, T, N, 8, seed=2)
    dropped = {"dropout_rng": jax.random.key(5), "dropout_rate": 0.25, "broadcast_dropout": False}
    result = function(query, key, value, mask=CAUSAL, **dropped)
    kept = dropout_mask(dropped["dropout_rng"], 0.25, T, T, batch=(B,), heads=N)
    assert abs(kept.mean() - 0.75) < 0.03  # 4 sigma of 3528 draws
    weights = nnx.nn.attention.dot_product_attention_weights(query, key, mask=CAUSAL)
    assert_close(result, jnp.einsum("bnts,bsnh->btnh", jnp.where(kept, weights / 0.75, 0), value))


def test_layer_drops_with_keys_of_its_stream():
    x, options = draw(B, T, FEATURES), {"dropout_rate": 0.25, "deterministic": False, "keep_rngs": False}
    layer = build_flax(attention_fn=XLA, broadcast_dropout=False, **options)
    first, again, other = (np.asarray(layer(x, rngs=nnx.Rngs(dropout=n))) for n in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01

    expected = build_flax(**options)(x, rngs=nnx.Rngs(dropout=0))
    with pytest.warns(UserWarning, match=r"T×S weights are stored\. broadcast_dropout=True.*broadcast_dropout=False"):
        result = build_flax(attention_fn=flash_attention_fn, **options)(x, rngs=nnx.Rngs(dropout=0))
    np.testing.assert_array_equal(result, expected)
    with pytest.raises(NotImplementedError, match=r"broadcast_dropout=True: .*got implementation; build"):
        build_flax(attention_fn=XLA, **options)(x, rngs=nnx.Rngs(dropout=0))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_weights_are_sown_by_flax():
    x, layers = draw(B, T, FEATURES), [build_flax(**given) for given in ({"attention_fn": flash_attention_fn}, {})]
    ours, flax = (layer(x, is_causal=True, sow_weights=True) for layer in layers)
    np.testing.assert_array_equal(ours, flax)
    sown, expected = (nnx.pop(layer, nnx.Intermediate)["attention_weights"][0] for layer in layers)
    assert sown.shape == (B, N, T, T)
    np.testing.assert_array_equal(sown, expected)
    with pytest.raises(NotImplementedError, match=r"module: .*got implementation; call without sow_weights"):
        build_flax(attention_fn=XLA)(x, sow_weights=True)


def test_function_has_the_signature_of_flax():
    ours, flax = (inspect.signature(f).parameters for f in (flash_attention_fn, nnx.dot_product_attention))
    assert [(p.name, p.default) for p in ours.values()][:-1] == [(p.name, p.default) for p in flax.values()]


def test_function_promotes_as_it_is_told():
    """Every dtype as Flax has it; `promote_dtype` is called once with all three, and `dtype`."""
    arrays = draw(B, T, N, 8), draw(B, T, N, 8, seed=1), draw(B, T, N, 8, seed=2).astype(jnp.bfloat16)
    for dtype in (None, jnp.bfloat16):
        ours, flax = (f(*arrays, dtype=dtype) for f in (XLA, nnx.dot_product_attention))
        assert ours.dtype == flax.dtype
        eps = float(jnp.finfo(flax.dtype).eps)
        np.testing.assert_allclose(np.asarray(ours, float), np.asarray(flax, float), atol=8 * eps, rtol=8 * eps)
    halved = XLA(*arrays, promote_dtype=lambda tensors, dtype: tuple(jnp.asarray(x, jnp.float16) for x in tensors))
    assert halved.dtype == jnp.float16


def test_bias_and_its_gradient_equal_those_of_flax():
    arrays = draw(3, B, T, N, 8), draw(3, B, 30, 2, 8, seed=1), draw(3, B, 30, 2, 8, seed=2)
    bias = 2 * draw(3, B, N, T, 30, seed=3)
    rows = []
    for f in (XLA, nnx.dot_product_attention):
        out, pull = jax.vjp(lambda bias, f=f: f(*arrays, bias), bias)
        rows.append((np.asarray(out), np.asarray(pull(draw(*out.shape, seed=7))[0])))
    for ours, flax in zip(*rows, strict=True):
        assert_close(ours, flax)


def test_function_takes_no_part_of_the_cache_for_the_first_query():
    query, key = draw(B, 1, N, 8), draw(B, 8, N, 8)
    with pytest.raises(ValueError, match=r"local_window_size: .*got 1 queries and 8 keys; to decode .*leave it out"):
        flash_attention_fn(query, key, key, local_window_size=(3, 0))
    last = flash_attention_fn(query, key, key, local_window_size=(3, 0), query_offset=7)
    assert_close(last, flash_attention_fn(query, key[:, 4:], key[:, 4:]))
    with pytest.raises(TypeError, match=r"input_positions: expected options .*rotate query and key"):
        build_flax(attention_fn=flash_attention_fn)(draw(B, T, FEATURES), input_positions=jnp.arange(T))


def test_options_and_precision_reach_flash_attention(monkeypatch):
    got, query = {}, draw(B, T, N, 8)
    monkeypatch.setattr(attention_fn, "flash_attention", lambda query, *_, **keywords: got.update(keywords) or query)
    flash_attention_fn(query, query, query, precision="highest", is_causal=True, logits_soft_cap=5.0)
    assert got == {"precision": "highest", "is_causal": True, "logits_soft_cap": 5.0}
