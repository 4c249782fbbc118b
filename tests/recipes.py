"""Masks that are arrays or functions, by name, so that a case stays small and hashable.

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
    """A mask function in both forms.

    Attributes:
        function: (tile, *operands) → bool, as the library takes it.
        formula: (b, n, t, s, *operands) → bool, of NumPy arrays.
        axes: Letters of each operand.
        operands: (draw, B, N, T, S) → the operands.
    """

    function: Callable[..., Any]
    formula: Callable[..., np.ndarray]
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
