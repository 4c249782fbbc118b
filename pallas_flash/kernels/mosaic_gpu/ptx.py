"""The few instructions that Mosaic has no name for, as inline PTX or MLIR. Each warp of a warp group executes them."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.tree_util import Partial
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

_FIRST_NAMED_BARRIER = 8
"""Mosaic itself uses the ones below."""
_SCALAR = plgpu.Layout.WG_SPLAT
_TILE: Any = plgpu.Layout.WGMMA
_inline: Any = plgpu.inline_mgpu


def named_barrier(operation: str, number, threads: int = 256) -> None:
    """`sync` waits for, `arrive` announces to, the others of so many threads; by default of two warp groups."""

    @_inline(arg_types=(_SCALAR,))
    def emit(_, number):
        code = f"bar.{operation} $0, {threads};"
        mgpu.utils.inline_ptx(code, number.registers.item(), has_side_effects=True, convergent=True)

    emit(jnp.int32(_FIRST_NAMED_BARRIER) + number)


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
    """High and low word of the product of two uint32, of a tile: one instruction, of which LLVM would make two."""
    word = plgpu.ShapeDtypeStruct(x.shape, jnp.uint32, layout=_TILE)

    @_inline(arg_types=(_TILE,), return_type=(word, word))
    def words(_, x):
        found = [np.empty_like(x.registers) for _ in range(2)]
        for at, values in np.ndenumerate(x.registers):
            pairs = [_wide_product(element, factor) for element in _elements(values)]
            for array, elements in zip(found, zip(*pairs, strict=True), strict=True):
                array[at] = vector.from_elements(values.type, elements)
        return [mgpu.FragmentedArray(_registers=array, _layout=x.layout, _is_signed=False) for array in found]

    return words(plgpu.layout_cast(x, _TILE))


def _wide_product(x, factor: int):
    code = "{ .reg .b64 w; mul.wide.u32 w, $2, $3; mov.b64 {$1, $0}, w; }"
    by = mgpu.utils.c(factor - 2**32, x.type)
    return mgpu.utils.inline_ptx(code, x, by, result_types=[x.type, x.type])


def _elements(values) -> list:
    """Of a vector."""
    static: Any = [{"dynamic_position": [], "static_position": ir.DenseI64ArrayAttr.get([i])} for i in range(2)]
    return [vector.extract(values, **at) for at in static[: values.type.shape[0]]]


def groups(size: int, shape: tuple[int, int], axis: int, starts: tuple) -> tuple[Array, ...]:
    """uint32: which `size` (16 or 32) of the indices along an axis, from a multiple of it on, and their lowest 3 bits.

    Written out by registers, so that LLVM sees which of a thread's are the same, as it does not of sums.
    """
    tile = plgpu.ShapeDtypeStruct(shape, jnp.uint32, layout=_TILE)

    @_inline(arg_types=(_SCALAR,), return_type=(tile, tile))
    def written(_, start):
        warp, low = _of_thread(axis)
        group = arith.addi(arith.divui(start.registers.item(), _c(size)), arith.divui(warp, _c(size // 16)))
        offsets = _offsets(shape)
        arrays = [np.empty_like(offsets) for _ in range(2)]
        for at, offset in np.ndenumerate(offsets):
            of_register = arith.addi(group, _c(offset[axis] // size))
            for array, pair in zip(arrays, ([of_register] * 2, low), strict=True):
                array[at] = vector.from_elements(ir.VectorType.get((2,), pair[0].type), pair)
        return [mgpu.FragmentedArray(_registers=x, _layout=_TILE.to_mgpu(), _is_signed=False) for x in arrays]

    return written(starts[axis])


def indices(shape: tuple[int, int], axis: int, starts: tuple) -> Array:
    """int32 indices along an axis of a tile, from its first row and column: a thread's first one plus constants."""

    @_inline(arg_types=(_SCALAR,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=_TILE))
    def written(_, start):
        return _spread(_firsts(axis, start), arith.addi, shape, lambda offset: offset[axis])

    return written(starts[axis])


