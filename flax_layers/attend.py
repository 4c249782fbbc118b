"""What do the layers of both APIs have in common? Sizes, names of parameters' axes, and how heads attend."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypedDict, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from flax_layers.cache import KVCache
from flax_layers.rope import RoPE


@runtime_checkable
class Layer(Protocol):
    """Options of `FlashMultiHeadAttention` in both APIs that say how its heads attend.

    Attributes:
        num_heads: Number of query heads, N.
        is_causal: Whether query t attends to keys 0 … t alone. A step of the cache always does.
        local_window_size: Keys before and after a query's own position that it attends to, inclusive: (left, right), an
            int for both, None on a side for no bound there; None: no window. "Window W" elsewhere mostly is (W - 1, 0).
        logits_soft_cap: Positive number: scores become cap·tanh(scores / cap). Gemma 2 has 50.
        scale: Multiplies the scores; None: 1/sqrt(H).
        alibi: Whether to subtract each head's slope (`alibi_slopes`) times the distance from the scores.
        rope: Turns query and key by their positions, after normalisation; None: does not.
        dropout_rate: Chance of each attention weight to be dropped, fused: `pallas_flash.dropout_mask` tells which.
        deterministic: Whether nothing is dropped; the call's own goes before it. Must be told if the rate is not 0.
        decode: Whether keys and values come from the cache too; the call's own goes before it.
        precision: `jax.lax.Precision` or its name, of the projections and of attention's float32 dots.
        attention_fn: Computes the attention: `pallas_flash.flash_attention`, a `functools.partial` of it with more
            options (implementation, plan, score_modifiers, …), or a function that takes the keywords of it in use.
    """

    num_heads: int
    is_causal: bool
    local_window_size: Any
    logits_soft_cap: float | None
    scale: float | None
    alibi: bool
    rope: RoPE | None
    dropout_rate: float
    deterministic: bool | None
    decode: bool
    precision: Any
    attention_fn: Callable[..., Array]


class Masks(TypedDict, total=False):
    """Keywords of a layer's call that go to `flash_attention`, which documents them, as they are.

    With two liberties: `mask` may hold numbers too, 0 = do not attend, as Flax makes them; and in self-attention
    `key_value_segment_ids` are `query_segment_ids` unless given.
    """

    bias: ArrayLike | None
    mask: ArrayLike | None
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None


class Sizes(NamedTuple):
    """Of the projections: K, H, and features of the output."""

    num_kv_heads: int
    head_dim: int
    out_features: int

    @classmethod
    def of(
        cls,
        num_heads: int,
        in_features: int,
        qkv_features: int | None,
        out_features: int | None,
        num_kv_heads: int | None,
    ) -> "Sizes":
        """From a layer's arguments, None being what the layer says it is.

        Raises:
            ValueError: They do not fit each other.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        qkv_features = in_features if qkv_features is None else qkv_features
        if num_heads < 1:
            raise ValueError(f"num_heads: expected at least 1, got {num_heads}. Pass the number of query heads.")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of num_heads={num_heads}, got {num_kv_heads}. "
                f"Pass a divisor, or None for {num_heads}."
            )
        if qkv_features < 1 or qkv_features % num_heads:
            raise ValueError(
                f"qkv_features: expected a positive multiple of num_heads={num_heads}, got {qkv_features} "
                f"(in_features, if it was not given). Pass qkv_features={num_heads * max(1, qkv_features // num_heads)}"
                ", for example."
            )
        return cls(num_kv_heads, qkv_features // num_heads, in_features if out_features is None else out_features)


@dataclasses.dataclass(frozen=True)
class LogicalAxes:
    """Names of the parameters' axes, which rules map to axes of a mesh; None leaves an axis unnamed.

    Args:
        embed: Features of inputs and outputs.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Numbers of a head.
    """

    embed: str | None = "embed"
    heads: str | None = "heads"
    kv_heads: str | None = "kv_heads"
    head_dim: str | None = "head_dim"

    def of(self, parameter: str) -> tuple[str | None, ...]:
        """Those of a parameter, "query.kernel" for example."""
        query, key_value = (self.heads, self.head_dim), (self.kv_heads, self.head_dim)
        table = {
            "query.kernel": (self.embed, *query),
            "query.bias": query,
            "key.kernel": (self.embed, *key_value),
            "key.bias": key_value,
            "value.kernel": (self.embed, *key_value),
            "value.bias": key_value,
            "query_ln.scale": (self.head_dim,),
            "key_ln.scale": (self.head_dim,),
            "out.kernel": (*query, self.embed),
            "out.bias": (self.embed,),
            "sinks": (self.heads,),
        }
        return table[parameter]


def alibi_slopes(num_heads: int) -> np.ndarray:
    """float32 [num_heads]: 2^(-8/n), 2^(-16/n), … for n heads, a power of two; for other numbers, as in the source.

    Source: Press et al., Train Short, Test Long (arXiv:2108.12409), section 3 and its code, `get_slopes`.
    """
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8 * np.arange(1, whole + 1) / whole)
    between = 2.0 ** (-4 * np.arange(1, 2 * whole + 1, 2) / whole)
    return np.concatenate([slopes, between[: num_heads - whole]]).astype(np.float32)


