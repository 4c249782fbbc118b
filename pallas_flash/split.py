"""Which mesh axes cut which axes of arrays? Batch and heads by device; and what of it there is to tell."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_flash.problem import Problem

Axes = tuple[str, ...]
"""Names of an array's axes: "B", "N", "K", "T", "S", "H", "V" (of Hv); "mapped 0" … of `vmap`; "" of no other array."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Which mesh axes cut which axes of arrays.

    Attributes:
        sizes: Of each mesh axis, its devices.
        by: Axis of arrays → the mesh axes that cut it.
    """

    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    by: dict[str, Axes] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, sizes: dict[str, int], lengths: dict[str, int], specs: Sequence[tuple[Axes, PartitionSpec]]) -> "Split":
        """That of arrays which are sharded so: the batch and the heads as the array that is cut the most there.

        Key/value heads are cut by as many of the heads' mesh axes as divide them, beginning with the first.
        """
        asked: dict[str, Axes] = {}
        for axes, spec in specs:
            for axis, entry in zip(axes, spec, strict=False):
                axis, names = "N" if axis == "K" else axis, _names(entry)
                if axis in ("B", "N") or axis.startswith("mapped"):
                    asked[axis] = max(asked.get(axis, ()), names, key=lambda names: devices(sizes, names))
        by: dict[str, Axes] = {}
        for axis in sorted(asked):
            free = tuple(name for name in asked[axis] if not any(name in names for names in by.values()))
            by[axis] = _dividing(sizes, free, lengths[axis])
        by["K"] = _dividing(sizes, by.get("N", ()), lengths["K"])
        return cls(sizes, by)

    def __bool__(self) -> bool:
        return any(self.by.values())

    @property
    def names(self) -> frozenset[str]:
        """The mesh axes that cut something."""
        return frozenset(name for names in self.by.values() for name in names)

    def spec(self, axes: Axes) -> PartitionSpec:
        """How an array with these axes is sharded."""
        return PartitionSpec(*(self.by.get(axis) or None for axis in axes))

    def missing(self, axes: Axes) -> Axes:
        """The mesh axes that cut other arrays, but none with these axes: over them, parts are sums of parts."""
        own = {name for axis in axes for name in self.by.get(axis, ())}
        split = [name for axis, names in self.by.items() if not axis.startswith("mapped") for name in names]
        return tuple(name for name in dict.fromkeys(split) if name not in own)

    def start(self, axis: str, length: int) -> Any:
        """Where this device's `length` of an axis begin."""
        names = self.by.get(axis)
        return lax.axis_index(names) * jnp.int32(length) if names else jnp.int32(0)


def _names(entry: Any) -> Axes:
    """Of an entry of a `PartitionSpec`."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def devices(sizes: dict[str, int], names: Axes) -> int:
    """How many parts these mesh axes make."""
    return math.prod(sizes[name] for name in names)


def _dividing(sizes: dict[str, int], names: Axes, length: int) -> Axes:
    """As many of the mesh axes, from the first on, as cut the length into equal parts."""
    return next(names[:n] for n in range(len(names), -1, -1) if length % devices(sizes, names[:n]) == 0)


def told(problem: Problem, shardings: dict[str, tuple[Axes, NamedSharding]]) -> dict[str, str]:
    """What becomes of arrays that are sharded so, for `explain`: name or axis → how it is split, or gathered."""
    if not shardings:
        return {}
    sizes = dict(next(iter(shardings.values()))[1].mesh.shape)
    lengths = {"B": problem.B, "N": problem.N, "K": problem.K}
    split = Split.of(sizes, lengths, [(axes, sharding.spec) for axes, sharding in shardings.values()])
    found = {}
    for axis, name in (("B", "batch"), ("N", "heads")):
        if names := split.by.get(axis):
            found[name] = f"split over {', '.join(names)}; no collective"
    if shared := [name for name in split.by.get("N", ()) if name not in split.by["K"]]:
        degrees = [n for n in range(1, problem.K + 1) if problem.K % n == 0]
        found["key/value heads"] = (
            f"{problem.K}, the same on all devices of {', '.join(shared)}, over which their gradients are summed; "
            f"split whole by {' or '.join(map(str, degrees))}"
        )
    for name, (axes, sharding) in shardings.items():
        lost = [
            f"{axis} over {', '.join(rest)}"
            for axis, entry in zip(axes, sharding.spec, strict=False)
            if (rest := [n for n in _names(entry) if n not in split.by.get(axis, ())])
        ]
        if lost:
            found[name] = f"gathered along {' and '.join(lost)}"
    return found
