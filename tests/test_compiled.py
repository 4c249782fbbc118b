"""Compiled without a GPU: for an H200 no kernel's wgmma is serialised, and none spills more than its budget.

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
from typing import NamedTuple

import pytest
from cases import Case

FACTS = pathlib.Path(__file__).with_name("compiled_facts.json")
ROOT = FACTS.parent.parent
SITE = pathlib.Path(os.environ.get("JAX_CUDA_SITE", "no JAX_CUDA_SITE")).expanduser()
JAXLIB = importlib.metadata.version("jaxlib")
SLACK = 64  # bytes by which a budget may lag behind: an improvement larger than this is recorded
SERIALISED = re.compile(r"C751[012]\b|wgmma.*serialized")


class Gpu(NamedTuple):
    """What a compiler has to know of an absent GPU; the rest is that of an H200."""

    kind: str
    major: int
    minor: int
    cores: int
    shared_memory: int
    arch: str

    def description(self) -> str:
        """For XLA."""
        extension = "feature_extension: ACCELERATED_FEATURES" if self.arch.endswith("a") else ""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  core_count: {self.cores} fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared_memory}
  shared_memory_per_core: {self.shared_memory + 1024}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability {{ major: {self.major} minor: {self.minor} {extension} }}
}}
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 10 }}
platform_name: "CUDA"
device_description_str: "{self.kind}"
"""


GPUS = {
    "H200": Gpu("NVIDIA H200", 9, 0, 132, 227 * 1024, "sm_90a"),
    "A100": Gpu("NVIDIA A100-SXM4-80GB", 8, 0, 108, 163 * 1024, "sm_80"),
    "L4": Gpu("NVIDIA L4", 8, 9, 58, 99 * 1024, "sm_89"),
    "B200": Gpu("NVIDIA B200", 10, 0, 148, 227 * 1024, "sm_100a"),
}


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


def compile_here(name: str, gpu: Gpu, dump: str) -> None:
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

    devices = get_topology_desc("absent", "cuda", target_config=gpu.description(), topology="1x1x1").devices
    there = NamedSharding(Mesh(devices, ("x",)), PartitionSpec())
    sizes = ((case.T, case.N, case.H), (case.S, case.K, case.H), (case.S, case.K, case.Hv))
    args = [jax.ShapeDtypeStruct((case.B, *size), case.dtype, sharding=there) for size in sizes]
    absent = AbstractDevice(gpu.kind, None, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=absent)):
        lowered = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",))
    lowered.compile(compiler_options={"xla_dump_to": dump, "xla_dump_emitter_re": "ptx"})


def ptxas(*arguments: str) -> str:
    """What ptxas tells."""
    done = subprocess.run(["ptxas", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def report_here(name: str, gpu: Gpu) -> dict:
    """Of our kernels in a case: bytes of spill stores of each, and what ptxas tells about serialised wgmma."""
    spills, serialised = {}, []
    with tempfile.TemporaryDirectory() as dump:
        compile_here(name, gpu, dump)
        for path in pathlib.Path(dump).glob("*.ptx"):
            if entries := re.findall(r"\.entry (flash_\w+)", path.read_text()):
                told = ptxas("-v", f"-arch={gpu.arch}", str(path), "-o", str(path.with_suffix(".cubin")))
                serialised += [line for line in told.splitlines() if SERIALISED.search(line)]
                for entry in entries:
                    kernel = entry.removesuffix("_mosaic_gpu_kernel")
                    assert kernel not in spills
                    stores = re.search(rf"properties for {entry}\n.* (\d+) bytes spill stores", told).group(1)
                    spills[kernel] = int(stores)
    return {"spills": spills, "serialised": serialised}


def report(name: str, gpu: str = "H200") -> dict:
    """The same, in a process of its own."""
    command = [sys.executable, __file__, "--case", name, "--gpu", gpu]
    done = subprocess.run(command, capture_output=True, text=True)
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


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("gpu", ["A100", "L4", "B200"])
@pytest.mark.parametrize("name", ["triton_h128_causal", "triton_h256_full"])
def test_other_gpus(name, gpu):
    """Plans of devices that nothing was measured on: they compile, and hardly spill (`families._spills`)."""
    spills = report(name, gpu)["spills"]
    assert spills.keys() == {"flash_forward", "flash_dq", "flash_dkv"} and max(spills.values()) <= 40, spills


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, help="report one case as JSON, and write nothing")
    parser.add_argument("--gpu", choices=GPUS, default="H200", help="that it is compiled for")
    options = parser.parse_args()
    name = options.case
    if missing():
        sys.exit(missing())
    if name:
        print(json.dumps(report_here(name, GPUS[options.gpu])))
    else:
        kept = json.loads(FACTS.read_text()) if FACTS.exists() else {}
        kept[versions()] = {name: report(name)["spills"] for name in CASES}
        FACTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
