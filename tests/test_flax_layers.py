"""`FlashMultiHeadAttention` of linen and nnx: as Flax's layers where those can do it, as the oracle where not."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx, serialization
from jax.sharding import NamedSharding, PartitionSpec

import flax_layers.linen
import flax_layers.nnx
from flax_layers.attend import LogicalAxes, alibi_slopes
from flax_layers.rope import Llama3Scaling, RoPE
from pallas_flash import dropout_mask, flash_attention

B, T, S, FEATURES, N, H = 2, 13, 17, 12, 4, 8
SIZES = {"num_heads": N, "qkv_features": N * H, "out_features": 10}
EPS = np.finfo(np.float32).eps
APIS = ["linen", "nnx"]
OURS = {"linen": flax_layers.linen.FlashMultiHeadAttention, "nnx": flax_layers.nnx.FlashMultiHeadAttention}
FLAX = {"linen": nn.MultiHeadDotProductAttention, "nnx": functools.partial(nnx.MultiHeadAttention, decode=False)}
every_api = pytest.mark.parametrize("api", APIS)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def shapes_of(api: str, classes=OURS, **options):
    """Nested dict of the parameters' shapes, the same in both APIs."""
    if api == "linen":
        x = jnp.ones((1, 1, FEATURES))
        return jax.eval_shape(classes[api](**{**SIZES, **options}).init, jax.random.key(0), x)["params"]
    return nnx.to_pure_dict(nnx.state(_abstract(classes[api], options), nnx.Param))


def parameters(api: str, classes=OURS, **options):
    """Random ones, biases too, in place of initial values."""
    leaves, structure = jax.tree.flatten(shapes_of(api, classes, **options))
    return jax.tree.unflatten(structure, [0.5 * draw(*p.shape, seed=n) for n, p in enumerate(leaves)])


def _abstract(cls, options):
    return nnx.eval_shape(lambda: cls(**{**SIZES, "in_features": FEATURES, **options}, rngs=nnx.Rngs(0)))


def layer_of(api: str, classes=OURS, **options):
    """(parameters, *inputs, **call) → output."""
    if api == "linen":
        layer = classes[api](**{**SIZES, **options})
        return lambda params, *inputs, **call: layer.apply({"params": params}, *inputs, **call)
    graph, abstract, rest = nnx.split(_abstract(classes[api], options), nnx.Param, ...)
    assert not jax.tree.leaves(rest)

    def run(params, *inputs, **call):
        state = nnx.clone(abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state, rest)(*inputs, **call)

    return run


def output_and_gradients(run, params, inputs, **call) -> dict[str, np.ndarray]:
    """Output, and gradients by every input and parameter, of `vdot(cotangent, output)`, under jit."""

    @jax.jit
    def gradients(params, inputs):
        def pulled(params, inputs):
            out = run(params, *inputs, **call)
            return jnp.vdot(draw(*out.shape, seed=7), out), out

        (_, out), found = jax.value_and_grad(pulled, argnums=(0, 1), has_aux=True)(params, inputs)
        return {"output": out, "gradient": found}

    rows, _ = jax.tree_util.tree_flatten_with_path(gradients(params, inputs))
    return {jax.tree_util.keystr(path): np.asarray(array) for path, array in rows}


def assert_close(result, expected, scale=64):
    """Equal up to `scale` roundings of the largest value: sums over features, H, keys, tokens, 10 to 60 terms each."""
    np.testing.assert_allclose(result, expected, rtol=0, atol=scale * EPS * np.abs(expected).max())


def assert_all_close(result: dict, expected: dict, scale=64):
    """As `assert_close`; d(key.bias) is 0 in exact arithmetic, a sum of terms as large as those of d(query.bias)."""
    assert result.keys() == expected.keys()
    for name, right in expected.items():
        largest = np.abs(expected[name.replace("['key']['bias']", "['query']['bias']")]).max()
        np.testing.assert_allclose(result[name], right, rtol=0, atol=scale * EPS * largest, err_msg=name)


# As Flax's own layers


def keep(*shape: int) -> np.ndarray:
    """A random mask that leaves the first key to each query."""
    mask = np.random.default_rng(9).random(shape) < 0.6
    mask[..., 0] = True
    return mask


