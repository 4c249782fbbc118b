"""What does a mask cost? Times masks of every kind beside causal attention: `python -m benchmarks.masks --help`."""

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
import numpy as np

import pallas_flash
from benchmarks import reference
from benchmarks.run import Program, compile_program, default_path, environment, measure
from tests.cases import Case

T, H, N = 16_384, 128, 16
PREFIX = 4096
INPUTS = Case("masks", B=1, T=T, N=N, H=H, dtype="bfloat16")


def prefix_lm(tile):
    """Causal, but for a prefix that all queries see."""
    return (tile.k_ids <= tile.q_ids) | (tile.k_ids < PREFIX)


@dataclasses.dataclass(frozen=True)
class Masked:
    """A mask whose queries keep one interval of keys each.

    Attributes:
        bounds: query indices → first key kept, and end.
        static: Keywords of `flash_attention`.
        arrays: Makes arrays on the device, arguments of the timed program.
        keywords: From these arrays, more keywords.
        packed: Whether it is `flash_attention_varlen` that takes them.
    """

    bounds: Callable[[np.ndarray], tuple[Any, Any]]
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Callable[[], Any] = tuple
    keywords: Callable[[Any], dict[str, Any]] = dict
    packed: bool = False

    def attend(self, implementation: str, q, k, v, arrays) -> jax.Array:
        keywords = {"implementation": implementation, **self.static, **self.keywords(arrays)}
        if self.packed:
            return pallas_flash.flash_attention_varlen(q[0], k[0], v[0], **keywords)[None]
        return pallas_flash.flash_attention(q, k, v, **keywords)

    def program(self, mode: str, implementation: str, q, k, v, do) -> Program:
        """Results by name; `bwd` takes the forward's residuals as arguments."""
        attend, arrays = functools.partial(self.attend, implementation), self.arrays()
        if mode == "fwd":
            return compile_program(lambda *args: {"out": attend(*args)}, q, k, v, arrays)

        def forward(q, k, v, arrays):
            return jax.vjp(lambda *qkv: attend(*qkv, arrays), q, k, v)

        _, vjp = compile_program(forward, q, k, v, arrays).call()
        return compile_program(lambda vjp, do: dict(zip(("dq", "dk", "dv"), vjp(do), strict=True)), vjp, do)

    def scores(self) -> int:
        """How many scores count."""
        lower, upper = (np.broadcast_to(x, T) for x in self.bounds(np.arange(T)))
        return int(np.maximum(upper - lower, 0).sum())

    def visited(self) -> float:
        """Of all cells of 64 squared, the share in which some score counts."""
        lower, upper = (np.broadcast_to(x, T).reshape(-1, 64, 1) for x in self.bounds(np.arange(T)))
        first = 64 * np.arange(T // 64)
        return float(np.mean(np.any((lower < first + 64) & (upper > first), 1)))


def _causal_from(start: Callable[[np.ndarray], Any], **options) -> Masked:
    return Masked(lambda t: (np.maximum(start(t), 0), t + 1), options.pop("static", {"is_causal": True}), **options)


def _documents(length: int) -> Masked:
    return _causal_from(
        lambda t: t // length * length,
        arrays=lambda: jnp.arange(T)[None] // length,
        keywords=lambda ids: {"query_segment_ids": ids, "key_value_segment_ids": ids},
    )


def _varlen(length: int) -> Masked:
    return _causal_from(
        lambda t: t // length * length,
        arrays=lambda: jnp.arange(0, T + 1, length),
        keywords=lambda starts: {"cu_seqlens_q": starts, "cu_seqlens_k": starts},
        packed=True,
    )


def _window(keys: int) -> Masked:
    static = {"is_causal": True, "local_window_size": (keys - 1, 0)}
    return _causal_from(lambda t: t - keys + 1, static=static)


def _dense(mask: Callable[[], jax.Array], end: int = T) -> Masked:
    return Masked(lambda t: (0, end), arrays=mask, keywords=lambda mask: {"mask": mask})


def _prefix(surveyed: bool) -> Masked:
    functions = {"mask_modifiers": (prefix_lm,)}
    more = {
        "arrays": lambda: pallas_flash.block_mask(T, T, **functions),
        "keywords": lambda block_mask: {"block_mask": block_mask},
    }
    return Masked(lambda t: (0, np.maximum(t + 1, PREFIX)), functions, **(more if surveyed else {}))


MASKS = {
    "causal": _causal_from(lambda t: 0),
    "full": Masked(lambda t: (0, T)),
    "window_1024": _window(1024),
    "documents_1024": _documents(1024),
    "varlen_1024": _varlen(1024),
    "padding": _dense(lambda: (jnp.arange(T) < T - 300)[None, None, None], T - 300),
    "all_true": _dense(lambda: jnp.ones((1, 1, T, T), bool)),
    "prefix_lm": _prefix(surveyed=False),
    "prefix_lm_surveyed": _prefix(surveyed=True),
    **{f"documents_{n}": _documents(n) for n in (4096, 8192)},
    **{f"window_{n}": _window(n) for n in (4096, 8192)},
}


def check(masked: Masked, mode: str, results: dict[str, jax.Array], inputs) -> dict[str, float]:
    """Errors relative to the dense computation of one head."""
    lower, upper = (np.broadcast_to(np.int32(x), (1, T)) for x in masked.bounds(np.arange(T)))
    chosen = np.array([[0, N - 1]], np.int32)
    right = reference._dense(*inputs, lower, upper, np.float32(H**-0.5), chosen, gradients=mode != "fwd")
    return reference.errors(INPUTS, results, right, chosen)


def row(name: str, masked: Masked, mode: str, implementation: str, inputs, limits) -> dict[str, Any]:
    """Checks, then times one mask in one mode."""
    program = masked.program(mode, implementation, *inputs)
    errors = check(masked, mode, program.call(), inputs)
    if not all(e <= reference.BOUNDS["bfloat16"] for e in errors.values()):
        return {"status": "wrong", "errors": {n: e if math.isfinite(e) else str(e) for n, e in errors.items()}}
    work = 4 * N * H * masked.scores() * {"fwd": 1, "bwd": 2.5}[mode]
    timed = measure(program, limits.seconds, 50)
    speed = {"tflops": work / timed["median_ms"] * 1e-9, "visited": masked.visited(), "kept": masked.scores() / T**2}
    return {"status": "ok", "errors": errors, **timed, **speed}


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Time against the share of visited blocks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for mode, marker in (("fwd", "o"), ("bwd", "s")):
        shown = [r for r in rows if r["mode"] == mode and r["status"] == "ok"]
        axes.plot([r["visited"] for r in shown], [r["median_ms"] for r in shown], marker, label=mode)
        full = next(r for r in shown if r["mask"] == "full")
        axes.plot([0, 1], [0, full["median_ms"]], ":", color="gray")
    axes.set(
        xlabel="share of 64x64 blocks visited", ylabel="ms", title=f"{rows[0]['device']}, T = {T}, H = {H}, N = {N}"
    )
    axes.legend()
    FigureCanvasAgg(figure).print_figure(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masks", description=__doc__)
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS)
    parser.add_argument("--modes", nargs="+", default=["fwd", "bwd"], choices=["fwd", "bwd"])
    parser.add_argument("--implementation", default="mosaic_gpu")
    parser.add_argument("--seconds", type=float, default=0.3, help="time to sample each cell for (default 0.3)")
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines file to append to")
    parser.add_argument("--figure", type=pathlib.Path, help="picture of time against visited blocks")
    limits = parser.parse_args(argv)
    out = limits.out or default_path()
    out.parent.mkdir(parents=True, exist_ok=True)
    inputs, common, rows = reference.draw(INPUTS), environment(), []
    for name in limits.masks:
        for mode in limits.modes:
            try:
                found = row(name, MASKS[name], mode, limits.implementation, inputs, limits)
            except Exception as error:
                found = {"status": "error", "reason": f"{type(error).__name__}: {str(error)[:300]}"}
            case = dict(mask=name, mode=mode, peer=f"ours_{limits.implementation}", case=dataclasses.asdict(INPUTS))
            rows.append({**case, **found, **common})
            with out.open("a") as file:
                file.write(json.dumps(rows[-1], default=str) + "\n")
            causal = next((r for r in rows if r["mask"] == "causal" and r["mode"] == mode), {})
            ratio = (
                causal["median_ms"] / found["median_ms"] if {"median_ms"} <= found.keys() & causal.keys() else math.nan
            )
            shown = f"{found['median_ms']:.3f} ms, {found['tflops']:.4g} TFLOP/s" if "tflops" in found else found
            print(f"{name} {mode}: {shown}, {ratio:.2f}x as fast as causal", flush=True)
    if limits.figure:
        draw(rows, limits.figure)
    return int(any(r["status"] != "ok" for r in rows))


if __name__ == "__main__":
    sys.exit(main())
