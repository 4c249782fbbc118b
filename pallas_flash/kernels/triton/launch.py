"""Everything that names Triton: launching, layouts, loads and stores, dots and the GPU's elementary functions.

The kernel bodies beside this file are plain jnp on tiles, written against what is here.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax._src.pallas.triton.pallas_call_registration import pallas_call_lowering
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.extend.pallas import register_lowering_rule
from jax.tree_util import Partial
from jax.typing import ArrayLike

from pallas_flash import choice, varying
from pallas_flash import plan as plans
from pallas_flash.cells import Span
from pallas_flash.choice import Choice
from pallas_flash.elementary import PLAIN, Elementary, differentiable, margin
from pallas_flash.kernels import device
from pallas_flash.kernels.grid import Grid
from pallas_flash.lists import Listed
from pallas_flash.masks import Lengths, Mask
from pallas_flash.plan import Blocks, padded
from pallas_flash.problem import Problem
from pallas_flash.tile import Tile, indices

TARGET = "__gpu$xla.gpu.triton"
"""Name of the custom call that a kernel becomes."""


@dataclasses.dataclass(frozen=True)
class _CompilerParams(plt.CompilerParams):
    """Triton's parameters, lowered without JAX's deprecation warning of its Triton backend."""


def _quiet_lowering(*args, **kwargs):
    # Filters are the process's, so that another thread may see the warning while this one lowers.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        return pallas_call_lowering(*args, **kwargs)


register_lowering_rule(_CompilerParams, _quiet_lowering, "gpu")


def refusal(problem: Problem) -> str | None:
    """Why these kernels cannot serve the problem on the current device; None: they can."""
    if isinstance(problem.plan, plans.MosaicPlan):
        return "the plan is one of Mosaic-GPU kernels; give a pallas_flash.Plan, or plan=None"
    if problem.dtype == "float64":
        return "float64 is not supported; cast to float32 or use implementation='xla'"
    if problem.interpret and jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return "Pallas' interpret mode mixes int32 and int64 indices under jax_enable_x64; disable it around the call"
    for name, width in (("query", problem.H), ("value", problem.Hv)):
        if width > 256:
            return (
                f"the head dim of {name} is {width}, at most 256 is supported; use more heads or implementation='xla'"
            )
    capability = device.capability(problem)
    if isinstance(capability, str):
        return capability
    if capability < 80:
        found = f"the GPU has compute capability {capability // 10}.{capability % 10}"
        return f"{found}, 8.0 (Ampere) or later is required; use implementation='xla'"
    return plans.shortage(planned(problem).plan, capability, choice.sizes(problem, _dots(problem)))


def planned(problem: Problem) -> Choice:
    """The user's plan, or the one chosen for the current device, which there must be."""
    return choice.of("triton", problem, device.current(problem), _dots(problem))


def place(grid: Grid) -> tuple[Array, Array, Array]:
    """Batch entry, head and tile of rows of this program, inside a kernel."""
    return grid.at(*(pl.program_id(axis) for axis in range(3)))


def tile(problem: Problem, blocks: Blocks, b, head, q_start, k_start, transposed: bool = False) -> Tile:
    """The tile of scores of a query head from these indices on, which reads arrays where they are for it."""
    zero = b * 0  # Pallas' interpret mode takes no Python integers beside slices

    def read(ref) -> Array:
        B, N, T, S = ref.shape
        rows = pl.ds(q_start, blocks.block_q) if T > 1 else zero
        columns = pl.ds(k_start, blocks.block_k) if S > 1 else zero
        x = plt.load(ref.at[b if B > 1 else zero, head if N > 1 else zero, rows, columns])
        if x.ndim == 2:
            return x.T if transposed else x
        return x if x.ndim == 0 else jnp.expand_dims(x, int((T > 1) != transposed))

    where = Tile.at(q_start, blocks.block_q, k_start, blocks.block_k, transposed)
    return where._replace(batch=b, head=head, read=read, fast=elementary(problem))


