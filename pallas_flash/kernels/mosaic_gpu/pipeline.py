"""All synchronisation of the Mosaic kernels: warp roles, rings, turns, layouts, copies and sums.

The kernels beside this file read like the algorithm; they are written against what is here. A thread block is one warp
group that fills rings of shared memory by TMA (the producer) and one to three that compute (the consumers).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import ArrayLike

from pallas_flash.kernels.grid import Grid
from pallas_flash.kernels.mosaic_gpu import ptx
from pallas_flash.lists import Listed
from pallas_flash.masks import Mask
from pallas_flash.problem import Problem

GROUP_ROWS = 64
"""Rows of a tile that one consumer holds: what one wgmma instruction computes."""
TILE = plgpu.Layout.WGMMA
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}
"""Registers per thread of a consumer and of the producer, by the number of consumers; of 65,536 in all."""
BLOCK, GROUP = "flash_block", "flash_group"
"""Names of the axes over thread blocks and over their warp groups."""


def tiles(*shape: int, dtype) -> Any:
    """Type of shared memory for tiles [..., rows, width], swizzled as TMA writes and wgmma reads them."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    width = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, width)), swizzle(128)))


def vectors(*shape: int) -> Any:
    """Type of shared memory for float32 vectors."""
    return plgpu.SMEM(shape, jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots of shared memory that the producer fills and the consumers free, by turns, from 0.

    `Ring.of` gives the types of one; inside a kernel its fields are references.

    Attributes:
        buffers: What a slot holds, each [stages, ...].
        ready: Barrier per slot: its copies have landed.
        free: Barrier per slot: all consumers are done with it.
        stages: Number of slots.
    """

    buffers: tuple[Any, ...]
    ready: Any
    free: Any
    stages: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, stages: int, consumers: int, *buffers) -> "Ring":
        ready = plgpu.Barrier(num_arrivals=len(buffers), num_barriers=stages)
        return cls(buffers, ready, plgpu.Barrier(num_arrivals=consumers, num_barriers=stages), stages)

    def _slot(self, t):
        if self.stages == 1:
            return 0
        return t % self.stages if isinstance(t, int) else lax.rem(t, jnp.int32(self.stages))

    def fill(self, t, *sources) -> None:
        """Starts copying the sources of turn t, once the slot is free."""
        slot = self._slot(t)
        if not isinstance(t, int) or t >= self.stages:
            pl.when(t >= self.stages)(lambda: plgpu.barrier_wait(self.free.at[slot]))
        for source, buffer in zip(sources, self.buffers, strict=True):
            plgpu.copy_gmem_to_smem(source, buffer.at[slot], self.ready.at[slot])

    def wait(self, t) -> tuple[Any, ...]:
        """What turn t brought, once it is there."""
        plgpu.barrier_wait(self.ready.at[self._slot(t)])
        return self.at(t)

    def at(self, t) -> tuple[Any, ...]:
        """What turn t brought, known to be there."""
        return tuple(buffer.at[self._slot(t)] for buffer in self.buffers)

    def anew(self, slot) -> tuple[Any, ...]:
        """What a fixed slot holds."""
        return tuple(anew(buffer, slot) for buffer in self.buffers)

    def release(self, t) -> None:
        """This consumer is done with turn t."""
        plgpu.barrier_arrive(self.free.at[self._slot(t)])


def meet() -> None:
    """Waits for the other consumer of two; what either has written to shared memory is then seen by both's products."""
    ptx.fence()
    ptx.named_barrier("sync", 0)


def anew(tiles_ref, index):
    """A fixed tile of several, with addresses computed where they are used.

    Inside a loop the compiler would compute those of a fixed tile before it, one for each instruction that uses it, and
    spill them, or copy accumulators: at H = 128, causal, 550 against 490 instructions a step of the backward kernel for
    what its products read, and 545 against 461 for where it stores dq.
    """
    return tiles_ref.at[index + ptx.first_lane(jnp.int32(0))]


def uniform(scalars):
    """A tree of scalars, which the compiler then knows to be the same in all threads and keeps in uniform registers."""
    return jax.tree.map(lambda x: x if isinstance(x, int) else ptx.first_lane(x), scalars)


class Turns:
    """Consumers take turns in issuing matrix products, so that one's softmax runs under the others' products."""

    def __init__(self, consumers: int):
        self.consumers = consumers

    def open(self, w) -> None:
        if self.consumers > 1:
            pl.when(w == self.consumers - 1)(lambda: ptx.named_barrier("arrive", 0))

    def begin(self, w) -> None:
        if self.consumers > 1:
            ptx.named_barrier("sync", w)

    def end(self, w) -> None:
        if self.consumers > 1:
            ptx.named_barrier("arrive", lax.rem(w + 1, jnp.int32(self.consumers)))

    def close(self, w) -> None:
        if self.consumers > 1:  # the first takes the last one's last turn
            pl.when(w == 0)(lambda: ptx.named_barrier("sync", 0))


def roles(consumers: int, produce: Callable[[], None], consume: Callable[[Any], None]) -> None:
    """Runs the producer and the consumers, each with its share of the registers."""
    most, least = REGISTERS[consumers]
    group = ptx.first_lane(lax.axis_index(GROUP))

    @pl.when(group == consumers)
    def _():
        plgpu.set_max_registers(least, action="decrease")
        produce()

    @pl.when(group < consumers)
    def _():
        plgpu.set_max_registers(most, action="increase")
        consume(group)


def share(w, size: int) -> Any:
    """What consumer w has of a tile: so many rows, or columns."""
    return pl.ds(w * size if isinstance(w, int) else pl.multiple_of(w * size, size), size)


def by_warp(*jobs: Callable[[], None]) -> None:
    """Each job is done by a warp of this warp group, beside the others."""

    @plgpu.warp_map
    def _(warp):
        for i, job in enumerate(jobs):
            pl.when(warp == i)(job)


def part(problem: Problem, grid: Grid, number) -> tuple[Any, tuple[Any, int]]:
    """Of a part of a group, a head of the grid: the key/value head, and its query heads, the first and how many."""
    count = problem.N // grid.heads
    return lax.div(number, jnp.int32(grid.heads // problem.K)), (number * count, count)


def _of_each_head(heads: tuple[Any, int], walk: Callable[[Any, Any], Any]) -> None:
    """`walk(head, turn)` for each of the heads; it returns the turn of the next one's first step."""
    first, count = heads

    def one(g, turn):
        return walk(first + g, turn)

    one(0, 0) if count == 1 else lax.fori_loop(0, count, one, jnp.int32(0))


def of_each_block(heads: tuple[Any, int], visit: Callable, job: Callable[[Any, Any, Any], None]) -> None:
    """`job(head, turn, block)` for each of the query heads and each block of `visit(head)`."""

    def walk(head, turn):
        seen = visit(head)
        lax.fori_loop(0, seen.steps, lambda t, _: job(head, turn + t, seen.block(t)), None)
        return turn + seen.steps

    _of_each_head(heads, walk)


def of_each_step(heads: tuple[Any, int], visit: Callable, step: Callable[..., None]) -> None:
    """`step(t, edge, turn, head, visit(head))` for each of the query heads and of its blocks."""

    def walk(head, turn):
        seen = visit(head)
        seen.walk_by_turn(lambda t, _, edge: step(t, edge, turn + t, head, seen), None)
        return turn + seen.steps

    _of_each_head(heads, walk)


def place(grid: Grid) -> tuple[Array, Array, Array]:
    """Batch entry, head and tile of rows of this thread block."""
    return grid.at_number(lax.axis_index(BLOCK))


def row_vector(value: ArrayLike) -> Array:
    """A float32 vector over the rows of a tile."""
    return plgpu.layout_cast(jnp.full((GROUP_ROWS,), value, jnp.float32), ROW)


def by_row(vector_ref, shape: tuple[int, int]) -> Array:
    """A vector over the rows of a tile, from shared memory, repeated to the tile's shape."""
    return lax.broadcast_in_dim(plgpu.load(vector_ref, layout=ROW), shape, [0])


def by_column(vector_ref, shape: tuple[int, int]) -> Array:
    """A vector over the columns of a tile, from shared memory, repeated to the tile's shape."""
    return lax.broadcast_in_dim(plgpu.load(vector_ref, layout=COLUMN), shape, [1])


def accumulate(scope: Callable, *shapes: tuple[int, int]):
    """Runs `scope` with float32 accumulators of these shapes, which start at 0."""
    return pl.run_scoped(scope, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))  # pyright: ignore[reportPrivateImportUsage]


def after(word_ref, sums: Array, *values: Array) -> tuple[Array, ...]:
    """The sums and the values, not before the sums have been computed.

    ptxas moves a wait for products above everything that does not depend on them, softmax included.
    """
    return lax.optimization_barrier((ptx.early(word_ref, sums), *values))


def rescaled(o: Array, alpha: Array) -> Array:
    """A tile, its rows times `alpha`; a warp passes over it where all of its factors are 1."""
    return ptx.rescaled(o, alpha)


def no_sums() -> Array:
    """What sums of the rows of a tile are, before the first (`ptx.sums`)."""
    return plgpu.layout_cast(jnp.zeros((GROUP_ROWS, ptx.PARTS), jnp.float32), TILE)


def scrub(mask: Mask, seen, t, b, *tile_refs) -> None:
    """Zeros, in tiles of shared memory, what takes no part of the t-th block, where arrays decide that.

    Consumers may do so side by side: they write the same.
    """
    if isinstance(mask, Listed) and mask.used[0] is not None:
        rows = tile_refs[0].shape[0]
        pl.when(seen.holds_unused(t))(lambda: _scrub(mask.used[0], b, seen.block(t) * rows, tile_refs))


def scrub_rows(mask: Mask, b, i, first, *tile_refs) -> None:
    """The same for tiles, from row `first` on, of this thread block's i-th block of rows; both consumers meet then."""
    if isinstance(mask, Listed) and mask.used[1] is not None:

        @pl.when(mask.unused[b if mask.unused.shape[0] > 1 else 0, 0, 0, i] == 1)
        def _():
            _scrub(mask.used[1], b, first, tile_refs)
            meet()


def _scrub(used_ref, b, first, tile_refs) -> None:
    for tile_ref in tile_refs:
        for start in range(0, tile_ref.shape[0], GROUP_ROWS):
            part = tile_ref.at[pl.ds(start, GROUP_ROWS)]
            rows = used_ref.at[b if used_ref.shape[0] > 1 else 0, 0, 0, pl.ds(first + start, GROUP_ROWS)]
            values = plgpu.load(part, layout=TILE)
            used = lax.broadcast_in_dim(plgpu.load(rows, layout=ROW, optimized=False), values.shape, [0])
            part[...] = jnp.where(used != 0, values, jnp.zeros_like(values))
    ptx.fence()
    ptx.join_warps()


def send(*copies: tuple[Array, Any, Any]) -> None:
    """Sends values to device memory, each through a tile of shared memory that only this warp group has used.

    Or straight, if the value is float32 and the tile is not: then its rows must be within the array.
    """
    through = []
    for value, tile_ref, destination in copies:
        if value.dtype == jnp.float32 != tile_ref.dtype:
            destination[...] = value
        else:
            through.append((value, tile_ref, destination))
    ptx.join_warps()
    for value, tile_ref, _ in through:
        tile_ref[...] = value
    plgpu.commit_smem()
    for _, tile_ref, destination in through:
        plgpu.copy_smem_to_gmem(tile_ref, destination)
    plgpu.wait_smem_to_gmem(0)


class Handover:
    """A tile of shared memory that a consumer gives to a warp of the producer, again and again.

    Named barriers let them wait for each other: to wait at a memory barrier is a loop, around which ptxas copies the
    accumulators of products in flight.

    Attributes:
        tiles_ref: Such a tile for each consumer.
        w: Number of the consumer.
    """

    def __init__(self, tiles_ref, w):
        self.tiles_ref, self.w = tiles_ref, w
        self._free, self._full = 2 * w + 1, 2 * w + 2

    def give(self, value: Array) -> None:
        """Of the consumer: stores a value, once the tile is free."""
        ptx.named_barrier("sync", self._free, 160)
        ptx.store_woven(anew(self.tiles_ref, self.w), value)
        ptx.fence()
        ptx.named_barrier("arrive", self._full, 160)

    @staticmethod
    def in_order(sums: Array) -> Array:
        """What was added up in device memory [..., columns], its columns in order."""
        return ptx.unwoven(sums)

    def add(self, destination, order: "Order", place, rank) -> None:
        """Of the warp: adds the next value to device memory, in a place to which `rank` others add before."""
        ptx.named_barrier("arrive", self._free, 160)
        ptx.named_barrier("sync", self._full, 160)
        order.wait(place, rank)
        plgpu.copy_smem_to_gmem(self.tiles_ref.at[self.w], destination, reduction_op="add")
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        order.done(place)


class Order:
    """Lets thread blocks add to the same place of device memory one after the other, so that sums are reproducible.

    Each place has an int32 counter, from 0: how many have added to it. Who waits must have been launched after all that
    it waits for, since the GPU starts thread blocks in the order of their numbers.

    Attributes:
        counters: Reference to [places]; None: any order will do.
    """

    def __init__(self, counters=None):
        self.counters = counters

    def wait(self, place, rank) -> None:
        """Until `rank` others have added to the place."""
        if self.counters is not None:
            ptx.await_count(self.counters.at[pl.ds(place, 1)], rank)

    def done(self, place) -> None:
        """Completes this warp's additions, of which the last was to that place."""
        if self.counters is not None:
            plgpu.wait_smem_to_gmem(0)
            ptx.count_up(self.counters.at[pl.ds(place, 1)])
