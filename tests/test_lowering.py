"""Lowering to CUDA without a GPU: every case lowers, and for six GPUs the facts of Triton's launches are kept.

`python tests/test_lowering.py` writes the facts anew; the difference is reviewed with the change that caused it.
"""

import dataclasses
import functools
import json
import math
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import recipes
from cases import BENCHMARK, HALF, LARGE, SMALL, Case
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_flash import RESIDUAL_NAMES, MaskModifier, ScoreModifier, explain, flash_attention, masks, vjp

FACTS = pathlib.Path(__file__).with_name("lowering_facts.json")
DEVICES = {
    "A100": "NVIDIA A100-SXM4-80GB",
    "H100": "NVIDIA H100 80GB HBM3",
    "H200": "NVIDIA H200",
    "B200": "NVIDIA B200",
    "L4": "NVIDIA L4",
    "RTX 4090": "NVIDIA GeForce RTX 4090",
}
FACT_CASES = [
    case
    for case in [*BENCHMARK, *LARGE]
    if case.name in ("h64_full_t8192", "h128_causal_t8192", "fp32_h256", "everything_bf16")
]


def on(device: str):
    """Traces and lowers for an absent GPU."""
    abstract = AbstractDevice(DEVICES[device], None, platform="cuda")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract))


def shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    sizes = ((case.T, case.N, case.H), (case.S, case.K, case.H), (case.S, case.K, case.Hv))
    return [jax.ShapeDtypeStruct((case.B, *size), case.dtype) for size in sizes]


def further(case: Case) -> list[jax.ShapeDtypeStruct]:
    """The other arrays by which there is a gradient."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.differentiable().values()]


def lowered(function, *args) -> jax.stages.Lowered:
    """For CUDA, with any warning an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


def lower(function, *args) -> str:
    """StableHLO of the CUDA lowering."""
    return lowered(function, *args).as_text()


def with_gradients(case: Case, **options):
    """(query, key, value, *further) → out, residual and gradients by all given, every cotangent in use."""
    names = case.differentiable()

    def run(query, key, value, *further):
        def attention(query, key, value, *further):
            given = case.scored(dict(zip(names, further, strict=True))) if further else {}
            return flash_attention(query, key, value, return_residual=True, **(case.options() | options | given))

        results, vjp = jax.vjp(attention, query, key, value, *further)
        return results, vjp(results)

    return run


def score_kernels(case: Case) -> list[str]:
    """Those of the gradients of bias, slopes and operands: one each, by whether it has axes of queries and of keys."""
    operands = [
        x for name in case.scores for x in zip(case._operands(name), recipes.SCORES[name].axes, strict=True)
        if np.issubdtype(x[0].dtype, np.floating)
    ]  # fmt: skip
    named = {"logits_scale": "BN", "bias": "BNTS", "alibi_slopes": "BN"}
    operands += [(x, named[name]) for name, x in case.differentiable().items() if name in named]
    shapes = [oracle.spread(x, letters).shape for x, letters in operands]
    return [
        "flash_d_cells" if T > 1 and S > 1 else "flash_d_columns" if S > 1 else "flash_d_rows" for _, _, T, S in shapes
    ]


def launches(text: str) -> dict[str, str]:
    """The kernels in a module's text, by name: grid, warps and stages of Triton's, what goes in and out of Mosaic's."""
    found = {}
    for line in text.splitlines():
        if "custom_call @__gpu$xla.gpu.triton" in line:
            number = dict(re.findall(r"(grid_[xyz]|num_warps|num_stages) = (\d+)", line))
            grid = "x".join(number[f"grid_{axis}"] for axis in "xyz")
            name = re.search(r'name = "(flash_\w+)"', line).group(1)
            launch = f"grid {grid}, {number['num_warps']} warps, {number['num_stages']} stages"
        elif "custom_call @mosaic_gpu" in line:
            name = re.search(r"\\00(flash_\w+)_mosaic_gpu\\00", line).group(1)
            launch = line[line.rindex(" : (") + 3 :]
        else:
            assert "custom_call" not in line
            continue
        assert name not in found or name.startswith("flash_d_")
        found[name] = launch
    return found


