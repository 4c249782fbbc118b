"""Attention for Flax nnx, computed by `flash_attention`: a function for Flax's layer, and a layer."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, PrecisionLike
from jax import Array
from jax.typing import ArrayLike

from flax_layers import attention_fn
from pallas_flash import flash_attention


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
        dropout_rate: Chance of each weight to be dropped, 0 <= rate < 1, a Python number, rounded to a multiple of
            2⁻¹⁵.
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
    """Multi-head attention whose T×S scores are never stored.

    Parameters have the names and shapes of `flax.nnx.MultiHeadAttention`'s, and the same `rngs` draw the same initial
    values, so that checkpoints move freely between the two. Masks are told by structure (causal, window, lengths)
    rather than by an array of T×S booleans.

    Example:
        layer = FlashMultiHeadAttention(num_heads=8, in_features=512, is_causal=True, rngs=nnx.Rngs(0))
        y = layer(x)  # [*B, T, 512] to [*B, T, 512]

    Args:
        num_heads: Number of query heads, N.
        in_features: Size of the last axis of the inputs.
        num_key_value_heads: Number of key and value heads, K, a divisor of N (grouped-query attention); None: N.
        qkv_features: Size of query after projection, all heads together: N·H; None: `in_features`.
        out_features: Size of the last axis of the output; None: `in_features`.
        use_bias: Whether the four projections add a bias.
        dtype: Of the computation; None: promoted from inputs and parameters.
        param_dtype: Of the parameters.
        is_causal: Whether query t attends to keys 0 … t alone.
        local_window_size: Keys before and after a query's own position that it attends to, inclusive: (left, right), an
            int for both, None on a side for no bound there; None: no window.
        attention_fn: Computes the attention. Any function with the keywords of `jax.nn.dot_product_attention` will do,
            itself included (which takes at most one batch dimension and no None inside a window).
        rngs: Random keys; draws initial parameters from the stream "params".

    Raises:
        ValueError: Sizes that do not fit each other.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        num_key_value_heads: int | None = None,
        qkv_features: int | None = None,
        out_features: int | None = None,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        is_causal: bool = False,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        attention_fn: Callable[..., Array] = flash_attention,
        rngs: nnx.Rngs,
    ):
        num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        qkv_features = in_features if qkv_features is None else qkv_features
        _check_sizes(num_heads, num_key_value_heads, qkv_features)

        self.num_heads = num_heads
        self.num_key_value_heads = num_key_value_heads
        self.in_features = in_features
        self.head_dim = qkv_features // num_heads
        self.out_features = in_features if out_features is None else out_features
        self.dtype = dtype
        self.is_causal = is_causal
        self.local_window_size = local_window_size
        self.attention_fn = attention_fn

        def projection(in_features, out_features, axis: int | tuple[int, int] = -1) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                in_features, out_features, axis=axis, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs
            )

        self.query = projection(in_features, (num_heads, self.head_dim))
        self.key = projection(in_features, (num_key_value_heads, self.head_dim))
        self.value = projection(in_features, (num_key_value_heads, self.head_dim))
        self.out = projection((num_heads, self.head_dim), self.out_features, axis=(-2, -1))

    def __call__(
        self,
        inputs_q: Array | np.ndarray,
        inputs_k: Array | np.ndarray | None = None,
        inputs_v: Array | np.ndarray | None = None,
        *,
        query_seq_lengths: Array | np.ndarray | None = None,
        key_value_seq_lengths: Array | np.ndarray | None = None,
    ) -> Array:
        """Projects the inputs to query, key and value, attends, and projects the heads back to one vector a token.

        Args:
            inputs_q: [*B, T, in_features], floating. Any number of batch dimensions.
            inputs_k: [*B, S, in_features], floating; None: `inputs_q` (self-attention).
            inputs_v: [*B, S, in_features], floating; None: `inputs_k`.
            query_seq_lengths: [*B], int32, 0 … T. How many queries count; None: all. Attention gives 0 for the rest, so
                their output is the bias of the output projection.
            key_value_seq_lengths: [*B], int32, 0 … S. How many keys count; None: all.

        Returns:
            [*B, T, out_features], in `dtype` or the dtype promoted from inputs and parameters.

        Raises:
            ValueError: Inputs whose last axis is not `in_features`, or `inputs_v` without `inputs_k`.
        """
        if inputs_k is None and inputs_v is not None:
            raise ValueError(
                "inputs_k: expected an array beside inputs_v, got None. Pass inputs_k=inputs_v to use it for both."
            )
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        inputs_q, inputs_k, inputs_v = jnp.asarray(inputs_q), jnp.asarray(inputs_k), jnp.asarray(inputs_v)
        for name, inputs in (("inputs_q", inputs_q), ("inputs_k", inputs_k), ("inputs_v", inputs_v)):
            if inputs.ndim < 2 or inputs.shape[-1] != self.in_features:
                raise ValueError(
                    f"{name}: expected shape [*B, length, {self.in_features}], as in_features={self.in_features}; "
                    f"got {inputs.shape}. Pass inputs of that size, or build the layer with in_features to match."
                )

        query, key, value = self.query(inputs_q), self.key(inputs_k), self.value(inputs_v)
        query, key, value = dtypes.promote_dtype((query, key, value), dtype=self.dtype)
        heads = self.attention_fn(
            query,
            key,
            value,
            is_causal=self.is_causal,
            local_window_size=self.local_window_size,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
        )
        return self.out(heads)


def _check_sizes(num_heads: int, num_key_value_heads: int, qkv_features: int) -> None:
    if num_heads < 1:
        raise ValueError(f"num_heads: expected at least 1, got {num_heads}. Pass the number of query heads.")
    if num_key_value_heads < 1 or num_heads % num_key_value_heads:
        raise ValueError(
            f"num_key_value_heads: expected a divisor of num_heads={num_heads}, got {num_key_value_heads}. "
            f"Pass a divisor, or None for {num_heads}."
        )
    if qkv_features < 1 or qkv_features % num_heads:
        raise ValueError(
            f"qkv_features: expected a positive multiple of num_heads={num_heads}, got {qkv_features} (in_features, "
            f"if it was not given). Pass qkv_features={num_heads * max(1, qkv_features // num_heads)}, for example."
        )
