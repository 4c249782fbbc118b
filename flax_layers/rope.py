"""Rotary position embedding (RoPE): by what angle is each pair of a head's numbers turned at each position?"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

Scaling = Callable[[np.ndarray], np.ndarray]
"""What becomes of the frequencies, float64 [H/2] in radians for each position, where a context was extended."""


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by one number: position interpolation.

    Args:
        factor: Positive.

    Source: Chen et al., Extending Context Window of Large Language Models via Position Interpolation
        (arXiv:2306.15595).
    """

    factor: float

    def __post_init__(self):
        _check_positive(self, "factor")

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, those between interpolated; the names are Hugging Face's.

    Args:
        factor: Positive. Llama 3.1 has 8, Llama 3.2 has 32.
        low_freq_factor: A frequency is low if it turns less than this often within the original context; positive.
        high_freq_factor: And high if it turns more than this often; more than `low_freq_factor`.
        original_max_position_embeddings: The original context, in positions.

    Source: Llama 3.1's reference code, `apply_scaling` (github.com/meta-llama/llama-models).
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self):
        for field in dataclasses.fields(self):
            _check_positive(self, field.name)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: expected more than low_freq_factor={self.low_freq_factor}, got "
                f"{self.high_freq_factor}; pass the model's own, 4.0 in Llama 3"
            )

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class RoPE:
    """Turns number h of a head together with number h + H/2 (the "rotate half" of Llama, Hugging Face and `nnx.RoPE`).

    The angle is position · theta^(-2h/H), after scaling. Checkpoints of models that turn neighbours 2h and 2h + 1
    instead (GPT-J, and Llama's own format) need their query and key projections permuted first.

    Example:
        query = RoPE(theta=500_000.0, scaling=Llama3Scaling())(query, positions)

    Args:
        theta: Base of the frequencies, positive.
        scaling: `LinearScaling`, `Llama3Scaling`, a function of your own that is hashable, or None.

    Source: Su et al., RoFormer (arXiv:2104.09864), equation 34.
    """

    theta: float = 10_000.0
    scaling: Scaling | None = None

    def __post_init__(self):
        _check_positive(self, "theta")

    def frequencies(self, head_dim: int) -> np.ndarray:
        """float64 [head_dim / 2], radians for each position.

        Raises:
            ValueError: `head_dim` is odd.
        """
        if head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, got {head_dim}; RoPE turns pairs")
        frequencies = float(self.theta) ** (-np.arange(0, head_dim, 2) / head_dim)
        return frequencies if self.scaling is None else self.scaling(frequencies)

    def __call__(self, x: ArrayLike, positions: ArrayLike) -> Array:
        """Turns every head.

        Args:
            x: [*B, T, N, H], floating, H even.
            positions: [*B, T] or broadcastable, integer, traced or not. Angles are float32: they are off by up to
                2⁻²³ of themselves, 0.01 at position 100,000.

        Returns:
            [*B, T, N, H] in the dtype of `x`, computed in float32 at least.

        Raises:
            TypeError: Positions are no integers.
            ValueError: H is odd, or the shapes do not fit.
        """
        x, positions = jnp.asarray(x), jnp.asarray(positions)
        _check_positions(x.shape, positions)
        angles = positions[..., None, None].astype(jnp.float32) * self.frequencies(x.shape[-1]).astype(np.float32)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second = jnp.split(x, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(x.dtype)


def _check_positive(value: object, name: str) -> None:
    if not getattr(value, name) > 0:
        raise ValueError(f"{name}: expected a positive number, got {getattr(value, name)}; pass the model's own")


def _check_positions(shape: tuple[int, ...], positions: Array) -> None:
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"positions: expected integers, got {positions.dtype}; cast them to int32")
    expected = shape[:-2]
    try:
        fits = np.broadcast_shapes(expected, positions.shape) == expected
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"positions: expected a shape that broadcasts to {expected}, batch axes and length of {shape}, got "
            f"{positions.shape}; pass one for each of a sequence"
        )
