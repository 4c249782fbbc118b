"""Online softmax by properties: however keys are split, the result is the softmax over all of them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_flash import merge, softmax

ROWS, COLUMNS, WIDTH = 3, 7, 2
EPS = np.finfo(np.float32).eps

properties = settings(max_examples=40, deadline=None, derandomize=True, database=None)

seeds = st.integers(0, 2**32 - 1)
cuts = st.lists(st.integers(0, COLUMNS), max_size=3).map(lambda ends: [0, *sorted(ends), COLUMNS])
"""Where COLUMNS keys are cut into 1 to 4 parts, some of them perhaps empty."""
poisons = st.sampled_from([np.nan, np.inf, -np.inf, 3e38])


def draw(seed: int, magnitude: float = 3.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw scores [ROWS, COLUMNS], float32, values [COLUMNS, WIDTH], and which scores to keep; a row may keep none."""
    rng = np.random.default_rng(seed)
    s = magnitude * rng.standard_normal((ROWS, COLUMNS), np.float32)
    keep = rng.random((ROWS, COLUMNS)) < rng.random((ROWS, 1)) * 1.5 - 0.25
    return s, rng.standard_normal((COLUMNS, WIDTH), np.float32), keep


def exact(s: np.ndarray, v: np.ndarray, keep) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp by definition, in float64; 0 and -inf for an empty row."""
    s = np.where(keep, s.astype(np.float64), -np.inf)
    weights = np.exp(s - np.where(keep.any(1, keepdims=True), s.max(1, keepdims=True, initial=-np.inf), 0))
    total = weights.sum(1, keepdims=True)
    out = np.divide(weights @ v, total, out=np.zeros((len(s), v.shape[1])), where=total > 0)
    return out, np.logaddexp.reduce(s, axis=1)


def assert_same(found, expected, roundings: float) -> None:
    """Equal up to so many float32 roundings of the largest number; -inf equals only itself."""
    for result, number in zip(found, expected, strict=True):
        number = np.asarray(number)
        finite = number[np.isfinite(number)]
        tolerance = roundings * EPS * np.abs(finite).max(initial=1.0)
        np.testing.assert_allclose(result, number, rtol=0, atol=tolerance)


def online(s, v, keep, c, ends: list[int], dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    """`update` over the blocks that `ends` cut, then `finish`."""
    run = softmax.start((ROWS,), WIDTH, dtype)
    for first, last in itertools.pairwise(ends):
        if first < last:  # a block has columns
            block = jnp.asarray(v[first:last])
            part = None if keep is None else jnp.asarray(keep[:, first:last])
            counted = softmax.masked(jnp.asarray(s[:, first:last]), part)
            run = softmax.update(run, counted, c, lambda p, block=block: p @ block)
    return softmax.finish(run)


@properties
@given(seeds, cuts, st.sampled_from([0.0, 0.3, 1.0, 20.0]))
def test_update_over_any_blocks_is_the_dense_softmax(seed, ends, scale):
    s, v, keep = draw(seed)
    found = online(s, v, keep, softmax.base2(scale)[1], ends)
    assert_same(found, exact(scale * s.astype(np.float64), v, keep), 4)


@properties
@given(seeds, cuts)
def test_update_without_a_mask(seed, ends):
    s, v, _ = draw(seed)
    assert_same(online(s, v, None, softmax.LOG2E, ends), exact(s, v, np.full(s.shape, True)), 4)


@properties
@given(seeds, cuts, poisons)
def test_what_is_masked_does_not_matter(seed, ends, poison):
    s, v, keep = draw(seed)
    found = online(np.where(keep, s, np.float32(poison)), v, keep, softmax.LOG2E, ends)
    for result, clean in zip(found, online(s, v, keep, softmax.LOG2E, ends), strict=True):
        np.testing.assert_array_equal(result, clean)


@properties
@given(seeds, poisons, st.sampled_from([softmax.TINY, 1.0, 1e4]))
def test_what_is_masked_weighs_exactly_nothing(seed, poison, c):
    """In both passes, whatever the score was, and in rows that keep nothing, whose finite log-sum-exp is 0."""
    s, _, keep = draw(seed)
    counted = softmax.masked(jnp.asarray(np.where(keep, s, np.float32(poison))), jnp.asarray(keep))
    run = softmax.start((ROWS,), WIDTH)
    m, l, p, _ = softmax.advance(run.m, run.l, counted, c)  # noqa: E741
    lse2 = softmax.base2_lse(softmax.finish(run._replace(m=m, l=l))[1])
    assert np.isfinite(lse2).all() and not lse2[~keep.any(1)].any()
    for weights in (p, softmax.recompute(counted, c, lse2[:, None])):
        assert not weights[~keep].any()
        assert (weights.max(1) > 0).tolist() == keep.any(1).tolist()


@pytest.mark.parametrize("c", [softmax.TINY, 1e-30, 1.0, 1e4])
@pytest.mark.parametrize("ends", [[0, COLUMNS], [0, 2, 5, COLUMNS]], ids=["one", "three"])
def test_rows_that_keep_nothing(c, ends):
    """They give exactly 0 and -inf, and neither delay nor disturb what comes after: row 1 keeps only the last key."""
    s, v, _ = draw(0)
    keep = np.zeros(s.shape, bool)
    keep[1, -1] = True
    out, lse = online(s, v, keep, c, ends)
    np.testing.assert_array_equal(out, np.where(keep.any(1)[:, None], v[-1], 0))
    np.testing.assert_allclose(lse, [-np.inf, s[1, -1] * c * softmax.LN2, -np.inf], rtol=2 * EPS)


def test_large_scores_do_not_overflow():
    s, v, keep = draw(1, magnitude=1e4)
    assert_same(online(s, v, keep, softmax.LOG2E, [0, 3, COLUMNS]), exact(s, v, keep), 4)


def test_update_in_float64():
    with jax.enable_x64(True):
        s, v, keep = draw(2)
        out, lse = online(s.astype(np.float64), v.astype(np.float64), keep, softmax.LOG2E, [0, 3, COLUMNS], jnp.float64)
        assert (out.dtype, lse.dtype) == (np.float64, np.float64)
        assert_same((out, lse), exact(s, v, keep), 1e-7)


def test_gradients_through_update_are_those_of_the_dense_softmax():
    """Dropping the derivative of the running maximum changes nothing; a masked NaN has gradient 0."""
    s, v, keep = draw(3)
    keep[0] = False
    poisoned = np.where(keep, s, np.nan)
    rng = np.random.default_rng(0)
    do, dlse = rng.standard_normal((ROWS, WIDTH), np.float32), rng.standard_normal(ROWS, np.float32)

    def blockwise(s, v):
        return online(s, v, keep, softmax.LOG2E, [0, 3, COLUMNS])

    ds, dv = jax.vjp(blockwise, poisoned, v)[1]((do, dlse))
    out, lse = exact(s, v, keep)
    p = np.where(keep, np.exp(s - np.where(np.isfinite(lse), lse, 0)[:, None]), 0)
    delta = np.sum(out * do, 1) - dlse
    assert_same((ds, dv), (p * (do @ v.T - delta[:, None]), p.T @ do), 4)
    assert not ds[~keep].any()


@properties
@given(seeds)
def test_recompute_and_d_score(seed):
    s, v, keep = draw(seed)
    do = np.random.default_rng(seed).standard_normal((ROWS, WIDTH), np.float32)
    out, lse = exact(s, v, keep)
    counted = softmax.masked(jnp.asarray(np.where(keep, s, np.nan)), jnp.asarray(keep))
    p = softmax.recompute(counted, softmax.LOG2E, softmax.base2_lse(jnp.asarray(lse, jnp.float32))[:, None])
    exact_p = np.where(keep, np.exp(s - np.where(np.isfinite(lse), lse, 0)[:, None]), 0)
    dp, delta = do @ v.T, np.sum(out * do, 1, keepdims=True).astype(np.float32)
    ds = softmax.d_score(p, jnp.asarray(dp), jnp.asarray(delta))
    # A rounding of the exponent, at most lse2 + s2, is one of p; measured: 11.
    assert_same((p, ds), (exact_p, exact_p * (dp - delta)), 24)


@pytest.mark.parametrize("scale", [0.7, -0.7, 0.0, -0.0])
@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
def test_base2(scale, traced):
    sign, c = softmax.base2(jnp.float32(scale) if traced else scale)
    assert sign in (1, -1) and c > 0
    np.testing.assert_allclose(float(sign) * float(c) * softmax.LN2, scale, rtol=2 * EPS, atol=softmax.TINY)


@properties
@given(seeds, st.sampled_from([-2.0, -0.1, 0.0, 0.1]), st.booleans())
def test_signed_scores_give_the_softmax_of_the_scaled(seed, scale, traced):
    s, v, keep = draw(seed)
    sign, c = softmax.base2(jnp.float32(scale) if traced else scale)
    found = online(np.asarray(softmax.signed(sign, jnp.asarray(s))), v, keep, c, [0, 4, COLUMNS])
    assert_same(found, exact(scale * s.astype(np.float64), v, keep), 4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_signed_is_exact(dtype):
    x = jnp.asarray(draw(4)[0], dtype)
    assert softmax.signed(1.0, x) is x
    for sign in (-1.0, jnp.float32(-1)):
        flipped = softmax.signed(sign, x)
        assert flipped.dtype == dtype
        np.testing.assert_array_equal(flipped.astype(jnp.float32), -x.astype(jnp.float32))


def test_gradient_by_a_traced_scale():
    """Which goes into the scores: by `c` there is none where a score is -inf."""
    s, v, keep = draw(5)

    def total(scale):
        results = online(s * scale * softmax.LOG2E, v, keep, 1.0, [0, 4, COLUMNS])
        return sum(jnp.sum(jnp.where(jnp.isneginf(x), 0, x)) for x in results)

    def exact_total(scale):
        return sum(np.sum(x, where=np.isfinite(x)) for x in exact(scale * s.astype(np.float64), v, keep))

    for scale in (-0.7, 0.4):
        expected = (exact_total(scale + 1e-5) - exact_total(scale - 1e-5)) / 2e-5
        np.testing.assert_allclose(jax.grad(total)(jnp.float32(scale)), expected, rtol=32 * EPS)


def partial_results(seed: int, ends: list[int]) -> list[tuple[jax.Array, jax.Array]]:
    """Outputs [1, ROWS, 1, WIDTH] and log-sum-exp [1, ROWS, 1] of the parts that `ends` cut."""
    s, v, keep = draw(seed)
    parts = [exact(s[:, i:j], v[i:j], keep[:, i:j]) for i, j in itertools.pairwise(ends)]
    return [tuple(jnp.asarray(x[None, :, None], jnp.float32) for x in part) for part in parts]


def whole(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The same over all keys, in float64."""
    out, lse = exact(*draw(seed))
    return out[None, :, None], lse[None, :, None]


