"""What array is it? One argument at a time: arrays of a kind, integers of each batch entry, operands by their axes."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_flash.modifiers import Modifier

FAR = 2**29
"""Edges of the window and traced offsets beyond this are taken as this, so that their sums with indices fit int32."""


def array(name: str, x: Any, kind: str = "") -> Array:
    """`x` as JAX sees it (float64 is float32 unless x64 is enabled); of a `kind` like "floating", or of any dtype."""
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}; convert it with jnp.asarray") from error
    if kind == "boolean" and x.dtype != bool:
        raise TypeError(
            f"{name}: expected dtype bool (True = attend), got {x.dtype}; compare it, e.g. mask != 0; "
            "numbers to add to the scores are a bias"
        )
    if kind == "integer" and not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: expected an integer dtype, got {x.dtype}; count tokens and number segments")
    if kind == "floating" and not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{name}: expected a floating dtype, got {x.dtype}; convert it with .astype"
            + (", or pass it as mask (True = attend)" if x.dtype == bool else "")
        )
    return x


def operands(modifier: Modifier, batch: tuple[int, ...], axes: dict[str, int]) -> list[Array]:
    """Those of a user's function."""
    named = [(modifier.operand(i), x) for i, x in enumerate(modifier.operands)]
    found = [
        operand(name, array(name, x), letters, batch, axes)
        for (name, x), letters in zip(named, modifier.axes, strict=True)
    ]
    for (name, _), x in zip(named, found, strict=True):
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(f"{name}: expected a real dtype, got {x.dtype}; pass real and imaginary part apart")
    return found


def operand(name: str, x: Array, letters: str, batch: tuple[int, ...], axes: dict[str, int]) -> Array:
    """[B or 1, N or 1, T or 1, S or 1] from an array that broadcasts to the axes of `letters`."""
    batch = batch if "B" in letters else ()
    shape = (*batch, *(axes[letter] for letter in letters if letter != "B"))
    try:
        if x.ndim > len(shape) or jnp.broadcast_shapes(x.shape, shape) != shape:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {shape}, the axes {letters}, got {x.shape}; "
            "size 1 broadcasts an axis"
        ) from None
    x = x.reshape(*[1] * (len(shape) - x.ndim), *x.shape)
    if x.shape[: len(batch)] != batch and math.prod(x.shape[: len(batch)]) > 1:
        if jnp.issubdtype(x.dtype, jnp.floating):  # JAX sums its gradient, in this dtype
            x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x = jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :]))
    sizes = {"B": math.prod(x.shape[: len(batch)])}
    sizes |= dict(zip(letters.removeprefix("B"), x.shape[len(batch) :], strict=True))
    return x.reshape([sizes.get(letter, 1) for letter in "BNTS"])


def per_batch(name: str, values: Any, batch: tuple[int, ...], limit: int | None = None) -> Array | None:
    """int32 [B] from an integer scalar or array that broadcasts to the batch axes, clipped to 0 … limit or ±FAR."""
    if values is None and limit is not None:
        return None
    try:
        values = values if isinstance(values, Array) else np.asarray(values)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected integers, got {values!r}; pass one int32 per batch entry") from error
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"{name}: expected an integer dtype, got {values.dtype}; pass one int32 per batch entry")
    low, high = (-FAR, FAR) if limit is None else (0, limit)
    if isinstance(values, np.ndarray):
        values = np.minimum(values, np.uint64(FAR)) if values.dtype == np.uint64 else values
        values = np.clip(values.astype(np.int64), low, high)
    elif jnp.issubdtype(values.dtype, jnp.unsignedinteger):
        values = jnp.minimum(values.astype(jnp.promote_types(values.dtype, jnp.uint32)), high)
    else:
        values = jnp.clip(values.astype(jnp.promote_types(values.dtype, jnp.int32)), low, high)
    try:
        return jnp.asarray(jnp.broadcast_to(values, batch).reshape(-1), jnp.int32)
    except ValueError:
        raise ValueError(
            f"{name}: expected shape {batch}, the batch axes of query, or one that broadcasts to it, "
            f"got {values.shape}; pass one int32 per batch entry"
        ) from None


def describe(value) -> str:
    """Shape and dtype of an array, or type and value of anything else."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return f"{type(value).__name__} {value!r}"
