"""What lies between scores and outputs: bias, slopes, cap, functions, sinks and dropout, together and one by one."""

import functools
import itertools

import checks
import dense
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, keep_mask
from test_attention import IMPLEMENTATIONS
from test_transforms import assert_close

from pallas_flash import Blocks, Plan, ScoreModifier, flash_attention
from pallas_flash.dropout import philox
from pallas_flash.testing import error, tolerance

B, T, S, N, K, H = 3, 21, 26, 4, 2, 8
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def attending(implementation: str, **options):
    return functools.partial(flash_attention, return_residual=True, **IMPLEMENTATIONS[implementation], **options)


FEATURES = {
    "bias": {"bias": "of_entries"},
    "alibi": {"alibi": "entries"},
    "cap": {"soft_cap": 1.5},
    "scores": {"scores": ("head_gain", "bent")},
    "sinks": {"sinks": True},
    "dropout": {"dropout": 0.3},
}
MASKS = [
    {"is_causal": True, "query_offset": (2, 9)},
    {"local_window_size": (10, 3), "query_offset": -5},
    {"query_seq_lengths": (24, 5), "key_value_seq_lengths": (0, 30)},
    {"segments": "repeated"},
    {"mask": "per_head"},
]
PAIRS = [
    Case(f"{a}_{b}", T=24, S=33, N=4, K=2, H=8, **FEATURES[a], **FEATURES[b], **MASKS[i % len(MASKS)])
    for i, (a, b) in enumerate(itertools.combinations(FEATURES, 2))
]


@pytest.mark.parametrize("case", PAIRS, ids=str)
@every_implementation
def test_pairs_of_features(implementation, case):
    """Each with each, under masks of one kind or another, some of which leave rows empty."""
    checks.check(case, attending(implementation, **case.options()))


CASE = Case("scores", B=B, T=T, S=S, N=N, K=K, H=H, is_causal=True, query_offset=3)
SHAPES = [(*pair, *cell) for pair in itertools.product((1, B), (1, N)) for cell in itertools.product((1, T), (1, S))]
BIASES = [*((shape, "float32") for shape in SHAPES), ((1, N, T, S), "bfloat16"), ((B, 1, 1, S), "bfloat16")]


@pytest.mark.parametrize(("shape", "dtype"), BIASES, ids=str)
@every_implementation
def test_gradient_of_bias_alone(implementation, shape, dtype):
    """Under every broadcasting; with a cap, without which a whole row's would only move the residual."""
    q, k, v, do, dlse = checks.inputs(CASE)
    options = CASE.options() | {"logits_soft_cap": 1.5}
    bias = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)

    def gradient(attention):
        return jax.jit(lambda bias: jax.vjp(lambda x: attention(q, k, v, bias=x), bias)[1]((do, dlse))[0])(bias)

    right = oracle.gradients(q, k, v, do, dlse, bias=bias, **options).bias
    by_matrix = gradient(functools.partial(dense.attend, dtype="float32", precision="highest", **options))
    found = gradient(attending(implementation, **options))
    assert (found.shape, found.dtype) == (bias.shape, bias.dtype)
    assert error(found, right) <= tolerance(error(by_matrix, right), right, dtype, 10.0)


MASK = np.random.default_rng(1).random((B, 1, T, S)) < 0.6
MASK[1, :, 5:9] = False


@every_implementation
def test_what_is_masked_may_hold_nan(implementation):
    """In a bias and in operands of functions; their gradients are 0 there."""
    arrays = checks.inputs(CASE)
    rng = np.random.default_rng(2)
    bias, operand = (jnp.asarray(rng.standard_normal((B, N, T, S)), jnp.float32) for _ in range(2))

    def keywords(bias, operand):
        return {"bias": bias, "score_modifiers": (ScoreModifier(times, (operand,), ("BNTS",)),)}

    run = checks.evaluator(attending(implementation, mask=MASK, logits_soft_cap=3.0), keywords)
    clean = run(*arrays, bias, operand)
    for fill in (jnp.nan, jnp.inf):
        spoiled = run(*arrays, jnp.where(MASK, bias, fill), jnp.where(MASK, operand, fill))
        for ours, right in zip(spoiled, clean, strict=True):
            assert np.array_equal(ours, right)
        for gradient in spoiled[-2:]:
            assert np.isfinite(gradient).all() and not np.where(MASK, 0, gradient).any()


