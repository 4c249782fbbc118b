"""Is it well posed? The frozen `Problem` that every room below speaks of, and all validation of what users pass."""

import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_flash.masks import Band, Lengths
from pallas_flash.plan import MosaicPlan, Plan

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")
FAR = 2**29
"""Edges of the window and traced offsets beyond this are taken as this, so that their sums with indices fit int32."""
DTYPES = ("bfloat16", "float16", "float32", "float64")


def _static() -> Any:
    return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """An attention problem without its tensors: a pytree whose structure is static and hashable.

    The batch axes are folded into one, of size `B`. The leaves are int32 or float32 arrays of shape [B], so that an
    implementation can hand each program the scalars of its batch entry by indexing every leaf the same way.

    Attributes:
        mask: `masks.Mask`: which scores count, beyond the array bounds T and S.
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
    def is_empty(self) -> bool:
        """Whether there is no score at all, so that every output row is 0."""
        return 0 in (self.B, self.T, self.S, self.N)


def pose(
    query, key, value, *, scale, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size,
    return_residual, implementation, query_offset, deterministic, precision, plan, interpret,
) -> tuple[Problem, tuple[int, ...]]:  # fmt: skip
    """Validates a call of `flash_attention`; returns the problem and its batch axes. Raises as documented there."""
    batch, sizes = _sizes(query, key, value)
    flags = {
        "is_causal": is_causal,
        "return_residual": return_residual,
        "deterministic": deterministic,
        "interpret": interpret,
    }
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(
                f"{name}: expected a Python bool, got {_describe(flag)}; "
                "it selects code at trace time, so mark it static under jit"
            )
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected None or one of {IMPLEMENTATIONS}, got {implementation!r}; None picks the fastest"
        )
    if not isinstance(plan, Plan | MosaicPlan | None):
        raise TypeError(
            f"plan: expected None, a pallas_flash.Plan or a MosaicPlan, got {_describe(plan)}; "
            "None picks the block sizes"
        )
    static_scale, traced_scale = _scale(scale, sizes["H"], batch, query.dtype)
    lengths = Lengths(
        _per_batch("query_seq_lengths", query_seq_lengths, batch, sizes["T"]),
        _per_batch("key_value_seq_lengths", key_value_seq_lengths, batch, sizes["S"]),
    )
    problem = Problem(
        mask=lengths & _band(bool(is_causal), local_window_size, query_offset, batch),
        scale=traced_scale,
        static_scale=static_scale,
        B=math.prod(batch),
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
            f"scale: expected None, a number or a floating scalar array, got {_describe(scale)}; "
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
    return Band(lo, hi, _per_batch("query_offset", offset, batch) if shift is None else None)


def _per_batch(name: str, values: Any, batch: tuple[int, ...], limit: int | None = None) -> Array | None:
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


def _describe(value) -> str:
    """Shape and dtype of an array, or type and value of anything else."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return f"{type(value).__name__} {value!r}"
