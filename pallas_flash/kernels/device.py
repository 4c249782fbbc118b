"""Which GPU do we compile for?"""

from jax.experimental.pallas import triton as plt

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