@properties
@given(seeds, cuts)
def test_merge_is_attention_over_the_union(seed, ends):
    out, lse = merge(*partial_results(seed, ends))
    assert (out.dtype, lse.dtype) == (np.float32, np.float32)
    assert_same((out, lse), whole(seed), 4)


@properties
@given(seeds, cuts, st.randoms(use_true_random=False))
def test_merge_is_associative_and_commutative(seed, ends, random):
    parts = partial_results(seed, ends)
    together = merge(*parts)
    random.shuffle(parts)
    while len(parts) > 1:
        joined = random.randint(2, len(parts))
        parts = [merge(*parts[:joined]), *parts[joined:]]
        random.shuffle(parts)
    assert_same(parts[0], together, 4)


@properties
@given(seeds, st.integers(0, 2))
def test_empty_part_is_the_identity(seed, place):
    [part] = partial_results(seed, [0, COLUMNS])
    nothing = jnp.zeros_like(part[0]), jnp.full_like(part[1], -jnp.inf)
    parts = [nothing, nothing]
    parts.insert(place, part)
    for alone, expected in ((merge(part), part), (merge(*parts), part), (merge(nothing, nothing), nothing)):
        for result, exactly in zip(alone, expected, strict=True):
            np.testing.assert_array_equal(result, exactly)


