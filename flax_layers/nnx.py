"""Attention for Flax nnx, computed by `flash_attention`: a function for Flax's layer, and a layer."""

from collections.abc import Callable
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import Array
from jax.typing import ArrayLike

from flax_layers import attend, attention_fn
from flax_layers.attend import LogicalAxes
from flax_layers.cache import KVCache
from flax_layers.rope import RoPE
from pallas_flash import flash_attention

KERNEL_INIT = nnx.initializers.lecun_normal()
ZEROS_INIT, ONES_INIT = nnx.initializers.zeros_init(), nnx.initializers.ones_init()


def flash_attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: PrecisionLike = None,
    module: nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    **options: Any,
) -> Array:
    """`flax.nnx.dot_product_attention` whose T×S weights are never stored; docs/flax.md tells the rules.

    Example:
        layer = nnx.MultiHeadAttention(8, 512, attention_fn=flash_attention_fn, decode=False, rngs=nnx.Rngs(0))

    What a layer passes itself is set on the layer (`broadcast_dropout=False`) or in its call (`is_causal=True`); a
    `functools.partial` holds options.

    Args:
        query: [*B, T, N, H], floating, any number of batch axes.
        key: [*B, S, K, H], floating; K divides N.
        value: [*B, S, K, Hv], floating.
        bias: Floating, broadcastable to [*B, N, T, S], added to the scaled scores.
        mask: Boolean or a number, 0 = do not attend, broadcastable to [*B, N, T, S]. A query with nothing to attend to
            gives 0 (Flax's function: the mean of the values).
        broadcast_dropout: Whether to drop the same in every batch entry and head, for which Flax's own function is
            called, with a warning. False: by `flash_attention`.
        dropout_rng: A key of `jax.random`. `pallas_flash.dropout_mask` tells what it drops, which is not what
            Flax's function drops for the same key.
        dropout_rate: Chance of each weight to be dropped, 0 <= rate < 1, a Python number.
        deterministic: Whether nothing is dropped. (For gradients that repeat bit for bit, what `flash_attention` calls
            deterministic, put --xla_gpu_deterministic_ops in XLA_FLAGS.)
        dtype: To which query, key and value are cast; None: the one that they promote to.
        precision: `jax.lax.Precision` or its name, of the dots of float32 inputs (which Flax's function does not heed
            without dropout). A pair is an error.
        module: Sows the weights, for which Flax's own function is called.
        promote_dtype: Casts the tuple of query, key and value.
        is_causal: Whether query t attends to keys 0 … t alone.
        **options: More keywords of `flash_attention`: local_window_size, implementation, interpret, … Those that
            depend on positions need T = S or `query_offset`.

    Returns:
        [*B, T, N, Hv] in the promoted dtype.

    Raises:
        NotImplementedError: Flax's own function would have to be called, but `implementation` is named, or an option
            is given that it does not know.
        TypeError, ValueError: As of `flash_attention`; an option that Flax sets itself; weights to drop without a key;
            an option of positions where T is not S.
    """
    drops = not deterministic and dropout_rate > 0
    if refused := attention_fn.refusal(module, drops and broadcast_dropout):
        return attention_fn.by_flax(
            nnx.dot_product_attention, refused, options,
            query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype,
            precision, module, promote_dtype, is_causal,
        )  # fmt: skip
    tensors = promote_dtype((query, key, value), dtype=dtype)
    from_flax = {"precision": precision, "is_causal": is_causal}
    from_flax |= attention_fn.dropout(dropout_rng, dropout_rate, deterministic)
    return attention_fn.attend(tensors, bias, mask, options, **from_flax)


