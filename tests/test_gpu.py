"""On a GPU: the compiled kernels at real sizes. `pytest -m gpu -n 16 --dist loadgroup`, for 16 cores."""

import dataclasses
import functools

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HALF, LARGE, SMALL, Case, keep_mask

from pallas_flash import (
    Blocks,
    MaskModifier,
    MosaicBlocks,
    MosaicPlan,
    Plan,
    explain,
    flash_attention,
    flash_attention_varlen,
)
from pallas_flash.families import MOSAIC_GPU
from pallas_flash.plan import Sizes

pytestmark = pytest.mark.gpu


def by_case(*cases: Case):
    """Parametrises a test. All tests of a case run in one process, which works out what is right for it once."""
    params = [pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(str(case))) for case in cases]
    return pytest.mark.parametrize("case", params)


@by_case(*LARGE, *SMALL)
def test_triton_matches_oracle(case):
    """Outputs, residual and gradients; float32 with the three-product dots, whose error is that of float32."""
    attention = functools.partial(
        flash_attention, return_residual=True, implementation="triton", precision="highest", **case.options()
    )
    checks.check(case, attention)


@by_case(*HALF)
def test_mosaic_matches_oracle(case):
    attention = functools.partial(flash_attention, return_residual=True, implementation="mosaic_gpu", **case.options())
    checks.check(case, attention)


def mosaic_plans(H: int, Hv: int) -> list[MosaicPlan]:
    """All blocks of each kernel that fit, with one or two stages, in as few plans as hold them."""
    sizes, kernels = Sizes(600, 700, H, Hv, "half"), [field.name for field in dataclasses.fields(MosaicPlan)]

    def fitting(kernel: str) -> list[MosaicBlocks | None]:
        options = [x for x in MOSAIC_GPU.candidates(kernel) if x.num_stages < 3]
        return [x for x in options if MOSAIC_GPU.fits(kernel, x, sizes, 90)] or [None]

    options = {kernel: fitting(kernel) for kernel in kernels}
    turns = range(max(map(len, options.values())))
    plans = [MosaicPlan(**{kernel: found[n % len(found)] for kernel, found in options.items()}) for n in turns]
    alone = [dataclasses.replace(plan, backward=None) for plan in plans]
    return list(dict.fromkeys([*plans, *alone]))


PLANNED = [
    (H, Hv, plan)
    for H, Hv in ((64, 64), (128, 64), (128, 128), (192, 192), (256, 64), (256, 256))
    for plan in mosaic_plans(H, Hv)
]


@pytest.mark.parametrize("H,Hv,plan", PLANNED, ids=str)
def test_mosaic_with_any_blocks(H, Hv, plan):
    case = Case("planned", T=600, S=700, N=4, K=2, H=H, Hv=Hv, dtype="bfloat16", is_causal=True, dropout=0.2)
    attention = functools.partial(
        flash_attention, return_residual=True, implementation="mosaic_gpu", plan=plan, **case.options()
    )
    checks.check(case, attention)


IN_ORDER = [
    *(
        c
        for c in LARGE
        if c.name
        in (
            "h64_causal_float16",
            "h128_full_bfloat16",
            "h256_causal_bfloat16",
            "everything_bf16",
            "groups_divided_bf16",
            "groups_divided_masked_bf16",
            "scores_of_every_kind_large",
            "scores_of_every_kind_h256_fp16",
        )
    ),
    Case("windows_in_order", T=2500, N=4, K=2, H=128, dtype="bfloat16", local_window_size=(300, 200)),
    Case("anticausal_in_order", T=1500, S=2100, N=2, H=64, dtype="bfloat16", local_window_size=(0, None)),
    Case("long_in_order", B=1, T=8192, N=4, H=64, dtype="bfloat16"),
]
"""Thread blocks that wait for each other, in every order of tiles, and more of them than run at once."""


@by_case(*(c for c in IN_ORDER if c.T < 4096))
def test_mosaic_in_order_matches_oracle(case):
    attention = functools.partial(
        flash_attention, return_residual=True, implementation="mosaic_gpu", deterministic=True, **case.options()
    )
    checks.check(case, attention)


