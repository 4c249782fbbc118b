"""What does an implementation have in hardware? Elementary functions, with plain twins."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import Partial
from jax.typing import ArrayLike


def product(factor: int, x: Array) -> tuple[Array, Array]:
    """High and low word of the product of two uint32."""
    with jax.enable_x64(True):
        wide = x.astype(jnp.uint64) * np.uint64(factor)
        return (wide >> np.uint64(32)).astype(jnp.uint32), wide.astype(jnp.uint32)


def only(keep: Array | None, x: Array) -> Array:
    """`x` with 0 where it is not kept, whatever is there; so is its cotangent. `keep` None: all of it."""
    return x if keep is None else jnp.where(keep, x, x.dtype.type(0))


def sieve(words: tuple[Array, Array], bits: tuple[Array, Array, Array], bound: Array) -> Callable[[Array], Array]:
    """The map x ↦ x where a score's seven bits are at least `bound`, else 0; a pytree.

    Args:
        words: Two of uint32, the shape of x.
        bits: uint32, bit 3 of the index of the query, and bits 3 and 4 of that of the key. The last says which word;
            the first and twice the second are the number of its bits below those of the score.
        bound: uint32, 0 <= bound <= 128.
    """
    of_query, of_key, of_word = bits
    word = jnp.where(of_word > 0, words[1], words[0])
    return Partial(only, (word >> (of_query + 2 * of_key)) % np.uint32(128) >= bound)


def margin(bound: Array) -> Array:
    """What to add to seven bits in each byte of a word so that bit 7 tells whether they are at least `bound`."""
    return (np.uint32(128) - bound) * np.uint32(0x01010101)


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
        sums: Sums of rows [..., rows], or of some columns each [..., rows, parts].
        constant: x, without a derivative; the identity where nothing is differentiated.
        tanh: Hyperbolic tangent, differentiable.
        product: High and low word of a number times a uint32.
        sieve: x ↦ x, or 0 where random bits are below a bound.
    """

    exp2: Callable[[Array], Array] = jnp.exp2
    fma_exp2: Callable[[Array, ArrayLike, Array], Array] = lambda a, b, c: jnp.exp2(a * b + c)
    sums: Callable[[Array], Array] = lambda x: jnp.sum(x, -1)
    constant: Callable[[Array], Array] = lax.stop_gradient
    tanh: Callable[[Array], Array] = jnp.tanh
    product: Callable[[int, Array], tuple[Array, Array]] = product
    sieve: Callable[[tuple[Array, Array], tuple[Array, Array, Array], Array], Callable[[Array], Array]] = sieve


PLAIN = Elementary()