def distances(shape: tuple[int, int], axis: int, starts: tuple) -> Array:
    """float32 indices along an axis of a tile minus those along the other.

    Written out by registers, as sums of a thread's first one and constants, so that LLVM computes equal ones once: of a
    thread's 64 there are 34.
    """

    @_inline(arg_types=(_SCALAR,) * 2, return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_TILE))
    def written(_, *starts):
        pairs = zip(_firsts(axis, starts[axis]), _firsts(1 - axis, starts[1 - axis]), strict=True)
        firsts = [arith.sitofp(ir.F32Type.get(), arith.subi(along, across)) for along, across in pairs]
        return _spread(firsts, arith.addf, shape, lambda offset: offset[axis] - offset[1 - axis])

    return written(*starts)


def _firsts(axis: int, start) -> list:
    """Indices along an axis of the values of a thread's first register."""
    warp, low = _of_thread(axis)
    first = arith.addi(start.registers.item(), arith.muli(warp, _c(16)))
    return [arith.addi(first, of_lane) for of_lane in low]


def _spread(firsts: list, add, shape: tuple[int, int], constant) -> mgpu.FragmentedArray:
    """A tile of the values of a thread's first register plus a constant of each register's row and column."""
    offsets, number = _offsets(shape), firsts[0].type
    registers = np.empty_like(offsets)
    for at, offset in np.ndenumerate(offsets):
        pair = [add(x, mgpu.utils.c(constant(offset), number)) for x in firsts]
        registers[at] = vector.from_elements(ir.VectorType.get((2,), number), pair)
    is_signed = True if add is arith.addi else None
    return mgpu.FragmentedArray(_registers=registers, _layout=_TILE.to_mgpu(), _is_signed=is_signed)


def _of_thread(axis: int) -> tuple[Any, list]:
    """A thread's share in indices along an axis of a tile: its warp's, of 16, and those of its first register."""
    thread = arith.remui(mgpu.utils.thread_idx(), _c(128))
    lane, warp = arith.remui(thread, _c(32)), arith.divui(thread, _c(32))
    if axis == 0:
        return warp, [arith.divui(lane, _c(4))] * 2
    even = arith.muli(arith.remui(lane, _c(4)), _c(2))
    return _c(0), [even, arith.addi(even, _c(1))]


def _c(n: int):
    """A word of 32 bits."""
    return mgpu.utils.c(n, ir.IntegerType.get_signless(32))


def _offsets(shape: tuple[int, ...]) -> np.ndarray:
    """Row and column of the first value of each register of a thread of the first warp, less its lane's."""
    layout = _TILE.to_mgpu()
    strides = layout.tiling.tile_strides((shape[1], 1))
    offsets = np.empty(layout.registers_shape(shape), object)
    for at in np.ndindex(offsets.shape):
        offsets[at] = divmod(sum(i * stride for i, stride in zip(at, strides, strict=False)), shape[1])
    return offsets