@by_case(*IN_ORDER)
def test_mosaic_repeats_bitwise(case):
    """All results are the same bits in 30 runs, with other work in between."""
    attention = functools.partial(
        flash_attention, return_residual=True, implementation="mosaic_gpu", deterministic=True, **case.options()
    )
    arrays, run = checks.inputs(case), checks.evaluator(attention, checks.scored(case))
    first = [np.asarray(x) for x in run(*arrays)]
    for i in range(29):
        jnp.full((1 << 20,), float(i)).block_until_ready()  # moves the next results elsewhere
        for ours, before in zip(run(*arrays), first, strict=True):
            assert np.array_equal(ours, before, equal_nan=False)


@by_case(*(c for c in LARGE if c.dtype == "float32"))
def test_triton_tf32_matches_oracle(case):
    """The default precision of float32, against the dense computation at the default precision."""
    attention = functools.partial(flash_attention, return_residual=True, implementation="triton", **case.options())
    checks.check(case, attention, precision=None)


@by_case(*(c for c in LARGE if c.T * c.S * c.N < 10e6))
def test_xla_matches_oracle(case):
    attention = functools.partial(
        flash_attention, return_residual=True, implementation="xla", precision="highest", **case.options()
    )
    checks.check(case, attention)


@pytest.mark.parametrize("dtype,best", [("bfloat16", "mosaic_gpu"), ("float32", "triton")])
def test_default(dtype, best):
    q = jax.ShapeDtypeStruct((2, 1024, 8, 64), dtype)
    assert explain(q, q, q).implementation == best


KERNELS = pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])


def test_mosaic_ends_and_repeats():
    """1,000 launches of small grids, with empty tiles and ragged lengths: all but dq, of no fixed order, repeat."""
    for name in ("lengths_empty", "bottom_right_empty_rows", "cross_causal_short_keys", "one_query", "everything"):
        case = next(c for c in HALF if c.name == name)
        attention = functools.partial(
            flash_attention, return_residual=True, implementation="mosaic_gpu", **case.options()
        )
        arrays, run = checks.inputs(case), checks.evaluator(attention)
        first = run(*arrays)
        same = jax.jit(
            lambda a, b: [jnp.array_equal(x, y) for i, (x, y) in enumerate(zip(a, b, strict=True)) if i != 2]
        )
        results = [same(run(*arrays), first) for _ in range(200)]
        assert np.asarray(jax.device_get(results)).all(), name


@pytest.mark.parametrize("H", [64, 128, 256])
def test_mosaic_under_vmap(H):
    """Gradients under vmap, lengths mapped too, are bit for bit those of a loop.

    Each query's cotangent has one element, so that XLA's sum for delta is exact in whatever order it adds.
    """
    rng = jax.random.key(0)
    q = jax.random.normal(rng, (3, 2, 200, 4, H), jnp.bfloat16)
    k = jax.random.normal(rng, (3, 2, 150, 2, H), jnp.bfloat16)
    lengths = jnp.array([[3, 150], [100, 0], [64, 65]])

    def gradients(q, k, lengths):
        def loss(q, k, v):
            out = flash_attention(
                q, k, v, key_value_seq_lengths=lengths, implementation="mosaic_gpu", deterministic=True, is_causal=True
            )
            return jnp.sum(jnp.where(jnp.arange(H) == jnp.arange(200)[:, None, None] % H, out, 0).astype(jnp.float32))

        return jax.grad(loss, (0, 1, 2))(q, k, k)

    together = jax.jit(jax.vmap(gradients))(q, k, lengths)
    for i in range(3):
        for a, b in zip(together, gradients(q[i], k[i], lengths[i]), strict=True):
            assert np.array_equal(a[i], b)


@pytest.mark.parametrize(
    "name",
    [
        "h64_causal_bfloat16",
        "h128_causal_bfloat16",
        "everything_bf16",
        "lengths_bf16",
        "fp32_ragged",
        "scores_of_every_kind_large",
        "bias_of_heads_h128_bf16",
    ],
)
def test_bitwise_repeats(name):
    """Output and gradients are the same bits in 10 runs, with other work and other memory in between."""
    case = next(c for c in LARGE if c.name == name)
    arrays = checks.inputs(case)
    attention = functools.partial(flash_attention, return_residual=True, implementation="triton", **case.options())
    run = checks.evaluator(attention, checks.scored(case))
    first = run(*arrays)
    for i in range(9):
        jnp.full((1 << 20,), float(i)).block_until_ready()  # moves the next results elsewhere
        for ours, before in zip(run(*arrays), first, strict=True):
            assert np.array_equal(ours, before)


