"""`flax_layers.rope`: against the formula in float64, and what Flax and Hugging Face give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers.rope import LinearScaling, Llama3Scaling, RoPE

B, T, N, H = 2, 7, 3, 16
LLAMA = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
ROPES = {
    "standard": RoPE(),
    "linear": RoPE(scaling=LinearScaling(4.0)),
    "llama3": RoPE(theta=500_000.0, scaling=LLAMA),
}


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


def llama_frequency(frequency: float) -> float:
    """As the reference code of Llama 3.1 has it, by wavelengths."""
    wavelength = 2 * np.pi / frequency
    if wavelength < 8192 / 4.0:
        return frequency
    if wavelength > 8192 / 1.0:
        return frequency / 8.0
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * frequency / 8.0 + smooth * frequency


def turned(name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """By complex numbers, head by head, in float64."""
    half = x.shape[-1] // 2
    frequencies = [ROPES[name].theta ** (-h / half) for h in range(half)]
    if name == "linear":
        frequencies = [f / 4.0 for f in frequencies]
    if name == "llama3":
        frequencies = [llama_frequency(f) for f in frequencies]
    pairs = x[..., :half] + 1j * x[..., half:]
    pairs = pairs * np.exp(1j * positions[..., None, None] * np.array(frequencies))
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.parametrize("name", ROPES)
def test_equals_the_formula_in_float64(name):
    x = draw(B, T, N, 64)
    positions = np.random.default_rng(1).integers(0, 100_000, (B, T))
    expected = turned(name, x, positions)
    result = jax.jit(ROPES[name])(x.astype(np.float32), positions)
    # An angle is rounded twice, frequency and product, and turns a pair of at most sqrt(2)·max|x|; then x itself.
    largest = np.abs(x).max()
    atol = (np.sqrt(2) * positions.max() * 2.0**-23 + 4 * 2.0**-24) * largest
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected, rtol=0, atol=atol)
    near = jax.jit(ROPES[name])(x.astype(np.float32), positions % 50)
    np.testing.assert_allclose(near, turned(name, x, positions % 50), rtol=0, atol=5e-5)


def test_llama_scaling_has_all_three_ranges():
    plain, scaled = (RoPE(500_000.0, scaling).frequencies(128) for scaling in (None, LLAMA))
    ratios = plain / scaled
    assert {1.0, 8.0} < set(ratios.round(12)) and np.all(np.diff(ratios) >= -1e-12)
    np.testing.assert_allclose(scaled, [llama_frequency(f) for f in plain], rtol=1e-14)


def test_equals_flax():
    """The convention is that of `nnx.RoPE`; to a rounding of float32, in which Flax has its frequencies."""
    x = draw(B, T, N, H).astype(np.float32)
    expected = jax.vmap(nnx.RoPE(theta=1000.0), in_axes=-2, out_axes=-2)(x)
    np.testing.assert_allclose(RoPE(1000.0)(x, np.arange(T)), expected, rtol=0, atol=1e-5)


def test_scores_depend_on_distances_alone():
    q, k = draw(1, 1, 1, H), draw(1, 1, 1, H)

    def score(t: int, s: int) -> float:
        return float(jnp.vdot(RoPE()(q, np.array([[t]])), RoPE()(k, np.array([[s]]))))

    assert abs(score(3, 1) - score(103, 101)) < 1e-4 < abs(score(3, 1) - score(5, 1))


def test_traced_positions_dtype_and_broadcast():
    x = jnp.asarray(draw(B, T, N, H), jnp.bfloat16)
    rotate = jax.jit(lambda x, start: RoPE()(x, start + jnp.arange(T)))
    results = [rotate(x, start) for start in (0, 5)]
    assert rotate._cache_size() == 1 and results[0].dtype == jnp.bfloat16
    whole = jnp.broadcast_to(5 + jnp.arange(T), (B, T))
    np.testing.assert_array_equal(results[1].astype(float), jax.jit(RoPE())(x, whole).astype(float))
    assert hash(RoPE(scaling=LLAMA)) == hash(RoPE(scaling=Llama3Scaling()))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RoPE(theta=0.0), ValueError, r"theta: expected a positive number, got 0\.0; pass"),
        (lambda: LinearScaling(-1.0), ValueError, r"factor: expected a positive number, got -1\.0"),
        (lambda: Llama3Scaling(original_max_position_embeddings=0), ValueError, "original_max_position_embeddings: "),
        (lambda: Llama3Scaling(high_freq_factor=1.0), ValueError, r"high_freq_factor: expected more than .* got 1\.0;"),
        (lambda: RoPE()(jnp.ones((T, N, 5)), jnp.arange(T)), ValueError, "head_dim: expected an even number, got 5"),
        (lambda: RoPE()(jnp.ones((T, N, H)), jnp.ones(T)), TypeError, "positions: expected integers, got float32"),
        (lambda: RoPE()(jnp.ones((T, N, H)), jnp.arange(T + 1)), ValueError, r"positions: .*\(7,\).*got \(8,\); pass"),
        (lambda: RoPE()(jnp.ones((T, N, H)), jnp.ones((B, T), int)), ValueError, r"positions: .*got \(2, 7\); pass"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()