def sieve(scratch, transposed: bool, words: tuple[Array, Array], margin: Array) -> Partial:
    """`elementary.sieve` of a tile, four scores of a word at once, given `elementary.margin`; `early` with scratch."""
    shape = words[0].shape

    @_inline(arg_types=(_TILE,) * 3, return_type=plgpu.ShapeDtypeStruct(shape, jnp.uint16, layout=_TILE))
    def compared(_, *arrays):
        offsets, marks = _offsets(shape), {}
        at_offset = {offset: at for at, offset in np.ndenumerate(offsets)}
        registers = np.empty_like(offsets)
        second = arith.trunci(ir.IntegerType.get_signless(1), _of_thread(0)[0])  # rows are keys, warp by warp
        for at, (row, column) in np.ndenumerate(offsets):
            of_query, of_key = (column & 8, row & 8) if transposed else (row & 8, column & 8)
            first = at_offset[row & ~8, column & (~8 if transposed else ~24)]  # of those that share words
            which = second if transposed else mgpu.utils.c(column // 16 % 2, second.type)
            if (first, column & 16) not in marks:
                pairs = zip(*(_elements(array.registers[first]) for array in arrays), strict=True)
                marks[first, column & 16] = [_marked(arith.select(which, b, a), add) for a, b, add in pairs]
            left, right = marks[first, column & 16]
            byte = of_query // 8 + of_key // 4
            halves = _permuted(left, right, 0x1111 * (8 + byte) + 0x4400)
            registers[at] = llvm.bitcast(ir.VectorType.get((2,), ir.IntegerType.get_signless(16)), halves)
        return mgpu.FragmentedArray(_registers=registers, _layout=_TILE.to_mgpu(), _is_signed=False)

    mask = compared(*(plgpu.layout_cast(x, _TILE) for x in (*words, margin)))
    return Partial(_only, mask if scratch is None else early(scratch, mask))


def _only(mask: Array, x: Array) -> Array:
    """`x`, of 16 or 32 bits, where the 16 bits of a mask are set, else 0."""

    @_inline(arg_types=(_TILE, _TILE), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=_TILE))
    def masked(_, x, mask):
        registers, word = np.empty_like(x.registers), ir.IntegerType.get_signless(32)
        for at, values in np.ndenumerate(x.registers):
            bits, kept = word, llvm.bitcast(word, mask.registers[at])
            if mgpu.utils.bitwidth(values.type) > 32:
                bits = ir.VectorType.get((2,), word)
                kept = vector.from_elements(bits, [_permuted(kept, kept, half) for half in (0x1010, 0x3232)])
            registers[at] = llvm.bitcast(values.type, arith.andi(llvm.bitcast(bits, values), kept))
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)

    return masked(plgpu.layout_cast(x, _TILE), mask)


def _marked(word, margin):
    """A word in whose bytes bit 7 tells whether the others are at least what `margin` says."""
    return arith.addi(arith.andi(word, _c(0x7F7F7F7F)), margin)


def _permuted(a, b, selector: int):
    """Bytes of two words, or of a byte its bit 7 eight times."""
    return llvm.call_intrinsic(a.type, "llvm.nvvm.prmt", [a, b, _c(selector)], [], [])


PARTS = 8
"""Of columns, each of a row's threads sums some."""


def sums(x: Array) -> Array:
    """Sums [rows, PARTS] of the columns of a tile, without exchange between threads."""
    part = plgpu.ShapeDtypeStruct((x.shape[0], PARTS), x.dtype, layout=_TILE)

    @_inline(arg_types=(_TILE,), return_type=part)
    def added(_, x):
        places = {}
        for at, (row, column) in np.ndenumerate(_offsets(x.shape)):
            places.setdefault((row, column % PARTS), []).append(x.registers[at])
        registers = np.empty_like(_offsets(part.shape))
        for at, place in np.ndenumerate(_offsets(part.shape)):
            registers[at] = functools.reduce(arith.addf, places[place])
        return mgpu.FragmentedArray(_registers=registers, _layout=_TILE.to_mgpu(), _is_signed=None)

    return added(plgpu.layout_cast(x, _TILE))