def kernels(jaxpr) -> list[str]:
    """The same names before lowering, one for each launch in a jaxpr and in those inside it."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("pallas_call", "mpmd_map"):
            found.append(equation.params["name"])
        else:
            inner = [leaf for leaf in jax.tree.leaves([*equation.params.values()]) if hasattr(leaf, "eqns")]
            found += [name for each in inner for name in kernels(each)]
    return found


def facts(device: str, case: Case) -> dict:
    with on(device):
        return {
            "plan": str(explain(*shapes(case), implementation="triton", **case.options()).plan),
            **launches(lower(with_gradients(case, implementation="triton"), *shapes(case))),
        }


@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=str)
def test_every_case_lowers(case):
    """In three kernels of Triton, those of the gradients of what scores depend on, and without a warning."""
    with on("H200"):
        text = lower(with_gradients(case, implementation="triton"), *shapes(case), *further(case))
    assert launches(text).keys() == {"flash_forward", "flash_dq", "flash_dkv", *score_kernels(case)}


@pytest.mark.parametrize("case", FACT_CASES, ids=str)
def test_facts(case):
    kept = json.loads(FACTS.read_text())
    assert {device: facts(device, case) for device in DEVICES} == kept[case.name]


def mosaic_kernels(case: Case) -> set[str]:
    """Those that forward and backward take."""
    together = max(case.H, case.Hv) <= 128
    return {"flash_forward", *(("flash_backward",) if together else ("flash_dq", "flash_dk", "flash_dv"))}


@pytest.mark.parametrize("case", HALF, ids=str)
def test_every_half_case_traces_for_mosaic(case):
    with on("H200"):
        run = jax.jit(with_gradients(case, implementation="mosaic_gpu"))
        found = kernels(run.trace(*shapes(case), *further(case)).jaxpr)
    assert sorted(found) == sorted([*mosaic_kernels(case), *score_kernels(case)])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("h64_full_bfloat16", {}),
        ("h128_causal_float16", {}),
        ("h64_causal_bfloat16", {"deterministic": True}),
        ("h256_causal_bfloat16", {}),
        ("h192_v128_bf16", {}),
        ("everything_bf16", {"scale": jnp.float32(0.2)}),
        ("scores_of_every_kind_large", {}),
        ("scores_of_every_kind_h256_fp16", {}),
    ],
)
def test_mosaic_kernels_lower(name, options):
    """Full, causal with grouped heads, reproducible, wide, of two head dims; window, lengths, traced scale; scores."""
    case = next(case for case in HALF if case.name == name)
    with on("H200"):
        run = with_gradients(dataclasses.replace(case, scale=None), implementation="mosaic_gpu", **options)
        text = lower(run, *shapes(case), *further(case))
    assert launches(text).keys() == {*mosaic_kernels(case), *score_kernels(case)}


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize("name", ["bias_full_bf16", "bias_of_keys_h256_fp16", "alibi_h128_bf16"])
def test_gradients_not_asked_for_are_dropped(name, implementation):
    """By JAX or XLA: their kernels say of no side effect, and no result depends on them unless they are asked for."""
    case = next(case for case in LARGE if case.name == name)
    for arrays in ([], further(case)):
        with on("H200"):
            module = lowered(with_gradients(case, implementation=implementation), *shapes(case), *arrays).compiler_ir()
        calls = [op for op in _operations(module) if re.search(r"flash_d_(rows|columns|cells)", str(op))]
        assert (calls or not arrays) and all("has_side_effect" not in str(op) for op in calls)
        assert [_is_returned(op) for op in calls] == [bool(arrays)] * len(calls)


def _operations(module) -> list:
    """All custom calls of an MLIR module."""
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    inside = [op.operation for function in functions for op in function.regions[0].blocks[0].operations]
    return [op for op in inside if op.name == "stablehlo.custom_call"]


def _is_returned(operation) -> bool:
    """Whether what a function returns depends on it."""
    users = [use.owner for result in operation.results for use in result.uses]
    return any(user.name == "func.return" or _is_returned(user.operation) for user in users)


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize("H", [64, 256])
def test_kernels_ask_the_mask_as_it_is(monkeypatch, H, implementation):
    """Those whose rows are keys walk its transpose, whose `keep` would be wrong: a tile carries indices."""
    asked, keep = set(), masks.Band.keep

    def seen(band, tile):
        asked.add((band.lo, band.hi))
        return keep(band, tile)

    monkeypatch.setattr(masks.Band, "keep", seen)
    case = Case("band", T=1024, H=H, dtype="bfloat16", local_window_size=(300, 20))
    with on("H200"):
        jax.jit(with_gradients(case, implementation=implementation)).trace(*shapes(case))
    assert asked == {(-300, 20)}


@pytest.mark.parametrize("device", DEVICES)
def test_default(device):
    """The fastest that takes the dtype on the device."""
    for case in BENCHMARK:
        with on(device):
            half = explain(*shapes(case), **case.options())
            single = explain(*shapes(dataclasses.replace(case, dtype="float32")), **case.options())
        assert half.implementation == ("mosaic_gpu" if device in ("H100", "H200") else "triton")
        assert single.implementation == "triton"


def test_mosaic_kernels_in_vmap():
    """Over batch axes, alone and under the gradient, with lengths mapped and keys shared; nothing is looped over."""
    q, k = jax.ShapeDtypeStruct((3, 2, 256, 4, 64), "bfloat16"), jax.ShapeDtypeStruct((2, 256, 2, 64), "bfloat16")
    lengths = jax.ShapeDtypeStruct((3, 2), "int32")

    def attention(q, k, lengths):
        return flash_attention(q, k, k, is_causal=True, key_value_seq_lengths=lengths)

    def gradients(q, k, lengths):
        return jax.grad(lambda q, k: jnp.sum(attention(q, k, lengths).astype(jnp.float32)), (0, 1))(q, k)

    for function, kernels in ((attention, 1), (gradients, 2)):
        with on("H200"):
            text = lower(jax.vmap(function, (0, None, 0)), q, k, lengths)
        assert text.count("custom_call @mosaic_gpu") == kernels and "stablehlo.while" not in text


def test_functions_may_ignore_what_they_asked_for():
    """Indices and operands of which nothing follows: Mosaic would search long for their layout, and find none."""
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), "bfloat16")

    def score(score, tile, weight):
        del weight
        tile.k_ids + 1
        return score * (1 + 0 * tile.head)

    def keep(tile):
        tile.q_ids + 1
        return tile.k_ids >= 3

    def gradients(q, weight):
        attention = functools.partial(
            flash_attention,
            score_modifiers=(ScoreModifier(score, (weight,), ("S",)),),
            mask_modifiers=(MaskModifier(keep),),
            implementation="mosaic_gpu",
        )
        return jax.grad(lambda q: jnp.sum(attention(q, q, q).astype(jnp.float32)))(q)

    with on("H200"):
        text = lower(gradients, q, jax.ShapeDtypeStruct((256,), "float32"))
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_no_buffer_of_scores(implementation):
    """Nothing in the program, forward and backward, is as large as T×S."""
    case = Case("long", B=1, T=4096, N=2, K=1, H=64, dtype="bfloat16", is_causal=True, key_value_seq_lengths=(4000,))
    with on("H200"):
        text = lower(with_gradients(case, implementation=implementation), *shapes(case))
    assert largest(text) == case.T * case.N * case.H < case.T * case.S / 8


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_no_buffer_of_scores_for_gradients_of_vectors(implementation):
    """Nor for a bias of keys, slopes, sinks, a function's vectors and dropout."""
    case = Case(
        "long_scores", B=1, T=4096, N=2, K=1, H=64, dtype="bfloat16", is_causal=True, bias="of_keys", alibi="heads",
        soft_cap=5.0, scores=("head_gain", "key_weight"), sinks=True, dropout=0.1,
    )  # fmt: skip
    with on("H200"):
        text = lower(with_gradients(case, implementation=implementation), *shapes(case), *further(case))
    assert largest(text) == case.T * case.N * case.H < case.T * case.S / 8