CAUSAL = nn.make_causal_mask(jnp.ones((B, T)))  # float32, as Flax makes them
NO_DROPOUT = {"dropout_rate": 0.3, "deterministic": True}
GRID = {
    "causal": ({}, [(B, T)], {"is_causal": True}, {"mask": CAUSAL}),
    "masks": ({"use_bias": False, **NO_DROPOUT}, [(B, T)], {"mask": CAUSAL * keep(B, 1, T, T)}, None),
    "cross": ({"normalize_qk": True}, [(B, T), (B, S)], {"mask": keep(B, N, T, S)}, None),
    "three_inputs": ({}, [(T,), (S,), (S,)], {}, None),
    "batch_axes": ({"normalize_qk": True}, [(3, B, T)], {"key_value_seq_lengths": np.full((3, B), 9)},
                   {"mask": np.broadcast_to(np.arange(T) < 9, (3, B, 1, T, T))}),
    "grouped": ({"num_kv_heads": 2}, [(B, T)], {"is_causal": True}, {"mask": CAUSAL}),
    "one_kv_head": ({"num_kv_heads": 1}, [(B, T), (B, S)], {}, None),
}  # fmt: skip
"""Options, shapes of inputs, what our call is told, and what Flax's is if that is something else."""


@pytest.mark.parametrize("name", GRID)
def test_output_and_gradients_equal_those_of_flax(name):
    """In both APIs, to Flax's nnx layer, and to its linen layer where that has such a one."""
    options, shapes, call, flax_call = GRID[name]
    inputs = [draw(*shape, FEATURES, seed=n) for n, shape in enumerate(shapes)]
    params = parameters("nnx", FLAX, **options)
    right = layer_of("nnx", FLAX, **{**options, "keep_rngs": False})
    expected = output_and_gradients(right, params, inputs, **(flax_call or call))
    for api in APIS:
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes_of(api, **options))
        more = {"keep_rngs": False} if api == "nnx" else {}
        result = output_and_gradients(layer_of(api, **options, **more), params, inputs, **call)
        assert_all_close(result, expected)
    if "num_kv_heads" not in options:
        right = layer_of("linen", FLAX, **options)
        assert_all_close(expected, output_and_gradients(right, params, inputs, **(flax_call or call)))


@every_api
def test_kernels_give_the_same(api):
    """The layer's options reach the kernels, here interpreted."""
    options = {"num_kv_heads": 2, "is_causal": True, "use_sinks": True, "rope": RoPE(), "logits_soft_cap": 3.0}
    params, inputs = parameters(api, **options), [draw(B, T, FEATURES)]
    kernels = functools.partial(flash_attention, implementation="triton", interpret=True)
    result = output_and_gradients(layer_of(api, attention_fn=kernels, **options), params, inputs)
    assert_all_close(result, output_and_gradients(layer_of(api, **options), params, inputs))


@every_api
def test_initial_parameters_and_checkpoints_of_flax(api):
    """Drawn alike, and moved through the bytes of a checkpoint in either direction."""
    x, options = draw(B, T, FEATURES), {"normalize_qk": True}
    if api == "linen":
        ours, flax = (classes[api](**SIZES, **options) for classes in (OURS, FLAX))
        drawn = [jax.jit(layer.init)(jax.random.key(3), x) for layer in (ours, flax)]
        jax.tree.map(np.testing.assert_array_equal, *drawn)
        trained = {"params": parameters(api, FLAX, **options)}
        stored = serialization.to_bytes(trained)
        assert_close(ours.apply(serialization.from_bytes(drawn[0], stored), x), flax.apply(trained, x))
        assert serialization.to_bytes(serialization.from_bytes(drawn[0], stored)) == stored
        return
    make = {"in_features": FEATURES, **SIZES, **options}
    ours, flax = (classes[api](**make, rngs=nnx.Rngs(3)) for classes in (OURS, FLAX))
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(layer, nnx.Param) for layer in (ours, flax)))
    trained = parameters(api, FLAX, **options)
    nnx.update(flax, jax.tree.map(jnp.asarray, trained))
    stored = serialization.to_bytes(nnx.to_pure_dict(nnx.state(flax, nnx.Param)))
    nnx.update(ours, serialization.from_bytes(nnx.to_pure_dict(nnx.state(ours, nnx.Param)), stored))
    assert_close(ours(x), flax(x))
    assert serialization.to_bytes(nnx.to_pure_dict(nnx.state(ours, nnx.Param))) == stored


