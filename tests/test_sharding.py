"""Split over eight virtual devices, in every way, a call gives what it gives on one; its collectives are counted."""

import collections
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_attention import IMPLEMENTATIONS
from test_transforms import assert_close

from pallas_flash import (
    RESIDUAL_NAMES,
    MaskModifier,
    ScoreModifier,
    block_mask,
    explain,
    flash_attention,
    flash_attention_varlen,
)
from pallas_flash.testing import tolerance

B, T, S, N, K, H = 4, 20, 24, 8, 4, 16
COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
)
OVER = {"B": "data", "N": "model", "K": "model"}

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_kind = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)

TENSORS = {"query": "BTNH", "key": "BSKH", "value": "BSKH"}
FLOATING = TENSORS | {"bias": "11TS", "sinks": "N", "gain": "N", "scale": "", "factors": "N"}
"""Axes of the arrays by which there are gradients."""
WHOLE = {
    "alibi_slopes": "BN", "mask": "B1TS", "ids": "BS", "lengths": "B", "offset": "B", "allowed": "NS",
    "dropout key": "D",
}  # fmt: skip


def by_place(tile, allowed):
    return allowed | ((tile.k_ids + tile.head + 2 * tile.batch) % 4 > 0)


def placed(score, tile, gain):
    return score + gain * ((tile.k_ids + tile.head + 2 * tile.batch) % 3)


def drawn(axes: dict[str, str], **sizes: int) -> dict[str, np.ndarray]:
    """Floating arrays with these axes."""
    sizes = {"B": B, "T": T, "S": S, "N": N, "K": K, "H": H, "1": 1} | sizes
    rng = np.random.default_rng(0)
    return {
        name: 0.5 * rng.standard_normal([sizes[letter] for letter in letters], np.float32)
        for name, letters in axes.items()
    }


def arrays() -> dict[str, np.ndarray]:
    """Of every argument."""
    rng = np.random.default_rng(1)
    return drawn(FLOATING) | {
        "alibi_slopes": rng.random((B, N), np.float32),
        "mask": rng.random((B, 1, T, S)) < 0.8,
        "ids": np.sort(rng.integers(0, 3, (B, S))),
        "lengths": np.array([24, 17, 20, 5]),
        "offset": np.array([4, 0, 2, 4]),
        "allowed": rng.random((N, S)) < 0.2,
        "dropout key": np.array([7, 11], np.uint32),
    }


def with_everything(x: dict, **options):
    """Output of a call with every argument."""
    return flash_attention(
        x["query"], x["key"], x["value"], x["bias"], x["mask"], scale=x["scale"], logits_scale=x["factors"],
        is_causal=True, local_window_size=20, key_value_seq_lengths=x["lengths"], query_offset=x["offset"],
        query_segment_ids=x["ids"][:, -T:], key_value_segment_ids=x["ids"], alibi_slopes=x["alibi_slopes"],
        sinks=x["sinks"], dropout_rate=0.2, dropout_key=x["dropout key"],
        mask_modifiers=(MaskModifier(by_place, (x["allowed"],), ("NS",)),),
        score_modifiers=(ScoreModifier(placed, (x["gain"],), ("N",)),), **options,
    )  # fmt: skip


def plain(x: dict, **options):
    return flash_attention(x["query"], x["key"], x["value"], is_causal=True, query_offset=4, **options)


def mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


def spec(letters: str, over: dict = OVER) -> P:
    return P(*(over.get(letter) for letter in letters))


def put(mesh: jax.sharding.Mesh, x: dict, axes: dict[str, str], over: dict = OVER) -> dict:
    """The arrays, cut along axes that they have."""
    return {name: jax.device_put(x[name], NamedSharding(mesh, spec(axes[name], over))) for name in x}


def collectives(compiled) -> dict[str, int]:
    """How many of each kind there are in a compiled program."""
    return dict(collections.Counter(COLLECTIVE.findall(compiled.as_text())))


def gradients(attention, names, implementation: str):
    """(arrays, cotangent) → output, and gradients by the arrays of these names."""

    def run(x: dict, do):
        call = functools.partial(attention, **IMPLEMENTATIONS[implementation])
        out, vjp = jax.vjp(lambda some: call(x | some), {name: x[name] for name in names})
        return {"out": out} | vjp(do)[0]

    return jax.jit(run)


