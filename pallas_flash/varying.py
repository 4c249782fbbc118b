"""Over which mesh axes does it vary? Types of arrays inside a `shard_map`, where JAX checks them (`check_vma`)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def over(x: Any) -> frozenset[str]:
    """Names of the mesh axes along which an array, or the type of one, is known to differ; outside of those: none."""
    kind = (x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)).manual_axis_type
    return kind.varying if kind else frozenset()


def as_over(names: frozenset[str], x: Array) -> Array:
    """The same array, of a type that varies over these axes too. Costs nothing; gradients are summed over them."""
    missing = tuple(sorted(names - over(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def unchecked(compute: Callable[..., Sequence[Array]]) -> Callable[..., list[Array]]:
    """`compute`, of arrays that all vary over the same axes, as its results do; inside, none has a type that varies.

    Kernels cannot take such types: Mosaic's refuses references to them, and Pallas' interpret mode mixes them.
    """

    def run(*arrays: Array) -> list[Array]:
        names = frozenset[str]().union(*map(over, arrays))
        if not names:
            return list(compute(*arrays))
        return [as_over(names, x) for x in compute(*map(_untyped.bind, arrays))]

    return run


_untyped = Primitive("untyped")
_untyped.def_abstract_eval(lambda aval: aval.update(manual_axis_type=type(aval.manual_axis_type)()))
mlir.register_lowering(_untyped, lambda ctx, x: [x])
batching.defvectorized(_untyped)


def like(x: Array, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The type of a kernel's output, of this shape, that varies as an array does."""
    return shape.update(manual_axis_type=jax.typeof(x).manual_axis_type)
