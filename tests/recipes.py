"""Masks, biases and other arrays and functions, by name, so that a case stays small and hashable.

Each function of a modifier is there twice: as the library takes it, of a tile, and as the oracle does, of four index
arrays; what both read is drawn once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


def random(draw, B, N, T, S):
    return draw.random((B, N, T, S)) < 0.6


def sparse(draw, B, N, T, S):
    """Two in a hundred: most blocks are empty, and so are some rows and columns."""
    return draw.random((B, 1, T, S)) < 0.02


def per_head(draw, B, N, T, S):
    return draw.random((1, N, T, S)) < 0.4


def padding(draw, B, N, T, S):
    """Of keys alone: those from a length on, which differs, are out."""
    return np.arange(S) < draw.permutation(np.linspace(S // 3, S, B, dtype=int)).reshape(B, 1, 1, 1)


def rows(draw, B, N, T, S):
    """Of queries alone."""
    return draw.random((B, 1, T, 1)) < 0.5


def heads(draw, B, N, T, S):
    """Every second head attends to nothing."""
    return (np.arange(N) % 2 == 0).reshape(N, 1, 1)


def tril(draw, B, N, T, S):
    return np.tri(T, S, dtype=bool)


def block_holes(draw, B, N, T, S):
    """A checkerboard of 32 queries by 32 keys, wholly kept or wholly out."""
    return ((np.arange(T)[:, None] // 32 + np.arange(S) // 32) % 2 == 0)[None, None]


def empty_rows(draw, B, N, T, S):
    """Some rows attend to nothing, the first 32 among them, and one entry's keys are all out."""
    found = (draw.random((B, 1, T, S)) < 0.5) & (draw.random((B, 1, T, 1)) < 0.7)
    found[:, :, :32] = False
    found[-1, :, :, S // 2 :] = False
    return found


def one_entry_empty(draw, B, N, T, S):
    return (np.arange(B) > 0).reshape(B, 1, 1, 1)


def all_true(draw, B, N, T, S):
    return np.ones((1, 1, T, S), bool)


def all_false(draw, B, N, T, S):
    return np.zeros((1, 1, T, S), bool)


MASKS = {
    f.__name__: f
    for f in (
        random,
        sparse,
        per_head,
        padding,
        rows,
        heads,
        tril,
        block_holes,
        empty_rows,
        one_entry_empty,
        all_true,
        all_false,
    )
}
"""(draw, B, N, T, S) → bool, broadcastable to [B, N, T, S]."""


def _self(ids: np.ndarray, T: int, S: int):
    """The first T ids for queries and the first S for keys; the same array for both if it can be."""
    return (ids, ids) if T == S else (ids[:, :T], ids[:, :S])


def sorted_(draw, B, T, S):
    return _self(np.sort(draw.integers(0, 5, (B, max(T, S))), 1), T, S)


def unsorted(draw, B, T, S):
    return _self(draw.integers(0, 4, (B, max(T, S))), T, S)


def repeated(draw, B, T, S):
    """The same three ids again and again, shared by all entries."""
    return _self((np.arange(max(T, S)) // 11 % 3)[None], T, S)


def padded(draw, B, T, S):
    """Sorted, with negative ids before, after and in between."""
    ids = np.sort(draw.integers(0, 4, (B, max(T, S))), 1)
    ids[:, :5] = -1
    ids[:, T // 2 : T // 2 + 3] = -7
    ids[-1, min(T, S) - 9 :] = -2
    return _self(ids, T, S)


def cross(draw, B, T, S):
    """Ids of queries and keys that are drawn apart; some are on one side only."""
    return np.sort(draw.integers(0, 6, (B, T)), 1), np.sort(draw.integers(3, 9, (B, S)), 1)


def blocks(draw, B, T, S):
    """Whole blocks of 32: those of the same id keep everything."""
    return np.arange(T)[None] // 32, np.arange(S)[None] // 32


def all_padding(draw, B, T, S):
    return np.full((B, T), -1), np.full((B, S), -1)


SEGMENTS = {f.__name__.strip("_"): f for f in (sorted_, unsorted, repeated, padded, cross, blocks, all_padding)}
"""(draw, B, T, S) → ids of queries, broadcastable to [B, T], and of keys, to [B, S]."""


class Modifier(NamedTuple):
    """A function of masks or of scores in both forms.

    Attributes:
        function: (tile, *operands) → bool, or (score, tile, *operands) → score, as the library takes it.
        formula: (b, n, t, s, *operands) → bool, of NumPy arrays; of scores, that of `oracle.ScoreFunction`.
        axes: Letters of each operand.
        operands: (draw, B, N, T, S) → the operands.
    """

    function: Callable[..., Any]
    formula: Callable[..., Any]
    axes: tuple[str, ...] = ()
    operands: Callable[..., tuple[np.ndarray, ...]] = lambda draw, B, N, T, S: ()


def prefix_lm(tile):
    return (tile.k_ids <= tile.q_ids) | (tile.k_ids < 20)


def dilated(tile):
    return (tile.q_ids - tile.k_ids) % 3 == 0


def by_place(tile):
    return (tile.k_ids + tile.head + 2 * tile.batch) % 4 > 0


def by_head(tile, width):
    return abs(tile.q_ids - tile.k_ids) <= width


def document_window(tile, q_document, k_document):
    return (q_document == k_document) & (abs(tile.q_ids - tile.k_ids) <= 20)


def important(tile, weight, allowed):
    return (weight > 0.5) & allowed | (tile.q_ids == tile.k_ids)


def table(tile, bits):
    return bits == tile.head


MODIFIERS = {
    "prefix_lm": Modifier(prefix_lm, lambda b, n, t, s: (s <= t) | (s < 20)),
    "dilated": Modifier(dilated, lambda b, n, t, s: (t - s) % 3 == 0),
    "by_place": Modifier(by_place, lambda b, n, t, s: (s + n + 2 * b) % 4 > 0),
    "by_head": Modifier(
        by_head,
        lambda b, n, t, s, width: abs(t - s) <= width[n],
        ("N",),
        lambda draw, B, N, T, S: (draw.integers(0, 40, N),),
    ),
    "document_window": Modifier(
        document_window,
        lambda b, n, t, s, q, k: (q[b, t] == k[b, s]) & (abs(t - s) <= 20),
        ("BT", "BS"),
        lambda draw, B, N, T, S: SEGMENTS["sorted"](draw, B, T, S),
    ),
    "important": Modifier(
        important,
        lambda b, n, t, s, weight, allowed: (weight[b, s] > 0.5) & allowed[n, t, s] | (t == s),
        ("BS", "NTS"),
        lambda draw, B, N, T, S: (draw.random((B, S), np.float32), draw.random((N, T, S)) < 0.5),
    ),
    "table": Modifier(
        table,
        lambda b, n, t, s, bits: bits[b, n, t, s] == n,
        ("BNTS",),
        lambda draw, B, N, T, S: (draw.integers(0, N, (B, N, T, S)),),
    ),
}


def full(draw, B, N, T, S):
    return draw.standard_normal((B, N, T, S), np.float32)


def shared(draw, B, N, T, S):
    """By all entries and heads."""
    return draw.standard_normal((T, S), np.float32)


def of_heads(draw, B, N, T, S):
    """As relative position biases are: a table for each head."""
    return draw.standard_normal((N, T, S), np.float32)


def of_entries(draw, B, N, T, S):
    return draw.standard_normal((B, 1, T, S), np.float32)


def of_keys(draw, B, N, T, S):
    return draw.standard_normal((B, 1, 1, S), np.float32)


def of_rows(draw, B, N, T, S):
    return draw.standard_normal((N, T, 1), np.float32)


def minus_infinity(draw, B, N, T, S):
    """-inf masks: single scores, whole rows, and whole columns of one entry."""
    found = draw.standard_normal((B, 1, T, S), np.float32)
    hidden = (draw.random((B, 1, T, S)) < 0.3) | (draw.random((B, 1, T, 1)) < 0.1)
    hidden[-1, :, :, S // 2 :] = True
    return np.where(hidden, np.float32(-np.inf), found)


def sunk(draw, B, N, T, S):
    """The same, but finite: so low that these keys do not count."""
    found = minus_infinity(draw, B, N, T, S)
    low = np.float32(-1e9) * 10 ** draw.random(found.shape, np.float32)
    return np.where(np.isneginf(found), low, found)


BIASES = {f.__name__: f for f in (full, shared, of_heads, of_entries, of_keys, of_rows, minus_infinity, sunk)}
"""(draw, B, N, T, S) → float32, broadcastable to [B, N, T, S]."""


def heads_(draw, B, N):
    """Those of the paper: a geometric sequence."""
    return np.float32(2.0) ** (-8 * np.arange(1, N + 1, dtype=np.float32) / N)


def entries(draw, B, N):
    """Of either sign, for each batch entry."""
    return 0.3 * draw.standard_normal((B, N), np.float32)


SLOPES = {f.__name__.strip("_"): f for f in (heads_, entries)}
"""(draw, B, N) → float32, [N] or [B, N]."""


def relative(score, tile):
    """By distance, folded into five classes."""
    return score + 0.25 * ((tile.q_ids - tile.k_ids) % 5).astype(score.dtype)


def placed(score, tile):
    """By batch entry and head."""
    return score + 0.3 * ((tile.k_ids + tile.head + 2 * tile.batch) % 3).astype(score.dtype)


def bent(score, tile):
    """A polynomial of the score."""
    return score - 0.05 * score * score


def key_weight(score, tile, weight):
    return score * weight


def head_gain(score, tile, gain, shift):
    """Two operands of different axes, and a distance."""
    return score * gain + shift * (tile.q_ids - tile.k_ids).astype(score.dtype)


def gated(score, tile, gate):
    return score * (1 + gate) + gate


def buckets(score, tile, bucket, weight):
    """An operand of integers has no gradient."""
    return score + weight * bucket.astype(score.dtype)


def allowed_only(score, tile, allowed):
    """A score of -inf does not count."""
    return where(allowed, score, -np.inf)


def where(condition, x, y):
    """Of the library whose array `x` is."""
    return x.__array_namespace__().where(condition, x, y)


SCORES = {
    "relative": Modifier(relative, lambda z, b, n, t, s: (z + 0.25 * ((t - s) % 5), 1, ())),
    "placed": Modifier(placed, lambda z, b, n, t, s: (z + 0.3 * ((s + n + 2 * b) % 3), 1, ())),
    "bent": Modifier(bent, lambda z, b, n, t, s: (z - 0.05 * z * z, 1 - 0.1 * z, ())),
    "key_weight": Modifier(
        key_weight,
        lambda z, b, n, t, s, weight: (z * weight, weight, (z,)),
        ("BS",),
        lambda draw, B, N, T, S: (draw.standard_normal((B, S), np.float32),),
    ),
    "head_gain": Modifier(
        head_gain,
        lambda z, b, n, t, s, gain, shift: (z * gain + shift * (t - s), gain, (z, t - s)),
        ("N", "BT"),
        lambda draw, B, N, T, S: (draw.uniform(0.5, 1.5, N).astype(np.float32), _small(draw, B, T)),
    ),
    "gated": Modifier(
        gated,
        lambda z, b, n, t, s, gate: (z * (1 + gate) + gate, 1 + gate, (z + 1,)),
        ("NTS",),
        lambda draw, B, N, T, S: (0.5 * draw.standard_normal((N, T, S), np.float32),),
    ),
    "buckets": Modifier(
        buckets,
        lambda z, b, n, t, s, bucket, weight: (z + weight * bucket, 1, (0, bucket)),
        ("BT", "NS"),
        lambda draw, B, N, T, S: (draw.integers(-2, 3, (B, T)), draw.standard_normal((N, S), np.float32)),
    ),
    "allowed_only": Modifier(
        allowed_only,
        lambda z, b, n, t, s, allowed: (where(allowed, z, -np.inf), allowed, (0,)),
        ("BS",),
        lambda draw, B, N, T, S: (draw.random((B, S)) < 0.7,),
    ),
}
"""Functions of scores, whose formulas give the derivatives too."""


def _small(draw, B, T):
    return 0.02 * draw.standard_normal((B, T), np.float32)


def sinks(draw, N):
    """Around the largest logits of standard normal queries and keys, so that each takes a good part of its rows."""
    return draw.uniform(1, 4, N).astype(np.float32)
