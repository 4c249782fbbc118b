"""The oracle is right: finite differences, jax.nn, and the rules it must obey where jax.nn says otherwise."""

import itertools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import ScoreFunction

B, T, S, N, K, H, Hv = 2, 5, 6, 4, 2, 3, 2


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


OPTIONS = {
    "plain": {},
    "scale": {"scale": -0.7},
    "zero_scale": {"scale": 0.0},
    "causal": {"is_causal": True},
    "offset": {"is_causal": True, "query_offset": 1},
    "empty_rows": {"is_causal": True, "query_offset": -2},
    "offset_per_batch": {"is_causal": True, "query_offset": (2, -1)},
    "window": {"local_window_size": (1, 2)},
    "window_int": {"local_window_size": 1, "query_offset": (0, 3)},
    "window_open": {"local_window_size": (None, 0)},
    "window_causal": {"local_window_size": (2, 2), "is_causal": True},
    "lengths": {"query_seq_lengths": (5, 2), "key_value_seq_lengths": (3, 6)},
    "no_keys": {"query_seq_lengths": (4, 5), "key_value_seq_lengths": (0, 4)},
    "mask": {"mask": np.arange(B * N * T * S).reshape(B, N, T, S) % 7 % 2 == 0},
    "mask_of_keys": {"mask": (np.arange(B * S) % 4 > 0).reshape(B, 1, 1, S)},
    "mask_of_one_head": {"mask": np.array([True, False, True, True])[:, None, None], "is_causal": True},
    "segments": {"query_segment_ids": (0, 2, 2, 0, -1), "key_value_segment_ids": ((2, 0, 0, -1, 5, 0), (0,) * S)},
    "functions": {"mask_functions": (lambda b, n, t, s: (s + n) % 3 > b, lambda b, n, t, s: s != t)},
    "everything": {
        "scale": 0.4,
        "is_causal": True,
        "local_window_size": (2, 1),
        "query_offset": (1, 0),
        "query_seq_lengths": (4, 5),
        "key_value_seq_lengths": (6, 3),
        "mask": np.arange(N * T * S).reshape(1, N, T, S) % 5 > 0,
        "query_segment_ids": (0, 0, 1, 1, 1),
        "key_value_segment_ids": (0, 1, 0, 1, 1, 1),
        "mask_functions": (lambda b, n, t, s: s != 2 * n,),
    },
}
SCORES = draw((B, N, T, S), (S,), (N, 1, 1), (B, N), (B, S), (N, T, S), seed=1)
SCORE_FUNCTIONS = (
    ScoreFunction(lambda z, b, n, t, s, weight: (z * weight + 0.1 * (t - s * b), weight, (z,)), (SCORES[4],), ("BS",)),
    ScoreFunction(lambda z, b, n, t, s: (z - 0.1 * z**2, 1 - 0.2 * z, ())),
    ScoreFunction(
        lambda z, b, n, t, s, table, gain: (z * gain + 0.1 * table * z**2, gain + 0.2 * table * z, (0.1 * z**2, z)),
        (SCORES[5], SCORES[3][:1]),
        ("NTS", "BN"),
    ),
)
HIDING = ScoreFunction(
    lambda z, b, n, t, s: (z.__array_namespace__().where((t + s + n) % 3 > 0, z, -np.inf), (t + s + n) % 3 > 0, ())
)
DROPOUT = {"dropout_keep": np.arange(B * N * T * S).reshape(B, N, T, S) % 11 % 3 > 0, "dropout_rate": 0.25}
OPTIONS |= {
    "bias": {"bias": SCORES[0]},
    "logits_scale": {"logits_scale": 1 + SCORES[3][1], "bias": SCORES[1], "logits_soft_cap": 0.9},
    "bias_of_keys": {"bias": SCORES[1], "is_causal": True},
    "bias_of_heads": {"bias": SCORES[2], "logits_soft_cap": 0.7},
    "bias_minus_infinity": {
        "bias": np.where(np.arange(T * S).reshape(1, 1, T, S) % 9 % 4 > 0, SCORES[0][:1], -np.inf),
        "logits_soft_cap": 0.9,
        "sinks": SCORES[3][0],
    },
    "alibi": {"alibi_slopes": SCORES[3][0], "query_offset": (2, -1)},
    "alibi_of_entries": {"alibi_slopes": SCORES[3], "local_window_size": 2},
    "soft_cap": {"logits_soft_cap": 0.5},
    "sinks": {"sinks": SCORES[3][1], "is_causal": True, "query_offset": -2},
    "score_functions": {"score_functions": SCORE_FUNCTIONS},
    "score_functions_hide": {"score_functions": (*SCORE_FUNCTIONS[:2], HIDING), "sinks": SCORES[3][1]},
    "dropout": DROPOUT,
    "dropout_empty_rows": {**DROPOUT, "is_causal": True, "query_offset": -2},
    "scores": {
        **OPTIONS["everything"],
        **DROPOUT,
        "bias": SCORES[0][:, :1],
        "alibi_slopes": SCORES[3],
        "logits_soft_cap": 1.1,
        "score_functions": SCORE_FUNCTIONS,
        "sinks": SCORES[3][0],
    },
}
SIDES = (("query", T), ("key_value", S))
OF_SCORES = {"scale", "logits_scale", "bias", "alibi_slopes", "logits_soft_cap", "score_functions", "sinks", *DROPOUT}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def tensors() -> list[np.ndarray]:
    """query, key, value, d_out and d_residual."""
    return draw((B, T, N, H), (B, S, K, H), (B, S, K, Hv), (B, T, N, Hv), (B, T, N))


