"""Compiled for an H200 without a GPU: no kernel's wgmma is serialised, and none spills more than its budget.

Optional: it needs the compiler in JAX's CUDA plugin, and ptxas; CONTRIBUTING.md says how to get them. Each case is
compiled in a process of its own, because the dumps are asked for before jax is imported; `python tests/test_compiled.py
--case NAME` is that process. `python tests/test_compiled.py` measures all of them and writes the budgets anew, those
of these versions of jaxlib and ptxas; the difference is reviewed with the change that caused it.
"""

import argparse
import functools
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest
from cases import Case

FACTS = pathlib.Path(__file__).with_name("compiled_facts.json")
ROOT = FACTS.parent.parent
SITE = pathlib.Path(os.environ.get("JAX_CUDA_SITE", "no JAX_CUDA_SITE")).expanduser()
JAXLIB = importlib.metadata.version("jaxlib")
SLACK = 64  # bytes by which a budget may lag behind: an improvement larger than this is recorded
SERIALISED = re.compile(r"C751[012]\b|wgmma.*serialized")

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 10 }
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
"""


def _case(name: str, H: int, **rest) -> Case:
    return Case(name, **{"B": 2, "T": 8192, "N": 2048 // H, "H": H, "dtype": "bfloat16", **rest})


MOSAIC, TRITON = {"implementation": "mosaic_gpu"}, {"implementation": "triton"}
EVERYTHING = {
    "scale": 0.2,
    "is_causal": True,
    "local_window_size": (1000, 30),
    "query_offset": (300, 100),
    "query_seq_lengths": (5000, 8192),
    "key_value_seq_lengths": (8192, 4400),
}
CASES = {
    case.name: (case, keywords)
    for case, keywords in [
        *((_case(f"h{H}_full", H), MOSAIC) for H in (64, 128, 256)),
        *((_case(f"h{H}_causal", H, is_causal=True), MOSAIC) for H in (64, 128, 256)),
        (_case("h128_causal_gqa8_deterministic", 128, K=2, is_causal=True), {**MOSAIC, "deterministic": True}),
        (_case("h96_everything", 96, K=7, **EVERYTHING), MOSAIC),
        (_case("h128_segments_causal", 128, segments="sorted", is_causal=True), MOSAIC),
        (_case("h64_padding", 64, mask="padding"), MOSAIC),
        (_case("h256_padding", 256, mask="padding"), MOSAIC),
        (_case("triton_h128_causal", 128, is_causal=True), TRITON),
        (_case("triton_h256_full", 256), TRITON),
        # Beside these arrays, blocks of the plain plan do not fit shared memory.
        (_case("triton_h256_bias_and_mask", 256, T=512, N=4, bias="full", mask="per_head"), TRITON),
    ]
}
"""Name → case and further keywords of `flash_attention`."""


def missing() -> str | None:
    """What this machine lacks, and how to get it."""
    wheels = f"jax-cuda13-plugin=={JAXLIB} jax-cuda13-pjrt=={JAXLIB}"
    unpacked = [SITE / (wheel.replace("-", "_").replace("==", "-") + ".dist-info") for wheel in wheels.split()]
    if not all(folder.exists() for folder in unpacked):
        return (
            f"no CUDA plugin of jaxlib {JAXLIB}: `python -m pip download --no-deps {wheels}`, "
            "unzip both wheels in one folder, and let JAX_CUDA_SITE name it"
        )
    if not shutil.which("ptxas"):
        return "no ptxas on PATH: install the CUDA toolkit, or the wheel nvidia-cuda-nvcc and add its bin folder"
    return None


def compile_here(name: str, dump: str) -> None:
    """Compiles forward and backward of a case, with PTX into the folder `dump`; jax must not be imported yet."""
    assert "jax" not in sys.modules
    for variable in [v for v in os.environ if v.startswith(("JAX_", "MOSAIC_", "XLA_"))]:
        del os.environ[variable]
    os.environ.update(JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_TO=dump)
    sys.path[:0] = [str(SITE), str(ROOT)]
    import jax
    from jax.experimental.topologies import get_topology_desc
    from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

    from pallas_flash import flash_attention

    case, keywords = CASES[name]
    attention = functools.partial(flash_attention, **case.options(), **keywords)

    def run(query, key, value):
        out, vjp = jax.vjp(attention, query, key, value)
        return out, vjp(out)

    devices = get_topology_desc("h200", "cuda", target_config=H200, topology="1x1x1").devices
    there = NamedSharding(Mesh(devices, ("x",)), PartitionSpec())
    sizes = ((case.T, case.N, case.H), (case.S, case.K, case.H), (case.S, case.K, case.Hv))
    args = [jax.ShapeDtypeStruct((case.B, *size), case.dtype, sharding=there) for size in sizes]
    absent = AbstractDevice("NVIDIA H200", None, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=absent)):
        lowered = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",))
    lowered.compile(compiler_options={"xla_dump_to": dump, "xla_dump_emitter_re": "ptx"})


def ptxas(*arguments: str) -> str:
    """What ptxas tells."""
    done = subprocess.run(["ptxas", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def report_here(name: str) -> dict:
    """Of our kernels in a case: bytes of spill stores of each, and what ptxas tells about serialised wgmma."""
    spills, serialised = {}, []
    with tempfile.TemporaryDirectory() as dump:
        compile_here(name, dump)
        for path in pathlib.Path(dump).glob("*.ptx"):
            if entries := re.findall(r"\.entry (flash_\w+)", path.read_text()):
                told = ptxas("-v", "-arch=sm_90a", str(path), "-o", str(path.with_suffix(".cubin")))
                serialised += [line for line in told.splitlines() if SERIALISED.search(line)]
                for entry in entries:
                    kernel = entry.removesuffix("_mosaic_gpu_kernel")
                    assert kernel not in spills
                    stores = re.search(rf"properties for {entry}\n.* (\d+) bytes spill stores", told).group(1)
                    spills[kernel] = int(stores)
    return {"spills": spills, "serialised": serialised}


def report(name: str) -> dict:
    """The same, in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--case", name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def versions() -> str:
    """The compilers that budgets belong to."""
    return f"jaxlib {JAXLIB}, ptxas {re.search(r'release ([0-9.]+)', ptxas('--version')).group(1)}"


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("name", CASES)
def test_case(name):
    """Nothing is serialised; each kernel spills at most its budget, and not so much less that the budget is stale."""
    measured, kept = report(name), json.loads(FACTS.read_text())
    assert not measured["serialised"]
    assert versions() in kept, f"no budgets for {versions()}; `python {__file__}` writes them"
    budgets = kept[versions()][name]
    assert measured["spills"].keys() == budgets.keys()
    outside = {k: (n, budgets[k]) for k, n in measured["spills"].items() if not n <= budgets[k] <= n + SLACK}
    assert not outside, "kernel: (bytes spilled, budget)"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, help="report one case as JSON, and write nothing")
    name = parser.parse_args().case
    if missing():
        sys.exit(missing())
    if name:
        print(json.dumps(report_here(name)))
    else:
        kept = json.loads(FACTS.read_text()) if FACTS.exists() else {}
        kept[versions()] = {name: report(name)["spills"] for name in CASES}
        FACTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
