"""Raw score → logit: factors of heads, bias, ALiBi, soft cap and the user's own functions, for every kernel.

A term is a function of scores and their tile, `function(score, tile, *operands)`; what is built in is written like what
users write. Derivatives are JAX's, taken of the terms inside the kernels.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from pallas_flash.elementary import only
from pallas_flash.tile import Tile

Leaf = Any  # of a pytree: an array, or what JAX's transformations put in its place


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Term:
    """One step from scores to logits.

    Attributes:
        function: `function(score, tile, *operands)`: float32, the shape of `score`.
        operands: Arrays [B or 1, N or 1, T or 1, S or 1], which the function gets the tile's part of, in float32.
        booleans: Which of them are bool, or stand for it.
    """

    function: Callable[..., Array] = dataclasses.field(metadata={"static": True})
    operands: tuple[Leaf, ...] = ()
    booleans: tuple[bool, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def is_built_in(self) -> bool:
        """Whether it is one of this file's."""
        return self.function in (times, add_bias) or isinstance(self.function, Alibi | SoftCap)

    def unit(self, scale: ArrayLike) -> float:
        """What its scores are divided by: a soft cap, for ALiBi an ordinary scale, as raw scores are; else 1."""
        if isinstance(self.function, SoftCap):
            return self.function.cap
        return scale if isinstance(self.function, Alibi) and isinstance(scale, float) and scale > 1e-6 else 1.0

    def divided(self, part: list[Array], unit: float) -> list[Array]:
        """The tile's part of its operands, for scores in that unit."""
        return [part[0] / unit, *part[1:]] if isinstance(self.function, Alibi) and unit != 1 else part

    def read(self, tile: Tile) -> tuple[Array, ...]:
        """The tile's part of each operand."""
        booleans = self.booleans or (False,) * len(self.operands)
        parts = zip(self.operands, booleans, strict=True)
        return tuple(tile.read(x) != 0 if is_bool else wide(tile.read(x)) for x, is_bool in parts)


def wide(x: Array) -> Array:
    """In float32, if it is floating and narrower."""
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
                dataclasses.replace(term, operands=(*term.operands, moves))
                if isinstance(term.function, Alibi)
                else term
                for term in self.terms
            )
        )

    def at(self, tile: Tile, scale: ArrayLike) -> "Located":
        """For the scores of one tile, with what their logits depend on read."""
        units = [term.unit(scale) for term in self.terms]
        return Located(self.terms, tile, [term.read(tile) for term in self.terms], units, scale)


class Located(NamedTuple):
    """A `Score` for one tile.

    The units of the first and the last term are left to factors that are there anyway: `of` takes scaled scores divided
    by the first, and gives logits divided by the last.

    Attributes:
        terms: Its terms, some.
        tile: Where the scores are.
        parts: The tile's part of each operand of each term.
        units: What each term's scores are divided by.
        scale: From raw to scaled scores.
    """

    terms: tuple[Term, ...]
    tile: Tile
    parts: list[tuple[Array, ...]]
    units: list[float]
    scale: ArrayLike

    @property
    def gain(self) -> float:
        """By what logits are divided."""
        return self.units[-1]

    def scaled(self, s: Array) -> Array:
        """What `of` takes of raw scores."""
        return s if self.scale is self.units[0] else s * (self.scale / self.units[0])

    def of(self, z: Array, keep: Array | None = None) -> Array:
        """Logits of scaled scores, both divided as above. A bias of -inf hides a score from later terms.

        What does not count, for `keep`, is 0 before, so that no derivative is NaN there.
        """
        z, hidden = only(keep, z), None
        for term, part, unit in zip(self.terms, self.parts, self.units, strict=True):
            is_first, is_last = term is self.terms[0], term is self.terms[-1]
            part = [only(keep, x) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in part]
            z = z if is_first or unit == 1 else z * (1 / unit)
            z = jnp.broadcast_to(term.function(z, self.tile, *term.divided(part, unit)), z.shape)
            z = z if is_last or unit == 1 else z * unit
            if term.function is add_bias and not is_last:
                hidden = z == -jnp.inf
                z = jnp.where(hidden, 0.0, z)
        return z if hidden is None else jnp.where(hidden, -jnp.inf, z)

    def linear(self, z: Array, keep: Array | None) -> tuple[Array, Callable[[Array], Array]]:
        """`of`, and the map from the logits' cotangent to that of the scaled scores, undivided.

        Forward passes take it from here too, so that a function's own derivative leaves no trace in a kernel.
        """
        value, pull = jax.vjp(lambda z: self.of(only(keep, z)), z)
        by = self.gain / self.units[0]
        return value, lambda ds: pull(ds)[0] if by == 1 else pull(ds)[0] * by

    def replaced(self, term: int, number: int, part: Array) -> "Located":
        """The same with another part of one operand."""
        parts = [[*found] for found in self.parts]
        parts[term][number] = part
        return self._replace(parts=[tuple(found) for found in parts])


def times(score: Array, tile: Tile, factor: Array) -> Array:
    """A factor for each head, its inverse temperature (Swin Transformer V2, arXiv:2111.09883, section 3.3)."""
    del tile
    return score * factor


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
        distances = tile.distances()
        for move in (self.shift, *moved):
            distances = distances if isinstance(move, int) and move == 0 else distances - jnp.float32(move)
        return score - slopes * jnp.abs(distances)


@dataclasses.dataclass(frozen=True)
class SoftCap:
    """cap·tanh(score / cap) (Gemma 2, arXiv:2408.00118, section 2)."""

    cap: float

    def __call__(self, score: Array, tile: Tile) -> Array:
        """Of scores divided by the cap, as the result is."""
        return tile.fast.tanh(score)
