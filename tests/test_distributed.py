"""Two processes of four devices each, plain SPMD: the same result, without a collective. `--process N PORT` is one."""

import argparse
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
PROCESSES = 2


def run_here(process: int, port: int) -> None:
    """Compares what this process holds of the output and the gradients with those of one device."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    sys.path[:0] = [str(ROOT)]
    import jax

    jax.distributed.initialize(f"localhost:{port}", PROCESSES, process)
    import numpy as np
    from test_sharding import DO, TENSORS, collectives, drawn, gradients, mesh, plain, spec
    from test_transforms import assert_close

    assert jax.process_count() == PROCESSES and jax.device_count() == 8 > jax.local_device_count()
    x, do = drawn(TENSORS), drawn(DO)
    across = mesh(jax.sharding.AxisType.Auto)

    def spread(whole: np.ndarray, letters: str) -> jax.Array:
        sharding = jax.sharding.NamedSharding(across, spec(letters))
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    sharded = {name: spread(x[name], letters) for name, letters in TENSORS.items()}
    run = gradients(plain, list(TENSORS), "triton")
    arguments = sharded, spread(do["do"], DO["do"])
    compiled = run.lower(*arguments).compile()
    assert not collectives(compiled)
    right = {name: np.asarray(value) for name, value in run(x, do["do"]).items()}
    for name, found in compiled(*arguments).items():
        for shard in found.addressable_shards:
            assert_close([shard.data], [right[name][shard.index]])


def test_two_processes():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--process", str(process), str(port)], stderr=subprocess.PIPE, text=True
        )
        for process in range(PROCESSES)
    ]
    ended = [(process.communicate(timeout=120)[1], process.returncode) for process in started]
    assert all(code == 0 for _, code in ended), "\n".join(error[-3000:] for error, _ in ended)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--process", type=int, nargs=2, required=True)
    run_here(*parser.parse_args().process)
