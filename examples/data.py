"""Documents as bytes: the reference documentation that every CPython carries, and its own sources."""

import functools
import importlib
import inspect
import re
from pydoc_data.topics import topics

import numpy as np

BEGIN = 256
"""The token that begins a document; the others are bytes."""

MODULES = (
    "argparse",
    "ast",
    "bisect",
    "collections",
    "dataclasses",
    "difflib",
    "enum",
    "functools",
    "heapq",
    "inspect",
)


def tokens(text: str) -> np.ndarray:
    """int32, one a byte after `BEGIN`; runs of spaces made one."""
    return np.array([BEGIN, *re.sub(" +", " ", text).encode()], np.int32)


def text(ids) -> str:
    return bytes(int(n) for n in ids if n != BEGIN).decode(errors="replace")


@functools.cache
def prose() -> list[np.ndarray]:
    return [tokens(topics[name]) for name in sorted(topics)]


@functools.cache
def code() -> list[np.ndarray]:
    return [tokens(inspect.getsource(importlib.import_module(name))) for name in MODULES]


def packed(documents: list[np.ndarray], batch: int, length: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Rows of whole and cut documents, one after the other without padding.

    Returns:
        int32 [batch, length] each: `ids`, the `targets` after them (-1 where the next token is another document's),
        `segment_ids`, equal within a document, and `positions`, counted from 0 in each.
    """
    rows = [_row(documents, length + 1, rng) for _ in range(batch)]
    ids, segments, positions = (np.stack(part) for part in zip(*rows, strict=True))
    same = segments[:, 1:] == segments[:, :-1]
    return {
        "ids": ids[:, :-1],
        "targets": np.where(same, ids[:, 1:], -1),
        "segment_ids": segments[:, :-1],
        "positions": positions[:, :-1],
    }


def _row(documents: list[np.ndarray], length: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """It begins anywhere in a document."""
    first = documents[rng.integers(len(documents))]
    parts = [first[rng.integers(len(first)) :]]
    while sum(map(len, parts)) < length:
        parts.append(documents[rng.integers(len(documents))])
    ids = np.concatenate(parts)[:length]
    segments = np.repeat(np.arange(len(parts)), [len(part) for part in parts])[:length]
    positions = np.concatenate([np.arange(len(part)) for part in parts])[:length]
    return ids, segments.astype(np.int32), positions.astype(np.int32)


def padded(documents: list[np.ndarray], batch: int, length: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Pieces of 16 to `length` tokens: ids int32 [batch, length], zeros behind them, and lengths int32 [batch]."""
    ids, lengths = np.zeros((batch, length), np.int32), rng.integers(16, length + 1, batch).astype(np.int32)
    for n in range(batch):
        document = documents[rng.integers(len(documents))]
        lengths[n] = min(lengths[n], len(document))
        start = rng.integers(len(document) - lengths[n] + 1)
        ids[n, : lengths[n]] = document[start : start + lengths[n]]
    return ids, lengths