def of_entry(problem: Problem, b) -> Problem:
    """The problem of a batch entry, inside a kernel that was called with it as a `whole`."""
    return jax.tree.map(lambda leaf: leaf[b] if leaf.ndim == 1 else leaf, problem)


class Whole(NamedTuple):
    """Layout of an array of which each program sees everything."""

    shape: tuple[int, ...]

    def spec(self, grid: Grid) -> pl.BlockSpec:
        del grid
        return pl.BlockSpec(self.shape, lambda x, y, z: (0,) * len(self.shape))


class Sequence(NamedTuple):
    """Layout of an operand: each program sees the whole sequence of its batch entry and head, and loads tiles of it.

    Attributes:
        length: Rows.
        block: Rows of the tiles that are loaded; the sequence is seen padded to a multiple of it.
        width: Features per row, also padded, to a power of two; None: the operand is a vector.
        group: Heads that a program sees as one axis after the rows; None: it sees the grid's one head.
        shared: Heads of the grid that see the same head of the operand.
        batch: Batch entries that a program sees as the first axis, and all heads as `group`; None: the grid's one.
    """

    length: int
    block: int
    width: int | None = None
    group: int | None = None
    shared: int = 1
    batch: int | None = None

    @property
    def tiles(self) -> int:
        """How many tiles hold the length."""
        return pl.cdiv(self.length, self.block)

    @property
    def rows(self) -> int:
        """The length, padded."""
        return self.tiles * self.block

    @property
    def tile(self) -> tuple[int, ...]:
        return (self.block,) if self.width is None else (self.block, padded(self.width))

    def spec(self, grid: Grid) -> pl.BlockSpec:
        """For an operand [B, length, heads, width], or a vector [B, heads, length]."""

        def index(x, y, z):
            b, head, _ = grid.at(x, y, z)
            b, head = (b, lax.div(head, jnp.int32(self.shared))) if self.batch is None else (0, 0)
            return (b, head, 0) if self.width is None else (b, 0, head, 0)

        rest = (self.group, self.rows) if self.width is None else (self.rows, self.group, padded(self.width))
        return pl.BlockSpec((self.batch, *rest), index)

    def _at(self, ref, start, head, b):
        """The tile of `ref` from row `start`, of one `head` of the group and one entry `b` of the batch."""
        entries, heads = (() if size is None else (at,) for size, at in ((self.batch, b), (self.group, head)))
        rows = pl.ds(start, self.block)
        rest = (*heads, rows) if self.width is None else (rows, *heads, pl.ds(0, self.tile[1]))
        return ref.at[(*entries, *rest)]

    def _mask(self, start, inside: Span | None) -> Array | None:
        """bool, the tile's shape: what lies `inside` and within the features. None: all of it."""
        conditions = []
        if inside is not None and not inside.is_whole(self.rows):
            conditions.append(inside.holds(start + indices(self.block, 0)))
        if self.width is None:
            return conditions[0].reshape(self.tile) if conditions else None
        if self.width != self.tile[1]:
            conditions.append(indices(self.tile[1], 1) < self.width)
        return jnp.broadcast_to(functools.reduce(jnp.logical_and, conditions), self.tile) if conditions else None

    def load(self, ref, start, inside: Span | None, head=None, b=None) -> Array:
        """The tile from row `start`, 0 where a row is not `inside` (None: all are) and beyond the features."""
        mask = self._mask(start, inside)
        return plt.load(self._at(ref, start, head, b), mask=mask, other=None if mask is None else 0)

    def store(self, ref, start, tile: Array, head=None, b=None) -> None:
        """Stores what lies within the array, in its dtype."""
        mask = self._mask(start, Span(0, self.length))
        plt.store(self._at(ref, start, head, b), tile.astype(ref.dtype), mask=mask)


