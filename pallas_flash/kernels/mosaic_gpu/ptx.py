"""The few instructions that Mosaic has no name for, as inline PTX or MLIR. Each warp of a warp group executes them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm, vector

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


def product(factor: int, x: Array) -> tuple[Array, Array]:
    """High and low word of the product of two uint32, of a tile.

    LLVM would make 64-bit numbers of what is computed from 64-bit products, and does not see that two instructions of
    inline PTX are the same: each twice the instructions.
    """
    layout = plgpu.Layout.WGMMA

    @_inline(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.uint32, layout=layout))
    def high_word(_, x):
        registers = np.empty_like(x.registers)
        for at, values in np.ndenumerate(x.registers):
            registers[at] = _high_words(values, factor)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=False)

    return high_word(plgpu.layout_cast(x, layout)), x * np.uint32(factor)


def _high_words(values, factor: int):
    """Of a vector of int32."""
    by = mgpu.utils.c(factor - 2**32, values.type.element_type)
    for i in range(values.type.shape[0]):
        at: Any = {"dynamic_position": [], "static_position": ir.DenseI64ArrayAttr.get([i])}
        element = vector.extract(values, **at)
        high = llvm.call_intrinsic(by.type, "llvm.nvvm.mulhi.ui", [element, by], [], [])
        values = vector.insert(high, values, **at)
    return values
