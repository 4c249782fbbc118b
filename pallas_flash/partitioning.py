"""How is it split over a mesh? Each device computes its batch entries and heads, however the program is sharded.

What implementations compute is a `Call` of arrays whose axes have names. From the `Split` of these follows the rest:
what each device takes, what it computes, and over which mesh axes results are summed, which are those that cut others
but not them. There are four ways to it (`split_up`):

- Arrays sharded under `jit`: the compiler asks for the computation of a part (`custom_partitioning`).
- Mesh axes in types: the parts are made by a `shard_map` of our own.
- Inside a `shard_map`, and on one device: there is nothing to split.
- What JAX differentiates, the implementation without kernels: the compiler splits it by itself.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from pallas_flash import dispatch, varying
from pallas_flash.patterns import Modified
from pallas_flash.problem import Problem
from pallas_flash.score import Term
from pallas_flash.split import Axes, Split, devices
from pallas_flash.tile import Tile


@dataclasses.dataclass(frozen=True)
class Shifted:
    """A user's function for a part of the batch and the heads; its last two operands say where the part begins."""

    function: Callable[..., Array]

    def __call__(self, *args):
        *args, batch, head = args
        args = [x._replace(batch=x.batch + batch, head=x.head + head) if isinstance(x, Tile) else x for x in args]
        return self.function(*args)


def _of_part(problem: Problem, split: Split, q: Array, k: Array) -> Problem:
    """The problem, of which a device has these queries and keys; users' functions see indices of the whole."""
    B, N = q.shape[0], q.shape[2]
    starts = tuple(split.start(axis, length).reshape(1, 1, 1, 1) for axis, length in (("B", B), ("N", N)))

    def shifted(node):
        if not _is_users(node):
            return node
        booleans = (*(node.booleans or (False,) * len(node.operands)), False, False)
        operands = (*node.operands, *starts)
        return dataclasses.replace(node, function=Shifted(node.function), operands=operands, booleans=booleans)

    return dataclasses.replace(jax.tree.map(shifted, problem, is_leaf=_is_users), B=B, N=N, K=k.shape[2])


def _is_users(node) -> bool:
    return isinstance(node, Modified) or (isinstance(node, Term) and not node.is_built_in)


class Call(NamedTuple):
    """A computation of arrays whose axes have names.

    Attributes:
        part: Split → the computation of a device's part.
        lengths: Of the axes that may be cut.
        operands: Axes of each array that goes in.
        results: Axes of each array that comes out.
    """

    part: Callable[[Split], Callable[..., list[Array]]]
    lengths: dict[str, int]
    operands: list[Axes]
    results: list[Axes]

    def mapped(self, size: int, batched: Sequence[bool]) -> "Call":
        """Under `vmap`, over the first axis of some operands; that is one more axis that may be cut."""
        name = f"mapped {sum(axis.startswith('mapped') for axis in self.lengths)}"
        over = [0 if x else None for x in batched]
        return Call(
            lambda split: jax.vmap(self.part(split), over),
            {**self.lengths, name: size},
            [(name, *axes) if x else axes for axes, x in zip(self.operands, batched, strict=True)],
            [(name, *axes) for axes in self.results],
        )

    def rule(self) -> tuple[str, tuple[str, ...]]:
        """How shardings propagate, for Shardy: the mapping of axes, and those that are not cut."""
        whole: list[str] = []

        def factor(axis: str) -> str:
            axis = "N" if axis == "K" and self.lengths["K"] == self.lengths["N"] else axis
            name = (axis or f"own{len(whole)}").replace(" ", "").lower()
            if axis not in self.lengths and name not in whole:
                whole.append(name)
            return name

        sides = (", ".join(" ".join(map(factor, axes)) for axes in side) for side in (self.operands, self.results))
        return " -> ".join(sides), tuple(whole)


class Operation(NamedTuple):
    """What implementations compute of a problem and its tensors.

    Attributes:
        compute: Problem and tensors → results.
        tensors: Letters of each tensor's axes.
        results: Of a problem, axes of each result.
    """

    compute: Callable[..., Sequence[Array]]
    tensors: tuple[str, ...]
    results: Callable[[Problem], Sequence[str | Axes]]

    def call(self, problem: Problem) -> Call:
        """Of the problem's leaves, then the tensors."""
        leaves, structure = jax.tree.flatten(problem)
        results = [tuple(axes) for axes in self.results(problem)]

        def part(split: Split) -> Callable[..., list[Array]]:
            def compute(*arrays: Array) -> list[Array]:
                own, tensors = structure.unflatten(arrays[: len(leaves)]), arrays[len(leaves) :]
                if not split:
                    return list(self.compute(own, *tensors))
                heads = KeyHeads.of(split, problem, tensors[0].shape[2])
                tensors = [heads.taken(x) if "K" in axes else x for x, axes in zip(tensors, self.tensors, strict=True)]
                found = self.compute(_of_part(own, split, *tensors[:2]), *tensors)
                found = [heads.given_back(x) if "K" in axes else x for x, axes in zip(found, results, strict=True)]
                return [_summed(x, split.missing(axes)) for x, axes in zip(found, results, strict=True)]

            return compute

        lengths = {"B": problem.B, "N": problem.N, "K": problem.K}
        operands = [*(_leaf_axes(problem, x) for x in leaves), *(tuple(letters) for letters in self.tensors)]
        return Call(part, lengths, operands, results)