def times(score, tile, operand):
    return score * (1 + 0.5 * operand)


@pytest.mark.parametrize(
    "options",
    [{}, {"logits_soft_cap": 1.0}, {"score_modifiers": (lambda s, tile: s + 1,)}],
    ids=["alone", "soft_cap", "function"],
)
@every_implementation
def test_minus_infinity_is_a_mask(implementation, options):
    """Also before a cap or a function, which would take it back."""
    arrays = checks.inputs(CASE)
    bias = jnp.zeros((B, 1, T, S))
    run = checks.evaluator(attending(implementation, **options), lambda bias: {"bias": bias})
    *found, d_bias = run(*arrays, jnp.where(MASK, bias, -jnp.inf))
    run = checks.evaluator(attending(implementation, mask=MASK, **options), lambda bias: {"bias": bias})
    *right, right_bias = run(*arrays, bias)
    empty = np.broadcast_to(~MASK.any(3).swapaxes(1, 2), (B, T, N))
    assert empty.any() and np.array_equal(np.isneginf(found[1]), empty)
    finite = [np.where(empty, 0, x) for x in (found[1], right[1])]
    assert_close([found[0], finite[0], *found[2:], d_bias], [right[0], finite[1], *right[2:], right_bias])


KEY = jax.random.key(3)


@pytest.mark.parametrize("rate", [0.03, 0.5, 0.9])
def test_dropout_keeps_at_its_rate(rate):
    keep = keep_mask(KEY, rate, 3, 4, 100, 77)
    sigma = (rate * (1 - rate) / keep.size) ** 0.5
    assert abs(keep.mean() - (1 - rate)) < 4 * sigma  # by chance once in 16,000 keys, but the key is fixed


def test_dropout_of_rows_heads_and_entries_is_uncorrelated():
    """All pairs of rows, and of columns: the largest of 1.2e5 correlations of 1024 numbers is below 6 sigma."""
    keep = keep_mask(KEY, 0.3, 2, 4, 64, 1024)
    others = keep_mask(jax.random.key(4), 0.3, 1, 1, 64, 1024)
    for rows in (np.concatenate([keep.reshape(-1, 1024), others.reshape(-1, 1024)]), _columns(keep)):
        found = np.corrcoef(rows)
        np.fill_diagonal(found, 0)
        assert np.abs(found).max() < 6 / rows.shape[1] ** 0.5


def _columns(keep: np.ndarray) -> np.ndarray:
    """512 neighbouring keys, as rows."""
    return np.moveaxis(keep, 3, 0)[:512].reshape(512, -1)


@every_implementation
def test_dropout_has_the_right_mean_and_variance(implementation):
    """Of uniform probabilities 1/S, outputs differ from those without by sqrt(rate / (1 - rate) · mean(v²) / S)."""
    rate, keys = 0.4, 2048
    value = jax.random.normal(jax.random.key(0), (1, keys, 1, 16))
    query = jnp.zeros((1, 16, 8, 1))
    attention = functools.partial(flash_attention, query, jnp.zeros((1, keys, 1, 1)), **IMPLEMENTATIONS[implementation])
    off = attention(value, dropout_rate=rate, dropout_key=KEY) - attention(value)
    off = off / np.sqrt(rate / (1 - rate) * np.mean(np.square(value), 1)[:, :, None] / keys)
    assert abs(off.mean()) < 4 / off.size**0.5 and abs(off.std() - 1) < 4 / (2 * off.size) ** 0.5


SIZE = 48
PLANS = [None, *(Plan(*[Blocks(*blocks)] * 3) for blocks in ((16, 32), (32, 16), (64, 64)))]


