"""Is it well posed? The frozen `Problem` that every room below speaks of, and all validation of what users pass."""

import dataclasses
import functools
import math
import operator
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import Partial

from pallas_flash import arguments, logits, patterns
from pallas_flash.arguments import FAR, describe, operand, per_batch
from pallas_flash.cells import Cells
from pallas_flash.masks import Band, Lengths, Mask
from pallas_flash.modifiers import MaskModifier
from pallas_flash.patterns import Dense, Modified, Segments
from pallas_flash.plan import MosaicPlan, Plan
from pallas_flash.survey import BlockMask
from pallas_flash.tile import Tile

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")
DTYPES = ("bfloat16", "float16", "float32", "float64")


def _static() -> Any:
    return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """An attention problem without its tensors: a pytree whose structure is static and hashable.

    The batch axes are folded into one, of size `B`. A leaf is an array of shape [B], of which an
    implementation hands each program the scalar of its batch entry, or an array [B or 1, N or 1, T or 1, S or 1] that
    is read by tiles.

    Attributes:
        mask: `masks.Mask`: which scores count, beyond the array bounds T and S.
        score: `score.Score`: the terms between scaled scores and logits.
        sinks: float32 [1, N, 1, 1], logits that join the denominators; None: there are none.
        dropout: `Dropout`; None: nothing is dropped.
        scale: float32 [B] when the user's scale is traced, else None.
        static_scale: The scale when it is not traced, else None.
        B, T, S, N, K, H, Hv: Sizes, in jax.nn's letters.
        dtype: Name of the dtype of query, key, value and output.
        precision: Of the dots of float32 inputs.
        deterministic: Whether gradients must be bitwise reproducible.
        implementation: Name of an implementation; None: not chosen yet.
        plan: `Plan` of block sizes; None: not chosen yet.
        interpret: Whether Pallas kernels run in interpret mode.
    """

    mask: Any
    score: Any
    sinks: Any
    dropout: Any
    scale: Any
    static_scale: float | None = _static()
    B: int = _static()
    T: int = _static()
    S: int = _static()
    N: int = _static()
    K: int = _static()
    H: int = _static()
    Hv: int = _static()
    dtype: str = _static()
    precision: lax.Precision = _static()
    deterministic: bool = _static()
    implementation: str | None = _static()
    plan: Any = _static()
    interpret: bool = _static()

    @property
    def G(self) -> int:
        """Query heads per key/value head."""
        return self.N // self.K

    @property
    def any_scale(self) -> Any:
        """The scale: a float, or traced."""
        return self.static_scale if self.scale is None else self.scale

    @property
    def gain(self) -> float:
        """What probabilities that are not dropped are multiplied by."""
        return self.dropout.gain if self.dropout else 1.0

    def drop(self, tile: Tile) -> Callable[[Array], Array]:
        """The map x ↦ x with 0 for what is dropped of a tile; a pytree."""
        return self.dropout.sieve(tile) if self.dropout else Partial(lambda x: x)

    @property
    def is_empty(self) -> bool:
        """Whether there is no score at all, so that every output row is 0."""
        return 0 in (self.B, self.T, self.S, self.N)


def pose(
    query, key, value, *, bias, mask, scale, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size,
    query_segment_ids, key_value_segment_ids, mask_modifiers, block_mask, logits_scale, logits_soft_cap,
    alibi_slopes, sinks, score_modifiers, dropout_rate, dropout_key, return_residual, implementation, query_offset,
    deterministic, precision, plan, interpret,
) -> tuple[Problem, tuple[int, ...]]:  # fmt: skip
    """Validates a call of `flash_attention`; returns the problem and its batch axes. Raises as documented there."""
    batch, sizes = _sizes(query, key, value)
    axes = {"B": math.prod(batch), **{letter: sizes[letter] for letter in "NTS"}}
    flags = {
        "is_causal": is_causal,
        "return_residual": return_residual,
        "deterministic": deterministic,
        "interpret": interpret,
    }
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(
                f"{name}: expected a Python bool, got {describe(flag)}; "
                "it selects code at trace time, so mark it static under jit"
            )
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected None or one of {IMPLEMENTATIONS}, got {implementation!r}; None picks the fastest"
        )
    if not isinstance(plan, Plan | MosaicPlan | None):
        raise TypeError(
            f"plan: expected None, a pallas_flash.Plan or a MosaicPlan, got {describe(plan)}; "
            "None picks the block sizes"
        )
    static_scale, traced_scale = _scale(scale, sizes["H"], batch, query.dtype)
    lengths = Lengths(
        per_batch("query_seq_lengths", query_seq_lengths, batch, sizes["T"]),
        per_batch("key_value_seq_lengths", key_value_seq_lengths, batch, sizes["S"]),
    )
    band = _band(bool(is_causal), local_window_size, query_offset, batch)
    read = _patterns(batch, axes, mask, query_segment_ids, key_value_segment_ids, mask_modifiers, block_mask)
    problem = Problem(
        mask=functools.reduce(operator.and_, read, lengths & band),
        score=logits.score(
            logits_scale, bias, alibi_slopes, query_offset, logits_soft_cap, score_modifiers, batch, axes, query.dtype
        ),
        sinks=logits.sinks(sinks, sizes["N"], query.dtype),
        dropout=logits.dropout(dropout_rate, dropout_key, axes["B"], sizes["N"]),
        scale=traced_scale,
        static_scale=static_scale,
        B=axes["B"],
        **sizes,
        dtype=str(query.dtype),
        precision=_precision(precision),
        deterministic=bool(deterministic) or _deterministic_ops(),
        implementation=implementation,
        plan=plan,
        interpret=bool(interpret),
    )
    return problem, batch


