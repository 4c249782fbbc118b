"""What did the user ask? Keywords become a `Problem`."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from pallas_flash import arguments, dispatch, logits, problem, split, vjp
from pallas_flash.modifiers import MaskModifier, ScoreModifier
from pallas_flash.plan import MosaicPlan, Plan
from pallas_flash.survey import BlockMask
from pallas_flash.tile import Tile


class Options(TypedDict, total=False):
    """Keywords of `flash_attention` that do not change what it returns; it documents them."""

    scale: ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: int | tuple[int | None, int | None] | None
    implementation: str | None
    query_offset: ArrayLike
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    mask_modifiers: Sequence[Callable[..., Array] | MaskModifier]
    block_mask: BlockMask | None
    logits_scale: ArrayLike | None
    logits_soft_cap: float | None
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None
    score_modifiers: Sequence[Callable[..., Array] | ScoreModifier]
    dropout_rate: float
    dropout_key: Array | None
    deterministic: bool
    precision: Any
    plan: Plan | MosaicPlan | None
    interpret: bool


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    return_residual: Literal[False] = ...,
    **options: Unpack[Options],
) -> Array: ...


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    return_residual: Literal[True],
    **options: Unpack[Options],
) -> tuple[Array, Array]: ...


@overload
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    return_residual: bool,
    **options: Unpack[Options],
) -> Array | tuple[Array, Array]: ...


def flash_attention(  # pyright: ignore[reportInconsistentOverload]  (the keywords in full)
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    return_residual=False,
    implementation=None,
    query_offset=0,
    query_segment_ids=None,
    key_value_segment_ids=None,
    mask_modifiers=(),
    block_mask=None,
    logits_scale=None,
    logits_soft_cap=None,
    alibi_slopes=None,
    sinks=None,
    score_modifiers=(),
    dropout_rate=0.0,
    dropout_key=None,
    deterministic=False,
    precision=None,
    plan=None,
    interpret=False,
) -> Any:
    """Exact attention, softmax(scale·q·kᵀ + bias, masked)·v, without a T×S buffer in device memory.

    Takes the arguments of `jax.nn.dot_product_attention` and more. It differs in one rule: a query with nothing to
    attend to gives 0 (residual -inf, gradients 0), where jax.nn gives the mean of the values. Masks of every kind hold
    together; a key that one of them hides from every query, NaN or inf included, never reaches a result or a gradient.

    Letters: B batch, T queries, S keys, N query heads, K key/value heads (K divides N; query head h attends to
    key/value head h // (N // K)), H head dim, Hv head dim of the values.

    Args:
        query: [*B, T, N, H], bfloat16, float16, float32 or float64, any number of batch axes, any sizes >= 0.
        key: [*B, S, K, H], the dtype of `query`.
        value: [*B, S, K, Hv], the dtype of `query`.
        bias: Floating, broadcastable to [*B, N, T, S], is added to the scaled scores. -inf masks (but unlike `mask` not
            NaN or inf in the key or value), and so does what makes a logit less than -1e8; logits above 9e7 may give
            NaN. Differentiable: its gradient has its shape and dtype, is summed in float32, and takes no more memory
            than the larger of itself and [*B, N, T or S].
        mask: Boolean, broadcastable to [*B, N, T, S], True = attend. Its size is what it costs: [*B, 1, 1, S] is never
            expanded. Blocks of scores that are all False are skipped, those that are all True need no mask.
        scale: Number or floating scalar array, multiplies the scores. A traced one is differentiable and never
            recompiles. None: 1/sqrt(H).
        is_causal: Whether query t attends to keys 0 … t + query_offset only.
        query_seq_lengths: Integer, [*B] or broadcastable, 0 … T: queries from there on give 0.
        key_value_seq_lengths: Integer, [*B] or broadcastable, 0 … S: keys from there on do not count.
        local_window_size: A query at position p attends to keys p - left … p + right, both included. One int is both
            sides, None is no bound on a side.
        return_residual: Whether to return the log-sum-exp of each query's logits too.
        implementation: "mosaic_gpu" (Hopper; bfloat16 and float16), "triton" (NVIDIA GPUs from Ampere on), "xla" (any
            device, differentiable to any order, in forward mode too), or None for the fastest that accepts the call;
            `explain` tells which and why.
        query_offset: Integer, scalar or [*B]: the position of query 0 among the keys, which moves the causal edge and
            the window. S - T aligns the last query with the last key. A Python int compiles anew for each value, an
            array does not.
        query_segment_ids: Integer, [*B, T] or broadcastable: a query attends to keys of its own id only. Negative
            ids are padding. Ids may repeat and come in any order; the fewer a block has, the more blocks are skipped.
        key_value_segment_ids: Integer, [*B, S] or broadcastable. For self-attention pass the same array twice.
        mask_modifiers: Your own masks: functions of a tile, `keep(tile)` → bool, traced into every kernel, or
            `MaskModifier`s, which have arrays as operands and tell more.
        block_mask: What `block_mask` made of the same `mask` and `mask_modifiers` before, once for many calls. None:
            each call works out itself which blocks these leave to visit.
        logits_scale: Floating, [N] or [*B, N]: a factor for each head, which the scaled scores are multiplied by before
            bias and ALiBi. Differentiable.
        logits_soft_cap: Positive number: scores, scaled and with bias, become cap·tanh(scores / cap). On GPUs, for
            bfloat16 and float16, by the hardware's tanh, whose relative error is up to 2⁻¹¹.
        alibi_slopes: Floating, [N] or [*B, N]: from each score its slope times |query position - key index| is
            subtracted, the position being that of `query_offset`. Differentiable.
        sinks: Floating, [N]: a logit for each head that joins the denominators, without a value, of queries that attend
            to something; it is part of the log-sum-exp. Differentiable.
        score_modifiers: Your own scores: functions `modify(score, tile)` → score, applied in order after the soft cap,
            or `ScoreModifier`s, which have arrays as operands, with gradients, and tell more.
        dropout_rate: Chance of each probability to be dropped, 0 <= rate < 1, a Python number; the kept ones are
            divided by 1 - rate. The residual is that without dropout.
        dropout_key: A key of `jax.random`, needed if the rate is not 0. What is dropped follows from it and from batch
            entry, head, query and key index, on every implementation (`dropout_mask`); another key never recompiles.
        deterministic: Whether gradients must be bitwise reproducible. Outputs always are, gradients are by default
            except from "mosaic_gpu" with head dims up to 128, which is faster for it. `--xla_gpu_deterministic_ops` in
            XLA_FLAGS asks for it too.
        precision: `jax.lax.Precision` (or its name) of the dots of float32 inputs, forward and backward: on GPUs
            "default" is tf32 and "highest" as accurate as float32; the Triton kernels take "high" as "highest". None
            follows `jax.default_matmul_precision`.
        plan: `Plan` of block sizes for the Triton kernels, or `MosaicPlan`. None: chosen for the device.
        interpret: Whether to run the Pallas kernels in interpret mode, which works on a CPU.

    Returns:
        Output [*B, T, N, Hv] in the dtype of `query`. With `return_residual`, also the log-sum-exp [*B, T, N], natural
        logarithm, float32 (float64 for float64 inputs), differentiable.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names it, what was expected, what came and the remedy.
        NotImplementedError: `implementation` refuses the call, with the reason; or a second derivative is taken through
            the kernels. They have no forward mode either (JAX raises a TypeError): use implementation="xla".

    Source: Dao, FlashAttention-2 (arXiv:2307.08691); docs/algorithm.md has the equations.
    """
    query, key, value = (arguments.array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    posed, batch = problem.pose(
        query, key, value, bias=bias, mask=mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
        query_segment_ids=query_segment_ids, key_value_segment_ids=key_value_segment_ids,
        mask_modifiers=mask_modifiers, block_mask=block_mask, logits_scale=logits_scale,
        logits_soft_cap=logits_soft_cap, alibi_slopes=alibi_slopes, sinks=sinks, score_modifiers=score_modifiers,
        dropout_rate=dropout_rate, dropout_key=dropout_key, return_residual=return_residual,
        implementation=implementation, query_offset=query_offset, deterministic=deterministic, precision=precision,
        plan=plan, interpret=interpret,
    )  # fmt: skip
    folded = (x.reshape(posed.B, *x.shape[-3:]) for x in (query, key, value))
    out, residual = vjp.attend(dispatch.resolve(posed), *folded)
    out = out.reshape(*batch, *out.shape[1:])
    if not return_residual:
        return out
    return out, jnp.swapaxes(residual, 1, 2).reshape(out.shape[:-1])


def explain(query: Any, key: Any, value: Any, **keywords: Any) -> dispatch.Explanation:
    """Which implementation a call of `flash_attention` takes on the current device, and why each other one refuses.

    Args:
        query, key, value: As for `flash_attention`; `jax.ShapeDtypeStruct`s will do. If they have a `NamedSharding`,
            it tells too what is split over the mesh, and what is gathered.
        **keywords: As for `flash_attention`.

    Returns:
        The choice, its plan and the refusals as data; printed, a table.

    Raises:
        TypeError, ValueError, NotImplementedError: As the call would.
    """
    tensors = {"query": query, "key": key, "value": value}
    shapes = {n: x if isinstance(x, jax.ShapeDtypeStruct) else arguments.array(n, x) for n, x in tensors.items()}
    posed, batch = problem_of(**shapes, **keywords)
    leading = ("B", *(f"batch axis {n}" for n in range(1, len(batch))))[: len(batch)]
    axes = {name: (*leading, *letters) for name, letters in (("query", "TNH"), ("key", "SKH"), ("value", "SKV"))}
    sharded = {
        name: (axes[name], sharding)
        for name, x in tensors.items()
        if isinstance(sharding := getattr(x, "sharding", None), NamedSharding)
    }
    return dataclasses.replace(dispatch.explain(posed), sharding=split.told(posed, sharded))


def block_mask(
    queries: int,
    keys: int,
    *,
    batch: tuple[int, ...] = (),
    heads: int = 1,
    **masks: Any,
) -> BlockMask:
    """Which blocks of scores masks leave to visit, worked out once for many calls of `flash_attention`.

    Args:
        queries: T, the number of queries.
        keys: S, the number of keys.
        batch: Batch axes, if a mask differs between batch entries.
        heads: N, the number of query heads, if a mask differs between heads.
        **masks: As for `flash_attention`: mask, mask_modifiers, is_causal, local_window_size, query_offset,
            query_seq_lengths, key_value_seq_lengths, query_segment_ids, key_value_segment_ids.

    Returns:
        To print, to draw, and to pass as `block_mask` with the same masks. A pytree: make it outside of training steps.

    Raises:
        TypeError, ValueError: As of `flash_attention`.

    Source: Dong et al., FlexAttention (arXiv:2412.05496), section 3.3.
    """
    allowed = {"mask", "mask_modifiers", "is_causal", "local_window_size", "query_offset"}
    allowed |= {f"{side}_{kind}" for side in ("query", "key_value") for kind in ("seq_lengths", "segment_ids")}
    if unknown := sorted(masks.keys() - allowed):
        raise TypeError(f"block_mask: expected masks, {sorted(allowed)}, got {unknown}; leave them to flash_attention")
    for name, n in (("queries", queries), ("keys", keys), ("heads", heads)):
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ValueError(f"{name}: expected an int >= 0, got {n!r}; pass the number of them")
    query, key = (jax.ShapeDtypeStruct((*batch, n, heads, 1), jnp.float32) for n in (queries, keys))
    posed, _ = problem_of(query, key, key, **masks)
    return BlockMask.of(posed.mask, posed.B, posed.N, posed.T, posed.S)


def problem_of(query: Any, key: Any, value: Any, **keywords: Any) -> tuple[problem.Problem, tuple[int, ...]]:
    """The problem of a call of `flash_attention`."""
    bound = inspect.signature(flash_attention).bind(query, key, value, **keywords)
    bound.apply_defaults()
    return problem.pose(**bound.arguments)


def dropout_mask(
    dropout_key: Array, dropout_rate: float, queries: int, keys: int, *, batch: tuple[int, ...] = (), heads: int = 1
) -> Array:
    """Which probabilities `flash_attention` keeps, whatever its implementation: for tests, T×S as it is.

    Args:
        dropout_key: A key of `jax.random`.
        dropout_rate: Chance of each probability to be dropped, 0 <= rate < 1.
        queries: T, the number of queries.
        keys: S, the number of keys.
        batch: Batch axes.
        heads: N, the number of query heads.

    Returns:
        bool [*batch, N, T, S]. Those kept are divided by 1 - rate.

    Raises:
        TypeError, ValueError: As of `flash_attention`.
    """
    for name, n in (("queries", queries), ("keys", keys), ("heads", heads), *(("batch", n) for n in batch)):
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ValueError(f"{name}: expected an int >= 0, got {n!r}; pass the number of them")
    B, shape = math.prod(batch), (*batch, heads, queries, keys)
    found = logits.dropout(dropout_rate, dropout_key, B, heads)
    if found is None:
        return jnp.ones(shape, bool)
    everything = jnp.ones((B, heads, queries, keys), bool)
    return found.sieve(Tile.at(0, queries, 0, keys))(everything).reshape(shape)
