"""Which probabilities are dropped? Random bits from a key and the indices of a score alone, on every implementation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_flash.elementary import PLAIN
from pallas_flash.tile import Tile

Leaf = Any  # of a pytree: an array, or what JAX's transformations put in its place

BITS = 15
"""Bits of randomness for each score."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Keeps each probability with chance 1 - rate, and divides it by that (eq. 32).

    Attributes:
        keys: Two of uint32 [B, N, 1, 1]: random words for each batch entry and head.
        dropped: How many of 2¹⁵ values of a score's bits drop it.
    """

    keys: tuple[Leaf, Leaf]
    dropped: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, key: Array, rate: float, B: int, N: int) -> "Dropout":
        """Of a typed key of `jax.random` and 0 < rate < 1, which is rounded to a multiple of 2⁻¹⁵."""
        low, high = jax.random.bits(key, (2, B, N, 1, 1), jnp.uint32)
        return cls((low, high), min(max(round(rate * 2**BITS), 1), 2**BITS - 1))

    @property
    def gain(self) -> float:
        """What kept probabilities are multiplied by."""
        return 1 / (1 - self.dropped / 2**BITS)

    def sieve(self, tile: Tile) -> Callable[[Array], Array]:
        """The map x ↦ x, the tile's shape, with 0 for what is dropped.

        Four scores share the two words of one counter: those that differ in bit 3 of q or k. On GPUs one thread holds
        these four, in either orientation, so that it computes their words once.
        """
        (q_group, q, q_bit), (k_group, k, k_bit) = tile.sixteens()
        low, high = (tile.read(key) for key in self.keys)
        rest = q_group * np.uint32(64) + q * np.uint32(8) + k
        words = philox((jnp.zeros_like(rest) + (k_group ^ high), rest), low, tile.fast.product)
        return tile.fast.sieve(words, (q_bit, k_bit), self.dropped)


def philox(
    counter: tuple[Array, Array], key: Array, product: Callable = PLAIN.product, rounds: int = 7
) -> tuple[Array, Array]:
    """Two random words, uint32, from a counter of two and a key of one.

    Source: Philox2x32 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with 7 of its 10
    rounds, as FlashAttention-2 does.
    """
    a, b = counter
    for _ in range(rounds):
        high, low = product(0xD256D193, a)
        a, b = high ^ key ^ b, low
        key = key + np.uint32(0x9E3779B9)
    return a, b