# What Flax's layers do not have


LLAMA = RoPE(theta=1000.0, scaling=Llama3Scaling(original_max_position_embeddings=64))
SEGMENTS = np.array([[0] * 5 + [1] * 8, [3] * 2 + [0] * 9 + [-1] * 2])
POSITIONS = np.array([[*range(5), *range(8)], [*range(2), *range(11)]])
EVERYTHING = {
    "num_kv_heads": 2, "normalize_qk": True, "use_sinks": True, "is_causal": True, "local_window_size": (4, 0),
    "logits_soft_cap": 2.0, "scale": 0.5, "alibi": True, "rope": LLAMA,
}  # fmt: skip
ORACLE = {
    "everything": (EVERYTHING, {}),
    "packed": ({"is_causal": True, "rope": RoPE()}, {"query_segment_ids": SEGMENTS, "input_positions": POSITIONS}),
    "lengths": ({"num_kv_heads": 1, "local_window_size": (2, 3)},
                {"query_seq_lengths": np.array([9, 13]), "key_value_seq_lengths": np.array([13, 6])}),
    "bias": ({"alibi": True}, {"bias": draw(N, T, T), "mask": keep(B, 1, T, T)}),
}  # fmt: skip


def turned(rope: RoPE, x, positions):
    """Rotate-half, in float64."""
    angles = np.broadcast_to(positions, x.shape[:2])[..., None, None] * rope.frequencies(x.shape[-1])
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def by_oracle(options, params, x, call) -> np.ndarray:
    """A layer of self-attention in float64."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    query, key, value = (
        np.einsum("btf,fnh->btnh", x, p[name]["kernel"]) + p[name]["bias"] for name in ("query", "key", "value")
    )
    if options.get("normalize_qk"):
        centred = (y - y.mean(-1, keepdims=True) for y in (query, key))
        query, key = (y / np.sqrt(y.var(-1, keepdims=True) + 1e-6) for y in centred)
        query, key = query * p["query_ln"]["scale"], key * p["key_ln"]["scale"]
    given = {name: value for name, value in call.items() if name != "input_positions"}
    if "query_segment_ids" in given:
        given["key_value_segment_ids"] = given["query_segment_ids"]
    if "rope" in options:
        positions = call.get("input_positions", np.arange(T))
        query, key = (turned(options["rope"], y, positions) for y in (query, key))
    if options.get("alibi"):
        given["alibi_slopes"] = np.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    if options.get("use_sinks"):
        given["sinks"] = p["sinks"]
    names = ("is_causal", "local_window_size", "logits_soft_cap", "scale")
    heads, _ = oracle.attend(query, key, value, **given, **{n: options[n] for n in names if n in options})
    return np.einsum("btnh,nhf->btf", heads, p["out"]["kernel"]) + p["out"]["bias"]


@every_api
@pytest.mark.parametrize("name", ORACLE)
def test_options_equal_the_oracle(name, api):
    options, call = ORACLE[name]
    params, x = parameters(api, **options), draw(B, T, FEATURES)
    result = jax.jit(functools.partial(layer_of(api, **options), **call))(params, x)
    assert_close(result, by_oracle(options, params, x.astype(float), call))


def test_slopes_of_alibi():
    np.testing.assert_array_equal(alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(alibi_slopes(6), 2.0 ** -np.array([2, 4, 6, 8, 1, 3]), rtol=1e-7)  # as in its code
    assert alibi_slopes(1) == 2.0**-8


def test_rope_in_cross_attention():
    """Queries and keys stand where they are told, or each from 0 on."""
    params, x, y = parameters("nnx"), draw(B, T, FEATURES), draw(B, S, FEATURES, seed=1)
    query, key = (
        (z @ params[name]["kernel"].reshape(FEATURES, -1) + params[name]["bias"].reshape(-1)).reshape(B, -1, N, H)
        for name, z in (("query", x), ("key", y))
    )
    seen = {}

    def attention(query, key, value, **_):
        seen.update(query=query, key=key)
        return flash_attention(query, key, value)

    told = {"input_positions": np.arange(T) + 3, "key_value_positions": np.arange(S)[::-1]}
    for api in APIS:
        layer = layer_of(api, attention_fn=attention, rope=RoPE())
        for given in ({}, told):
            layer(params, x, y, **given)
            assert_close(seen["query"], turned(RoPE(), query, given.get("input_positions", np.arange(T))))
            assert_close(seen["key"], turned(RoPE(), key, given.get("key_value_positions", np.arange(S))))


@every_api
def test_dropout_is_that_of_dropout_mask(api):
    """Fused, from the key of the stream or of the call; the same in both APIs for the same key."""
    params, x, key = parameters(api), draw(B, T, FEATURES), nnx.Rngs(dropout=5).dropout()
    options = {"dropout_rate": 0.25, **({"keep_rngs": False} if api == "nnx" else {})}
    given = {"rngs": nnx.Rngs(dropout=5)} if api == "nnx" else {"dropout_rng": key}
    result = layer_of(api, **options)(params, x, deterministic=False, **given)
    kept = np.asarray(dropout_mask(key, 0.25, T, T, batch=(B,), heads=N))
    dropping = functools.partial(_dropping, kept=kept)
    assert_close(result, layer_of(api, attention_fn=dropping)(params, x))
    assert np.abs(result - layer_of(api, **options)(params, x, deterministic=True)).max() > 0.01


def _dropping(query, key, value, *, kept):
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) / H**0.5)
    return jnp.einsum("bnts,bsnh->btnh", jnp.where(kept, weights / 0.75, 0), value)


def test_streams_of_dropout():
    x, options = draw(B, T, FEATURES), {"dropout_rate": 0.25, "deterministic": False}
    layer = OURS["linen"](**SIZES, **options)
    variables = layer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    first, again, other = (layer.apply(variables, x, rngs={"dropout": jax.random.key(n)}) for n in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01

    make = {"in_features": FEATURES, **SIZES, **options}
    layers = [OURS["nnx"](**make, rngs=nnx.Rngs(params=0, dropout=1)) for _ in range(2)]
    first, again = (layer(x) for layer in layers)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - layers[0](x)).max() > 0.01  # the stream went on
    np.testing.assert_array_equal(*(layer(x, rngs=nnx.Rngs(dropout=4)) for layer in layers))


AXES = {
    "['query']['kernel']": ("embed", "heads", "head_dim"),
    "['query']['bias']": ("heads", "head_dim"),
    "['query_ln']['scale']": ("head_dim",),
    "['key']['kernel']": ("embed", "kv_heads", "head_dim"),
    "['key']['bias']": ("kv_heads", "head_dim"),
    "['key_ln']['scale']": ("head_dim",),
    "['value']['kernel']": ("embed", "kv_heads", "head_dim"),
    "['value']['bias']": ("kv_heads", "head_dim"),
    "['out']['kernel']": ("heads", "head_dim", "embed"),
    "['out']['bias']": ("embed",),
    "['sinks']": ("heads",),
}


def named(tree) -> dict[str, tuple]:
    rows, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple | PartitionSpec))
    return {jax.tree_util.keystr(path): tuple(spec) for path, spec in rows}


@every_api
def test_parameters_have_names_of_axes(api):
    """Every parameter; rules map them to a mesh, on which the layer computes what it computes without."""
    options = {"num_kv_heads": 2, "normalize_qk": True, "use_sinks": True, "is_causal": True}
    x, params = draw(B, T, FEATURES), parameters(api, **options)
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=auto, devices=jax.devices()[:4])
    rules = (("heads", "model"), ("kv_heads", "model"), ("embed", "data"), ("head_dim", None))
    if api == "linen":
        layer = OURS[api](**SIZES, **options, logical_axes=LogicalAxes())
        boxed = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
        assert named(nn.get_partition_spec(boxed)) == AXES
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
        placed = jax.device_put(params, shardings)
        out = jax.jit(layer.apply)({"params": placed}, x)
    else:
        with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
            make = {"in_features": FEATURES, **SIZES, **options}
            layer = nnx.jit(lambda: OURS[api](**make, logical_axes=LogicalAxes(), rngs=nnx.Rngs(0)))()
            state = nnx.state(layer, nnx.Param)
            is_variable = {"is_leaf": lambda p: isinstance(p, nnx.Variable)}
            axes = jax.tree.map(lambda p: p.get_metadata("out_sharding"), state, **is_variable)
            assert named(nnx.to_pure_dict(axes)) == AXES
            placed = nnx.to_pure_dict(state)
            out = nnx.jit(lambda layer, x: layer(x))(layer, x)
            params = jax.device_get(placed)
    for array, spec in ((placed["query"]["kernel"], ("data", "model")), (placed["sinks"], ("model",))):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*spec)), array.ndim)
    assert_close(out, jax.jit(layer_of(api, **options))(params, x))


# Misuse


SIZES_THAT_DO_NOT_FIT = [
    ({"num_kv_heads": 3}, r"num_kv_heads: expected a divisor of num_heads=4, got 3\. Pass"),
    ({"num_kv_heads": 0}, r"num_kv_heads: expected a divisor of num_heads=4, got 0\. Pass"),
    ({"qkv_features": 30}, r"qkv_features: expected a positive multiple of num_heads=4, got 30"),
    ({"num_heads": 0}, r"num_heads: expected at least 1, got 0\. Pass"),
]
CALLS = [
    (
        {},
        {"inputs_v": draw(B, T, FEATURES)},
        ValueError,
        r"inputs_k: expected an array beside inputs_v, got None\. Pass",
    ),
    ({}, {"sow_weights": True}, TypeError, r"sow_weights: expected keywords among bias, mask, .*; give other options"),
    ({}, {"query_offset": 3}, TypeError, r"query_offset: expected keywords among"),
    ({"dropout_rate": 0.1}, {}, ValueError, r"deterministic: expected True or False with dropout_rate=0\.1, got None;"),
    ({"rope": RoPE(), "qkv_features": 20}, {}, ValueError, "head_dim: expected an even number, got 5"),
    ({"rope": RoPE()}, {"input_positions": np.arange(T + 1)}, ValueError, "positions: expected a shape"),
    ({}, {"input_positions": np.arange(T)}, ValueError, "input_positions: expected None without rope, got an array"),
    (
        {"rope": RoPE()},
        {"inputs_k": draw(B, S, FEATURES), "input_positions": np.arange(T)},
        ValueError,
        r"key_value_positions: expected integers beside .*, got None; pass them",
    ),
    ({"logits_soft_cap": -1.0}, {}, ValueError, "logits_soft_cap: expected"),
]


@every_api
@pytest.mark.parametrize(("options", "message"), SIZES_THAT_DO_NOT_FIT)
def test_sizes_that_do_not_fit(api, options, message):
    with pytest.raises(ValueError, match=message):
        if api == "linen":
            OURS[api](**{**SIZES, **options}).init(jax.random.key(0), draw(B, T, FEATURES))
        else:
            OURS[api](**{**SIZES, "in_features": FEATURES, **options}, rngs=nnx.Rngs(0))


@every_api
@pytest.mark.parametrize(("options", "call", "error", "message"), CALLS)
def test_calls_that_do_not_fit(api, options, call, error, message):
    x, options = draw(B, T, FEATURES), {**SIZES, **options}
    with pytest.raises(error, match=message):
        if api == "linen":
            OURS[api](**options).init(jax.random.key(0), x, **call)
        else:
            OURS[api](**options, in_features=FEATURES, rngs=nnx.Rngs(0))(x, **call)


@every_api
def test_inputs_that_do_not_fit(api):
    with pytest.raises(ValueError, match=r"inputs_q: expected shape \[\*B, length, .*got \(12,\)\. Pass"):
        layer_of(api)(parameters(api), draw(FEATURES))
