"""Sequences of different lengths, packed one after the other: attention within each, as intervals of keys."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from pallas_flash import arguments, dispatch, problem, vjp
from pallas_flash.modifiers import ScoreModifier
from pallas_flash.patterns import Intervals


def flash_attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    return_residual: bool = False,
    implementation: str | None = None,
    query_offset: ArrayLike = 0,
    logits_scale: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    score_modifiers: Sequence[Callable[..., Array] | ScoreModifier] = (),
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    deterministic: bool = False,
    precision: Any = None,
    plan: Any = None,
    interpret: bool = False,
) -> Any:
    """`flash_attention` within each of several sequences that are packed one after the other.

    Sequence i has the queries `cu_seqlens_q[i] … cu_seqlens_q[i + 1] - 1` and likewise its keys; each may be empty, and
    their numbers may differ. The lengths are traced: another packing of as many tokens does not compile anew.

    Args:
        query: [total_q, N, H], as for `flash_attention`.
        key: [total_k, K, H], the dtype of `query`.
        value: [total_k, K, Hv], the dtype of `query`.
        cu_seqlens_q: Integer [sequences + 1], not decreasing, 0 … total_q: where sequences of queries start and end.
            What comes before the first and after the last is padding: it gives 0, and never reaches a result.
        cu_seqlens_k: Integer [sequences + 1], likewise of keys, 0 … total_k.
        scale: As for `flash_attention`.
        is_causal: Whether query t of a sequence attends to its keys 0 … t + query_offset only.
        local_window_size: As for `flash_attention`, within each sequence.
        return_residual: Whether to return the log-sum-exp too.
        implementation: As for `flash_attention`.
        query_offset: Integer, scalar or [sequences]: position of a sequence's first query among its keys. 0 aligns the
            first query with the first key; `jnp.diff(cu_seqlens_k) - jnp.diff(cu_seqlens_q)` the last with the last.
        logits_scale: Floating [N], as for `flash_attention`.
        logits_soft_cap: As for `flash_attention`, and so are sinks, dropout_rate and dropout_key.
        alibi_slopes: Floating [N], as for `flash_attention`; positions are those within a sequence.
        sinks: One logit for each head.
        score_modifiers: As for `flash_attention`; indices are those of packed tokens.
        dropout_rate: Chance of each probability to be dropped.
        dropout_key: A key of `jax.random`.
        deterministic: As for `flash_attention`, and so are precision, plan and interpret.
        precision: Of the dots of float32 inputs.
        plan: Of block sizes.
        interpret: Whether to run the Pallas kernels in interpret mode.

    Returns:
        Output [total_q, N, Hv]; with `return_residual` also the log-sum-exp [total_q, N], float32, -inf where a query
        attends to nothing.

    Raises:
        TypeError, ValueError, NotImplementedError: As of `flash_attention`.

    Source: the packed layout of Dao, FlashAttention-2 (arXiv:2307.08691).
    """
    tensors = [arguments.array(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    for name, x in zip(("query", "key", "value"), tensors, strict=True):
        if x.ndim != 3:
            raise ValueError(f"{name}: expected shape [total, heads, head dim], got {x.shape}; sequences are packed")
    posed, _ = problem.pose(
        *(x[None] for x in tensors), bias=None, mask=None, scale=scale, is_causal=is_causal, query_seq_lengths=None,
        key_value_seq_lengths=None, local_window_size=local_window_size, query_segment_ids=None,
        key_value_segment_ids=None, mask_modifiers=(), block_mask=None, logits_scale=logits_scale,
        logits_soft_cap=logits_soft_cap, alibi_slopes=alibi_slopes, sinks=sinks, score_modifiers=score_modifiers,
        dropout_rate=dropout_rate, dropout_key=dropout_key, return_residual=return_residual,
        implementation=implementation, query_offset=0, deterministic=deterministic, precision=precision, plan=plan,
        interpret=interpret,
    )  # fmt: skip
    starts = _starts(cu_seqlens_q, cu_seqlens_k)
    band = posed.mask.second
    sequences = len(starts[0]) - 1
    if np.ndim(query_offset) and np.shape(query_offset) != (sequences,):
        raise ValueError(
            f"query_offset: expected an integer or one for each of {sequences} sequences, got shape "
            f"{np.shape(query_offset)}; cu_seqlens_q has one entry more"
        )
    offset: Any = arguments.per_batch("query_offset", query_offset, (sequences,))
    mask = _intervals(*starts, offset, band.lo, band.hi, posed.T, posed.S)
    posed = dataclasses.replace(posed, mask=mask, score=posed.score.moved(_moves(*starts, offset, posed.T)))
    out, residual = vjp.attend(dispatch.resolve(posed), *(x[None] for x in tensors))
    return (out[0], residual[0].T) if return_residual else out[0]


def _starts(cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike) -> tuple[Array, Array]:
    starts = []
    for name, given in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        x = arguments.array(name, given, "integer")
        if x.ndim != 1 or x.size < 2:
            raise ValueError(f"{name}: expected shape [sequences + 1], got {x.shape}; one sequence is [0, total]")
        starts.append(x.astype(jnp.int32))
    if starts[0].shape != starts[1].shape:
        raise ValueError(
            f"cu_seqlens_k: expected the shape of cu_seqlens_q, {starts[0].shape}, got {starts[1].shape}; "
            "a sequence without keys has equal start and end"
        )
    return starts[0], starts[1]


def _intervals(q_starts: Array, k_starts: Array, offset: Array, lo, hi, T: int, S: int) -> Intervals:
    """The keys of each query: those of its sequence whose distance to its position is `lo … hi`."""
    i, t = _place(q_starts, T)
    first, count = k_starts[i], k_starts[i + 1] - k_starts[i]
    start = jnp.int32(0) if lo is None else jnp.maximum(0, t + offset[i] + lo)
    end = count if hi is None else jnp.minimum(count, t + offset[i] + hi + 1)
    start, end = (jnp.where((t >= 0) & (start < end), first + x, 0)[None, None, :, None] for x in (start, end))

    i, u = _place(k_starts, S)
    positions = q_starts[i + 1] - q_starts[i]
    keys = (u >= 0) & (positions > 0)
    keys &= True if lo is None else u >= offset[i] + lo
    keys &= True if hi is None else u < offset[i] + positions + hi
    return Intervals(start, end, keys[None])


def _moves(q_starts: Array, k_starts: Array, offset: Array, T: int) -> Array:
    """int32 [1, 1, T, 1]: from each query's index to that of the key at its position, both of packed tokens."""
    i, t = _place(q_starts, T)
    return (k_starts[i] + offset[i] + t - lax.iota(jnp.int32, T))[None, None, :, None]


def _place(starts: Array, count: int) -> tuple[Array, Array]:
    """For each of `count` tokens the number of its sequence and its index there, which is negative outside of all."""
    token = lax.iota(jnp.int32, count)
    i = jnp.sum(starts[1:-1] <= token[:, None], 1)
    inside = (token >= starts[0]) & (token < starts[-1])
    return i, jnp.where(inside, token - starts[i], -1)
