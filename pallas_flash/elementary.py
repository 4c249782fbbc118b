"""What does an implementation have in hardware? Elementary functions, with plain twins."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike


def product(factor: int, x: Array) -> tuple[Array, Array]:
    """High and low word of the product of two uint32."""
    with jax.enable_x64(True):
        wide = x.astype(jnp.uint64) * np.uint64(factor)
        return (wide >> np.uint64(32)).astype(jnp.uint32), wide.astype(jnp.uint32)


def differentiable(tanh: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A hyperbolic tangent with the derivative 1 - tanh²."""
    f = jax.custom_jvp(tanh)

    @f.defjvp
    def _(primals, tangents):
        y = tanh(*primals)
        return y, tangents[0] * (1 - y * y)

    return f


class Elementary(NamedTuple):
    """Elementary functions that an implementation may have in hardware; the defaults are plain jnp.

    Attributes:
        exp2: 2^x.
        fma_exp2: 2^(a·b + c), fused.
        constant: x, without a derivative; the identity where nothing is differentiated.
        tanh: Hyperbolic tangent, differentiable.
        product: High and low word of a number times a uint32.
        early: Its arguments, computed where they are written and not where they are used: under products, for example.
    """

    exp2: Callable[[Array], Array] = jnp.exp2
    fma_exp2: Callable[[Array, ArrayLike, Array], Array] = lambda a, b, c: jnp.exp2(a * b + c)
    constant: Callable[[Array], Array] = lax.stop_gradient
    tanh: Callable[[Array], Array] = jnp.tanh
    product: Callable[[int, Array], tuple[Array, Array]] = product
    early: Callable[..., tuple[Array, ...]] = lambda *tiles: tiles


PLAIN = Elementary()
