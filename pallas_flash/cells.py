"""Which part of the scores? Ranges of queries or keys, and the cells that the matrix of scores is cut into."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

Index = int | Array


class Span(NamedTuple):
    """Half-open range of indices; empty when `hi <= lo`."""

    lo: Index
    hi: Index

    def holds(self, ids: Array) -> Array:
        """bool, the shape of `ids`: which of them lie in the range."""
        return (ids >= self.lo) & (ids < self.hi)

    def is_whole(self, size: int) -> bool:
        """Whether it is statically known to be 0 … size-1."""
        return all(isinstance(x, int) for x in self) and self == (0, size)


NONE, SOME, ALL = 0, 1, 2
"""How much of a cell is kept; the smaller of two is, or bounds, that of both masks together."""


@dataclasses.dataclass(frozen=True)
class Cells:
    """The T×S scores of B batch entries and N heads, cut into cells of block_q×block_k; the last may reach beyond."""

    B: int
    N: int
    T: int
    S: int
    block_q: int
    block_k: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of cells."""
        return -(-self.T // self.block_q), -(-self.S // self.block_k)

    @property
    def rows(self) -> Span:
        """Queries of each row of cells, [rows, 1]."""
        first = self.block_q * jnp.arange(self.shape[0], dtype=jnp.int32)[:, None]
        return Span(first, first + self.block_q)

    @property
    def columns(self) -> Span:
        """Keys of each column of cells, [columns]."""
        first = self.block_k * jnp.arange(self.shape[1], dtype=jnp.int32)
        return Span(first, first + self.block_k)

    def padded(self, array: Array) -> Array:
        """An array [B or 1, N or 1, T or 1, S or 1] that reaches to the end of the last cells, with 0."""
        blocks = zip(array.shape[2:], (self.block_q, self.block_k), strict=True)
        return jnp.pad(array, ((0, 0), (0, 0), *((0, -n % block if n > 1 else 0) for n, block in blocks)))
