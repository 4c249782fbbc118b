"""Split over eight virtual devices, in every way, the call gives what it gives on one; and what that costs in collectives."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_attention import IMPLEMENTATIONS
from test_transforms import assert_close

from pallas_flash import MaskModifier, ScoreModifier, flash_attention

B, T, S, N, K, H = 4, 20, 24, 8, 4, 16
COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
)
OVER = {"B": "data", "N": "model", "K": "model"}

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_mesh = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])

FLOATING = {
    "query": "BTNH",
    "key": "BSKH",
    "value": "BSKH",
    "bias": "BN1S",
    "shared bias": "11TS",
    "alibi_slopes": "BN",
    "sinks": "N",
    "gain": "N",
    "scale": "",
}
"""Axes of the arrays by which there are gradients, in order; a bias of several axes is a modifier's operand."""
WHOLE = {"mask": "B1TS", "ids": "BS", "lengths": "B", "offset": "B", "allowed": "NS", "dropout key": "D"}


def placed(score, tile, bias, gain):
    return score + bias + gain * ((tile.k_ids + tile.head + 2 * tile.batch) % 3)


def by_place(tile, allowed):
    return allowed | ((tile.k_ids + tile.head + 2 * tile.batch) % 4 > 0)


def arrays(heads: int = K) -> dict[str, np.ndarray]:
    """Of every argument."""
    rng, sizes = np.random.default_rng(0), {"B": B, "T": T, "S": S, "N": N, "K": heads, "H": H, "1": 1, "D": 2}
    shapes = {name: [sizes[letter] for letter in axes] for name, axes in (FLOATING | WHOLE).items()}
    drawn = {name: 0.5 * rng.standard_normal(shapes[name], np.float32) for name in FLOATING}
    return drawn | {
        "mask": rng.random(shapes["mask"]) < 0.8,
        "ids": np.sort(rng.integers(0, 3, shapes["ids"])),
        "lengths": np.array([24, 17, 20, 5]),
        "offset": np.array([4, 0, 2, 4]),
        "allowed": rng.random(shapes["allowed"]) < 0.2,
        "dropout key": np.array([7, 11], np.uint32),
    }


def everything(x: dict, **options):
    """Output of a call with every argument."""
    return flash_attention(
        x["query"], x["key"], x["value"], x["bias"], x["mask"], scale=x["scale"], is_causal=True,
        local_window_size=20, key_value_seq_lengths=x["lengths"], query_offset=x["offset"],
        query_segment_ids=x["ids"][:, -T:], key_value_segment_ids=x["ids"], alibi_slopes=x["alibi_slopes"],
        sinks=x["sinks"], dropout_rate=0.2, dropout_key=x["dropout key"],
        mask_modifiers=(MaskModifier(by_place, (x["allowed"],), ("NS",)),),
        score_modifiers=(ScoreModifier(placed, (x["shared bias"], x["gain"]), ("BNTS", "N")),), **options,
    )  # fmt: skip


def mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


def over(mesh: jax.sharding.Mesh, x: dict, axes: dict[str, str], heads: int = K) -> dict:
    """The arrays, cut along the axes of batch and heads that they have."""
    names = OVER if heads == K else OVER | {"K": None}
    specs = {name: P(*(names.get(letter) for letter in axes[name])) for name in x}
    return {name: jax.device_put(x[name], NamedSharding(mesh, spec)) for name, spec in specs.items()}


def collectives(compiled) -> dict[str, int]:
    """How many of each kind there are in a compiled program."""
    return dict(collections.Counter(COLLECTIVE.findall(compiled.as_text())))


def with_gradients(attention, names):
    """Of all arrays and a cotangent: output and gradients by those of these names."""

    def run(x, do):
        out, vjp = jax.vjp(lambda some: attention(x | some), {name: x[name] for name in names})
        return out, vjp(do)[0]

    return run


COTANGENT = np.random.default_rng(1).standard_normal((B, T, N, H), np.float32)


@functools.cache
def on_one_device(implementation: str, heads: int = K):
    run = with_gradients(functools.partial(everything, **IMPLEMENTATIONS[implementation]), list(FLOATING))
    return jax.jit(run)(arrays(heads), COTANGENT)


@every_mesh
@every_implementation
@pytest.mark.parametrize("heads", [4, 2])
def test_every_argument(implementation, kind, heads):
    axes = FLOATING | WHOLE
    x = over(mesh(kind), arrays(heads), axes, heads)
    do = over(mesh(kind), {"do": COTANGENT}, {"do": "BTNH"})["do"]
    run = with_gradients(functools.partial(everything, **IMPLEMENTATIONS[implementation]), list(FLOATING))
    compiled = jax.jit(run).lower(x, do).compile()
    print(implementation, kind, heads, collectives(compiled))
    out, gradients = compiled(x, do)
    expected, right = on_one_device(implementation, heads)
    assert_close([out, *gradients.values()], [expected, *right.values()])
    run = with_gradients(functools.partial(everything, **IMPLEMENTATIONS[implementation]), list(FLOATING)[:3])
    compiled = jax.jit(run).lower(x, do).compile()
    print(implementation, kind, heads, collectives(compiled))
