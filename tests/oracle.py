"""Attention and its gradients in NumPy float64, one head at a time: what every implementation is measured against.

The formulas are written out by hand and share nothing with the library. A number counts only where something attends
to it, so that NaN in padding stays there.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

LEAST = -1e8
"""A bias below it hides a key, as -inf does: float32 would tell no score from another there. (With a soft cap it would
not; no case has both.)"""


class ScoreFunction(NamedTuple):
    """A function of scores, with its derivatives.

    Attributes:
        formula: (score, b, n, t, s, *parts) → the new score, its derivative by the score, and those by the operands:
            all of one head, [T, S] or broadcastable to it, from index arrays and the operands' parts for that head.
            Elementwise, of arrays of any library. -inf is a score that does not count.
        operands: Arrays.
        axes: For each the letters of its axes, in the order of "BNTS"; it may be broadcastable to them.
    """

    formula: Callable[..., tuple[Any, Any, tuple[Any, ...]]]
    operands: tuple[Any, ...] = ()
    axes: tuple[str, ...] = ()


class Gradients(NamedTuple):
    """By each argument, in its shape; None for what was not given.

    Attributes:
        operands: Of each score function, by each of its operands.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    scale: float
    logits_scale: np.ndarray | None
    bias: np.ndarray | None
    alibi_slopes: np.ndarray | None
    sinks: np.ndarray | None
    operands: tuple[tuple[np.ndarray, ...], ...]


def attend(query, key, value, **options) -> tuple[np.ndarray, np.ndarray]:
    """Output [B, T, N, Hv] and residual (natural log-sum-exp) [B, T, N]; 0 and -inf for a row that attends to nothing.

    Args:
        query: [B, T, N, H], any floating dtype.
        key: [B, S, K, H].
        value: [B, S, K, Hv].
        **options: Those of `kept`, and further
            scale: A number, None is 1/sqrt(H);
            logits_scale: [N] or [B, N], times the scaled scores;
            bias: Broadcastable to [B, N, T, S], added to the scaled scores; -inf masks;
            alibi_slopes: [N] or [B, N], times the distance of query and key, subtracted;
            logits_soft_cap: A number, of cap·tanh(score / cap), which comes next;
            score_functions: `ScoreFunction`s, which come last, in order;
            sinks: [N], logits that join the denominators of rows that attend to something;
            dropout_keep: bool [B, N, T, S], which probabilities are not dropped;
            dropout_rate: A number: those are divided by 1 - rate. The residual is that without dropout.
    """
    given = _prepared(query, key, value, **options)
    out = np.zeros((*given.query.shape[:3], given.value.shape[3]))
    residual = np.full(given.query.shape[:3], -np.inf)
    for b, n in np.ndindex(given.mask.shape[:2]):
        q, k, v, gain, sink = given.of_head(b, n)
        p, residual[b, :, n], _ = _softmax(logits(given.scale * (q @ k.T), given, b, n)[0], sink)
        out[b, :, n] = (gain * p) @ v
    return out, residual


def gradients(query, key, value, d_out, d_residual, **options) -> Gradients:
    """Gradients of sum(out · d_out) + sum(residual · d_residual).

    Args:
        query: [B, T, N, H].
        key: [B, S, K, H].
        value: [B, S, K, Hv].
        d_out: [B, T, N, Hv], cotangent of the output.
        d_residual: [B, T, N], cotangent of the residual. Rows that attend to nothing are left out of both sums.
        **options: As for `attend`.
    """
    given = _prepared(query, key, value, **options)
    d_out, d_residual = np.asarray(d_out, np.float64), np.asarray(d_residual, np.float64)
    dq, dk, dv = (np.zeros(x.shape) for x in given[:3])
    dscale, d_sinks = 0.0, np.zeros(given.query.shape[2])
    d_operands = {name: np.zeros(x.shape) for name, x in given.operands.items()}
    for b, n in np.ndindex(given.mask.shape[:2]):
        q, k, v, gain, sink = given.of_head(b, n)
        s, derivatives = logits(given.scale * (q @ k.T), given, b, n)
        p, _, p_sink = _softmax(s, sink)
        rows, kv_head = given.mask[b, n].any(1), n // given.G
        do, dlse = _only(rows, d_out[b, :, n]), _only(rows, d_residual[b, :, n])

        dp = gain * (do @ v.T)  # out = (gain p) v
        delta = np.sum(p * dp, axis=1) - dlse  # of the softmax's Jacobian diag(p) - p pᵀ; d lse / d s = p
        ds = p * (dp - delta[:, None])
        dz = ds * derivatives.pop("score")
        dq[b, :, n] = given.scale * (dz @ k)  # z = scale q kᵀ
        dk[b, :, kv_head] += given.scale * (dz.T @ q)
        dv[b, :, kv_head] += (gain * p).T @ do
        dscale += np.sum(dz * (q @ k.T))
        d_sinks[n] -= np.sum(p_sink * delta)  # a key without a value, of which dp is 0
        for name, derivative in derivatives.items():
            _add(d_operands[name], ds * derivative, b, n)
    shaped = {name: x.reshape(given.shapes[name]) for name, x in d_operands.items()}
    return Gradients(
        dq,
        dk,
        dv,
        dscale,
        shaped.get("logits_scale"),
        shaped.get("bias"),
        shaped.get("alibi_slopes"),
        None if given.sinks is None else d_sinks,
        tuple(tuple(shaped[i, j] for j in range(len(f.operands))) for i, f in enumerate(given.functions)),
    )


