"""Compiled for 2 and 8 absent H200s: the kernels are split over batch and heads, and there is no collective.

Optional, as test_compiled.py is, and with the same needs. All programs of one number of devices are compiled in one
process of its own: `python tests/test_compiled_sharding.py --devices 8`.
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys

import pytest
from test_compiled import GPUS, ROOT, SITE, missing

COLLECTIVE = re.compile(r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
WAYS = ("jit", "types", "shard_map", "vmap", "vmap in types", "layers")
KERNELS = {"triton": {"__gpu$xla.gpu.triton": 3}, "mosaic_gpu": {"mosaic_gpu_v2": 2}}
"""Forward and backward are as many custom calls."""


def compile_here(devices: int) -> dict:
    """Way → implementation → how many collectives and custom calls there are; jax must not be imported yet."""
    assert "jax" not in sys.modules
    os.environ.pop("XLA_FLAGS", None)
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(SITE), str(ROOT)]
    import functools

    import jax
    import numpy as np
    from jax.experimental.topologies import get_topology_desc
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from pallas_flash import RESIDUAL_NAMES, flash_attention

    there = get_topology_desc(
        "h200", "cuda", target_config=GPUS["H200"].description(), topology=f"1x1x{devices}"
    ).devices
    absent = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", None, platform="cuda"))

    def layers(attention, query, key, value):
        """Three, rematerialised but for the residuals: each kernel still runs once."""

        def layer(query, dropout_key):
            return query + attention(query, key, value, dropout_rate=0.1, dropout_key=dropout_key), None

        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES))
        return jax.lax.scan(layer, query, np.arange(6, dtype=np.uint32).reshape(3, 2))[0]

    def compiled(way: str, implementation: str) -> str:
        kind = AxisType.Explicit if "types" in way else AxisType.Auto
        mesh = Mesh(np.array(there).reshape(2, devices // 2), ("data", "model"), axis_types=(kind, kind))
        lead = {"vmap": (None, "data"), "vmap in types": ("data", None)}.get(way, ("data",))
        cut = NamedSharding(mesh, P(*lead, None, "model", None))
        args = [jax.ShapeDtypeStruct((*(2, 4)[-len(lead) :], 256, n, 64), "bfloat16", sharding=cut) for n in (8, 4, 4)]
        attention = functools.partial(flash_attention, is_causal=True, implementation=implementation)
        if way == "layers":
            attention = functools.partial(layers, attention)
        if way == "shard_map":
            attention = jax.shard_map(attention, mesh=mesh, in_specs=cut.spec, out_specs=cut.spec)
        attention = jax.vmap(attention) if "vmap" in way else attention

        def run(query, key, value):
            out, vjp = jax.vjp(attention, query, key, value)
            return out, vjp(out)

        with jax.sharding.use_abstract_mesh(absent):
            lowered = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",))
        return lowered.compile().as_text()

    def counts(text: str) -> dict:
        named = (COLLECTIVE, re.compile(r'custom_call_target="([^"]+)"'))
        return dict(zip(("collectives", "kernels"), (collections.Counter(x.findall(text)) for x in named), strict=True))

    ways = WAYS if devices > 2 else WAYS[:1]
    return {way: {name: counts(compiled(way, name)) for name in KERNELS} for way in ways}


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("devices", [2, 8])
def test_no_collective(devices):
    done = subprocess.run([sys.executable, __file__, "--devices", str(devices)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for way, by_implementation in json.loads(done.stdout.splitlines()[-1]).items():
        for name, found in by_implementation.items():
            assert found == {"collectives": {}, "kernels": KERNELS[name]}, (way, name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, required=True)
    print(json.dumps(compile_here(parser.parse_args().devices)))
