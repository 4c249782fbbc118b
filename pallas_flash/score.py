"""Raw score → logit: bias, ALiBi, soft cap and the user's own functions, for every kernel, forward and backward.

A term is a function of scores and their tile, `function(score, tile, *operands)`; what is built in is written like what
users write. Derivatives are JAX's, taken of the terms inside the kernels.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from pallas_flash import softmax
from pallas_flash.tile import Tile

Leaf = Any  # of a pytree: an array, or what JAX's transformations put in its place


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Term:
    """One step from scores to logits.

    Attributes:
        function: `function(score, tile, *operands)`: float32, the shape of `score`.
        operands: Arrays [B or 1, N or 1, T or 1, S or 1], which the function gets the tile's part of; floats as float32.
        booleans: Which of them are bool, or stand for it.
    """

    function: Callable[..., Array] = dataclasses.field(metadata={"static": True})
    operands: tuple[Leaf, ...] = ()
    booleans: tuple[bool, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def is_built_in(self) -> bool:
        """Whether it is one of this file's."""
        return self.function is add_bias or isinstance(self.function, Alibi | SoftCap)

    def read(self, tile: Tile) -> tuple[Array, ...]:
        """The tile's part of each operand."""
        booleans = self.booleans or (False,) * len(self.operands)
        return tuple(_wide(tile.read(x), is_bool) for x, is_bool in zip(self.operands, booleans, strict=True))


def _wide(x: Array, is_bool: bool) -> Array:
    if is_bool:
        return x != 0
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Score:
    """The way from raw scores q·k to logits: the scale, then the terms in order (eq. 29)."""

    terms: tuple[Term, ...] = ()

    def moved(self, moves: Array) -> "Score":
        """The same, for ALiBi with queries moved by so many keys, int32 [B or 1, 1, T or 1, 1]."""
        return Score(
            tuple(
                dataclasses.replace(term, operands=(*term.operands, moves)) if isinstance(term.function, Alibi) else term
                for term in self.terms
            )
        )

    def logits(
        self, s: Array, c: ArrayLike, tile: Tile, keep: Array | None
    ) -> tuple[Array, ArrayLike, Callable[[Array], Array]]:
        """Logits, -inf where not `keep` (None: all count), as scores of which some factor times is base 2.

        Args:
            s: Raw scores.
            c: scale·log2(e).
            tile: Where they are.
            keep: bool, broadcastable to them.

        Returns:
            The scores and the factor (`s` and `c` if there are no terms), and the map from the logits' cotangent to that
            of the scaled scores. Forward passes ask for it too: so a function's own derivative leaves no trace in a kernel.
        """
        if not self.terms:
            return softmax.masked(s, keep), c, lambda ds: ds
        inner, outer, parts = self._inner, self._outer, self.parts(tile)
        value, pull = jax.vjp(lambda z: self.of(softmax.only(keep, z), tile, parts), s * (c * softmax.LN2 / inner))

        def pulled(ds: Array) -> Array:
            (dz,) = pull(ds)
            return dz if inner == outer else dz * (outer / inner)

        return softmax.masked(value, keep), outer * softmax.LOG2E, pulled

    def guarded(self, s: Array, c: ArrayLike, tile: Tile, keep: Array | None) -> tuple[Array, ArrayLike]:
        """`logits`, not masked, for JAX to differentiate: what does not count is 0, so that no derivative is NaN."""
        if not self.terms:
            return s, c
        value = self.of(s * (c * softmax.LN2 / self._inner), tile, self.parts(tile), keep)
        return value, self._outer * softmax.LOG2E

    @property
    def _inner(self) -> float:
        """By what `of` wants scaled scores to be divided: a cap that comes first, so that it costs no multiplication."""
        return _cap(self.terms[0])

    @property
    def _outer(self) -> float:
        """By what the logits are divided that `of` returns: a cap that comes last."""
        return _cap(self.terms[-1])

    def parts(self, tile: Tile) -> list[tuple[Array, ...]]:
        """The tile's parts of all operands, term by term."""
        return [term.read(tile) for term in self.terms]

    def of(self, z: Array, tile: Tile, parts: list[tuple[Array, ...]], keep: Array | None = None) -> Array:
        """Logits of scaled scores, both divided as above, given the parts of the operands.

        A bias of -inf hides a score from later terms. What does not count, for `keep`, is 0 before, so that no
        derivative is NaN there.
        """
        z, hidden = softmax.only(keep, z), None
        for term, part in zip(self.terms, parts, strict=True):
            part = [softmax.only(keep, x) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in part]
            if isinstance(term.function, SoftCap):
                z = z if term is self.terms[0] else z * (1 / term.function.cap)
                z = tile.fast.tanh(z)
                z = z if term is self.terms[-1] else z * term.function.cap
            else:
                z = term.function(z, tile, *part)
            if term.function is add_bias and term is not self.terms[-1]:
                hidden = z == -jnp.inf
                z = jnp.where(hidden, 0.0, z)
        return z if hidden is None else jnp.where(hidden, -jnp.inf, z)


def add_bias(score: Array, tile: Tile, bias: Array) -> Array:
    """A bias is added."""
    del tile
    return score + bias


@dataclasses.dataclass(frozen=True)
class Alibi:
    """Attention with linear biases (Press et al., arXiv:2108.12409): minus the distance times a slope for each head.

    Attributes:
        shift: Position of query 0 among the keys; an operand after the slopes, int32, is added to it.
    """

    shift: int

    def __call__(self, score: Array, tile: Tile, slopes: Array, *moved: Array) -> Array:
        position = functools.reduce(operator.add, moved, tile.q_ids + self.shift)
        # In floating point, exact below 2²⁴, so that integers are converted once for a row or column.
        distance = position.astype(score.dtype) - tile.k_ids.astype(score.dtype)
        return score - slopes * jnp.abs(distance)


@dataclasses.dataclass(frozen=True)
class SoftCap:
    """cap·tanh(score / cap) (Gemma 2, arXiv:2408.00118, section 2)."""

    cap: float


def _cap(term: Term) -> float:
    """Of a soft cap; 1 for other terms."""
    return term.function.cap if isinstance(term.function, SoftCap) else 1.0
