"""Lowering to CUDA without a GPU: every case lowers, and for six GPUs the facts of what is launched are kept.

`python tests/test_lowering.py` writes the facts anew; the difference is reviewed with the change that caused it.
"""

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
from cases import BENCHMARK, LARGE, SMALL, Case
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_flash import RESIDUAL_NAMES, explain, flash_attention, vjp

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
    """Grid, warps and stages of each Triton kernel in a module's text, by its name."""
    found = {}
    for line in text.splitlines():
        if "custom_call @__gpu$xla.gpu.triton" in line:
            number = dict(re.findall(r"(grid_[xyz]|num_warps|num_stages) = (\d+)", line))
            grid = "x".join(number[f"grid_{axis}"] for axis in "xyz")
            name = re.search(r'name = "(flash_\w+)"', line).group(1)
            assert name not in found
            found[name] = f"grid {grid}, {number['num_warps']} warps, {number['num_stages']} stages"
    return found


def facts(device: str, case: Case) -> dict:
    with on(device):
        return {
            "plan": str(explain(*shapes(case), **case.options()).plan),
            **launches(lower(with_gradients(case), *shapes(case))),
        }


@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=str)
def test_every_case_lowers(case):
    """In three kernels and without a warning."""
    with on("H200"):
        text = lower(with_gradients(case), *shapes(case))
    assert launches(text).keys() == {"flash_forward", "flash_dq", "flash_dkv"}


@pytest.mark.parametrize("case", FACT_CASES, ids=str)
def test_facts(case):
    kept = json.loads(FACTS.read_text())
    assert {device: facts(device, case) for device in DEVICES} == kept[case.name]


def test_no_buffer_of_scores():
    """Nothing in the program, forward and backward, is as large as T×S."""
    case = Case("long", B=1, T=4096, N=2, K=1, H=64, dtype="bfloat16", is_causal=True, key_value_seq_lengths=(4000,))
    with on("H200"):
        text = lower(with_gradients(case), *shapes(case))
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


@pytest.mark.parametrize("saved,forwards", [(RESIDUAL_NAMES, 1), ((), 2)], ids=["saved", "recomputed"])
def test_remat_saves_by_name(saved, forwards):
    """With the residuals saved by their names, the forward kernel runs once, else twice."""
    case = Case("remat", T=1024, H=64, dtype="bfloat16", is_causal=True)
    policy = jax.checkpoint_policies.save_only_these_names(*saved)

    @functools.partial(jax.checkpoint, policy=policy)
    def block(query, key, value):
        return jnp.sum(flash_attention(query, key, value, is_causal=True).astype(jnp.float32) ** 2)

    with on("H200"):
        jaxpr = str(jax.jit(jax.grad(block, (0, 1, 2))).trace(*shapes(case)).jaxpr)
    assert jaxpr.count("name=flash_forward") == forwards


if __name__ == "__main__":
    everything = {case.name: {device: facts(device, case) for device in DEVICES} for case in FACT_CASES}
    FACTS.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
