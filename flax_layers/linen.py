"""Attention for Flax linen, computed by `flash_attention`."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax.linen.dtypes import promote_dtype
from flax.typing import Dtype, PrecisionLike
from jax import Array
from jax.typing import ArrayLike

from flax_layers import attention_fn


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
        dropout_rate: Chance of each weight to be dropped, 0 <= rate < 1, a Python number, rounded to a multiple of
            2⁻¹⁵.
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
