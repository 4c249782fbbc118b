"""Attention for Flax linen, computed by `flash_attention`: a function for Flax's layers, and a layer."""

from collections.abc import Callable
from typing import Any, Unpack

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import Array
from jax.typing import ArrayLike

from flax_layers import attend, attention_fn
from flax_layers.attend import LogicalAxes
from flax_layers.cache import KVCache
from flax_layers.rope import RoPE
from pallas_flash import flash_attention

CACHED = ("cached_key", "cached_value", "cache_index")
"""Variables of the collection "cache": the fields of a `KVCache`."""


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
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
    **options: Any,
) -> Array:
    """`flax.linen.dot_product_attention` whose T×S weights are never stored; docs/flax.md tells the rules.

    Example:
        layer = nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=flash_attention_fn)

    What a layer passes itself is set on the layer (`broadcast_dropout=False`); a `functools.partial` holds options.

    Args:
        query: [*B, T, N, H], floating, any number of batch axes.
        key: [*B, S, K, H], floating; K divides N (Flax's function: K = N).
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
        precision: `jax.lax.Precision` or its name, of the dots of float32 inputs. A pair is an error.
        module: Sows the weights, for which Flax's own function is called.
        force_fp32_for_softmax: Of no effect: scores and softmax are float32 always.
        einsum_dot_general: If given, Flax's own function is called, with a warning.
        qk_attn_weights_einsum: As `einsum_dot_general`.
        attn_weights_value_einsum: As `einsum_dot_general`.
        **options: More keywords of `flash_attention`: is_causal, local_window_size, implementation, interpret, … Those
            that depend on positions need T = S or `query_offset`.

    Returns:
        [*B, T, N, Hv] in the promoted dtype.

    Raises:
        NotImplementedError: Flax's own function would have to be called, but `implementation` is named, or an option
            is given that it does not know.
        TypeError, ValueError: As of `flash_attention`; an option that Flax sets itself; weights to drop without a key;
            an option of positions where T is not S.
    """
    drops = not deterministic and dropout_rate > 0
    multiplies = any((einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum))
    if refused := attention_fn.refusal(module, drops and broadcast_dropout, multiplies):
        return attention_fn.by_flax(
            nn.dot_product_attention, refused, options,
            query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype,
            precision, module, force_fp32_for_softmax, einsum_dot_general, qk_attn_weights_einsum,
            attn_weights_value_einsum,
        )  # fmt: skip
    tensors = promote_dtype(query, key, value, dtype=dtype)
    dropped = attention_fn.dropout(dropout_rng, dropout_rate, deterministic)
    return attention_fn.attend(tensors, bias, mask, options, precision=precision, **dropped)