def largest(text: str) -> int:
    """Elements of the largest array of a program."""
    return max(math.prod(map(int, s.rstrip("x").split("x"))) for s in re.findall(r"tensor<((?:\d+x)+)", text))


@pytest.mark.parametrize("options", [{}, {"interpret": True}], ids=["xla", "triton"])
def test_values_never_recompile(options):
    """One compilation serves 20 packings, offsets and scales of one shape, called without a jit around."""
    flash_attention(
        *[jnp.ones((1, 8, 1, 8))] * 3, **options
    )  # JAX's interpreter changes its configuration on first use
    q = jnp.ones((2, 16, 2, 8))
    before = vjp.attended._cache_size()
    for i in range(20):
        lengths, offset, scale = np.array([i % 16, 3]), jnp.int32(i), jnp.float32(0.1 * i)
        flash_attention(
            q, q, q, is_causal=True, key_value_seq_lengths=lengths, query_offset=offset, scale=scale, **options
        ).block_until_ready()
    assert vjp.attended._cache_size() == before + 1


def below(tile, limit):
    return tile.k_ids < limit


@pytest.mark.parametrize("options", [{}, {"interpret": True}], ids=["xla", "triton"])
def test_masks_never_recompile(options):
    """keras#21808: nor do 20 masks, ids and operands of one shape."""
    q = jnp.ones((2, 16, 2, 8))
    flash_attention(q, q, q, **options)
    draw = np.random.default_rng(0)
    before = vjp.attended._cache_size()
    for _ in range(20):
        ids, limit = draw.integers(-1, 3, (2, 16)), draw.integers(0, 16, (2, 1))
        flash_attention(
            q, q, q, mask=draw.random((16, 16)) < 0.5, query_segment_ids=ids, key_value_segment_ids=ids,
            mask_modifiers=(MaskModifier(below, (limit,), ("BT",)),), **options,
        ).block_until_ready()  # fmt: skip
    assert vjp.attended._cache_size() == before + 1