@pytest.mark.parametrize("ends", [[0, COLUMNS], [0, 3, COLUMNS], [0, 1, 1, 4, COLUMNS]], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_gradients_through_merge_are_those_of_the_whole(seed, ends):
    s, v, keep = draw(seed)
    keep[0, :4] = False  # a row that some parts have nothing for
    keep[1] = False  # and one that none has anything for
    rng = np.random.default_rng(seed)
    do, dlse = rng.standard_normal((ROWS, WIDTH), np.float32), rng.standard_normal(ROWS, np.float32)

    def of_keys(s, v, keep):
        e = jnp.where(keep, jnp.exp(s), 0)
        total = jnp.sum(e, 1)
        safe = jnp.where(total == 0, 1, total)
        return e @ v / safe[:, None], jnp.where(total == 0, -jnp.inf, jnp.log(safe))

    def merged(s, v):
        return merge(*(of_keys(s[:, i:j], v[i:j], keep[:, i:j]) for i, j in itertools.pairwise(ends)))

    found = jax.vjp(merged, s, v)[1]((do, dlse))
    expected = jax.vjp(lambda s, v: of_keys(s, v, keep), s, v)[1]((do, dlse))
    assert np.isfinite(found[0]).all()
    assert_same(found, expected, 8)


@pytest.mark.parametrize("ends", [[0, COLUMNS], [0, 1, 1, 4, COLUMNS]], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_merge_by_its_parts(seed, ends):
    """By eq. 11, with weights w = exp(lse_part - lse): w·do, and w·(do·(o_part - o) + dlse); 0 for an empty part."""
    parts = partial_results(seed, ends)
    rng = np.random.default_rng(seed)
    do, dlse = rng.standard_normal((1, ROWS, 1, WIDTH), np.float32), rng.standard_normal((1, ROWS, 1), np.float32)
    gradients = jax.vjp(merge, *parts)[1]((do, dlse))
    out, lse = whole(seed)
    for (o, part_lse), found in zip(parts, gradients, strict=True):
        w = np.exp(part_lse - np.where(np.isneginf(lse), 0, lse))
        assert_same(found, (w[..., None] * do, w * (np.sum(do * (o - out), -1) + dlse)), 4)
        assert not any(d[np.isneginf(part_lse)].any() for d in found)


def test_merge_keeps_the_dtype_of_outputs():
    (o1, lse1), (o2, lse2) = partial_results(6, [0, 3, COLUMNS])
    out, lse = merge((o1.astype(jnp.bfloat16), lse1), (o2.astype(jnp.bfloat16), lse2))
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(out.astype(jnp.float32), whole(6)[0], rtol=0, atol=eps * np.abs(o1).max())


def test_merge_of_nothing():
    with pytest.raises(ValueError, match=r"merge: expected at least one .* pair, got none; pass"):
        merge()


def test_a_sum_that_was_lost_is_no_empty_row():
    """Logits so large that their rounding hides them from the sum give NaN, not the 0 of rows without keys."""
    run = softmax.Running(jnp.array([2.0**34, softmax.LOWEST]), jnp.zeros(2), jnp.zeros((2, 3)))
    out, lse = softmax.finish(run)
    assert np.isnan(out[0]).all() and np.isnan(lse[0])
    assert not out[1].any() and np.isneginf(lse[1])