@pytest.mark.parametrize(
    "options",
    [{"implementation": "xla"}, *({"interpret": True, "plan": plan} for plan in PLANS)],
    ids=["xla", "default", "16x32", "32x16", "64x64"],
)
def test_the_same_is_dropped_everywhere(options):
    """Read off outputs of values eᵢ, and off the values' gradient from cotangents eᵢ, for each head and entry."""
    rate = 0.35
    keep = keep_mask(KEY, rate, 2, 3, SIZE, SIZE)
    q, k = (jax.random.normal(jax.random.key(i), (2, SIZE, 3, 8)) for i in range(2))
    eye = jnp.broadcast_to(jnp.eye(SIZE)[None, :, None], (2, SIZE, 3, SIZE))
    attention = functools.partial(flash_attention, dropout_rate=rate, dropout_key=KEY, **options)
    out, pull = jax.vjp(lambda v: attention(q, k, v), eye)
    (dv,) = pull(eye)
    p = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / 8**0.5)
    dropped = np.where(keep, p, 0) / (1 - rate)
    for found in (jnp.moveaxis(out, 2, 1), jnp.transpose(dv, (0, 2, 3, 1))):  # dv[s] holds what each query gave it
        assert np.array_equal(found > 0, keep)
        assert error(found, dropped) <= 1e-5


def test_dropout_follows_its_key_alone():
    """Another key drops others; one of the old kind is as good; none is needed, and none matters, at rate 0."""
    q, k, v, *_ = checks.inputs(CASE)
    attend = functools.partial(flash_attention, q, k, v)
    found = attend(dropout_rate=0.5, dropout_key=KEY)
    assert not np.array_equal(found, attend(dropout_rate=0.5, dropout_key=jax.random.key(4)))
    assert np.array_equal(found, attend(dropout_rate=0.5, dropout_key=jax.random.key_data(KEY)))
    assert np.array_equal(attend(), attend(dropout_rate=0))
    assert np.array_equal(attend(), attend(dropout_rate=0.0, dropout_key=KEY))


KNOWN_ANSWERS = [
    ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
    ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
    ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
]
"""Of Random123's kat_vectors, philox2x32: counter, key, and the words after 10 rounds."""


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_known_answers(counter, key, words):
    found = philox(tuple(map(jnp.uint32, counter)), jnp.uint32(key), rounds=10)
    assert tuple(map(int, found)) == words


@every_implementation
def test_sinks_above_every_logit(implementation):
    """By 2: they take most of each row; a row without keys stays empty."""
    case = Case("high_sinks", B=B, T=T, S=S, N=N, K=K, H=H, is_causal=True, query_offset=-4)
    q, k, v, do, dlse = checks.inputs(case)
    z = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, N // K, 2)) / H**0.5
    sinks = jnp.asarray(z.max((0, 2, 3)) + 2)
    options = case.options()
    run = checks.evaluator(attending(implementation, **options), lambda sinks: {"sinks": sinks})
    found = run(q, k, v, do, dlse, sinks)
    out, residual = oracle.attend(q, k, v, sinks=sinks, **options)
    right = oracle.gradients(q, k, v, do, dlse, sinks=sinks, **options)
    rows = np.isfinite(residual)
    assert not rows[:, :4].any() and rows[:, 4:].all() and not np.asarray(found[0])[~rows].any()
    assert np.array_equal(np.isneginf(found[1]), ~rows)
    values = (out, residual[rows], *right[:3], right.sinks)
    assert_close([found[0], np.asarray(found[1])[rows], *found[2:]], values)


TRANSFORMED = {
    "bias": jax.random.normal(jax.random.key(0), (2, N, T, S)),
    "alibi_slopes": jax.random.normal(jax.random.key(1), (2, N)),
    "sinks": jax.random.normal(jax.random.key(2), (2, N)),
    "operand": jax.random.normal(jax.random.key(5), (2, B, S)),
    "dropout_key": jax.random.split(KEY, 2),
}


D_OUT = checks.inputs(CASE)[3]


def with_argument(implementation: str, name: str):
    """(query, key, value, the argument) → output."""

    def attend(query, key, value, x):
        named = {"score_modifiers": (ScoreModifier(times, (x,), ("BS",)),)} if name == "operand" else {name: x}
        rate = 0.3 if name == "dropout_key" else 0.0
        return attending(implementation, dropout_rate=rate, **CASE.options())(query, key, value, **named)[0]

    return attend


