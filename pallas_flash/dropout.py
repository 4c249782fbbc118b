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

BITS, FRACTION = 7, 32
"""Bits of randomness for each score, and those that decide which of two bounds they are compared with."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Keeps each probability with chance 1 - rate, and divides it by that (eq. 32).

    Attributes:
        keys: Two of uint32 [B, N, 1, 1]: random words for each batch entry and head.
        dropped: The rate, in units of 2⁻³⁹.
    """

    keys: tuple[Leaf, Leaf]
    dropped: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, key: Array, rate: float, B: int, N: int) -> "Dropout":
        """Of a typed key of `jax.random` and 0 < rate < 1."""
        low, high = jax.random.bits(key, (2, B, N, 1, 1), jnp.uint32)
        return cls((low, high), min(max(round(rate * 2 ** (BITS + FRACTION)), 1), 2 ** (BITS + FRACTION) - 1))

    @property
    def gain(self) -> float:
        """What kept probabilities are multiplied by."""
        return 1 / (1 - self.dropped / 2 ** (BITS + FRACTION))

    def sieve(self, tile: Tile) -> Callable[[Array], Array]:
        """The map x ↦ x, the tile's shape, with 0 for what is dropped.

        Eight scores share the two words of one counter: those that differ in bit 3 of q, or 3 or 4 of k. On GPUs one
        thread holds these eight, or four of them in a transposed tile, so that it computes their words once. Seven bits
        of each are compared with one of two bounds next to each other. Which one, that is drawn for the eight (a Weyl
        sequence from a random start), so that the chance of each score is the rate, whatever that is; between two of
        the eight it leaves a correlation below 2⁻¹⁶ over rate · (1 - rate).
        """
        (q_group, q, q_bit), (k_group, k, *k_bits) = tile.groups()
        low, high = (tile.read(key) for key in self.keys)
        q, steps = q_group * np.uint32(64) + q * np.uint32(8), (np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B))
        words = philox((jnp.zeros_like(q + k) + (k_group ^ high), q + k), low, tile.fast.product)
        drawn = (high + q * steps[0]) + (k * steps[0] + k_group * steps[1])
        bound, fraction = divmod(self.dropped, 2**FRACTION)
        bound = jnp.where(drawn < np.uint32(fraction), np.uint32(bound + 1), np.uint32(bound))
        return tile.fast.sieve(words, (q_bit, *k_bits), bound)


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
