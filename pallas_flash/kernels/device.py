"""Which GPU do we compile for?"""

import jax
from jax.experimental.pallas import triton as plt

from pallas_flash.choice import Device
from pallas_flash.problem import Problem


def capability(problem: Problem) -> int | str:
    """Compute capability of the current device (90 for 9.0; in interpret mode too), or why there is none."""
    if problem.interpret:
        return 90
    if not plt.is_gpu_device():
        return "no GPU to compile for; use implementation='xla', or 'triton' with interpret=True"
    try:
        return plt.get_gpu_info().compute_capability
    except (ValueError, RuntimeError) as error:
        return f"unknown GPU ({error}); use implementation='xla'"


def current(problem: Problem) -> Device:
    """The device, which there must be."""
    return Device(_kind(problem), int(capability(problem)))


def _kind(problem: Problem) -> str:
    if problem.interpret:
        return "interpreter"
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.device_kind
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return (
        jax.local_devices(backend=default)[0] if default is None or isinstance(default, str) else default
    ).device_kind