def logits(z: np.ndarray, given: "_Given", b: int, n: int) -> tuple[np.ndarray, dict[Any, np.ndarray]]:
    """Logits [T, S] of one head from its scaled scores, -inf where they do not count; and their derivatives.

    The derivatives, by the scaled score and by what each operand holds for it, have the operands' names; they mean
    nothing where the logit is -inf.
    """
    t, s = np.indices(z.shape)
    keep = given.mask[b, n]
    parts = {name: _part(x, b, n, keep) for name, x in given.operands.items()}
    z, by = np.where(keep, z, 0), {"score": np.ones(z.shape)}
    if "logits_scale" in parts:
        z, by = z * parts["logits_scale"], {"score": by["score"] * parts["logits_scale"], "logits_scale": z}
    if "bias" in parts:
        z, by["bias"] = z + parts["bias"], np.ones(z.shape)
    if "alibi_slopes" in parts:
        distance = np.abs(t + given.offset[b] - s)
        z, by["alibi_slopes"] = z - parts["alibi_slopes"] * distance, -distance
    if given.cap is not None:
        y = np.tanh(z / given.cap)
        z, by = given.cap * y, {name: derivative * (1 - y**2) for name, derivative in by.items()}
    for i, function in enumerate(given.functions):
        own = [parts[i, j] for j in range(len(function.operands))]
        z, by_score, by_operands = function.formula(z, b, n, t, s, *own)
        by = {name: derivative * by_score for name, derivative in by.items()}
        by |= {(i, j): derivative for j, derivative in enumerate(by_operands)}
    return np.where(keep, z, -np.inf), by


def kept(
    B: int,
    N: int,
    T: int,
    S: int,
    *,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    query_offset=0,
    mask=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    mask_functions=(),
) -> np.ndarray:
    """Which query attends to which key: bool [B, N, T, S].

    Args:
        B: Batch.
        N: Query heads.
        T: Queries.
        S: Keys.
        is_causal: Whether a query sees no key after its own position.
        query_seq_lengths: Scalar or [B], queries from there on are padding; None: T.
        key_value_seq_lengths: Scalar or [B], keys from there on are padding; None: S.
        local_window_size: (left, right): keys before and after a query's position that it sees, inclusive; None on a
            side: no bound; an int: both; None: no window.
        query_offset: Scalar or [B]: query t has position t + query_offset.
        mask: bool, broadcastable to [B, N, T, S]; None: all True.
        query_segment_ids: Integer, broadcastable to [B, T]; a query sees keys of its own id, none if it is negative.
        key_value_segment_ids: Integer, broadcastable to [B, S].
        mask_functions: Functions of four index arrays (b, n, t, s) that say whether a score counts.
    """
    left, right = local_window_size if isinstance(local_window_size, tuple) else (local_window_size, local_window_size)
    query_len, key_len, offset = (
        np.broadcast_to(default if values is None else values, (B,))
        for values, default in ((query_seq_lengths, T), (key_value_seq_lengths, S), (query_offset, 0))
    )
    query_ids, key_ids = (
        np.broadcast_to(0 if ids is None else ids, (B, size))
        for ids, size in ((query_segment_ids, T), (key_value_segment_ids, S))
    )
    array = np.broadcast_to(True if mask is None else mask, (B, N, T, S))
    found = np.zeros((B, N, T, S), bool)
    for b, n in np.ndindex(B, N):
        t, u = np.arange(T)[:, None], np.arange(S)[None, :]
        position = t + offset[b]
        keep = (t < query_len[b]) & (u < key_len[b]) & array[b, n]
        keep = keep & (query_ids[b][:, None] == key_ids[b][None, :]) & (query_ids[b][:, None] >= 0)
        if is_causal:
            keep = keep & (u <= position)
        if left is not None:
            keep = keep & (u >= position - left)
        if right is not None:
            keep = keep & (u <= position + right)
        for function in mask_functions:
            keep = keep & function(*np.broadcast_arrays(b, n, t, u))
        found[b, n] = keep
    return found