def weighed(score, tile, weight):
    return score * weight


@pytest.mark.parametrize("options", [{}, {"interpret": True}], ids=["xla", "triton"])
def test_scores_never_recompile(options):
    """Nor do 20 biases, slopes, sinks, operands and dropout keys, traced or not."""
    q = jnp.ones((2, 16, 2, 8))
    flash_attention(q, q, q, **options)
    draw = np.random.default_rng(0)
    before = vjp.attended._cache_size()
    for i in range(20):
        flash_attention(
            q, q, q, bias=draw.random((2, 16, 16), np.float32), alibi_slopes=draw.random(2, np.float32),
            sinks=draw.random(2, np.float32), dropout_rate=0.1, dropout_key=jax.random.key(i), logits_soft_cap=5.0,
            score_modifiers=(ScoreModifier(weighed, (draw.random((2, 16), np.float32),), ("BS",)),), **options,
        ).block_until_ready()  # fmt: skip
    assert vjp.attended._cache_size() == before + 1

    @jax.jit
    def step(key):
        return flash_attention(q, q, q, dropout_rate=0.1, dropout_key=key, **options)

    results = [step(jax.random.key(i)) for i in range(3)]
    assert step._cache_size() == 1 and not np.array_equal(results[0], results[1])


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize("saved,forwards", [(RESIDUAL_NAMES, 1), ((), 2)], ids=["saved", "recomputed"])
def test_remat_saves_by_name(saved, forwards, implementation):
    """With the residuals saved by their names, the forward kernel runs once, else twice."""
    case = Case("remat", T=1024, H=64, dtype="bfloat16", is_causal=True)
    policy = jax.checkpoint_policies.save_only_these_names(*saved)

    @functools.partial(jax.checkpoint, policy=policy)
    def block(query, key, value):
        out = flash_attention(query, key, value, is_causal=True, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    with on("H200"):
        jaxpr = jax.jit(jax.grad(block, (0, 1, 2))).trace(*shapes(case)).jaxpr
    assert kernels(jaxpr).count("flash_forward") == forwards


if __name__ == "__main__":
    everything = {case.name: {device: facts(device, case) for device in DEVICES} for case in FACT_CASES}
    FACTS.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