def gradients(attend, name: str):
    """What `attend` returns, and the gradients by all but a key."""
    numbers = 3 if name == "dropout_key" else 4

    def run(*x):
        out, vjp = jax.vjp(lambda *numbers_of: attend(*numbers_of, *x[numbers:]), *x[:numbers])
        return out, *vjp(jnp.broadcast_to(D_OUT, out.shape))

    return run


def assert_near(results, references):
    """Within 16 float32 epsilons: sums of up to 2,000 terms in other orders differ by up to 10."""
    for ours, ref in zip(results, references, strict=True):
        assert error(ours, np.asarray(ref)) <= 16 * 2**-23 * max(1.0, float(np.max(np.abs(ref))))


@pytest.mark.parametrize("name", TRANSFORMED)
@every_implementation
def test_vmap_is_a_loop(implementation, name):
    """Over one argument, with queries, keys and values in common; gradients within it, and through it."""
    q, k, v, *_ = checks.inputs(CASE)
    attend, values = with_argument(implementation, name), TRANSFORMED[name]
    run = gradients(attend, name)
    found = jax.jit(jax.vmap(run, (None, None, None, 0)))(q, k, v, values)
    loop = [jax.jit(run)(q, k, v, x) for x in values]
    stacked = [jnp.stack(x) for x in zip(*loop, strict=True)]
    assert_near(found, stacked)
    assert not np.array_equal(found[0][0], found[0][1])

    mapped = jax.vmap(attend, (None, None, None, 0))
    through = jax.jit(gradients(mapped, name))(q, k, v, values)
    assert_near(through, [stacked[0], *(x.sum(0) for x in stacked[1:4]), *stacked[4:]])


@pytest.mark.parametrize("name", TRANSFORMED)
@every_implementation
def test_checkpoint_recomputes_the_same(implementation, name):
    """The same is dropped when the forward pass runs again."""
    q, k, v, *_ = checks.inputs(CASE)
    attend = with_argument(implementation, name)
    arguments = q, k, v, TRANSFORMED[name][0]
    found, right = (jax.jit(gradients(f, name))(*arguments) for f in (jax.checkpoint(attend), attend))
    assert_near(found, right)


def test_gradients_of_narrow_biases_are_summed_in_float32():
    """Over the blocks of XLA's loop, and over batch axes of which one is shared: one rounding, at the end."""
    rng = np.random.default_rng(5)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 3, 1100, 1, 8)), jnp.float32) for _ in range(3))

    def gradient(dtype):
        bias = jnp.zeros((2, 1, 1, 1, 1100), dtype)
        attention = functools.partial(flash_attention, implementation="xla")
        return jax.jit(jax.grad(lambda bias: jnp.sum(attention(q, k, v, bias) * v)))(bias)

    right = np.asarray(gradient("float32"), np.float64)
    off = np.abs(np.asarray(gradient("bfloat16"), np.float64) - right)
    assert (off <= 2**-8 * np.abs(right) + 1e-5).all()  # half of bfloat16's spacing, and float32's own rounding


@every_implementation
def test_a_function_may_ignore_the_scores(implementation):
    q, k, v = checks.inputs(CASE)[:3]
    by_distance = attending(implementation, score_modifiers=(nearness,))
    weights = jax.nn.softmax(-jnp.abs(jnp.arange(T)[:, None] - jnp.arange(S)).astype(jnp.float32))
    right = jnp.einsum("ts,bsnh->btnh", weights, jnp.repeat(v, N // K, 2))
    assert error(by_distance(q, k, v)[0], np.asarray(right, np.float64)) <= 2e-6


def nearness(score, tile):
    del score
    return -jnp.abs(tile.q_ids - tile.k_ids).astype(jnp.float32)


def test_captured_arrays_are_refused():
    """Where the user is, and on every implementation alike: kernels could not take them."""
    q = jnp.ones((1, 8, 1, 8))
    weight = jnp.ones(3)
    with pytest.raises(TypeError, match=r"score_modifiers: .* to get its arrays as operands, got an array of shape"):
        flash_attention(q, q, q, score_modifiers=(lambda score, tile: score * weight[0],))
