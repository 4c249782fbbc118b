"""What do Flax's attention functions ask for? By `flash_attention`, or, where that cannot be, by Flax itself."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from pallas_flash import flash_attention

NOT_OPTIONS = {
    "dropout_key": "pass Flax's dropout_rng",
    "input_positions": "rotate query and key in a function of your own, which then calls this one",
    "return_residual": "call pallas_flash.flash_attention for the log-sum-exp",
}
"""Keywords that are refused, and what to do instead."""

OF_POSITIONS = ("is_causal", "local_window_size", "alibi_slopes")
"""Options that take query t to stand at key t, unless `query_offset` says otherwise."""


class Refusal(NamedTuple):
    """Why `flash_attention` cannot compute a call, what to change so that it can, and whether to warn."""

    reason: str
    remedy: str
    warns: bool = True


def refusal(module: Any, broadcasts_dropout: bool, multiplies: bool = False) -> Refusal | None:
    """The first reason for which Flax's own function has to compute a call; None: there is none.

    Args:
        module: Where attention weights are to be sown, or None.
        broadcasts_dropout: Whether weights are dropped, the same in every batch entry and head.
        multiplies: Whether the caller brings its own functions for the two products.
    """
    if module is not None:
        reason = "module: the attention weights that it sows are made by Flax's own function alone"
        return Refusal(reason, "call without sow_weights", warns=False)
    if multiplies:
        reason = "einsum: products by a function of the caller are made by Flax's own function alone"
        return Refusal(reason, "leave einsum_dot_general and the einsums of weights and values out")
    if broadcasts_dropout:
        reason = "broadcast_dropout=True: Flax's own function alone drops the same in every batch entry and head"
        return Refusal(reason, "build the layer with broadcast_dropout=False, or call with it")
    return None


def by_flax(function: Callable[..., Array], refused: Refusal, options: Mapping[str, Any], *arguments: Any) -> Array:
    """What Flax's own `function` makes of `arguments`, with a warning, unless the user's options rule that out.

    Raises:
        NotImplementedError: An implementation is named, or an option would change the result, which Flax's function
            does not know.
    """
    given = {name for name, value in options.items() if value is not None and value is not False}
    if stands := sorted(given - {"plan", "interpret"}):
        raise NotImplementedError(
            f"{refused.reason}, which takes no option of flash_attention, got {', '.join(stands)}; {refused.remedy}, "
            "or leave the options out"
        )
    if refused.warns:
        warnings.warn(
            f"flash_attention_fn: T×S weights are stored. {refused.reason}; {refused.remedy}", UserWarning, stacklevel=3
        )
    return function(*arguments)


def dropout(rng: Array | None, rate: float, deterministic: bool) -> dict[str, Any]:
    """Flax's arguments of dropout as keywords of `flash_attention`.

    Raises:
        ValueError: Weights are to be dropped without a key.
    """
    if deterministic or not rate > 0:
        return {}
    if rng is None:
        raise ValueError(
            f"dropout_rng: expected a key of jax.random with dropout_rate={rate} and deterministic=False, got None; "
            "pass one, or deterministic=True"
        )
    return {"dropout_rate": rate, "dropout_key": rng}


def attend(
    tensors: Sequence[ArrayLike],
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    options: Mapping[str, Any],
    **from_flax: Any,
) -> Array:
    """Attention by `flash_attention`.

    Args:
        tensors: Query [*B, T, N, H], key [*B, S, K, H] and value [*B, S, K, Hv], of one dtype.
        bias: Floating, broadcastable to [*B, N, T, S], or None.
        mask: Boolean or a number, 0 = do not attend, broadcastable to [*B, N, T, S], or None.
        options: Keywords of `flash_attention` that the user chose.
        **from_flax: Keywords of `flash_attention` made of what Flax passes.

    Returns:
        [*B, T, N, Hv] in the dtype of the query.

    Raises:
        TypeError: An option is none here.
        ValueError: An option needs to know where a query stands among the keys. Others are those of `flash_attention`.
    """
    for name, remedy in NOT_OPTIONS.items():
        if name in options:
            raise TypeError(f"{name}: expected options of flash_attention that Flax does not set; {remedy}")
    query, key, value = map(jnp.asarray, tensors)
    _check_positions(query.shape[-3], key.shape[-3], options)
    mask = None if mask is None else jnp.asarray(mask).astype(bool)
    return flash_attention(query, key, value, bias, mask, **from_flax, **options)


def _check_positions(queries: int, keys: int, options: Mapping[str, Any]) -> None:
    """A step of Flax's cache has one query, which may stand at any key; a wrong guess would drop most of the cache."""
    if queries == keys or "query_offset" in options:
        return
    for name in OF_POSITIONS:
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(
                f"{name}: expected as many queries as keys, or query_offset beside it, got {queries} queries and "
                f"{keys} keys; to decode with Flax's cache, whose mask is causal, leave it out"
            )