def pulled(query, key, value, d_out, d_residual, **options) -> float:
    """What `oracle.gradients` differentiates."""
    out, residual = oracle.attend(query, key, value, **options)
    return np.sum(out * d_out) + np.sum(np.where(np.isneginf(residual), 0, residual) * d_residual)


def of_masks(options: dict) -> dict:
    """Those of `oracle.kept`."""
    return {name: value for name, value in options.items() if name not in OF_SCORES}


def differentiable(options: dict) -> dict:
    """The arrays among the options by which there is a gradient, operands of score functions by two numbers."""
    named = {name: options[name] for name in ("logits_scale", "bias", "alibi_slopes", "sinks") if name in options}
    functions = options.get("score_functions", ())
    return named | {(i, j): x for i, f in enumerate(functions) for j, x in enumerate(f.operands)}


def replaced(options: dict, arrays: dict) -> dict:
    """The options with other arrays in the place of those of `differentiable`."""
    functions = tuple(
        f._replace(operands=tuple(arrays[i, j] for j in range(len(f.operands))))
        for i, f in enumerate(options.get("score_functions", ()))
    )
    return options | {name: x for name, x in arrays.items() if isinstance(name, str)} | {"score_functions": functions}


def of_arrays(found: oracle.Gradients, options: dict) -> dict:
    """The gradients by the arrays of `differentiable`."""
    return {n: getattr(found, n) if isinstance(n, str) else found.operands[n[0]][n[1]] for n in differentiable(options)}


@every_option
def test_gradients_are_finite_differences(options):
    """By every element of every array, and by the scale."""
    *inputs, d_out, d_residual = tensors()
    arrays = {name: np.array(x) for name, x in differentiable(options).items()}
    scale = np.array(options.get("scale", H**-0.5))
    found = oracle.gradients(*inputs, d_out, d_residual, **options)
    further = of_arrays(found, options)
    step = 1e-5  # truncation and cancellation are both about 1e-10 then

    def at() -> float:
        return pulled(*inputs, d_out, d_residual, **{**replaced(options, arrays), "scale": float(scale)})

    pairs = [*zip(inputs, found[:3], strict=True), (scale, np.array(found.scale))]
    for array, gradient in [*pairs, *((x, further[name]) for name, x in arrays.items())]:
        assert array.shape == gradient.shape
        for index in np.ndindex(array.shape):
            ends, was = [], array[index]
            for move in (step, -step):
                array[index] = was + move
                ends.append(at())
            array[index] = was
            if np.isneginf(was):
                assert gradient[index] == 0
            else:
                np.testing.assert_allclose(gradient[index], (ends[0] - ends[1]) / (2 * step), rtol=0, atol=2e-9)


