"""The few instructions that Mosaic has no name for, as inline PTX or MLIR. Each warp of a warp group executes them."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

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


def sixteens(shape: tuple[int, int], axis: int, start) -> tuple[Array, ...]:
    """`Tile.sixteens` of the indices from `start` on, a multiple of 16, along an axis of a tile.

    Written out by registers, so that LLVM sees which of a thread's are the same, as it does not of sums.
    """
    layout: Any = plgpu.Layout.WGMMA
    tile = plgpu.ShapeDtypeStruct(shape, jnp.uint32, layout=layout)

    @_inline(arg_types=(_SCALAR,), return_type=(tile, tile, tile))
    def written(_, start):
        tiled, word = layout.to_mgpu(), ir.IntegerType.get_signless(32)
        strides = tiled.tiling.tile_strides((shape[1], 1))

        def c(n: int):
            return mgpu.utils.c(n, word)

        thread = arith.remui(mgpu.utils.thread_idx(), c(128))
        lane, warp = arith.remui(thread, c(32)), arith.divui(thread, c(32))
        group = arith.divui(start.registers.item(), c(16))
        arrays = [np.empty(tiled.registers_shape(shape), object) for _ in range(3)]
        for at in np.ndindex(arrays[0].shape):
            offset = divmod(sum(i * stride for i, stride in zip(at, strides, strict=False)), shape[1])[axis]
            if axis == 0:
                low = [arith.divui(lane, c(4))] * 2
                of_register = arith.addi(arith.addi(group, warp), c(offset // 16))
            else:
                even = arith.muli(arith.remui(lane, c(4)), c(2))
                low, of_register = [even, arith.addi(even, c(1))], arith.addi(group, c(offset // 16))
            for array, pair in zip(arrays, ([of_register] * 2, low, [c(offset & 8)] * 2), strict=True):
                array[at] = vector.from_elements(ir.VectorType.get((2,), word), pair)
        return [mgpu.FragmentedArray(_registers=x, _layout=tiled, _is_signed=False) for x in arrays]

    return written(start)


def early(scratch, *tiles: Array) -> tuple[Array, ...]:
    """The tiles, not later than here: something of all their bits is stored, to a word of shared memory.

    ptxas moves a wait for products above all that does not depend on them; it does not move it above a store.
    """

    @_inline(arg_types=(plgpu.RefType(), *[plgpu.Layout.WGMMA] * len(tiles)))
    def store(_, scratch, *tiles):
        bits = [_bits(values) for tile in tiles for values in tile.registers.flat]
        mixed = functools.reduce(arith.xori, bits)
        address = mgpu.utils.memref_ptr(scratch)
        mgpu.utils.inline_ptx("st.volatile.shared.b32 [$0], $1;", address, mixed, has_side_effects=True)

    store(scratch, *tiles)
    return tiles


def _bits(values):
    """32 bits of a register of several values, in which each of them has a share."""
    word = ir.IntegerType.get_signless(32)
    size = mgpu.utils.bitwidth(values.type.element_type) * values.type.shape[0]
    bits = llvm.bitcast(ir.IntegerType.get_signless(size), values)
    if size <= 32:
        return bits if size == 32 else arith.extui(word, bits)
    high = arith.shrui(bits, mgpu.utils.c(32, bits.type))
    return arith.xori(arith.trunci(word, bits), arith.trunci(word, high))