def inputs(
    inputs_q: ArrayLike, inputs_k: ArrayLike | None, inputs_v: ArrayLike | None, decode: bool
) -> tuple[Array, Array, Array]:
    """What query, key and value are projections of: None is the one before.

    Raises:
        ValueError: `inputs_v` without `inputs_k`; keys of other inputs with the cache.
    """
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "inputs_k: expected an array beside inputs_v, got None. Pass inputs_k=inputs_v to use it for both."
        )
    if decode and not all(x is None or x is inputs_q for x in (inputs_k, inputs_v)):
        raise ValueError(
            "inputs_k: expected None with decode=True, got an array; the cache holds keys of the inputs_q so far. "
            "Call layers of cross-attention with decode=False."
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    return jnp.asarray(inputs_q), jnp.asarray(inputs_k), jnp.asarray(inputs_v)


def check_features(name: str, array: Array, features: int | None, argument: str = "") -> None:
    """Raises a ValueError unless `array` is [*B, length, features]."""
    if array.ndim < 2 or features not in (None, array.shape[-1]):
        size = "features" if features is None else features
        why = "" if features is None else f", as {argument}={features}"
        raise ValueError(
            f"{name}: expected shape [*B, length, {size}]{why}; got {array.shape}. Pass inputs of that size"
            + (f", or build the layer with {argument} to match." if argument else ".")
        )


def drops(layer: Layer, deterministic: bool | None) -> bool:
    """Whether this call drops attention weights.

    Raises:
        ValueError: Neither call nor layer tells.
    """
    if not layer.dropout_rate > 0:
        return False
    chosen = layer.deterministic if deterministic is None else deterministic
    if chosen is None:
        raise ValueError(
            f"deterministic: expected True or False with dropout_rate={layer.dropout_rate}, got None; pass it to the "
            "call or to the layer"
        )
    return not chosen


def attend(
    layer: Layer,
    query: Array,
    key: Array,
    value: Array,
    *,
    cache: KVCache | None,
    is_self: bool,
    positions: tuple[ArrayLike | None, ArrayLike | None],
    is_causal: bool | None,
    sinks: ArrayLike | None,
    dropped: dict[str, Any],
    masks: Masks,
) -> tuple[Array, KVCache | None]:
    """What the heads of a layer see.

    Args:
        layer: A `FlashMultiHeadAttention`.
        query: [*B, T, N, H].
        key: [*B, S, K, H], of one dtype with the others.
        value: [*B, S, K, H].
        cache: Holds keys and values before those; None: there are none.
        is_self: Whether keys are made of the inputs of which queries are.
        positions: The call's `input_positions` and `key_value_positions`.
        is_causal: Goes before the layer's own; None: that.
        sinks: [N], or None.
        dropped: Keywords for dropout.
        masks: The call's.

    Returns:
        [*B, T, N, H], NaN in batch entries whose cache overflowed; and the cache after it.

    Raises:
        TypeError, ValueError: As of `flash_attention`; masks that the cache rules out; T positions that do not fit.
    """
    given = _masks(masks, is_self, cache)
    of_queries, of_keys = _positions(layer, query, key, cache, is_self, *positions)
    if layer.rope is not None:
        query, key = layer.rope(query, of_queries), layer.rope(key, of_keys)
    given["is_causal"] = layer.is_causal if is_causal is None else is_causal
    if cache is not None:
        cache, seen = cache.extend(key, value, given.pop("query_seq_lengths", None))
        key, value = cache.key.astype(query.dtype), cache.value.astype(query.dtype)
        given |= seen
    given |= {
        "local_window_size": layer.local_window_size,
        "logits_soft_cap": layer.logits_soft_cap,
        "scale": layer.scale,
        "alibi_slopes": alibi_slopes(layer.num_heads) if layer.alibi else None,
        "sinks": sinks,
        "precision": layer.precision,
        **dropped,
    }
    out = layer.attention_fn(query, key, value, **{n: x for n, x in given.items() if x is not None and x is not False})
    if cache is None:
        return out, None
    return jnp.where(cache.overflowed()[..., None, None, None], jnp.nan, out), cache


def _positions(
    layer: Layer, query: Array, key: Array, cache: KVCache | None, is_self: bool, of_queries: Any, of_keys: Any
) -> tuple[ArrayLike, ArrayLike]:
    """Those of queries and keys: as given, or counted from 0, or on from what the cache holds."""
    for name, given in (("input_positions", of_queries), ("key_value_positions", of_keys)):
        if layer.rope is None and given is not None:
            raise ValueError(f"{name}: expected None without rope, got an array; masks, windows and ALiBi go by index")
    if of_keys is None and of_queries is not None and not is_self:
        raise ValueError(
            "key_value_positions: expected integers beside input_positions and inputs_k, got None; pass them, "
            "jnp.arange(S) for example"
        )
    counted = jnp.arange(query.shape[-3]) if cache is None else cache.positions(query.shape[-3])
    of_queries = counted if of_queries is None else of_queries
    of_keys = (of_queries if is_self else jnp.arange(key.shape[-3])) if of_keys is None else of_keys
    return of_queries, of_keys


def _masks(masks: Masks, is_self: bool, cache: KVCache | None) -> dict[str, Any]:
    """Those given, as keywords of `flash_attention`."""
    if unknown := sorted(masks.keys() - Masks.__annotations__.keys()):
        raise TypeError(
            f"{', '.join(unknown)}: expected keywords among {', '.join(Masks.__annotations__)}; give other options of "
            "flash_attention to the layer, or in a functools.partial as its attention_fn"
        )
    given: dict[str, Any] = {name: x for name, x in masks.items() if x is not None}
    if "mask" in given:
        given["mask"] = jnp.asarray(given["mask"]).astype(bool)
    if cache is not None:
        _check_masks_of_steps(given)
    elif is_self and "query_segment_ids" in given:
        given.setdefault("key_value_segment_ids", given["query_segment_ids"])
    return given


def _check_masks_of_steps(given: dict[str, Any]) -> None:
    apart = "the cache does not hold them; give each document a batch entry of its own"
    remedies = {
        "key_value_seq_lengths": "the cache knows its own; query_seq_lengths says how many of the new tokens count",
        "query_segment_ids": apart,
        "key_value_segment_ids": apart,
    }
    for name, remedy in remedies.items():
        if name in given:
            raise ValueError(f"{name}: expected None with decode=True, got an array; {remedy}")