class FlashMultiHeadAttention(nn.Module):
    """`nn.MultiHeadDotProductAttention` whose T×S weights are never stored, with grouped heads, RoPE, windows and more.

    Parameters have its names and shapes, and the same key draws the same initial values, so that checkpoints move
    freely between the two. Masks are told by structure (causal, window, lengths, segments) or by an array.

    Example:
        layer = FlashMultiHeadAttention(num_heads=8, is_causal=True)
        variables = layer.init(jax.random.key(0), x)
        y = layer.apply(variables, x)  # [*B, T, features] to [*B, T, features]

    Attributes:
        num_heads: Number of query heads, N.
        qkv_features: Size of query after projection, all heads together: N·H; None: that of the inputs.
        out_features: Size of the last axis of the output; None: that of the inputs.
        num_kv_heads: Number of key and value heads, K, a divisor of N (grouped-query attention); None: N.
        dtype: Of the computation; None: promoted from inputs and parameters.
        param_dtype: Of the parameters.
        kernel_init: Initialises the kernels of the projections.
        out_kernel_init: That of the output's; None: `kernel_init`.
        bias_init: Initialises their biases.
        out_bias_init: That of the output's; None: `bias_init`.
        use_bias: Whether the four projections add a bias.
        normalize_qk: Whether query and key are normalised (`nn.LayerNorm` of each head, with scales of their own).
        use_sinks: Whether each head has a learned logit that joins its softmax, without a value: parameter `sinks` [N].
        sinks_init: Initialises it.
        logical_axes: Names of the parameters' axes, for `nn.with_logical_partitioning`; None: parameters have none.
        is_causal, local_window_size, logits_soft_cap, scale, alibi, rope, dropout_rate, deterministic, decode,
            precision, attention_fn: How heads attend: `flax_layers.attend.Layer`.
    """

    num_heads: int
    qkv_features: int | None = None
    out_features: int | None = None
    num_kv_heads: int | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    out_bias_init: Initializer | None = None
    use_bias: bool = True
    normalize_qk: bool = False
    use_sinks: bool = False
    sinks_init: Initializer = nn.initializers.zeros_init()
    logical_axes: LogicalAxes | None = None
    is_causal: bool = False
    local_window_size: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    scale: float | None = None
    alibi: bool = False
    rope: RoPE | None = None
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    decode: bool = False
    attention_fn: Callable[..., Array] = flash_attention

    @nn.compact
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
        dropout_rng: Array | None = None,
        **masks: Unpack[attend.Masks],
    ) -> Array:
        """Projects the inputs to query, key and value, attends, and projects the heads back to one vector a token.

        Args:
            inputs_q: [*B, T, features], floating, any number of batch axes.
            inputs_k: [*B, S, features], floating; None: `inputs_q` (self-attention).
            inputs_v: [*B, S, features], floating; None: `inputs_k`.
            input_positions: [*B, T] or broadcastable, integer: where RoPE takes queries to stand. None: 0 … T - 1, or
                on from what the cache holds. Causal masks, windows and ALiBi go by index all the same.
            key_value_positions: [*B, S] or broadcastable, integer: the same of keys. None: where the queries stand in
                self-attention, else 0 … S - 1.
            is_causal: Goes before the layer's own; None: that.
            deterministic: Whether nothing is dropped; None: as the layer has it.
            decode: Whether to write to the cache (collection "cache", mutable) and attend to all it holds: a prompt, a
                part of one, or a token. `init` makes it empty, as long as its inputs. What does not fit gives NaN, or
                raises where it can be known. None: as the layer has it.
            dropout_rng: A key of dropout; None: from the stream "dropout".
            **masks: bias, mask, query_seq_lengths, key_value_seq_lengths, query_segment_ids, key_value_segment_ids, as
                `flash_attention` has them. Queries that attend to nothing, and those beyond `query_seq_lengths`, give
                the bias of the output projection. With the cache, `query_seq_lengths` says how many of the new tokens
                count, in each batch entry.

        Returns:
            [*B, T, out_features], in `dtype` or the dtype promoted from inputs and parameters.

        Raises:
            TypeError, ValueError: As of `flash_attention`; inputs of another size; no cache, too small a cache, or what
                the cache rules out.
        """
        decode = self.decode if decode is None else decode
        is_self = inputs_k is None or inputs_k is inputs_q
        inputs_q, inputs_k, inputs_v = attend.inputs(inputs_q, inputs_k, inputs_v, decode)
        for name, array in (("inputs_q", inputs_q), ("inputs_k", inputs_k), ("inputs_v", inputs_v)):
            attend.check_features(name, array, None)
        sizes = attend.Sizes.of(
            self.num_heads, inputs_q.shape[-1], self.qkv_features, self.out_features, self.num_kv_heads
        )

        query_heads, heads = (self.num_heads, sizes.head_dim), (sizes.num_kv_heads, sizes.head_dim)
        query = self._projection("query", query_heads, self.kernel_init, self.bias_init)(inputs_q)
        key = self._projection("key", heads, self.kernel_init, self.bias_init)(inputs_k)
        value = self._projection("value", heads, self.kernel_init, self.bias_init)(inputs_v)
        if self.normalize_qk:
            query, key = self._norm("query_ln")(query), self._norm("key_ln")(key)
        query, key, value = promote_dtype(query, key, value, dtype=self.dtype)
        cache = self._cache(key, decode)
        heads, cache = attend.attend(
            self, query, key, value, cache=cache, is_self=is_self, positions=(input_positions, key_value_positions),
            is_causal=is_causal, sinks=self._sinks(), dropped=self._dropped(deterministic, dropout_rng), masks=masks,
        )  # fmt: skip
        if cache is not None:
            for name, array in zip(CACHED, cache, strict=True):
                self.put_variable("cache", name, array)
        init = self.out_kernel_init or self.kernel_init, self.out_bias_init or self.bias_init
        return self._projection("out", sizes.out_features, *init, axis=(-2, -1))(heads)

    def _named(self, init: Initializer, parameter: str) -> Initializer:
        return nn.with_logical_partitioning(init, self.logical_axes.of(parameter)) if self.logical_axes else init

    def _projection(self, name: str, features, kernel_init, bias_init, axis: Any = -1) -> nn.DenseGeneral:
        return nn.DenseGeneral(
            features, axis=axis, use_bias=self.use_bias, dtype=self.dtype, param_dtype=self.param_dtype,
            kernel_init=self._named(kernel_init, f"{name}.kernel"), bias_init=self._named(bias_init, f"{name}.bias"),
            precision=self.precision, name=name,
        )  # fmt: skip

    def _norm(self, name: str) -> nn.LayerNorm:
        return nn.LayerNorm(
            use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype,
            scale_init=self._named(nn.initializers.ones_init(), f"{name}.scale"), name=name,
        )  # fmt: skip

    def _sinks(self) -> ArrayLike | None:
        if not self.use_sinks:
            return None
        return self.param("sinks", self._named(self.sinks_init, "sinks"), (self.num_heads,), self.param_dtype)

    def _cache(self, key: Array, decode: bool) -> KVCache | None:
        """The cache as it is; None: not to be used, or made by this very call, which is `init`."""
        if not decode:
            return None
        if self.has_variable("cache", CACHED[0]):
            return KVCache(*(self.get_variable("cache", name) for name in CACHED))
        if not self.is_initializing():
            raise ValueError(
                "decode: expected a cache, got decode=True without one; pass the collection that init makes with "
                "decode=True, from inputs as long as it is to be"
            )
        *batch, length, heads, head_dim = key.shape
        for name, array in zip(CACHED, KVCache.empty(tuple(batch), length, heads, head_dim, key.dtype), strict=True):
            self.put_variable("cache", name, array)
        return None

    def _dropped(self, deterministic: bool | None, dropout_rng: Array | None) -> dict[str, Any]:
        drops = attend.drops(self, deterministic)
        if drops and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        return attention_fn.dropout(dropout_rng, self.dropout_rate, not drops)
