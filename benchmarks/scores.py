"""What do bias, soft cap, dropout and the like cost? Beside the plain call: `python -m benchmarks.scores --help`."""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import reference
from benchmarks.run import Program, compile_program, default_path, environment, measure
from pallas_flash import ScoreModifier, flash_attention
from tests.cases import Case

B, T, N, H = 2, 8192, 16, 128
INPUTS = Case("scores", B=B, T=T, N=N, H=H, dtype="bfloat16")
BOUND = 1e-2
"""Of the largest difference to the XLA implementation, relative to its norm: that the same function is computed."""


def weighted(score, tile, weight):
    """The scores of each key times its weight."""
    del tile
    return score * weight


@dataclasses.dataclass(frozen=True)
class Feature:
    """What is added to the plain call.

    Attributes:
        array: Makes an array on the device, an argument of the timed program.
        keywords: From it, keywords of `flash_attention`.
        differentiated: Whether the backward pass computes its gradient too.
    """

    array: Callable[[], Any] = tuple
    keywords: Callable[[Any], dict[str, Any]] = lambda array: {}
    differentiated: bool = False

    def program(self, mode: str, options: dict[str, Any], q, k, v, do) -> Program:
        """Results by name; `bwd` takes the forward's residuals as arguments."""
        array = self.array()

        def attend(q, k, v, array):
            return flash_attention(q, k, v, **options, **self.keywords(array))

        if mode == "fwd":
            return compile_program(lambda *args: {"out": attend(*args)}, q, k, v, array)

        def forward(q, k, v, array):
            if self.differentiated:
                return jax.vjp(attend, q, k, v, array)
            return jax.vjp(functools.partial(attend, array=array), q, k, v)

        _, vjp = compile_program(forward, q, k, v, array).call()
        names = ("dq", "dk", "dv", "d_array")
        return compile_program(lambda vjp, do: dict(zip(names, vjp(do), strict=False)), vjp, do)


def _normal(*shape: int, dtype=jnp.float32) -> Callable[[], jax.Array]:
    return lambda: jax.random.normal(jax.random.key(1), shape, dtype)


def _bias(*shape: int, differentiated: bool = False) -> Feature:
    return Feature(_normal(*shape, dtype=jnp.bfloat16), lambda bias: {"bias": bias}, differentiated)


def _slopes(differentiated: bool) -> Feature:
    return Feature(lambda: 2.0 ** -jnp.linspace(0.5, 8, N), lambda slopes: {"alibi_slopes": slopes}, differentiated)


FEATURES = {
    "plain": Feature(),
    "soft_cap": Feature(keywords=lambda _: {"logits_soft_cap": 30.0}),
    "alibi": _slopes(differentiated=False),
    "alibi_gradient": _slopes(differentiated=True),
    "sinks": Feature(_normal(N), lambda sinks: {"sinks": sinks}, differentiated=True),
    "bias": _bias(1, N, T, T),
    "bias_gradient": _bias(1, N, T, T, differentiated=True),
    "bias_of_keys": _bias(B, 1, 1, T, differentiated=True),
    "function": Feature(
        _normal(B, T), lambda weight: {"score_modifiers": (ScoreModifier(weighted, (weight,), ("BS",)),)}
    ),
    "dropout": Feature(lambda: jax.random.key(0), lambda key: {"dropout_rate": 0.1, "dropout_key": key}),
}


def difference(ours: dict[str, jax.Array], right: dict[str, jax.Array]) -> dict[str, float]:
    """The norm of the difference, relative."""

    @jax.jit
    def relative(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)

    return {name: float(relative(ours[name], right[name])) for name in ours}


def row(feature: Feature, mode: str, options: dict[str, Any], inputs, right, limits) -> dict[str, Any]:
    """Checks, then times one feature in one mode."""
    program = feature.program(mode, options, *inputs)
    errors = difference(program.call(), right)
    if not all(e <= BOUND for e in errors.values()):
        return {"status": "wrong", "errors": {n: e if math.isfinite(e) else str(e) for n, e in errors.items()}}
    return {"status": "ok", "errors": errors, **measure(program, limits.seconds, 50)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scores", description=__doc__)
    parser.add_argument("--features", nargs="+", default=list(FEATURES), choices=FEATURES)
    parser.add_argument("--modes", nargs="+", default=["fwd", "bwd"], choices=["fwd", "bwd"])
    parser.add_argument("--implementations", nargs="+", default=["mosaic_gpu", "triton"])
    parser.add_argument("--causal", action="store_true", help="under a causal mask (default: none)")
    parser.add_argument("--seconds", type=float, default=0.3, help="time to sample each cell for (default 0.3)")
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines file to append to")
    limits = parser.parse_args(argv)
    out = limits.out or default_path()
    out.parent.mkdir(parents=True, exist_ok=True)
    inputs, common, plain, failed = reference.draw(INPUTS), environment(), {}, False
    for name, mode in ((n, m) for n in limits.features for m in limits.modes):
        feature = FEATURES[name]
        right = feature.program(mode, {"implementation": "xla", "is_causal": limits.causal}, *inputs).call()
        for implementation in limits.implementations:
            options = {"implementation": implementation, "is_causal": limits.causal}
            try:
                found = row(feature, mode, options, inputs, right, limits)
            except Exception as error:
                found = {"status": "error", "reason": f"{type(error).__name__}: {str(error)[:300]}"}
            case = dataclasses.asdict(dataclasses.replace(INPUTS, is_causal=limits.causal))
            named = dict(feature=name, mode=mode, peer=f"ours_{implementation}", case=case)
            with out.open("a") as file:
                file.write(json.dumps({**named, **found, **common}, default=str) + "\n")
            failed |= found["status"] != "ok"
            if name == "plain":
                plain[mode, implementation] = found.get("median_ms", math.nan)
            ratio = found.get("median_ms", math.nan) / plain.get((mode, implementation), math.nan)
            shown = f"{found['median_ms']:.3f} ms, {ratio:.2f} times plain" if "median_ms" in found else found
            print(f"{name} {mode} {implementation}: {shown}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