def rescaled(x: Array, by: Array) -> Array:
    """A tile, its rows times `by` [rows]; a warp passes over it where all of its factors are 1."""

    @_inline(arg_types=(_TILE, _TILE.reduce(1)), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=_TILE))
    def multiplied(_, x, by):
        values, factors = list(x.registers.flat), [_elements(factor)[0] for factor in by.registers.flat]
        change = arith.cmpi(arith.CmpIPredicate.ne, _any_but_one(*factors), _c(0))
        branch: Any = scf.IfOp(change, [value.type for value in values], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            wide = [vector.broadcast(values[0].type, factor) for factor in factors]
            pairs = zip(values, _offsets(x.shape).flat, strict=True)
            scf.yield_([arith.mulf(value, wide[row // 8]) for value, (row, _) in pairs])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(values)
        registers = np.empty_like(x.registers)
        registers.flat = list(branch.results)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return multiplied(x, by)


def _any_but_one(a, b):
    """Whether a float is not 1 in some thread of the warp, as an int."""
    code = (
        "{ .reg .pred p; setp.neu.f32 p, $1, 1.0; setp.neu.or.f32 p, $2, 1.0, p; "
        "vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
    )
    word = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(code, a, b, result_types=word, has_side_effects=True, convergent=True)


_tiling: Any = plgpu.TilingTransform
_swizzle: Any = plgpu.SwizzleTransform


@_inline(arg_types=(plgpu.RefType((_tiling((8, 32)), _swizzle(128))), _TILE))
def store_woven(_, tile, x):
    """Stores a float32 tile of 64 rows with its columns interwoven, see `unwoven`.

    In order, threads of different rows would store to the same banks, or select first which columns to begin with.
    """
    warp, (row, _) = _of_thread(0)
    eight_rows = 8 * 4 * x.shape[1]  # bytes
    pair = arith.divui(_of_thread(1)[1][0], _c(2))
    odd, second = arith.andi(pair, _c(1)), arith.divui(pair, _c(2))
    chunk = arith.xori(arith.muli(odd, _c(4)), row)
    start = _sum(arith.muli(warp, _c(2 * eight_rows)), arith.muli(row, _c(128)), arith.muli(second, _c(8)))
    base, pointer = mgpu.utils.memref_ptr(tile), ir.Type.parse("!llvm.ptr<3>")
    starts = [_sum(start, arith.muli(arith.xori(chunk, _c(n)), _c(16))) for n in range(4)]
    for at, (rows, column) in np.ndenumerate(_offsets(x.shape)):
        half, n = divmod(column // 8, 4)
        offset = _sum(starts[n], _c(rows // 8 * eight_rows + half * 1024))
        place = llvm.getelementptr(pointer, base, [offset], [-(2**31)], ir.IntegerType.get_signless(8), 0)
        llvm.store(x.registers[at], place)


def unwoven(x: Array) -> Array:
    """An array [..., columns] whose every 64 columns `store_woven` interwove, in order."""
    halves_odd_chunks_second_pairs = x.reshape(*x.shape[:-1], -1, 2, 2, 4, 2, 2)
    return jnp.moveaxis(halves_odd_chunks_second_pairs, -4, -2).reshape(x.shape)


def _sum(*terms):
    return functools.reduce(arith.addi, terms)


def early(scratch, x: Array) -> Array:
    """A tile, not later than here: something of all its bits is stored, to a word of shared memory.

    ptxas moves a wait for products above all that does not depend on them; it does not move it above a store.
    """

    @_inline(arg_types=(plgpu.RefType(), _TILE))
    def store(_, scratch, x):
        mixed = functools.reduce(arith.xori, [_bits(values) for values in x.registers.flat])
        address = mgpu.utils.memref_ptr(scratch)
        mgpu.utils.inline_ptx("st.volatile.shared.b32 [$0], $1;", address, mixed, has_side_effects=True)

    store(scratch, x)
    return x


def _bits(values):
    """32 bits of a register of several values, in which each of them has a share."""
    word = ir.IntegerType.get_signless(32)
    size = mgpu.utils.bitwidth(values.type.element_type) * values.type.shape[0]
    bits = llvm.bitcast(ir.IntegerType.get_signless(size), values)
    if size <= 32:
        return bits if size == 32 else arith.extui(word, bits)
    high = arith.shrui(bits, mgpu.utils.c(32, bits.type))
    return arith.xori(arith.trunci(word, bits), arith.trunci(word, high))