def _sizes(query, key, value) -> tuple[tuple[int, ...], dict[str, int]]:
    """Batch axes and the six sizes, from three arrays that agree."""
    arrays = {"query": query, "key": key, "value": value}
    for name, array in arrays.items():
        letters = "[*B, T, N, H]" if name == "query" else "[*B, S, K, H]"
        if array.ndim < 3:
            raise ValueError(f"{name}: expected shape {letters}, got {array.shape}; add the missing axes")
        if str(array.dtype) not in DTYPES:
            raise TypeError(f"{name}: expected dtype one of {DTYPES}, got {array.dtype}; convert it, e.g. with .astype")
        if array.dtype != query.dtype:
            raise ValueError(
                f"{name}: expected the dtype of query, {query.dtype}, got {array.dtype}; "
                "cast query, key and value to one dtype"
            )
        if array.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name}: expected the batch axes of query, {query.shape[:-3]}, got {array.shape[:-3]}; "
                "broadcast them first"
            )
        if isinstance(array, Array) and any(spec := tuple(jax.typeof(array).sharding.spec)[1:-3]):
            raise ValueError(
                f"{name}: expected mesh axes in its type along the first batch axis, not along the others, got {spec} "
                "there; move that axis to the front, or jax.vmap over it"
            )
    *batch, T, N, H = query.shape
    S, K, Hv = value.shape[-3:]
    if key.shape[-3:-1] != (S, K):
        raise ValueError(
            f"value: expected the key's length and heads {key.shape[-3:-1]} in [*B, S, K, Hv], got {(S, K)}; "
            "key and value need one entry per position and head"
        )
    if key.shape[-1] != H:
        raise ValueError(f"key: expected head dim {H}, that of query, got {key.shape[-1]}; project both to one size")
    if H == 0 or Hv == 0:
        raise ValueError(f"query, value: expected head dims of at least 1, got {H} and {Hv}; give them channels")
    if K == 0 or N % K:
        raise ValueError(
            f"key: expected a number of heads that divides the query's {N}, got {K}; "
            "query head h attends to key/value head h // (N // K)"
        )
    return tuple(batch), dict(T=T, S=S, N=N, K=K, H=H, Hv=Hv)


def _scale(scale: Any, H: int, batch: tuple[int, ...], dtype) -> tuple[float | None, Array | None]:
    """The scale as (static, traced)."""
    if scale is None:
        return 1.0 / math.sqrt(H), None
    numpy_number = isinstance(scale, np.generic) and jnp.issubdtype(scale.dtype, jnp.floating)
    if (isinstance(scale, int | float) and not isinstance(scale, bool)) or numpy_number:
        if not -(2.0**127) < scale < 2.0**127:  # pyright: ignore[reportOperatorIssue]  (a NumPy number)
            raise ValueError(f"scale: expected a finite number below 2**127, got {scale}; None gives 1/sqrt(H)")
        return float(scale), None
    if not isinstance(scale, Array | np.ndarray) or scale.ndim or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(
            f"scale: expected None, a number or a floating scalar array, got {describe(scale)}; "
            "multiply the query for a scale per head or position"
        )
    return None, jnp.broadcast_to(jnp.asarray(scale, jnp.promote_types(dtype, jnp.float32)), math.prod(batch))


def _band(is_causal: bool, window: Any, offset: Any, batch: tuple[int, ...]) -> Band:
    """Causal and window as one band around the diagonal that `offset` moves."""
    left: Any
    right: Any
    left, right = window if isinstance(window, tuple) and len(window) == 2 else (window, window)
    for side in (left, right):
        if side is not None and (not isinstance(side, int | np.integer) or isinstance(side, bool) or side < 0):
            raise ValueError(
                f"local_window_size: expected None, an int >= 0 or a pair (left, right) of them, got {window!r}; "
                "use None for a side without bound"
            )
    lo = None if left is None else -int(left)
    hi = None if right is None else int(right)
    if is_causal:
        hi = 0 if hi is None else min(hi, 0)
    shift = int(offset) if isinstance(offset, int | np.integer) and not isinstance(offset, bool) else None
    lo, hi = (None if edge is None else max(-FAR, min(edge + (shift or 0), FAR)) for edge in (lo, hi))
    return Band(lo, hi, per_batch("query_offset", offset, batch) if shift is None else None)


