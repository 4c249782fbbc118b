"""What are scores to become? Bias, slopes, cap, functions, sinks and dropout, as the user passed them, checked."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_flash import arguments, tile
from pallas_flash.arguments import FAR, describe, operand, per_batch
from pallas_flash.dropout import Dropout
from pallas_flash.modifiers import MaskModifier, ScoreModifier
from pallas_flash.score import Alibi, Score, SoftCap, Term, add_bias, times


def score(
    factors, bias, slopes, query_offset, soft_cap, modifiers, batch: tuple[int, ...], axes: dict[str, int], dtype
) -> Score:
    """The terms, in the order of the contract: factors, bias and ALiBi, soft cap, modifiers."""
    state = jnp.promote_types(dtype, jnp.float32)

    def floating(name: str, x, letters: str) -> Array:
        return _at_most(state, operand(name, arguments.array(name, x, "floating"), letters, batch, axes))

    terms = []
    if factors is not None:
        terms.append(Term(times, (floating("logits_scale", factors, "BN"),)))
    if bias is not None:
        terms.append(Term(add_bias, (floating("bias", bias, "BNTS"),)))
    if slopes is not None:
        is_static = isinstance(query_offset, int | np.integer)
        shift = max(-FAR, min(int(query_offset), FAR)) if is_static else 0
        offset = None if is_static else per_batch("query_offset", query_offset, batch)
        moves = () if offset is None else (offset.reshape(-1, 1, 1, 1),)
        terms.append(Term(Alibi(shift), (floating("alibi_slopes", slopes, "BN"), *moves)))
    if soft_cap is not None:
        is_number = isinstance(soft_cap, int | float | np.floating | np.integer) and not isinstance(soft_cap, bool)
        if not is_number or not 0 < soft_cap < 2.0**127:
            raise ValueError(
                "logits_soft_cap: expected None or a positive Python number below 2**127, got "
                f"{describe(soft_cap)}; None is no cap; mark it static under jit"
            )
        terms.append(Term(SoftCap(float(soft_cap))))
    if not isinstance(modifiers, tuple | list):
        raise TypeError(
            f"score_modifiers: expected a tuple of functions, got {describe(modifiers)}; for one, pass (function,)"
        )
    return Score((*terms, *(_scored(each, batch, axes, state) for each in modifiers)))


def _at_most(state, x: Array) -> Array:
    """`x`, no wider than the softmax if it is floating."""
    return x.astype(state) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > state.itemsize else x


def _scored(modifier, batch: tuple[int, ...], axes: dict[str, int], state) -> Term:
    if isinstance(modifier, MaskModifier):
        raise TypeError(
            f"score_modifiers: expected ScoreModifiers, got the MaskModifier {modifier.name}; pass it as mask_modifiers"
        )
    if not isinstance(modifier, ScoreModifier):
        modifier = ScoreModifier(modifier)
    operands = tuple(_at_most(state, x) for x in arguments.operands(modifier, batch, axes))
    term = Term(modifier.function, operands, tuple(x.dtype == bool for x in operands))

    shape = tile.EXAMPLE, tile.EXAMPLE

    def evaluated() -> Any:
        where = tile.example()
        return term.function(jnp.zeros(shape, state), where, *term.read(where))

    jaxpr, found = jax.make_jaxpr(evaluated, return_shape=True)()
    if captured := [describe(x) for x in jaxpr.consts]:
        raise TypeError(
            f"score_modifiers: expected {modifier.name} to get its arrays as operands, got {captured[0]} that it has "
            "captured; pass it by ScoreModifier(function, operands, axes)"
        )
    if not hasattr(found, "shape") or (found.shape, found.dtype) != (shape, state):
        got = f"{found.dtype} of {found.shape}" if hasattr(found, "shape") else repr(found)
        raise TypeError(
            f"score_modifiers: expected {modifier.name} to return {state} of the score's shape {shape}, got {got}; it "
            "maps scores to scores, e.g. score + weight * distance"
        )
    return term


def sinks(sinks, N: int, dtype) -> Array | None:
    """[1, N, 1, 1] from one for each head."""
    if sinks is None:
        return None
    x = arguments.array("sinks", sinks, "floating")
    if x.shape != (N,):
        raise ValueError(f"sinks: expected shape {(N,)}, one logit for each query head, got {x.shape}; broadcast it")
    return x.astype(jnp.promote_types(dtype, jnp.float32)).reshape(1, N, 1, 1)


def dropout(rate, key, B: int, N: int) -> Dropout | None:
    """None if nothing is dropped."""
    if not isinstance(rate, int | float | np.floating | np.integer) or isinstance(rate, bool) or not 0 <= rate < 1:
        raise ValueError(
            f"dropout_rate: expected a Python number, 0 <= rate < 1, got {describe(rate)}; it selects code at trace "
            "time, so mark it static under jit"
        )
    if key is not None:
        try:
            is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
            key = key if is_typed else jax.random.wrap_key_data(key)
        except (AttributeError, TypeError):
            raise TypeError(
                f"dropout_key: expected a key, got {describe(key)}; make one with jax.random.key(seed)"
            ) from None
        if key.ndim:
            raise ValueError(f"dropout_key: expected one key, got {key.shape} of them; pick one, or use jax.vmap")
    if rate == 0:
        return None
    if key is None:
        raise ValueError(
            f"dropout_key: expected a key with dropout_rate={rate}, got None; pass jax.random.key(seed), a new one in "
            "every step, or dropout_rate=0"
        )
    return Dropout.of(key, float(rate), B, N)
