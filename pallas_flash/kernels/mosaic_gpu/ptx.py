"""The few instructions that Mosaic has no name for, as inline PTX or MLIR. Each warp of a warp group executes them."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

_FIRST_NAMED_BARRIER = 8
"""Mosaic itself uses the ones below."""
_SCALAR = plgpu.Layout.WG_SPLAT
_inline: Any = plgpu.inline_mgpu


def named_barrier(operation: str, number: int, threads: int = 256) -> None:
    """`sync` waits for, `arrive` announces to, the others of so many threads; by default of two warp groups."""

    @_inline()
    def emit(_):
        code = f"bar.{operation} {_FIRST_NAMED_BARRIER + number}, {threads};"
        mgpu.utils.inline_ptx(code, has_side_effects=True, convergent=True)

    emit()


@_inline()
def fence(_):
    """Lets copies and products see what was written to shared memory before."""
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)


@_inline()
def join_warps(_):
    """Waits for the other warps of this warp group."""
    mgpu.utils.warpgroup_barrier()


@_inline(arg_types=(_SCALAR,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR))
def first_lane(_, x):
    """The value of a warp's first lane, in all of them."""
    value = x.registers.item()
    every_lane, lane, clamp = (mgpu.utils.c(n, value.type) for n in (-1, 0, 31))
    shared = nvvm.shfl_sync(every_lane, value, lane, clamp, nvvm.ShflKind.idx)
    return mgpu.FragmentedArray.splat(shared, (), is_signed=True)


@_inline(arg_types=(plgpu.RefType(), _SCALAR))
def await_count(_, counter, value):
    """Waits until a counter in device memory has reached a value; what was written before it did is seen then."""
    code = (
        "{ .reg .pred p; .reg .s32 n; AGAIN: ld.acquire.gpu.global.s32 n, [$0]; setp.lt.s32 p, n, $1; @p bra AGAIN; }"
    )
    address = mgpu.utils.memref_ptr(counter)
    mgpu.utils.inline_ptx(code, address, value.registers.item(), has_side_effects=True, convergent=True)


@_inline(arg_types=(plgpu.RefType(),))
def count_up(_, counter):
    """Adds 1 to a counter in device memory, after all that this warp has written. For one warp."""
    with mgpu.utils.when(mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARP)):
        address = mgpu.utils.memref_ptr(counter)
        mgpu.utils.inline_ptx("red.release.gpu.global.add.s32 [$0], 1;", address, has_side_effects=True)