def check(run, x: dict, do, sharded: dict, sharded_do, on_one=None) -> dict[str, int]:
    """Compares with the same (or `on_one`) on one device; returns the collectives."""
    compiled = run.lower(sharded, sharded_do).compile()
    found, right = compiled(sharded, sharded_do), (on_one or run)(x, do)
    # <query, dq> / scale: of dq each element may be off by the floor, and these errors are random. Measured: 9.5e-6; a
    # floor relative to dq's own size, 7.5e-6, forgets that dq's terms cancel too.
    if "scale" in right:
        size = np.linalg.norm(x["query"], keepdims=True) * np.max(np.abs(right["query"])) / x["scale"]
        assert abs(found.pop("scale") - right.pop("scale")) <= 2 * tolerance(0.0, size, "float32")
    assert_close(found.values(), [right[name] for name in found])
    return collectives(compiled)


DO = {"do": "BTNH"}


@functools.cache
def everything_on_one(implementation: str) -> dict:
    return gradients(with_everything, list(FLOATING), implementation)(arrays(), drawn(DO)["do"])


@every_kind
@every_implementation
def test_every_argument(implementation, kind):
    """Also dropout, and users' functions of batch entry and head; what arrays share is summed, and nothing else."""
    x, axes, do = arrays(), FLOATING | WHOLE, drawn(DO)
    run = gradients(with_everything, list(FLOATING), implementation)
    sharded = put(mesh(kind), x, axes)
    sharded_do = put(mesh(kind), do, DO)["do"]
    found = check(run, x, do["do"], sharded, sharded_do, lambda *_: dict(everything_on_one(implementation)))
    of_scale = {"all-gather"} if kind == AxisType.Explicit else set()  # one number for each batch entry
    assert found.keys() == {"all-reduce"} | of_scale
    forward = jax.jit(functools.partial(with_everything, **IMPLEMENTATIONS[implementation])).lower(sharded).compile()
    # Under jit, XLA's own implementation asks all devices which keys and blocks any head or entry needs.
    asks = implementation == "xla" and kind == AxisType.Auto
    assert collectives(forward).keys() == ({"all-reduce"} if asks else set())


@every_kind
@every_implementation
@pytest.mark.parametrize(
    ("heads", "shared"),
    [((8, 4), {}), ((8, 2), {"all-reduce": 1}), ((12, 6), {"all-reduce": 1})],
    ids=["whole", "cut", "ragged"],
)
def test_key_heads(implementation, kind, heads, shared):
    """No collective; where devices share key/value heads, the sums of their gradients, and of XLA's own its choice.

    jax#25986: unless it is in types, the cotangent is not cut as the output is.
    """
    x, do = drawn(TENSORS, N=heads[0], K=heads[1]), drawn(DO, N=heads[0])
    over = OVER if not shared else OVER | {"K": None}
    sharded = put(mesh(kind), x, TENSORS, over), put(mesh(kind), do, DO, {} if kind == AxisType.Auto else OVER)["do"]
    found = check(gradients(plain, list(TENSORS), implementation), x, do["do"], *sharded)
    if implementation != "xla" or kind == AxisType.Explicit or not shared:
        assert found == shared


@every_kind
def test_packed_sequences(kind):
    """Of which heads are cut."""
    axes = {"query": "TNH", "key": "SKH", "value": "SKH"}
    x, do = drawn(axes), drawn({"do": "TNH"})

    def attention(x, **options):
        starts = [0, 7, 20], [0, 9, 24]
        return flash_attention_varlen(*(x[name] for name in axes), *map(np.array, starts), is_causal=True, **options)

    sharded = put(mesh(kind), x, axes), put(mesh(kind), do, {"do": "TNH"})["do"]
    assert not check(gradients(attention, list(axes), "triton"), x, do["do"], *sharded)


@every_kind
def test_block_mask(kind):
    """Made before, and cut as the mask is."""
    mask = np.random.default_rng(1).random((B, N, T, S)) < 0.5
    x, do = drawn(TENSORS) | {"mask": mask}, drawn(DO)
    made = block_mask(T, S, batch=(B,), heads=N, mask=mask)
    leaves, structure = jax.tree.flatten(made)
    names = dict(zip(("cells", "queries", "keys"), leaves, strict=True))
    axes = TENSORS | {"mask": "BN", "cells": "BN", "queries": "B", "keys": "B"}

    def attention(x, **options):
        found = structure.unflatten(x[name] for name in names)
        return flash_attention(*(x[name] for name in TENSORS), mask=x["mask"], block_mask=found, **options)

    x = x | names
    sharded = put(mesh(kind), x, axes), put(mesh(kind), do, DO)["do"]
    assert not check(gradients(attention, list(TENSORS), "triton"), x, do["do"], *sharded)


