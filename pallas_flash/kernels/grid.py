"""In which order are tiles computed? The grid that the kernels of every compiler are launched over."""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from pallas_flash.masks import Mask


@dataclasses.dataclass(frozen=True)
class Grid:
    """One program per batch entry, head and tile of rows; programs side by side share the tile's index, not the head.

    Attributes:
        B, heads, tiles: Its extents.
        group: Heads that run side by side (`head_group` of a plan), a divisor of the number of heads.
        last_first: Whether the last tile of rows comes first, which balances masks that grow.
    """

    B: int
    heads: int
    tiles: int
    group: int
    last_first: bool

    @classmethod
    def of(cls, B: int, heads: int, tiles: int, head_group: int, mask: Mask) -> "Grid":
        group = max(g for g in range(1, head_group + 1) if heads % g == 0)
        return cls(B, heads, tiles, group, mask.grows)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.group, self.tiles, self.B * self.heads // self.group

    def at(self, x, y, z) -> tuple[Array, Array, Array]:
        """Batch entry, head and tile of the program at a place of the grid."""
        groups = jnp.int32(self.heads // self.group)
        head = lax.rem(z, groups) * self.group + x
        return lax.div(z, groups), head, self.tiles - 1 - y if self.last_first else y

    def at_number(self, number) -> tuple[Array, Array, Array]:
        """The same for programs numbered through, x fastest."""
        x, y, _ = self.shape
        return self.at(lax.rem(number, x), lax.rem(lax.div(number, x), y), lax.div(number, x * y))