class FlashMultiHeadAttention(nnx.Module):
    """`flax.nnx.MultiHeadAttention` whose T×S weights are never stored, with grouped heads, RoPE, windows and more.

    Parameters have its names and shapes, and the same `rngs` draw the same initial values, so that checkpoints move
    freely between the two. Masks are told by structure (causal, window, lengths, segments) or by an array.

    Example:
        layer = FlashMultiHeadAttention(num_heads=8, in_features=512, is_causal=True, rngs=nnx.Rngs(0))
        y = layer(x)  # [*B, T, 512] to [*B, T, 512]

    Args:
        num_heads: Number of query heads, N.
        in_features: Size of the last axis of `inputs_q`.
        qkv_features: Size of query after projection, all heads together: N·H; None: `in_features`.
        out_features: Size of the last axis of the output; None: `in_features`.
        num_kv_heads: Number of key and value heads, K, a divisor of N (grouped-query attention); None: N.
        in_kv_features: Size of the last axis of `inputs_k` and `inputs_v`; None: `in_features`.
        dtype: Of the computation; None: promoted from inputs and parameters.
        param_dtype: Of the parameters.
        kernel_init: Initialises the kernels of the projections.
        out_kernel_init: That of the output's; None: `kernel_init`.
        bias_init: Initialises their biases.
        out_bias_init: That of the output's; None: `bias_init`.
        use_bias: Whether the four projections add a bias.
        normalize_qk: Whether query and key are normalised (`nnx.LayerNorm` of each head, with scales of their own).
        use_sinks: Whether each head has a learned logit that joins its softmax, without a value: parameter `sinks` [N].
        sinks_init: Initialises it.
        logical_axes: Names of the parameters' axes, their sharding metadata; None: parameters have none.
        is_causal, local_window_size, logits_soft_cap, scale, alibi, rope, dropout_rate, deterministic, decode,
            precision, attention_fn: How heads attend: `flax_layers.attend.Layer`.
        rngs: Random keys; draws initial parameters from the stream "params", dropout from "dropout".
        keep_rngs: Whether the layer keeps a stream of dropout keys of its own, if it drops at all.

    Raises:
        ValueError: Sizes that do not fit each other.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = KERNEL_INIT,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = ZEROS_INIT,
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        normalize_qk: bool = False,
        use_sinks: bool = False,
        sinks_init: Initializer = ZEROS_INIT,
        logical_axes: LogicalAxes | None = None,
        is_causal: bool = False,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        scale: float | None = None,
        alibi: bool = False,
        rope: RoPE | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        decode: bool = False,
        attention_fn: Callable[..., Array] = flash_attention,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ):
        sizes = attend.Sizes.of(num_heads, in_features, qkv_features, out_features, num_kv_heads)
        self.num_heads = num_heads
        self.in_features = in_features
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.num_kv_heads, self.head_dim, self.out_features = sizes
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.is_causal = is_causal
        self.local_window_size = local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.scale = scale
        self.alibi = alibi
        self.rope = rope
        self.dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.decode = decode
        self.attention_fn = attention_fn

        def named(init: Initializer, parameter: str) -> Initializer:
            return nnx.with_partitioning(init, logical_axes.of(parameter)) if logical_axes else init

        def projection(
            name: str, in_features: Any, out_features: Any, kernel_init: Any, bias_init: Any, axis: Any = -1
        ):
            return nnx.LinearGeneral(
                in_features, out_features, axis=axis, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype,
                kernel_init=named(kernel_init, f"{name}.kernel"), bias_init=named(bias_init, f"{name}.bias"),
                precision=precision, rngs=rngs,
            )  # fmt: skip

        def norm(name: str) -> nnx.LayerNorm:
            return nnx.LayerNorm(
                self.head_dim, use_bias=False, dtype=dtype, param_dtype=param_dtype,
                scale_init=named(ONES_INIT, f"{name}.scale"), rngs=rngs,
            )  # fmt: skip

        query, key_value = (num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        self.query = projection("query", in_features, query, kernel_init, bias_init)
        self.key = projection("key", self.in_kv_features, key_value, kernel_init, bias_init)
        self.value = projection("value", self.in_kv_features, key_value, kernel_init, bias_init)
        self.query_ln = norm("query_ln") if normalize_qk else None
        self.key_ln = norm("key_ln") if normalize_qk else None
        init = out_kernel_init or kernel_init, out_bias_init or bias_init
        self.out = projection("out", query, self.out_features, *init, axis=(-2, -1))
        self.rngs = rngs.dropout.fork() if keep_rngs and dropout_rate > 0 else None
        sinks = named(sinks_init, "sinks")
        self.sinks = nnx.Param(sinks(rngs.params(), (num_heads,), param_dtype)) if use_sinks else None
        self.cached_key: nnx.Cache[Array] | None = nnx.data(None)
        self.cached_value: nnx.Cache[Array] | None = nnx.data(None)
        self.cache_index: nnx.Cache[Array] | None = nnx.data(None)

    def __call__(
        self,
        inputs_q: ArrayLike,
        inputs_k: ArrayLike | None = None,
        inputs_v: ArrayLike | None = None,
        *,
        input_positions: ArrayLike | None = None,
        key_value_positions: ArrayLike | None = None,
        is_causal: bool | None = None,
        deterministic: bool | None = None,
        decode: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        **masks: Unpack[attend.Masks],
    ) -> Array:
        """Projects the inputs to query, key and value, attends, and projects the heads back to one vector a token.

        Args:
            inputs_q: [*B, T, in_features], floating, any number of batch axes.
            inputs_k: [*B, S, in_kv_features], floating; None: `inputs_q` (self-attention).
            inputs_v: [*B, S, in_kv_features], floating; None: `inputs_k`.
            input_positions: [*B, T] or broadcastable, integer: where RoPE takes queries to stand. None: 0 … T - 1, or
                on from what the cache holds. Causal masks, windows and ALiBi go by index all the same.
            key_value_positions: [*B, S] or broadcastable, integer: the same of keys. None: where the queries stand in
                self-attention, else 0 … S - 1.
            is_causal: Goes before the layer's own; None: that.
            deterministic: Whether nothing is dropped; None: as the layer has it.
            decode: Whether to write to the cache that `init_cache` made, and attend to all it holds: a prompt, a part
                of one, or a token. What does not fit gives NaN, or raises where it can be known. None: as the layer.
            rngs: Keys of dropout; None: the layer's own.
            out_sharding: Of the output, for meshes whose axes are in types.
            qkv_sharding: The same of query, key and value.
            **masks: bias, mask, query_seq_lengths, key_value_seq_lengths, query_segment_ids, key_value_segment_ids, as
                `flash_attention` has them. Queries that attend to nothing, and those beyond `query_seq_lengths`, give
                the bias of the output projection. With the cache, `query_seq_lengths` says how many of the new tokens
                count, in each batch entry.

        Returns:
            [*B, T, out_features], in `dtype` or the dtype promoted from inputs and parameters.

        Raises:
            TypeError, ValueError: As of `flash_attention`; inputs of another size; weights to drop without a key; no
                cache, too small a cache, or what the cache rules out.
        """
        decode = self.decode if decode is None else decode
        cache = KVCache(*(variable[...] for variable in self._cached())) if decode else None
        is_self = inputs_k is None or inputs_k is inputs_q
        inputs_q, inputs_k, inputs_v = attend.inputs(inputs_q, inputs_k, inputs_v, decode)
        attend.check_features("inputs_q", inputs_q, self.in_features, "in_features")
        attend.check_features("inputs_k", inputs_k, self.in_kv_features, "in_kv_features")
        attend.check_features("inputs_v", inputs_v, self.in_kv_features, "in_kv_features")

        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        query, key, value = dtypes.promote_dtype((query, key, value), dtype=self.dtype)
        heads, cache = attend.attend(
            self, query, key, value, cache=cache, is_self=is_self, positions=(input_positions, key_value_positions),
            is_causal=is_causal, sinks=None if self.sinks is None else self.sinks[...],
            dropped=self._dropped(deterministic, rngs), masks=masks,
        )  # fmt: skip
        if cache is not None:
            for variable, array in zip(self._cached(), cache, strict=True):
                variable[...] = array
        return self.out(heads, out_sharding=out_sharding)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Dtype | None = None, out_sharding: Any = None) -> None:
        """Makes an empty cache.

        Args:
            input_shape: (*B, S_max, features): batch axes, and the number of positions it has room for.
            dtype: Of keys and values; None: the layer's `dtype`, or that of its parameters.
            out_sharding: Of keys and values [*B, S_max, K, H], for meshes whose axes are in types.
        """
        batch, length = tuple(input_shape[:-2]), input_shape[-2]
        dtype = dtype or self.dtype or self.param_dtype
        cache = KVCache.empty(batch, length, self.num_kv_heads, self.head_dim, dtype, out_sharding)
        self.cached_key, self.cached_value, self.cache_index = map(nnx.Cache, cache)

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """What `nnx.view` calls.

        Args:
            deterministic: Whether nothing is dropped; None: as before.
            decode: Whether to use the cache; None: as before.
            batch_size: B, with `max_length` for an empty cache.
            max_length: S_max, the number of positions it has room for.
        """
        self.deterministic = self.deterministic if deterministic is None else deterministic
        self.decode = self.decode if decode is None else decode
        if batch_size is not None and max_length is not None:
            batch = (batch_size,) if isinstance(batch_size, int) else batch_size
            self.init_cache((*batch, max_length, self.in_features))

    def _cached(self) -> tuple[nnx.Cache[Array], ...]:
        if self.cached_key is None or self.cached_value is None or self.cache_index is None:
            raise ValueError("decode: expected a cache, got decode=True without one; call init_cache first")
        return self.cached_key, self.cached_value, self.cache_index

    def _dropped(self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None) -> dict[str, Any]:
        drops = attend.drops(self, deterministic)
        rngs = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs or self.rngs
        return attention_fn.dropout(rngs() if drops and rngs is not None else None, self.dropout_rate, not drops)
