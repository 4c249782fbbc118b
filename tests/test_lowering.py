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
import pytest
from cases import BENCHMARK, HALF, LARGE, SMALL, Case
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_flash import RESIDUAL_NAMES, MaskModifier, explain, flash_attention, masks, vjp

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


def lower(function, *args) -> str:
    """StableHLO of the CUDA lowering, with any warning an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def with_gradients(case: Case, **options):
    """(query, key, value) → out, residual and gradients, every cotangent in use."""
    attention = functools.partial(flash_attention, return_residual=True, **case.options(), **options)

    def run(query, key, value):
        results, vjp = jax.vjp(attention, query, key, value)
        return results, vjp(results)

    return run


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
        assert name not in found
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
    """In three kernels of Triton and without a warning."""
    with on("H200"):
        text = lower(with_gradients(case, implementation="triton"), *shapes(case))
    assert launches(text).keys() == {"flash_forward", "flash_dq", "flash_dkv"}


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
        assert sorted(kernels(run.trace(*shapes(case)).jaxpr)) == sorted(mosaic_kernels(case))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("h64_full_bfloat16", {}),
        ("h128_causal_float16", {}),
        ("h64_causal_bfloat16", {"deterministic": True}),
        ("h256_causal_bfloat16", {}),
        ("h192_v128_bf16", {}),
        ("everything_bf16", {"scale": jnp.float32(0.2)}),
    ],
)
def test_mosaic_kernels_lower(name, options):
    """Full, causal with grouped heads, reproducible, wide, of two head dims; window, lengths and a traced scale."""
    case = next(case for case in HALF if case.name == name)
    with on("H200"):
        run = with_gradients(dataclasses.replace(case, scale=None), implementation="mosaic_gpu", **options)
        assert launches(lower(run, *shapes(case))).keys() == mosaic_kernels(case)


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


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_no_buffer_of_scores(implementation):
    """Nothing in the program, forward and backward, is as large as T×S."""
    case = Case("long", B=1, T=4096, N=2, K=1, H=64, dtype="bfloat16", is_causal=True, key_value_seq_lengths=(4000,))
    with on("H200"):
        text = lower(with_gradients(case, implementation=implementation), *shapes(case))
    sizes = [math.prod(map(int, s.rstrip("x").split("x"))) for s in re.findall(r"tensor<((?:\d+x)+)", text)]
    assert max(sizes) == case.T * case.N * case.H < case.T * case.S / 8


@pytest.mark.parametrize("options", [{}, {"interpret": True}], ids=["xla", "triton"])
def test_values_never_recompile(options):
    """One compilation serves 20 packings, offsets and scales of one shape, called without a jit around."""
    flash_attention(
        *[jnp.ones((1, 8, 1, 8))] * 3, **options
    )  # JAX's interpreter changes its configuration on first use
    q = jnp.ones((2, 16, 2, 8))
    before = vjp.attend._cache_size()
    for i in range(20):
        lengths, offset, scale = np.array([i % 16, 3]), jnp.int32(i), jnp.float32(0.1 * i)
        flash_attention(
            q, q, q, is_causal=True, key_value_seq_lengths=lengths, query_offset=offset, scale=scale, **options
        ).block_until_ready()
    assert vjp.attend._cache_size() == before + 1


def below(tile, limit):
    return tile.k_ids < limit


@pytest.mark.parametrize("options", [{}, {"interpret": True}], ids=["xla", "triton"])
def test_masks_never_recompile(options):
    """keras#21808: nor do 20 masks, ids and operands of one shape."""
    q = jnp.ones((2, 16, 2, 8))
    flash_attention(q, q, q, **options)
    draw = np.random.default_rng(0)
    before = vjp.attend._cache_size()
    for _ in range(20):
        ids, limit = draw.integers(-1, 3, (2, 16)), draw.integers(0, 16, (2, 1))
        flash_attention(
            q, q, q, mask=draw.random((16, 16)) < 0.5, query_segment_ids=ids, key_value_segment_ids=ids,
            mask_modifiers=(MaskModifier(below, (limit,), ("BT",)),), **options,
        ).block_until_ready()  # fmt: skip
    assert vjp.attend._cache_size() == before + 1


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
