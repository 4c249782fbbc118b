"""What did earlier calls leave? Keys and values of the positions so far, for decoding."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike


class KVCache(NamedTuple):
    """Keys and values of each batch entry up to its own position; a pytree.

    Attributes:
        key: [*B, S_max, K, H].
        value: [*B, S_max, K, Hv].
        written: int32 [*B], how many positions are: where the next one goes. More than S_max: it overflowed.
    """

    key: Array
    value: Array
    written: Array

    @classmethod
    def empty(
        cls, batch: tuple[int, ...], length: int, heads: int, head_dim: int, dtype: Any, out_sharding: Any = None
    ) -> "KVCache":
        """For `length` = S_max positions, none of them written.

        Args:
            batch: Sizes of the batch axes.
            length: S_max.
            heads: K.
            head_dim: H.
            dtype: Of keys and values.
            out_sharding: `PartitionSpec` of keys and values, for meshes whose axes are in types; None: whole.
        """
        zeros = jnp.zeros((*batch, length, heads, head_dim), dtype, out_sharding=out_sharding)
        of_batch = None if out_sharding is None else PartitionSpec(*out_sharding[: len(batch)])
        return cls(zeros, zeros, jnp.zeros(batch, jnp.int32, out_sharding=of_batch))

    def positions(self, count: int) -> Array:
        """int32 [*B, count]: where the next positions stand."""
        return self.written[..., None] + jnp.arange(count, dtype=jnp.int32)

    def extend(
        self, key: ArrayLike, value: ArrayLike, lengths: ArrayLike | None = None
    ) -> tuple["KVCache", dict[str, Any]]:
        """Writes T more positions: a prompt, a part of one, or a single token.

        Args:
            key: [*B, T, K, H], any floating dtype, cast to that of the cache.
            value: [*B, T, K, Hv].
            lengths: [*B] or broadcastable, integer, 0 … T: how many of them count in each batch entry (prompts of
                several lengths, padded at the end). What does not count is overwritten later. None: T.

        Returns:
            The cache after it, and keywords of `flash_attention` for queries at these positions: each attends to its
            own and the earlier ones, whatever else the buffers hold.

        Raises:
            ValueError: The shapes do not fit, or so many positions are known not to fit into S_max. Where `written` is
                traced nobody can tell: what does not fit is not written, and `overflowed` says so from then on.
        """
        key, value = jnp.asarray(key), jnp.asarray(value)
        _check_shapes(self, key, value)
        count = key.shape[-3]
        added = count if lengths is None else jnp.clip(jnp.asarray(lengths), 0, count)
        cache = KVCache(
            _write(self.key, key, self.written),
            _write(self.value, value, self.written),
            self.written + jnp.broadcast_to(added, self.written.shape).astype(jnp.int32),
        )
        _check_room(cache, count if lengths is None else 0)
        seen = {"is_causal": True, "query_offset": self.written, "key_value_seq_lengths": cache.written}
        return cache, seen | ({} if lengths is None else {"query_seq_lengths": lengths})

    def overflowed(self) -> Array:
        """Bool [*B]: whether more positions were to be written than there is room for."""
        return self.written > self.key.shape[-3]


def _write(buffer: Array, new: Array, first: Array) -> Array:
    """`new` at positions `first`, `first` + 1, … of each batch entry; beyond the end nothing is written."""

    def write(buffer, new, start):
        slots = start + jnp.arange(new.shape[0])
        return buffer.at[slots].set(new, mode="drop", indices_are_sorted=True, unique_indices=True)

    for _ in first.shape:
        write = jax.vmap(write)
    return write(buffer, new.astype(buffer.dtype), first)


def _check_shapes(cache: KVCache, key: Array, value: Array) -> None:
    for name, buffer, new in (("key", cache.key, key), ("value", cache.value, value)):
        expected = (*buffer.shape[:-3], new.shape[-3] if new.ndim > 2 else 1, *buffer.shape[-2:])
        if new.shape != expected:
            raise ValueError(
                f"{name}: expected shape {expected} for a cache of shape {buffer.shape}, got {new.shape}; pass the "
                "batch and heads that the cache was made for"
            )


def _check_room(cache: KVCache, least: int) -> None:
    """Raises a ValueError if `written`, or where it is traced the `least` that was written, is more than there is."""
    traced = isinstance(cache.written, Tracer)
    last, room = least if traced else int(jnp.max(cache.written, initial=0)), cache.key.shape[-3]
    if last > room:
        raise ValueError(
            f"cache: expected at most {room} positions, its length, got {last}; make it longer (in nnx by init_cache, "
            "in linen by the length of the inputs to init)"
        )