def _leaf_axes(problem: Problem, leaf) -> Axes:
    """Of [B], [B or 1, T or S], or [B or 1, N or 1, T or 1, S or 1]; the last two are whole on every device."""
    sizes = (("B", problem.B), ("N", problem.N))[: 2 if leaf.ndim == 4 else 1]
    axes = [axis if n == size else "" for (axis, size), n in zip(sizes, leaf.shape, strict=False)]
    return (*axes, *("",) * (leaf.ndim - len(axes)))


class KeyHeads(NamedTuple):
    """Which of the key/value heads on a device its query heads need.

    Attributes:
        ids: int32: one for each group of query heads, which may repeat; None: all, in order.
        kept: How many there are on the device.
    """

    ids: Array | None
    kept: int

    @classmethod
    def of(cls, split: Split, problem: Problem, heads: int) -> "KeyHeads":
        """For a device's `heads` query heads. Where groups are cut, they are as large as all can be alike."""
        kept = problem.K // devices(split.sizes, split.by["K"])
        if split.by.get("N", ()) == split.by["K"]:
            return cls(None, kept)
        shared = math.gcd(heads, problem.G)
        first = split.start("N", heads) + shared * jnp.arange(heads // shared, dtype=jnp.int32)
        return cls(first // problem.G - split.start("K", kept), kept)

    def taken(self, x: Array) -> Array:
        """Those of [B, S, K, *] that are needed."""
        return x if self.ids is None else jnp.take(x, self.ids, 2)

    def given_back(self, x: Array) -> Array:
        """Of gradients by those that were taken, those by all on the device, summed in float32."""
        if self.ids is None:
            return x
        whole = jnp.zeros((*x.shape[:2], self.kept, x.shape[3]), jnp.float32)
        return whole.at[:, :, self.ids].add(x.astype(jnp.float32)).astype(x.dtype)


def _summed(x: Array, names: Axes) -> Array:
    """Over mesh axes, in float32."""
    return lax.psum(x.astype(jnp.promote_types(x.dtype, jnp.float32)), names).astype(x.dtype) if names else x


def _score_axes(problem: Problem) -> list[Axes]:
    """Of the operands of the score's terms that have gradients."""
    return [_leaf_axes(problem, x) for x in jax.tree.leaves(problem.score) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _forward(problem: Problem, *tensors: Array) -> Sequence[Array]:
    return dispatch.chosen(problem).forward(problem, *tensors)


def _backward(problem: Problem, *tensors: Array) -> Sequence[Array]:
    found = dispatch.chosen(problem).backward(problem, *tensors)  # pyright: ignore[reportOptionalCall]
    return found if problem.scale is not None else found[:3]


def _d_score(problem: Problem, *tensors: Array) -> Sequence[Array]:
    found = dispatch.chosen(problem).d_score(problem, *tensors)  # pyright: ignore[reportOptionalCall]
    return [x for x in jax.tree.leaves(found) if jnp.issubdtype(x.dtype, jnp.inexact)]


_TENSORS = ("BTNH", "BSKH", "BSKV")
_OF_GRADIENTS = (*_TENSORS, "BNT", "BTNV", "BNT")
FORWARD = Operation(_forward, _TENSORS, lambda problem: ["BTNV", "BNT"])
"""q, k, v → output and log-sum-exp."""
BACKWARD = Operation(
    _backward, _OF_GRADIENTS, lambda problem: ["BTNH", "BSKH", "BSKV", *(["B"] if problem.scale is not None else [])]
)
"""q, k, v, lse, do, delta → dq, dk, dv, and for a traced scale its gradient."""
D_SCORE = Operation(_d_score, _OF_GRADIENTS, _score_axes)
"""The same → gradients of what scores depend on, those of `problem.score` that are floating, in order."""


def split_up(operation: Operation, problem: Problem, *tensors: Array) -> list[Array]:
    """The results of an operation, of which each device computes those of its batch entries and heads."""
    call, arrays = operation.call(problem), (*jax.tree.leaves(problem), *tensors)
    kinds, has_kernels = set(_mesh(tensors[0]).axis_types), dispatch.chosen(problem).backward is not None
    if not has_kernels:  # the compiler splits it, if types do not
        names = _of_types(call, arrays).names if AxisType.Explicit in kinds else frozenset()
        return _by_types(call, *arrays, names=names) if names else call.part(Split())(*arrays)
    if AxisType.Explicit in kinds or kinds == {AxisType.Manual, AxisType.Auto}:
        found = varying.unchecked(_mappable(_by_types, call))(*arrays)
    elif kinds == {AxisType.Manual}:
        found = varying.unchecked(call.part(Split()))(*arrays)
    else:
        found = _mappable(_by_compiler, call)(*arrays)
    # Without it, XLA runs a Mosaic kernel twice in a scan that saves its results, once into the stack of them, and once
    # for other uses (openxla/xla#45799; jaxlib 0.11.2). Each its own: those that nobody asks for are dropped.
    return [lax.optimization_barrier(x) for x in found]


def _mesh(x: Array) -> Any:
    """The abstract mesh of the context, or else that of an array's type; it has no axes if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.typeof(x).sharding.mesh if mesh.empty else mesh


def _mappable(way: Callable[..., list[Array]], call: Call) -> Callable[..., list[Array]]:
    """The way of a call and its arrays; under `vmap`, of one with one more axis. It cannot be differentiated."""

    @jax.custom_batching.custom_vmap
    def run(*arrays: Array) -> list[Array]:
        return way(call, *arrays)

    @run.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: Array):
        found = _mappable(way, call.mapped(size, batched))(*arrays)
        return found, [True] * len(found)

    return run


def _by_compiler(call: Call, *arrays: Array) -> list[Array]:
    """As the compiler finds the arrays sharded."""
    device = jax.sharding.AbstractMesh((), (), abstract_device=jax.sharding.get_abstract_mesh().abstract_device)

    def partition(mesh, operands, results):
        axes = [*zip(call.operands, operands, strict=True), *zip(call.results, results, strict=True)]
        split = Split.of(dict(mesh.shape), call.lengths, [(names, x.sharding.spec) for names, x in axes])

        def placed(side: list[Axes]) -> list[NamedSharding]:
            return [NamedSharding(mesh, split.spec(names)) for names in side]

        def part(*arrays: Array) -> list[Array]:
            with jax.sharding.use_abstract_mesh(device):  # compiled for the device that it was traced for
                return call.part(split)(*arrays)

        # Inlined where it is: JAX lowers no references here, by which Mosaic kernels return results, but in this.
        inlined = custom_partitioning(part)
        inlined.def_partition(partition)
        return mesh, inlined, placed(call.results), tuple(placed(call.operands))

    whole = custom_partitioning(call.part(Split()))
    rule, not_cut = call.rule()
    whole.def_partition(partition, sharding_rule=rule, need_replication_factors=not_cut)
    return whole(*arrays)


def _by_types(call: Call, *arrays: Array, names: frozenset[str] = frozenset()) -> list[Array]:
    """As the arrays' types are, which `typed` made them; over mesh axes of these names, or all that JAX lets."""
    mesh, split = _mesh(arrays[-1]), _of_types(call, arrays)
    specs = [[split.spec(axes) for axes in side] for side in (call.operands, call.results)]
    part = call.part(split)
    return jax.shard_map(
        part, mesh=mesh, in_specs=tuple(specs[0]), out_specs=specs[1], axis_names=names, check_vma=False
    )(*arrays)


def _of_types(call: Call, arrays: Sequence[Array]) -> Split:
    types = [jax.typeof(x).sharding for x in arrays]
    specs = [(names, type.spec) for names, type in zip(call.operands, types, strict=True)]
    return Split.of(dict(_mesh(arrays[-1]).shape), call.lengths, specs)


def typed(problem: Problem, *tensors: Array) -> tuple[Any, ...]:
    """The same arrays, of types that operations keep; JAX's own rules bring their gradients back to the former types.

    With mesh axes in types, sharded along batch and heads alone. Inside a `shard_map`, varying over the same axes all.
    """
    arrays, structure = jax.tree.flatten((problem, *tensors))
    mesh = _mesh(tensors[0])
    if AxisType.Explicit in mesh.axis_types:
        call = FORWARD.call(problem)
        split = _of_types(call, arrays)
        there = [NamedSharding(mesh, split.spec(names)) for names in call.operands]
        arrays = [jax.sharding.reshard(x, sharding) for x, sharding in zip(arrays, there, strict=True)]
    over = frozenset[str]().union(*map(varying.over, arrays))
    return structure.unflatten(varying.as_over(over, x) for x in arrays)