class Layouts(NamedTuple):
    """Layouts of q and dq, of k and dk, of v and dv, of o and do, and of vectors over the rows of q."""

    q: Sequence
    k: Sequence
    v: Sequence
    o: Sequence
    row: Sequence

    @property
    def column(self) -> Sequence:
        """Of vectors over the rows of k, for each query head."""
        return self.row._replace(length=self.k.length, block=self.k.block)

    @classmethod
    def of_everything(cls, problem: Problem, blocks: Blocks) -> "Layouts":
        """For programs that see all batch entries and heads."""
        queries, keys, B = (problem.T, blocks.block_q), (problem.S, blocks.block_k), problem.B
        return cls(
            Sequence(*queries, problem.H, group=problem.N, batch=B),
            Sequence(*keys, problem.H, group=problem.K, batch=B),
            Sequence(*keys, problem.Hv, group=problem.K, batch=B),
            Sequence(*queries, problem.Hv, group=problem.N, batch=B),
            Sequence(*queries, group=problem.N, batch=B),
        )

    @classmethod
    def of_query_heads(cls, problem: Problem, blocks: Blocks) -> "Layouts":
        """For programs of one query head each, which share their key/value head with its group."""
        queries, keys, G = (problem.T, blocks.block_q), (problem.S, blocks.block_k), problem.G
        return cls(
            Sequence(*queries, problem.H),
            Sequence(*keys, problem.H, shared=G),
            Sequence(*keys, problem.Hv, shared=G),
            Sequence(*queries, problem.Hv),
            Sequence(*queries),
        )

    @classmethod
    def of_key_heads(cls, problem: Problem, blocks: Blocks) -> "Layouts":
        """For programs of one key/value head each, which see all query heads of its group."""
        queries, keys = (problem.T, blocks.block_q), (problem.S, blocks.block_k)
        group = problem.G if problem.G > 1 else None
        return cls(
            Sequence(*queries, problem.H, group=group),
            Sequence(*keys, problem.H),
            Sequence(*keys, problem.Hv),
            Sequence(*queries, problem.Hv, group=group),
            Sequence(*queries, group=group),
        )


def bounded(problem: Problem, blocks: Blocks) -> Mask:
    """The problem's mask and the ends of the arrays, where tiles reach beyond them."""
    if isinstance(problem.mask, Listed):
        return problem.mask
    q_len = problem.T if problem.T % blocks.block_q else None
    k_len = problem.S if problem.S % blocks.block_k else None
    return Lengths(q_len, k_len) & problem.mask


Operand = tuple[Array, Sequence]
Output = tuple[jax.ShapeDtypeStruct, Sequence | Whole]


def call(
    kernel: Callable, name: str, problem: Problem, grid: Grid, blocks: Blocks, operands: list[Operand],
    outputs: Collection[Output], whole: bool = False,
):  # fmt: skip
    """Launches `kernel(*operand_refs, *output_refs, problem=, grid=, blocks=)`.

    In it, leaves of the problem are scalars, those of the program's batch entry, or references to what is no vector; of
    a `whole` problem, references to vectors too.
    """
    leaves, structure = jax.tree.flatten(problem)

    def body(*refs):
        parts = [ref if ref.ndim else ref[...] for ref in refs[: len(leaves)]]
        kernel(*refs[len(leaves) :], problem=structure.unflatten(parts), grid=grid, blocks=blocks)

    body.__name__ = body.__qualname__ = name

    def leaf_spec(leaf: Array) -> pl.BlockSpec:
        if leaf.ndim > 1 or whole:
            return Whole(leaf.shape).spec(grid)
        return pl.BlockSpec((None,), lambda x, y, z: grid.at(x, y, z)[:1])

    return pl.pallas_call(
        body,
        grid=grid.shape,
        in_specs=[*map(leaf_spec, leaves)] + [layout.spec(grid) for _, layout in operands],
        out_specs=[layout.spec(grid) for _, layout in outputs],
        out_shape=[varying.like(operands[0][0], shape) for shape, _ in outputs],
        interpret=problem.interpret,
        compiler_params=_CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        name=name,
    )(*leaves, *(array for array, _ in operands))


