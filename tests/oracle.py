"""Attention and its gradients in NumPy float64, one head at a time: what every implementation is measured against.

The formulas are written out by hand and share nothing with the library. A number counts only where something attends
to it, so that NaN in padding stays there.
"""

import math

import numpy as np


def attend(query, key, value, **options) -> tuple[np.ndarray, np.ndarray]:
    """Output [B, T, N, Hv] and residual (natural log-sum-exp) [B, T, N]; 0 and -inf for a row that attends to nothing.

    Args:
        query: [B, T, N, H], any floating dtype.
        key: [B, S, K, H].
        value: [B, S, K, Hv].
        **options: Those of `kept`, and `scale`: a number, None is 1/sqrt(H).
    """
    query, key, value, scale, mask, G = _prepared(query, key, value, **options)
    out = np.zeros((*query.shape[:3], value.shape[3]))
    residual = np.full(query.shape[:3], -np.inf)
    for b, n in np.ndindex(query.shape[0], query.shape[2]):
        rows, columns = mask[b, n].any(1), _of_group(mask[b], n, G).any(0)
        q, k, v = _only(rows, query[b, :, n]), _only(columns, key[b, :, n // G]), _only(columns, value[b, :, n // G])
        p, residual[b, :, n] = _softmax(scale * (q @ k.T), mask[b, n])
        out[b, :, n] = p @ v
    return out, residual


def gradients(query, key, value, d_out, d_residual, **options) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Gradients of sum(out · d_out) + sum(residual · d_residual) by query, key, value and scale.

    Args:
        query: [B, T, N, H].
        key: [B, S, K, H].
        value: [B, S, K, Hv].
        d_out: [B, T, N, Hv], cotangent of the output.
        d_residual: [B, T, N], cotangent of the residual. Rows that attend to nothing are left out of both sums.
        **options: As for `attend`.
    """
    query, key, value, scale, mask, G = _prepared(query, key, value, **options)
    d_out, d_residual = np.asarray(d_out, np.float64), np.asarray(d_residual, np.float64)
    dq, dk, dv, dscale = np.zeros(query.shape), np.zeros(key.shape), np.zeros(value.shape), 0.0
    for b, n in np.ndindex(query.shape[0], query.shape[2]):
        rows, columns = mask[b, n].any(1), _of_group(mask[b], n, G).any(0)
        q, k, v = _only(rows, query[b, :, n]), _only(columns, key[b, :, n // G]), _only(columns, value[b, :, n // G])
        do, dlse = _only(rows, d_out[b, :, n]), _only(rows, d_residual[b, :, n])
        p, _ = _softmax(scale * (q @ k.T), mask[b, n])

        dp = do @ v.T  # out = p v
        delta = np.sum(p * dp, axis=1) - dlse  # of the softmax's Jacobian diag(p) - p pᵀ; d lse / d s = p
        ds = p * (dp - delta[:, None])
        dq[b, :, n] = scale * (ds @ k)  # s = scale q kᵀ
        dk[b, :, n // G] += scale * (ds.T @ q)
        dv[b, :, n // G] += p.T @ do
        dscale += np.sum(ds * (q @ k.T))
    return dq, dk, dv, dscale


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


def _prepared(query, key, value, *, scale=None, **options):
    """Tensors in float64, scale, mask [B, N, T, S] and the number of query heads per key/value head."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    scale = 1 / math.sqrt(H) if scale is None else float(scale)
    return query, key, value, scale, kept(B, N, T, S, **options), N // K


def _of_group(mask: np.ndarray, n: int, G: int) -> np.ndarray:
    """Which query attends to which key [T, S] by any of the heads that share a key/value head with head n."""
    return mask[n - n % G : n - n % G + G].any(0)


def _softmax(s: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [T, S] and log-sum-exp [T] of the scores that are kept."""
    s = np.where(keep, s, -np.inf)
    lse = np.logaddexp.reduce(s, axis=1)
    return np.exp(s - np.where(keep.any(1), lse, 0)[:, None]), lse


def _only(taking_part: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """`rows` with 0 in place of those that take no part."""
    return np.where(taking_part.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)