@KERNELS
def test_garbage_around_the_arrays_is_not_read(implementation):
    """Ragged tiles reach beyond the arrays: the result must not depend on what the memory there holds."""
    case = Case("ragged", B=1, T=301, S=277, N=3, K=1, H=72, dtype="bfloat16")
    arrays = checks.inputs(case)
    results = []
    attention = functools.partial(
        flash_attention, return_residual=True, implementation=implementation, deterministic=True
    )
    for fill in (np.nan, 1e30):
        poison = [jnp.full((1 << 18,), fill, jnp.bfloat16) for _ in range(64)]
        jax.block_until_ready(poison)
        del poison
        results.append(checks.evaluate(attention, arrays))
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b)


@KERNELS
@pytest.mark.parametrize("H,rate", [(64, 0.35), (256, 0.35), (64, 0.98)])
def test_the_same_is_dropped_everywhere(H, rate, implementation):
    """As the plain function says: read off outputs of values eᵢ, and their gradient from cotangents eᵢ."""
    size, key = 200, jax.random.key(3)
    keep = keep_mask(key, rate, 2, 3, size, size)
    q, k = (jax.random.normal(jax.random.key(i), (2, size, 3, H), jnp.bfloat16) for i in range(2))
    eye = jnp.broadcast_to(jnp.eye(size, dtype=q.dtype)[None, :, None], (2, size, 3, size))
    attention = functools.partial(
        flash_attention, dropout_rate=rate, dropout_key=key, implementation=implementation, scale=0.02
    )
    out, pull = jax.vjp(lambda v: attention(q, k, v), eye)
    (dv,) = pull(eye)
    for found in (jnp.moveaxis(out, 2, 1), jnp.transpose(dv, (0, 2, 3, 1))):  # dv[s] holds what each query gave it
        assert np.array_equal(found > 0, keep)


Q_LENGTHS, K_LENGTHS = np.array([300, 77]), np.array([100, 259])
Q_INSIDE, K_INSIDE = np.arange(300) < Q_LENGTHS[:, None], np.arange(260) < K_LENGTHS[:, None]


def within(tile, q_len, k_len):
    return (tile.q_ids < q_len) & (tile.k_ids < k_len)


PADDING = {
    "lengths": {"query_seq_lengths": Q_LENGTHS, "key_value_seq_lengths": K_LENGTHS},
    "segments": {"query_segment_ids": Q_INSIDE - 1, "key_value_segment_ids": K_INSIDE - 1},
    "mask": {"mask": Q_INSIDE[:, None, :, None] & K_INSIDE[:, None, None]},
    "keys only": {"mask": K_INSIDE[:, None, None], "query_seq_lengths": Q_LENGTHS},
    "function": {"mask_modifiers": (MaskModifier(within, (Q_LENGTHS, K_LENGTHS), ("B", "B")),)},
}


@KERNELS
@pytest.mark.parametrize("H", [64, 256])
@pytest.mark.parametrize("kind", PADDING)
def test_padding_may_hold_nan_and_inf(kind, H, implementation):
    case = Case("padding", T=300, S=260, N=4, K=2, H=H, dtype="bfloat16")
    q, k, v, do, dlse = checks.inputs(case)
    attention = functools.partial(
        flash_attention, return_residual=True, implementation=implementation, deterministic=True, **PADDING[kind]
    )
    run = checks.evaluator(attention)
    clean = run(q, k, v, do, dlse)
    for poisoned in (
        (q.at[1, 77:].set(jnp.nan), k, v, do.at[1, 77:].set(jnp.nan), dlse),
        (q, k.at[0, 100:].set(jnp.inf), v, do, dlse),
        (q, k, v.at[0, 100:].set(jnp.nan), do, dlse),
    ):
        for ours, ref in zip(run(*poisoned), clean, strict=True):
            assert np.array_equal(ours, ref)