def _patterns(
    batch: tuple[int, ...], axes: dict[str, int], mask, query_segment_ids, key_value_segment_ids, mask_modifiers,
    block_mask,
) -> list[Mask]:  # fmt: skip
    """The masks that read arrays, from what the user passed for them."""
    found: list[Mask] = _segments(query_segment_ids, key_value_segment_ids, batch, axes)
    surveyed: list[Mask] = []
    if mask is not None:
        surveyed.append(Dense(operand("mask", arguments.array("mask", mask, "boolean"), "BNTS", batch, axes)))
    if not isinstance(mask_modifiers, tuple | list):
        raise TypeError(
            f"mask_modifiers: expected a tuple of functions, got {describe(mask_modifiers)}; for one, pass (function,)"
        )
    surveyed += [_modified(each, batch, axes) for each in mask_modifiers]
    if block_mask is None:
        return found + surveyed
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"block_mask: expected what pallas_flash.block_mask returns, got {describe(block_mask)}; "
            "None finds the blocks in each call"
        )
    if not surveyed:
        raise ValueError(
            "block_mask: expected a mask or mask_modifiers with it, got neither; it only tells which of their blocks "
            "to visit, so pass them too"
        )
    if axes["T"] != block_mask.T or axes["S"] != block_mask.S:
        raise ValueError(
            f"block_mask: expected one for {axes['T']} queries and {axes['S']} keys, got one for {block_mask.T} and "
            f"{block_mask.S}; make one for these lengths with pallas_flash.block_mask"
        )
    for axis, letter in enumerate("BN"):
        if block_mask.cells.shape[axis] not in (1, axes[letter]):
            raise ValueError(
                f"block_mask: expected 1 or {axes[letter]} along {letter}, got {block_mask.cells.shape[axis]}; "
                "make one for this batch and these heads"
            )
    return [*found, block_mask & functools.reduce(operator.and_, surveyed)]


def _segments(query_ids, key_ids, batch: tuple[int, ...], axes: dict[str, int]) -> list[Mask]:
    if query_ids is None and key_ids is None:
        return []
    for name, given, other, size in (
        ("query_segment_ids", query_ids, "key_value_segment_ids", "T"),
        ("key_value_segment_ids", key_ids, "query_segment_ids", "S"),
    ):
        if given is None:
            raise ValueError(
                f"{name}: expected integers [*B, {size}] beside {other}, got None; pass both, the same for "
                "self-attention"
            )
    q_ids, k_ids = (
        operand(name, _ids(name, ids), "B" + size, batch, axes)
        for name, ids, size in (("query_segment_ids", query_ids, "T"), ("key_value_segment_ids", key_ids, "S"))
    )
    return [Segments(q_ids, k_ids, shared=query_ids is key_ids)]


def _ids(name: str, ids: Any) -> Array:
    """int32, of which none has lost a bit."""
    x = arguments.array(name, ids, "integer")
    bounds = jnp.iinfo(jnp.int32)
    if isinstance(ids, Array) and jnp.iinfo(x.dtype).max > bounds.max:
        raise TypeError(
            f"{name}: expected integers that fit int32, got {x.dtype}; convert them with .astype(jnp.int32)"
        )
    if not isinstance(ids, Array) and np.size(ids) and not bounds.min <= np.min(ids) <= np.max(ids) <= bounds.max:
        raise ValueError(f"{name}: expected ids that fit int32, got {np.min(ids)} … {np.max(ids)}; number the segments")
    return x.astype(jnp.int32)


def _modified(modifier, batch: tuple[int, ...], axes: dict[str, int]) -> Mask:
    if not isinstance(modifier, MaskModifier):
        modifier = MaskModifier(modifier)
    operands = tuple(map(lax.stop_gradient, arguments.operands(modifier, batch, axes)))
    modified = Modified(modifier.function, operands, tuple(x.dtype == bool for x in operands))
    if 0 in axes.values():
        return modified
    cells = Cells(axes["B"], axes["N"], axes["T"], axes["S"], 64, 64)
    found = jax.eval_shape(lambda: jnp.asarray(patterns.kept(modified.with_arrays(cells.padded), cells, 0, 1)))
    if found.dtype != bool:
        raise TypeError(
            f"mask_modifiers: expected {modifier.name} to return booleans (True = attend), got {found.dtype}; compare, "
            "e.g. with tile.q_ids >= tile.k_ids"
        )
    return modified


def _precision(precision) -> lax.Precision:
    """Of the argument, or else of `jax.default_matmul_precision`."""
    if precision is None:
        default = jax.config.jax_default_matmul_precision or "default"  # pyright: ignore[reportAttributeAccessIssue]
        if "_" in default:  # an algorithm preset
            return (
                lax.Precision.HIGHEST
                if default.startswith(("F32", "F64")) or "_X" in default
                else lax.Precision.DEFAULT
            )
        precision = default
    try:
        return lax.Precision(precision)
    except (ValueError, TypeError):
        raise ValueError(
            f"precision: expected None or a jax.lax.Precision ('default', 'high', 'highest'), got {precision!r}; "
            "None follows jax.default_matmul_precision"
        ) from None


def _deterministic_ops() -> bool:
    """Whether XLA_FLAGS ask for it."""
    flags = [flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split()]
    values = [value for name, _, value in flags if name == "--xla_gpu_deterministic_ops"]
    return bool(values) and values[-1].lower() in ("", "true", "1")