@every_kind
def test_other_axes_are_gathered(kind):
    """Queries that are cut along T are gathered, and `explain` says so."""
    x, do = drawn(TENSORS), drawn(DO)
    over = {"B": "data", "T": "model"}
    sharded = put(mesh(kind), x, TENSORS, over)
    run = gradients(plain, list(TENSORS), "triton")
    found = check(run, x, do["do"], sharded, put(mesh(kind), do, DO, {"B": "data"})["do"])
    assert found.keys() == {"all-gather"}
    told = explain(*sharded.values()).sharding
    assert told == {"batch": "split over data; no collective", "query": "gathered along T over model"}


def test_explain_tells_of_key_heads():
    x = put(mesh(AxisType.Auto), drawn(TENSORS, K=2), TENSORS, OVER | {"K": None})
    explanation = explain(*x.values())
    assert explanation.sharding["heads"] == "split over model; no collective"
    told = explanation.sharding["key/value heads"]
    assert "over which their gradients are summed; split whole by 1 or 2" in told
    assert told in str(explanation)


@pytest.mark.parametrize(
    ("kind", "cut"),
    [(AxisType.Auto, "M"), (AxisType.Explicit, "M"), (AxisType.Explicit, "B")],
    ids=["Auto-mapped", "Explicit-mapped", "Explicit-batch"],
)
@every_implementation
def test_under_vmap(implementation, kind, cut):
    """The mapped axis is cut, or whole and the batch is; what is in common has the sum of gradients."""
    tensors = {"query": "MBTNH", "key": "BSKH", "value": "MBSKH"}
    axes = tensors | {"lengths": "MB", "dropout key": "MD"}
    more = {
        "lengths": np.array([arrays()["lengths"], [9, 24, 3, 20]]),
        "dropout key": np.array([[7, 11], [3, 5]], "u4"),
    }
    x, do = drawn(tensors, M=2) | more, drawn({"do": "MBTNH"}, M=2)

    def attention(x, **options):
        def entry(x):
            masked = dict(key_value_seq_lengths=x["lengths"], dropout_rate=0.2, dropout_key=x["dropout key"])
            return plain(x, **masked, **options)

        return jax.vmap(entry, ({name: 0 if axes[name][0] == "M" else None for name in x},))(x)

    over = {cut: "data", "N": "model", "K": "model"}
    sharded = put(mesh(kind), x, axes, over), put(mesh(kind), do, {"do": "MBTNH"}, over)["do"]
    found = check(gradients(attention, list(tensors), implementation), x, do["do"], *sharded)
    if implementation != "xla" or kind == AxisType.Explicit:  # else it asks all devices which keys any needs
        assert found == ({"all-reduce": 1} if cut == "M" else {})  # of the keys' gradients


@pytest.mark.parametrize("check_vma", [True, False])
@every_implementation
def test_in_shard_map(implementation, check_vma):
    """Shared sinks, bias and scale have gradients that are summed over devices; the rest has no collective."""
    some = {name: FLOATING[name] for name in ("query", "key", "value", "bias", "sinks", "scale")}
    axes = some | {"lengths": "B"}
    x, do = drawn(some) | {"lengths": arrays()["lengths"]}, drawn(DO)

    def attention(x, **options):
        return flash_attention(
            x["query"], x["key"], x["value"], x["bias"], is_causal=True, scale=x["scale"], sinks=x["sinks"],
            key_value_seq_lengths=x["lengths"], **options,
        )  # fmt: skip

    def mapped(x, **options):
        specs = {name: spec(axes[name]) for name in x}
        inner = functools.partial(attention, **options)
        return jax.shard_map(
            inner, mesh=mesh(AxisType.Explicit), in_specs=(specs,), out_specs=spec("BTNH"), check_vma=check_vma
        )(x)  # fmt: skip

    sharded, sharded_do = put(mesh(AxisType.Explicit), x, axes), put(mesh(AxisType.Explicit), do, DO)["do"]
    run, on_one = (gradients(f, list(some), implementation) for f in (mapped, attention))
    assert check(run, x, do["do"], sharded, sharded_do, on_one).keys() == {"all-reduce"}
    only = gradients(mapped, list(TENSORS), implementation).lower(sharded, sharded_do).compile()
    assert collectives(only) == {}