JAX_NN = [
    {},
    {"scale": 0.3},
    {"is_causal": True},
    {"local_window_size": (1, 2)},
    {"local_window_size": 1},
    {"local_window_size": (2, 2), "is_causal": True},
    {"query_seq_lengths": (5, 2), "key_value_seq_lengths": (3, 6)},
    {"bias": SCORES[0]},
    {"bias": SCORES[0][:1, :1], "is_causal": True, "scale": 0.3},
    {"bias": SCORES[0][:, :, :1]},
]


@pytest.mark.parametrize("options", JAX_NN, ids=lambda options: "-".join(options))
def test_agrees_with_jax_nn(options):
    """Up to rows that attend to nothing, to which jax.nn gives the mean; it drops the residual's cotangent."""
    *inputs, d_out = draw((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
    out, residual = oracle.attend(*inputs, **options)
    rows = np.isfinite(residual)
    d_out = np.where(rows[..., None], d_out, 0)
    lengths = {name: np.asarray(n, np.int32) for name, n in options.items() if "lengths" in name}

    def attend(query, key, value, *bias):
        return jax.nn.dot_product_attention(query, key, value, *bias, return_residual=True, **others)

    others = {name: x for name, x in {**options, **lengths}.items() if name != "bias"}
    biases = [np.broadcast_to(options["bias"], (1, *options["bias"].shape)[-4:])] if "bias" in options else []
    single = [jnp.asarray(x, jnp.float32) for x in (*inputs, *biases)]
    [found, lse], pull = jax.vjp(attend, *single)
    gradients = pull((jnp.asarray(d_out, jnp.float32), jnp.zeros_like(lse)))
    exact = oracle.gradients(*inputs, d_out, np.zeros(rows.shape), **options)
    exact_gradients = [*exact[:3], *(exact.bias.reshape(bias.shape) for bias in biases)]
    # Measured: up to 2.5 roundings of the largest number, from sums of at most 24 products.
    tolerance = 5 * np.finfo(np.float32).eps
    np.testing.assert_allclose(np.where(rows[..., None], found, 0), out, rtol=0, atol=tolerance * np.abs(out).max())
    np.testing.assert_allclose(lse[rows], residual[rows], rtol=0, atol=tolerance * np.abs(residual[rows]).max())
    for result, expected in zip(gradients, exact_gradients, strict=True):
        np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@every_option
def test_dense_is_the_oracle_in_float64(options):
    *inputs, d_out, d_residual = tensors()
    results, exact = oracle.attend(*inputs, **options), oracle.gradients(*inputs, d_out, d_residual, **options)
    scale = options.get("scale", H**-0.5)

    arrays = differentiable(options)

    def attend(query, key, value, scale, *further):
        given = replaced(options, dict(zip(arrays, further, strict=True)))
        return dense.attend(query, key, value, np.float64, **{**given, "scale": scale})

    with jax.enable_x64(True):
        found, pull = jax.vjp(attend, *inputs, scale, *arrays.values())
        gradients = pull((d_out, np.where(np.isneginf(results[1]), np.nan, d_residual)))
        right = *results, *exact[:4], *of_arrays(exact, options).values()
        for ours, ref in zip((*found, *gradients), right, strict=True):
            assert ours.dtype == np.float64 and ours.shape == np.shape(ref)
            np.testing.assert_allclose(ours, ref, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dense_computes_in_its_dtype(dtype):
    query, key, value, *_ = (x.astype(dtype) for x in tensors())
    out, residual = dense.attend(query, key, value, dtype)
    assert (out.dtype, residual.dtype) == (dtype, jnp.float32)
    exact_out, exact_residual = oracle.attend(query, key, value)
    error = np.abs(out.astype(jnp.float32) - exact_out).max() / np.abs(exact_out).max()
    eps = float(jnp.finfo(dtype).eps)
    assert eps / 16 < error < 2 * eps  # rounds to the dtype, and no more than probabilities and output
    np.testing.assert_allclose(residual, exact_residual, rtol=8 * np.finfo(np.float32).eps)  # scores stay in float32


def test_a_row_by_hand():
    """Logits log 1, log 2 and log 5 over values 8, 16 and 24: the output is (1·8 + 2·16 + 5·24) / 8."""
    key = np.log([1.0, 2.0, 5.0]).reshape(1, 3, 1, 1)
    value = np.array([8.0, 16.0, 24.0]).reshape(1, 3, 1, 1)
    query = np.full((1, 2, 1, 1), 2.0)
    out, residual = oracle.attend(query, key, value, scale=0.5, is_causal=True, query_offset=1)
    np.testing.assert_allclose(out[0, :, 0, 0], [(8 + 2 * 16) / 3, 20], rtol=1e-15)
    np.testing.assert_allclose(residual[0, :, 0], np.log([3, 8]), rtol=1e-15)


def by_definition(b: int, n: int, t: int, u: int, options: dict) -> bool:
    """Whether query t attends to key u in batch entry b and head n, one score at a time."""

    def entry(name: str, default: int) -> int:
        given = options.get(name, default)
        return given[b] if isinstance(given, tuple) else given

    window = options.get("local_window_size")
    left, right = window if isinstance(window, tuple) else (window, window)
    distance = u - (t + entry("query_offset", 0))
    ids = [np.broadcast_to(options.get(f"{side}_segment_ids", 7), (B, size)) for side, size in SIDES]
    mask = np.broadcast_to(options.get("mask", True), (B, N, T, S))
    return (
        t < entry("query_seq_lengths", T)
        and u < entry("key_value_seq_lengths", S)
        and (distance <= 0 or not options.get("is_causal", False))
        and (left is None or distance >= -left)
        and (right is None or distance <= right)
        and ids[0][b, t] == ids[1][b, u] >= 0
        and mask[b, n, t, u]
        and all(function(b, n, t, u) for function in options.get("mask_functions", ()))
    )


@every_option
def test_kept_by_definition(options):
    mask = oracle.kept(B, N, T, S, **of_masks(options))
    for place in np.ndindex(mask.shape):
        assert mask[place] == by_definition(*place, options)


EMPTY = ["empty_rows", "offset_per_batch", "lengths", "no_keys", "mask_of_keys", "mask_of_one_head", "segments"]


@pytest.mark.parametrize("name", [*EMPTY, "everything"])
@pytest.mark.parametrize("attend", ["oracle", "dense"])
def test_what_takes_no_part_is_never_read(name, attend):
    options = OPTIONS[name]
    mask = oracle.kept(B, N, T, S, **of_masks(options))
    rows = np.swapaxes(mask.any(3), 1, 2)  # [B, T, N]
    columns = np.swapaxes(mask.reshape(B, K, N // K, T, S).any((2, 3)), 1, 2)  # [B, S, K]
    assert not rows.all() or not columns.all()
    clean = tensors()
    spoiled = [np.where(part.reshape(*part.shape, *[1] * (x.ndim - 3)), x, np.nan)
               for x, part in zip(clean, (rows, columns, columns, rows, rows), strict=True)]  # fmt: skip
    if attend == "dense":
        result, expected = (dense.attend(*x[:3], np.float32, **options) for x in (spoiled, clean))
    else:
        result, expected = (
            (*oracle.attend(*x[:3], **options), *oracle.gradients(*x, **options)) for x in (spoiled, clean)
        )
        dq, dk, dv = result[2:5]
        assert not dq[~rows].any() and not dk[~columns].any() and not dv[~columns].any()
    for found, exact in zip(result, expected, strict=True):
        np.testing.assert_array_equal(found, exact)
    assert not result[0][~rows].any()
    assert np.isneginf(result[1][~rows]).all() and np.isfinite(result[1][rows]).all()


def test_sizes_of_zero():
    for size in itertools.product((0, 2), repeat=3):
        b, t, s = size
        out, residual = oracle.attend(np.ones((b, t, 2, 3)), np.ones((b, s, 1, 3)), np.ones((b, s, 1, 2)))
        assert out.shape == (b, t, 2, 2)
        np.testing.assert_allclose(out, 1 if s else 0, rtol=1e-15)
        assert np.isneginf(residual).all() == (s == 0 or residual.size == 0)