@KERNELS
@pytest.mark.parametrize("B,T,N,H", [(70_000, 32, 1, 16), (1, 4_304, 4_000, 128)], ids=["batch", "heads"])
@pytest.mark.xdist_group("memory")
def test_many_programs_and_elements(B, T, N, H, implementation):
    """More than 65,535 batch entries; more than 2³¹ elements. Compared with the same call on the last slice.

    It takes up to 40 GB; with 16 processes, each keeping what it once took, it may have to run again alone.
    """
    q = jax.random.normal(jax.random.key(0), (B, T, N, H), jnp.bfloat16)
    attention = functools.partial(flash_attention, is_causal=True, implementation=implementation, deterministic=True)
    loss = jax.jit(jax.grad(lambda q, k, v: jnp.sum(attention(q, k, v).astype(jnp.float32)), (0, 1, 2)))
    part = (slice(B - 1, None), slice(None), slice(N - 1, None))
    whole = [x[part] for x in (attention(q, q, q), *loss(q, q, q))]
    last = q[part]
    small = [attention(last, last, last), *loss(last, last, last)]
    for a, b in zip(whole, small, strict=True):
        assert np.array_equal(a, b)


@KERNELS
@pytest.mark.parametrize("H", [64, 128, 256])
def test_packed_sequences_are_those_alone(H, implementation):
    """Sequences of any lengths, one without queries, aligned to their last tokens; within 2.6 bfloat16 epsilons."""
    cu_q, cu_k = np.array([0, 300, 300, 517, 900]), np.array([0, 260, 350, 360, 1000])
    rng = jax.random.key(0)
    q, k = (jax.random.normal(rng, (n, heads, H), jnp.bfloat16) for n, heads in ((900, 4), (1000, 2)))
    attention = functools.partial(
        flash_attention_varlen,
        is_causal=True,
        query_offset=np.diff(cu_k) - np.diff(cu_q),
        implementation=implementation,
    )

    def gradients(attention, q, k):
        return jax.jit(jax.grad(lambda q, k, v: jnp.sum(attention(q, k, v).astype(jnp.float32)), (0, 1, 2)))(q, k, k)

    packed = gradients(lambda q, k, v: attention(q, k, v, cu_q, cu_k), q, k)
    alone = functools.partial(flash_attention, is_causal=True, implementation="xla")
    for i in range(4):
        rows, columns = slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])
        offset = int((np.diff(cu_k) - np.diff(cu_q))[i])
        right = gradients(functools.partial(alone, query_offset=offset), q[rows], k[columns])
        for a, b, part in zip(packed, right, (rows, columns, columns), strict=True):
            ours, ref = (np.asarray(x, np.float32) for x in (a[part], b))
            assert np.max(np.abs(ours - ref), initial=0) <= 0.02 * max(1.0, np.max(np.abs(ref), initial=0))


@KERNELS
def test_long_sequence_with_large_logits(implementation):
    """T = 131,072: every output is a mean of values, so ones stay ones, and the residual is finite."""
    q = 40 * jax.random.normal(jax.random.key(0), (1, 131_072, 1, 64), jnp.bfloat16)
    k = jax.random.normal(jax.random.key(1), q.shape, q.dtype)
    out, residual = flash_attention(
        q, k, jnp.ones_like(k), is_causal=True, return_residual=True, implementation=implementation
    )
    assert np.allclose(np.asarray(out, np.float32), 1, atol=2 * float(jnp.finfo(q.dtype).eps))
    assert np.isfinite(residual).all()


@pytest.mark.parametrize(
    "H,plan", [(64, None), (128, None), (256, None), *((64, Plan(*[Blocks(128, 64, w)] * 3)) for w in (4, 8))], ids=str
)
def test_toolchain(H, plan):
    """All-ones inputs give exactly ones: a compiler once miscompiled two chained dots (openxla/xla#19780)."""
    ones = jnp.ones((1, 128, 1, H), jnp.bfloat16)
    assert (flash_attention(ones, ones, ones, plan=plan) == 1).all()
