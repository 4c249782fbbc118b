"""How does it leave this machine? Programs with kernels exported for GPUs that the host need not have."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.export import DisabledSafetyCheck, Exported
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_flash import dispatch


def checks() -> list[DisabledSafetyCheck]:
    """What `jax.export.export` needs as `disabled_checks`: the custom calls that the kernels become.

    JAX guarantees compatibility for some custom calls only, and by default refuses others. What these mean belongs to
    the version of jaxlib: run the exported program with the one that it was exported with.
    """
    return [DisabledSafetyCheck.custom_call(each.target) for each in dispatch.implementations() if each.target]


def export(
    function: Callable, device: str = "NVIDIA H200", *, disabled_checks: Sequence[DisabledSafetyCheck] = ()
) -> Callable[..., Exported]:
    """`jax.export.export` for CUDA, on a host with or without a GPU.

    Args:
        function: Jitted or not; it may call anything of this package, and take gradients.
        device: Name of the GPU, `jax.devices()[0].device_kind` where there is one: implementation and plan are chosen
            for it.
        disabled_checks: Further ones.

    Returns:
        A function of the arguments, or of `jax.ShapeDtypeStruct`s, that returns a `jax.export.Exported`, to call or
        to `serialize` (which needs the package flatbuffers). Sizes must be numbers: a symbolic one would make grids so.

    Raises:
        NotImplementedError: `implementation` names one that refuses the call on the device.
    """
    jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
    exporting = jax.export.export(jitted, platforms=("cuda",), disabled_checks=[*checks(), *disabled_checks])
    absent = AbstractMesh((), (), abstract_device=AbstractDevice(device, None, platform="cuda"))

    def run(*args: Any, **keywords: Any) -> Exported:
        with jax.sharding.use_abstract_mesh(absent):
            return exporting(*args, **keywords)

    return run
