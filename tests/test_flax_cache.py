"""Decoding: prompts, parts of prompts and single tokens through the cache give what one whole causal pass gives."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from test_flax_layers import (
    EVERYTHING,
    FEATURES,
    FLAX,
    OURS,
    SIZES,
    H,
    N,
    assert_close,
    draw,
    every_api,
    keep,
    layer_of,
    parameters,
)

from flax_layers.attend import LogicalAxes
from flax_layers.cache import KVCache
from flax_layers.rope import RoPE
from pallas_flash import flash_attention

B, T, S_MAX = 2, 12, 16
CHUNKS = [(0, 4), (4, 7), (7, 8), (8, 9), (9, 12)]  # a prompt, a part of one, tokens, several again


class Decoder:
    """A layer of one of the APIs with its cache: `step(x, **call)` → output, under jit."""

    def __init__(self, api: str, params, length: int = S_MAX, batch: tuple[int, ...] = (B,), classes=OURS, **options):
        shape = (*batch, length, FEATURES)
        if api == "linen":
            layer = classes[api](**SIZES, **options, decode=True)
            self.cache = layer.init(jax.random.key(0), jnp.zeros(shape))["cache"]
            self._apply = jax.jit(
                lambda cache, x, call: layer.apply({"params": params, "cache": cache}, x, **call, mutable="cache")
            )
            self.step = self._linen
        else:
            self.layer = classes[api](**SIZES, **options, in_features=FEATURES, rngs=nnx.Rngs(0))
            nnx.update(self.layer, jax.tree.map(jnp.asarray, params))
            self.layer.init_cache(shape)
            run = nnx.jit(lambda layer, x, call: layer(x, decode=True, **call))
            self.step = lambda x, **call: run(self.layer, x, call)

    def _linen(self, x, **call):
        out, changed = self._apply(self.cache, x, call)
        self.cache = changed["cache"]
        return out

    def poison(self):
        """NaN in everything that is not written."""
        if hasattr(self, "cache"):
            written = np.arange(S_MAX) < self.cache["cache_index"][:, None]
            for name in ("cached_key", "cached_value"):
                self.cache[name] = jnp.where(written[..., None, None], self.cache[name], jnp.nan)
        else:
            written = np.arange(S_MAX) < self.layer.cache_index[...][:, None]
            for variable in (self.layer.cached_key, self.layer.cached_value):
                variable[...] = jnp.where(written[..., None, None], variable[...], jnp.nan)


DECODERS = {
    "plain": {},
    "everything": {name: value for name, value in EVERYTHING.items() if name != "is_causal"},
    "one_kv_head_window": {"num_kv_heads": 1, "local_window_size": (3, 2), "rope": RoPE()},
    "kernels": {
        "num_kv_heads": 2, "rope": RoPE(), "use_sinks": True, "local_window_size": (5, 0),
        "attention_fn": functools.partial(flash_attention, implementation="triton", interpret=True),
    },
}  # fmt: skip


@every_api
@pytest.mark.parametrize("name", DECODERS)
def test_steps_equal_the_whole(name, api):
    """Whatever is in the slots that are not written."""
    options, x = DECODERS[name], draw(B, T, FEATURES)
    params = parameters(api, **options)
    whole = np.asarray(jax.jit(layer_of(api, **options, is_causal=True))(params, x))
    decoder = Decoder(api, params, **options)
    for start, stop in CHUNKS:
        decoder.poison()
        assert_close(decoder.step(x[:, start:stop]), whole[:, start:stop])


@every_api
def test_prompts_of_several_lengths(api):
    """Padded at the end: each entry goes on from its own length."""
    options = {"rope": RoPE(), "num_kv_heads": 2, "alibi": True}
    params, x, lengths = parameters(api, **options), draw(B, T, FEATURES), np.array([5, 2], np.int32)
    whole = np.asarray(jax.jit(layer_of(api, **options, is_causal=True))(params, x))
    decoder = Decoder(api, params, **options)
    padded = np.where(np.arange(5)[:, None] < lengths[:, None, None], x[:, :5], np.nan)
    out = decoder.step(padded, query_seq_lengths=lengths)
    for b, length in enumerate(lengths):
        assert_close(out[b, :length], whole[b, :length])
        np.testing.assert_array_equal(out[b, length:], np.tile(params["out"]["bias"], (5 - length, 1)))
    for step in range(4):
        now = lengths + step
        out = decoder.step(x[np.arange(B), now][:, None])
        assert_close(out[:, 0], whole[np.arange(B), now])


@every_api
def test_steps_equal_those_of_flax(api):
    """Token by token in Flax's layer with the same parameters, a mask of the caller beside the cache's."""
    x, mask = draw(B, 6, FEATURES), keep(B, 1, 1, S_MAX)
    params = parameters(api, FLAX)
    ours, flax = Decoder(api, params), Decoder(api, params, classes=_FLAX)
    for t in range(6):
        assert_close(ours.step(x[:, t : t + 1], mask=mask), flax.step(x[:, t : t + 1], mask=mask))


_FLAX = {"linen": nn.MultiHeadDotProductAttention, "nnx": nnx.MultiHeadAttention}


@every_api
def test_overflow_is_never_silent(api):
    """Under jit: NaN in the entry from then on, and nothing overwritten; where it can be known: an error."""
    params, x = parameters(api), draw(B, 4, FEATURES)
    decoder = Decoder(api, params, length=6)
    decoder.step(x, query_seq_lengths=np.array([4, 1]))
    second = decoder.step(x, query_seq_lengths=np.array([3, 3]))
    assert np.isnan(second[0]).all() and np.isfinite(second[1]).all()
    third = decoder.step(x[:, :1])
    assert np.isnan(third[0]).all() and np.isfinite(third[1]).all()

    with pytest.raises(ValueError, match=r"cache: expected at most 6 positions, its length, got 7; make it longer"):
        Decoder(api, params, length=6).step(draw(B, 7, FEATURES))
    cache = KVCache.empty((B,), 6, N, H, jnp.float32)
    step = draw(B, 4, N, H)
    cache, _ = cache.extend(step, step, np.array([4, 1]))
    with pytest.raises(ValueError, match=r"cache: expected at most 6 positions, its length, got 8"):
        cache.extend(step, step)


def test_cache_alone():
    """In bfloat16, two batch axes, and prompts that end beyond the last slot though what counts does not."""
    cache = KVCache.empty((3, B), 5, 2, 4, jnp.bfloat16)
    new = draw(3, B, 4, 2, 4)
    cache, seen = cache.extend(new, 2 * new, np.array([1, 3]))
    assert seen.keys() == {"is_causal", "query_offset", "key_value_seq_lengths", "query_seq_lengths"}
    np.testing.assert_array_equal(cache.written, [[1, 3]] * 3)
    cache, seen = cache.extend(new, 2 * new, np.array([9, 2]))  # no more than 4 are there
    np.testing.assert_array_equal(seen["query_offset"], [[1, 3]] * 3)
    np.testing.assert_array_equal(cache.positions(2)[0], [[5, 6], [5, 6]])
    rounded = new.astype(jnp.bfloat16)
    np.testing.assert_array_equal(cache.key[:, 1], np.concatenate([rounded[:, 1, :3], rounded[:, 1, :2]], axis=1))
    np.testing.assert_array_equal(cache.value[:, 0, 1:], 2 * rounded[:, 0])
    assert not cache.overflowed().any()


@every_api
def test_bfloat16_cache_holds_what_the_layer_computes(api):
    """The cache has the dtype of the computation unless told."""
    x, params = draw(B, 3, FEATURES), parameters(api)
    decoder = Decoder(api, params, dtype=jnp.bfloat16)
    assert decoder.step(x).dtype == jnp.bfloat16
    key = decoder.cache["cached_key"] if api == "linen" else decoder.layer.cached_key
    assert key.dtype == jnp.bfloat16


def test_views_decode():
    """`nnx.view` turns decoding on and makes the cache."""
    layer = OURS["nnx"](**SIZES, in_features=FEATURES, is_causal=True, rngs=nnx.Rngs(0))
    x = draw(B, 3, FEATURES)
    decoding = nnx.view(layer, decode=True, batch_size=B, max_length=S_MAX)
    assert_close(decoding(x), layer(x))
    assert decoding.cached_key.shape == (B, S_MAX, N, H) and not layer.decode
    np.testing.assert_array_equal(decoding.cache_index[...], [3, 3])


REFUSED = [
    (
        {"key_value_seq_lengths": np.array([3, 3])},
        r"key_value_seq_lengths: expected None with decode=True, got an array; ",
    ),
    (
        {"query_segment_ids": np.zeros((B, 3), int)},
        r"query_segment_ids: expected None with decode=True.*batch entry of",
    ),
    ({"inputs_k": draw(B, 3, FEATURES)}, r"inputs_k: expected None with decode=True, got an array;.*decode=False"),
]


@every_api
@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_the_cache_rules_out(api, call, message):
    with pytest.raises(ValueError, match=message):
        Decoder(api, parameters(api)).step(draw(B, 3, FEATURES), **call)


@every_api
def test_no_cache_or_another_one(api):
    x, params = draw(B, 3, FEATURES), parameters(api)
    with pytest.raises(ValueError, match=r"decode: expected a cache, got decode=True without one; "):
        layer_of(api)(params, x, decode=True)
    with pytest.raises(
        ValueError, match=r"key: expected shape \(3, 3, 4, 8\) for a cache of shape \(3, 16, 4, 8\), got"
    ):
        Decoder(api, params, batch=(3,)).step(x)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded(kind):
    """Batch and heads split over a mesh, whose axes the compiler or the types tell."""
    axis_types = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axis_types, devices=jax.devices()[:4])
    options = {"num_kv_heads": 2, "rope": RoPE(), "use_sinks": True, "alibi": True}
    params, x = parameters("nnx", **options), draw(B, T, FEATURES)
    whole = jax.jit(layer_of("nnx", **options, is_causal=True))(params, x)
    heads, out = PartitionSpec("data", None, "model", None), PartitionSpec("data", None, None)
    shardings = {"qkv_sharding": heads, "out_sharding": out} if kind == "Explicit" else {}
    rules = (("heads", "model"), ("kv_heads", "model"), ("embed", None), ("head_dim", None))
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        make = {**SIZES, **options, "in_features": FEATURES, "logical_axes": LogicalAxes()}
        layer = nnx.jit(lambda: OURS["nnx"](**make, rngs=nnx.Rngs(0)))()
        places = jax.tree.map(lambda p: p.sharding, nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
        nnx.update(layer, jax.device_put(params, places))
        layer.init_cache((B, S_MAX, FEATURES), out_sharding=heads if kind == "Explicit" else None)
        step = nnx.jit(lambda layer, x: layer(x, decode=True, **shardings))
        for start, stop in CHUNKS[:3]:
            part = step(layer, jax.device_put(x[:, start:stop], out))
            assert_close(part, whole[:, start:stop])
    assert part.sharding.is_equivalent_to(NamedSharding(mesh, out), 3) or kind == "Auto"