def dot(problem: Problem, a: Array, b: Array, trans_b: bool = False) -> Array:
    """a·b, or a·bᵀ, of two tiles, in float32."""
    return plt.dot(a, b, trans_b=trans_b, precision=_dot_precision(problem))


def _dots(problem: Problem) -> str:
    """How dots are computed (`plan.Sizes.dots`).

    Three tf32 products are as accurate as float32 ones: error 5.5e-7 against 6.7e-7 of XLA's float32 at T = 512,
    H = 64, and run on tensor cores; exact float32 dots do not, and spill.
    """
    if problem.dtype != "float32":
        return "half"
    return "tf32" if problem.precision == lax.Precision.DEFAULT else "tf32x3"


def _dot_precision(problem: Problem) -> lax.Precision | lax.DotAlgorithmPreset:
    if problem.interpret:  # knows no presets
        return lax.Precision.HIGHEST
    return lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if _dots(problem) == "tf32x3" else lax.Precision.DEFAULT


def elementary(problem: Problem) -> Elementary:
    """The GPU's functions, or in interpret mode their plain twins."""
    if problem.interpret:
        return PLAIN
    return _HARDWARE._replace(tanh=PLAIN.tanh) if problem.dtype == "float32" else _HARDWARE


def _sieve(words: tuple[Array, Array], bits: tuple[Array, Array, Array], bound: Array) -> Callable[[Array], Array]:
    """`elementary.sieve`: compares four scores of a word at once, and passes 16-bit values two at once."""
    of_query, of_key, of_word = bits
    low, high = ((word & np.uint32(0x7F7F7F7F)) + margin(bound) for word in words)
    word = jnp.where(of_word > 0, high, low)
    byte = np.uint32(0xCC88) + (of_query // np.uint32(8) + of_key // np.uint32(4)) * np.uint32(0x1111)

    def only(x: Array) -> Array:
        code, constraints, pack = _ONLY_WIDE if x.dtype.itemsize > 2 else _ONLY
        (result,) = plt.elementwise_inline_asm(
            code,
            args=(x, *(jnp.broadcast_to(y, x.shape) for y in (word, byte))),
            constraints=constraints,
            pack=pack,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        )
        return result

    return Partial(only)


_ONLY = "{ .reg .b32 h; prmt.b32 h, $2, $3, $4; and.b32 $0, $1, h; }", "=r,r,r,r,r,r", 2
_ONLY_WIDE = "{ .reg .b32 h; prmt.b32 h, $2, $2, $3; and.b32 $0, $1, h; }", "=r,r,r,r", 1
"""PTX, constraints and number of values: 0 where the highest bit of a byte is 0.

Two values at once are neighbours along keys, or along queries in a transposed tile: of both it is the same byte.
"""


def _assembly(instructions: str, *args: ArrayLike) -> Array:
    """float32 inline PTX, element by element over the broadcast of `args`; `$0` is the result."""
    tiles = jnp.broadcast_arrays(*(jnp.asarray(arg, jnp.float32) for arg in args))
    shape = jax.ShapeDtypeStruct(tiles[0].shape, jnp.float32)
    constraints = ",".join(["=f"] + ["f"] * len(args))
    return plt.elementwise_inline_asm(
        instructions, args=tiles, constraints=constraints, pack=1, result_shape_dtypes=[shape]
    )[0]


# XLA's own exp2 handles denormals and its mul and sub are never fused: 797 against 540 instructions for the inner loop
# of a 128x128 forward tile at H = 128.
_HARDWARE = Elementary(
    exp2=functools.partial(_assembly, "ex2.approx.ftz.f32 $0, $1;"),
    fma_exp2=functools.partial(_assembly, "{ .reg .f32 t; fma.rn.ftz.f32 t, $1, $2, $3; ex2.approx.ftz.f32 $0, t; }"),
    constant=lambda x: x,
    tanh=differentiable(functools.partial(_assembly, "tanh.approx.f32 $0, $1;")),
    sieve=_sieve,
)