class _Given(NamedTuple):
    """What was asked: tensors in float64, bool [B, N, T, S] and further arrays with all four axes, of size 1 if shared.

    Attributes:
        G: Query heads for each key/value head.
        offset: [B], position of query 0.
        cap: Of the logits, or None.
        operands: Name → array [B or 1, N or 1, T or 1, S or 1]; those of score functions by number, and number in it.
        shapes: Name → the shape in which it was given.
        sinks: [N], or None.
        gain: [B, N, T, S], what dropout multiplies probabilities with.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    scale: float
    mask: np.ndarray
    G: int
    offset: np.ndarray
    cap: float | None
    functions: tuple[ScoreFunction, ...]
    operands: dict[Any, np.ndarray]
    shapes: dict[Any, tuple[int, ...]]
    sinks: np.ndarray | None
    gain: np.ndarray

    def of_head(self, b: int, n: int):
        """Query, key, value, what dropout multiplies with, and the sink, of one head."""
        first = n - n % self.G
        rows, columns = self.mask[b, n].any(1), self.mask[b, first : first + self.G].any((0, 1))
        q, k, v = self.query[b, :, n], self.key[b, :, n // self.G], self.value[b, :, n // self.G]
        sink = None if self.sinks is None else self.sinks[n]
        return _only(rows, q), _only(columns, k), _only(columns, v), self.gain[b, n], sink


def _prepared(
    query,
    key,
    value,
    *,
    scale=None,
    logits_scale=None,
    bias=None,
    alibi_slopes=None,
    logits_soft_cap=None,
    score_functions=(),
    sinks=None,
    dropout_keep=True,
    dropout_rate=0.0,
    **options,
) -> _Given:
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    named = {"logits_scale": (logits_scale, "BN"), "bias": (bias, "BNTS"), "alibi_slopes": (alibi_slopes, "BN")}
    for i, function in enumerate(score_functions):
        named |= {(i, j): x for j, x in enumerate(zip(function.operands, function.axes, strict=True))}
    operands = {name: spread(_wide(x), letters) for name, (x, letters) in named.items() if x is not None}
    mask = kept(B, N, T, S, **options)
    return _Given(
        query,
        key,
        value,
        scale=1 / math.sqrt(H) if scale is None else float(scale),
        mask=mask if bias is None else mask & (operands["bias"] > LEAST),
        G=N // K,
        offset=np.broadcast_to(options.get("query_offset", 0), (B,)),
        cap=logits_soft_cap,
        functions=tuple(score_functions),
        operands=operands,
        shapes={name: np.shape(x) for name, (x, _) in named.items() if x is not None},
        sinks=None if sinks is None else np.asarray(sinks, np.float64),
        gain=np.broadcast_to(dropout_keep, mask.shape) / (1 - dropout_rate),
    )


def _wide(x) -> np.ndarray:
    """Floating numbers in float64 (bfloat16 too, which NumPy does not know as such)."""
    x = np.asarray(x)
    return x if x.dtype.kind in "biu" else x.astype(np.float64)


def spread(x, letters: str):
    """[B or 1, N or 1, T or 1, S or 1] from an array that broadcasts to the axes of `letters`."""
    x = x.reshape(*[1] * (len(letters) - x.ndim), *x.shape)
    sizes = dict(zip(letters, x.shape, strict=True))
    return x.reshape([sizes.get(letter, 1) for letter in "BNTS"])


def _part(x: np.ndarray, b: int, n: int, keep: np.ndarray) -> np.ndarray:
    """What an operand with four axes holds for one head, [T, S], 0 where that does not count."""
    own = x[b % x.shape[0], n % x.shape[1]]
    return np.where(keep, own, np.zeros_like(own))


def _add(total: np.ndarray, part: np.ndarray, b: int, n: int) -> None:
    """Adds to an operand's gradient, with four axes, that for one head, [T, S], summed over what it shares."""
    shared = tuple(axis for axis in (0, 1) if total.shape[2 + axis] == 1)
    total[b % total.shape[0], n % total.shape[1]] += np.sum(part, shared, keepdims=True)


def _softmax(s: np.ndarray, sink: float | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities [T, S], log-sum-exp [T], and the sink's probability [T], of logits."""
    lse = np.logaddexp.reduce(s, axis=1)
    empty = np.isneginf(lse)
    if sink is not None:
        lse = np.where(empty, lse, np.logaddexp(lse, sink))
    finite = np.where(empty, 0, lse)
    p_sink = np.zeros(lse.shape) if sink is None else np.where(empty, 0, np.exp(sink - finite))
    return np.exp(s - finite[:, None]), lse, p_sink


def _only(taking_part: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """`rows` with 0 in place of those that take no part."""
    return np.where(taking_part.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)
