"""Which probabilities are dropped? Random bits from a key and the indices of a score alone, on every implementation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_flash.tile import Tile

Leaf = Any  # of a pytree: an array, or what JAX's transformations put in its place

_BIT, _OTHERS = np.uint32(8), np.uint32(2**32 - 1 - 8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Keeps each probability with chance 1 - rate, and divides it by that (eq. 32).

    Attributes:
        seeds: Two of uint32 [B], the same for all entries.
        numbers: uint32 [B, N, 1, 1]: the number of each pair of batch entry and head.
        rate: Chance to be dropped, 0 < rate < 1.
    """

    seeds: tuple[Leaf, Leaf]
    numbers: Leaf
    rate: float = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, key: Array, rate: float, B: int, N: int) -> "Dropout":
        """Of a typed key of `jax.random`."""
        words = jax.random.bits(key, (2, 1), jnp.uint32)
        numbers = jnp.arange(B * N, dtype=jnp.uint32).reshape(B, N, 1, 1)
        return cls((jnp.broadcast_to(words[0], B), jnp.broadcast_to(words[1], B)), numbers, rate)

    def keep(self, tile: Tile) -> Array:
        """bool, the tile's shape. Four scores share the words of one counter: those that differ in bit 3 of q and k.

        On GPUs one thread holds these four, in either orientation, so that the compiler finds their counter's rounds
        once.
        """
        q, k = tile.q_ids.astype(jnp.uint32), tile.k_ids.astype(jnp.uint32)
        q_bit, k_bit = (q & _BIT) != 0, (k & _BIT) != 0
        zero = jnp.zeros_like(q + k)
        counter = (zero + (k & _OTHERS), zero + (q & _OTHERS), zero + tile.read(self.numbers), zero)
        words = philox(counter, self.seeds)
        word = jnp.where(q_bit, jnp.where(k_bit, words[3], words[2]), jnp.where(k_bit, words[1], words[0]))
        return word >= np.uint32(min(round(self.rate * 2**32), 2**32 - 1))


def philox(counter: tuple[Array, ...], key: tuple[Array, Array], rounds: int = 7) -> tuple[Array, ...]:
    """Four random words, uint32, from a counter of four and a key of two.

    Source: Philox4x32 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), where 7 rounds pass
    BigCrush; 10 are its authors' safe choice.
    """
    a, b, c, d = counter
    low, high = key
    for _ in range(rounds):
        (a_high, a_low), (c_high, c_low) = _product(0xD2511F53, a), _product(0xCD9E8D57, c)
        a, b, c, d = c_high ^ b ^ low, c_low, a_high ^ d ^ high, a_low
        low, high = low + np.uint32(0x9E3779B9), high + np.uint32(0xBB67AE85)
    return a, b, c, d


def _product(factor: int, x: Array) -> tuple[Array, Array]:
    """High and low word of a product."""
    with jax.enable_x64(True):
        wide = x.astype(jnp.uint64) * np.uint64(factor)
        return (wide >> np.uint64(32)).astype(jnp.uint32), wide.astype(jnp.uint32)


def dropper(dropout: Dropout | None, tile: Tile) -> Callable[[Array], Array]:
    """Of probabilities, or their cotangents: 0 where they are dropped, the rest times the gain. None: all as they are."""
    if dropout is None:
        return lambda x: x
    keep, gain = dropout.keep(tile), 1 / (1 - dropout.rate)
    return lambda x: jnp.where(keep, x * gain, 0.0)
