"""`flax_layers.nnx`: the same layer as Flax's own, parameter for parameter and number for number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers.nnx import FlashMultiHeadAttention

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


def shapes(layer: nnx.Module) -> dict[str, tuple[int, ...]]:
    return {".".join(map(str, path)): p.shape for path, p in nnx.to_flat_state(nnx.state(layer))}


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


def test_parameters_are_those_of_flax():
    both = FlashMultiHeadAttention, nnx.MultiHeadAttention
    ours, flax = jax.jit(lambda: [nnx.state(cls(**SIZES, rngs=nnx.Rngs(3)), nnx.Param) for cls in both])()
    jax.tree.map(np.testing.assert_array_equal, ours, flax)  # the same names, shapes and initial values
    ours, flax = (shapes(build(cls, use_bias=False)) for cls in both)
    assert ours == flax


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


def test_cross_attention_without_causal_mask():
    layer = build(FlashMultiHeadAttention)
    flax_layer = build(nnx.MultiHeadAttention, nnx.state(layer, nnx.Param), decode=False)
    arrays = draw(B, T, FEATURES), draw(B, 30, FEATURES, seed=1), draw(B, 30, FEATURES, seed=2)
    assert_close(call(layer, *arrays), call(flax_layer, *arrays))


def test_jit_equals_eager_and_inputs_default_to_queries():
    layer, x = build(FlashMultiHeadAttention, is_causal=True), draw(B, T, FEATURES)
    assert_close(call(layer, x, x, x), layer(x))


@pytest.mark.parametrize(
    "options",
    [{"num_key_value_heads": 2, "local_window_size": (5, 2)}, {"num_key_value_heads": 1, "is_causal": True}],
    ids=["window_gqa", "causal_mqa"],
)
def test_grouped_heads_and_lengths_equal_those_of_jax_nn(options):
    layer = build(FlashMultiHeadAttention, **options)
    assert layer.key.kernel.shape == (FEATURES, options["num_key_value_heads"], 8)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, r"num_heads: expected at least 1, got 0\. Pass"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads: expected a divisor of num_heads=4, got 3\. Pass"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads: expected a divisor of num_heads=4, got 0\. Pass"),
        ({"qkv_features": 30}, r"qkv_features: expected a positive multiple of num_heads=4, got 30 .*qkv_features=28"),
        ({"in_features": 6, "qkv_features": None}, r"qkv_features: expected .*got 6 .*in_features"),
    ],
)
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        FlashMultiHeadAttention(**{**SIZES, **options}, rngs=nnx.Rngs(0))


def test_inputs_that_do_not_fit():
    layer, x = build(FlashMultiHeadAttention), draw(B, T, FEATURES)
    with pytest.raises(ValueError, match=r"inputs_q: expected shape \[\*B, length, 12\].*got \(2, 21, 5\)\. Pass"):
        layer(x[..., :5])
    with pytest.raises(ValueError, match=r"inputs_v: expected shape .*got \(2, 21, 7\)"):
        layer(x, x, x[..., :7])
    with pytest.raises(ValueError, match="inputs_k: expected an array beside inputs_v, got None"):
        layer(x, inputs_v=x)