def test_in_shard_map_over_some_axes():
    """What the compiler splits beside it is gathered around the kernels: name all mesh axes."""
    x, do = drawn(TENSORS), drawn(DO)

    def mapped(x, **options):
        specs = {name: P("data") for name in x}
        return jax.shard_map(
            functools.partial(plain, **options), mesh=mesh(AxisType.Auto), in_specs=(specs,), out_specs=P("data"),
            axis_names={"data"},
        )(x)  # fmt: skip

    sharded = put(mesh(AxisType.Auto), x, TENSORS), put(mesh(AxisType.Auto), do, DO)["do"]
    run, on_one = (gradients(f, list(TENSORS), "triton") for f in (mapped, plain))
    assert check(run, x, do["do"], *sharded, on_one).keys() == {"all-gather"}


LAYERS = 3


def layers(x: dict, saves: bool = True, **options):
    """In a scan, with dropout; each rematerialised but for what our residual names keep, or not at all."""

    def layer(query, key):
        return query + plain(x | {"query": query}, dropout_rate=0.2, dropout_key=key.reshape(2), **options), None

    policy = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
    return jax.lax.scan(jax.checkpoint(layer, policy=policy) if saves else layer, x["query"], x["dropout keys"])[0]


def layered(data: int, model: int) -> dict:
    """Arrays for the layers, with dropout keys for each of data x model devices."""
    return drawn(TENSORS) | {
        "dropout keys": np.arange(LAYERS * data * model * 2, dtype="u4").reshape(-1, data, model, 2)
    }


def part(array: np.ndarray, letters: str, parts: tuple[int, int], place: tuple[int, ...]) -> np.ndarray:
    """What one of data x model devices has of an array; a view."""
    cut = {"B": (parts[0], place[0]), "N": (parts[1], place[1]), "K": (parts[1], place[1])}
    of_axes = [(n, *cut.get(letter, (1, 0))) for n, letter in zip(array.shape, letters, strict=True)]
    return array[tuple(slice(i * n // count, (i + 1) * n // count) for n, count, i in of_axes)]


@functools.cache
def layers_on_one(*parts: int) -> dict:
    """What the part of each of data x model devices gives by itself, with XLA's implementation and no `checkpoint`."""
    run = gradients(functools.partial(layers, saves=False), list(TENSORS), "xla")
    x, do, axes = layered(*parts), drawn(DO)["do"], TENSORS | {"dropout keys": "LBN2", "out": "BTNH"}
    whole = {name: np.zeros_like(x[name]) for name in TENSORS} | {"out": np.zeros_like(do)}
    for place in np.ndindex(*parts):
        own = {name: part(array, axes[name], parts, place) for name, array in x.items()}
        for name, array in run(own, part(do, "BTNH", parts, place)).items():
            part(whole[name], axes[name], parts, place)[:] = array
    return whole


@pytest.mark.parametrize("way", ["Auto", "Explicit", "shard_map"])
@every_implementation
def test_scan_over_rematerialised_layers(implementation, way):
    """Gradients are those without sharding and `checkpoint`, with dropout; no layer has a collective."""
    parts, axes = ((2, 4), "LBN2") if way == "shard_map" else ((1, 1), "L")
    x, axes = layered(*parts), TENSORS | {"dropout keys": axes}
    across = mesh(AxisType.Explicit if way == "Explicit" else AxisType.Auto)

    def mapped(x, **options):
        specs = {name: spec(axes[name]) for name in x}
        inner = functools.partial(layers, **options)
        return jax.shard_map(inner, mesh=across, in_specs=(specs,), out_specs=spec("BTNH"))(x)

    sharded = put(across, x, axes), put(across, drawn(DO), DO)["do"]
    run = gradients(mapped if way == "shard_map" else layers, list(TENSORS), implementation)
    assert check(run, x, None, *sharded, lambda *_: layers_on_one(*parts)) == {}


def test_second_batch_axis_in_types():
    q = jax.device_put(np.ones((2, 4, T, N, H), np.float32), NamedSharding(mesh(AxisType.Explicit), P(None, "data")))
    with pytest.raises(ValueError, match=r"query: expected mesh axes .* first batch axis.* got \('data',\).* jax.vmap"):
        flash_attention(q, q, q)
