"""How fast does a GPT train with each attention? `python -m benchmarks.training --help`; about 90 s on an H200.

The model is Flax's own: nnx layers, of which only `attention_fn` differs. Activations are bfloat16, parameters and
optimizer float32; nothing is rematerialised.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"  # what grows by pieces cannot be one array later

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.run import default_path, environment

try:
    import flax
    import optax
    from flax import nnx

    from flax_layers.nnx import flash_attention_fn
except ModuleNotFoundError as missing:
    sys.exit(f"benchmarks.training: {missing.name} is not installed; pip install flax optax")

CHECKED_STEPS, WARM_UP_STEPS, MIN_STEPS = 3, 2, 5
BOUND = 2e-2
"""Of the relative difference of losses, and of the norms of attention's first gradients: the peers train the same."""

# The model


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model."""

    layers: int
    width: int
    heads: int
    vocabulary: int


class Block(nnx.Module):
    """Causal attention, then a two-layer perceptron, each on the normalised stream and added back to it."""

    def __init__(self, sizes: Sizes, attention_fn: Callable, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        norm = functools.partial(nnx.LayerNorm, sizes.width, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.norm_1, self.norm_2 = norm(), norm()
        self.attention = nnx.MultiHeadAttention(
            sizes.heads, sizes.width, use_bias=False, dtype=jnp.bfloat16, attention_fn=attention_fn, decode=False,
            rngs=rngs,
        )  # fmt: skip
        self.up, self.down = linear(sizes.width, 4 * sizes.width), linear(4 * sizes.width, sizes.width)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class GPT(nnx.Module):
    """Tokens int32 [B, T] to logits of the next one, bfloat16 [B, T, vocabulary]; layers in a scan."""

    def __init__(self, sizes: Sizes, length: int, attention_fn: Callable, rngs: nnx.Rngs):
        embed = functools.partial(
            nnx.Embed, dtype=jnp.bfloat16, embedding_init=nnx.initializers.normal(0.02), rngs=rngs
        )
        self.embed, self.position = embed(sizes.vocabulary, sizes.width), embed(length, sizes.width)
        self.norm = nnx.LayerNorm(sizes.width, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        make = nnx.split_rngs(splits=sizes.layers)(nnx.vmap(lambda rngs: Block(sizes, attention_fn, rngs)))
        self.blocks = make(rngs)

    def __call__(self, ids):
        x = self.embed(ids) + self.position(jnp.arange(ids.shape[1]))
        through = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.embed.attend(self.norm(through(x, self.blocks)))


def cudnn(query, key, value, *, is_causal: bool, **_):
    """For Flax's layer, which here passes no mask and drops nothing."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal, implementation="cudnn")


PEERS = {"ours": flash_attention_fn, "jax_cudnn": cudnn, "flax": nnx.dot_product_attention}
"""Those that need less memory first: the device's own peak only ever rises."""

# One step

ADAMW = optax.adamw(3e-4)


@functools.cache
def initial(sizes: Sizes, length: int) -> Callable:
    """Makes parameters and moments, the same for every peer."""

    @jax.jit
    def init():
        params = nnx.split(GPT(sizes, length, nnx.dot_product_attention, nnx.Rngs(0)))[1]
        return params, ADAMW.init(params)

    return init


class Trainer:
    """A training step, compiled for a batch, and its state."""

    def __init__(self, sizes: Sizes, length: int, batch: int, attention_fn: Callable):
        draw = np.random.default_rng(0).integers(sizes.vocabulary, size=(batch, length + 1))
        self.ids = jnp.asarray(draw, jnp.int32)
        graph, _ = nnx.split(nnx.eval_shape(lambda: GPT(sizes, length, attention_fn, nnx.Rngs(0))))
        self.init, self.state = initial(sizes, length), None

        def loss_of(params, ids):
            logits = nnx.merge(graph, params)(ids[:, :-1]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

        def step(params, moments, ids):
            loss, gradients = jax.value_and_grad(loss_of)(params, ids)
            seen = {"loss": loss}
            for name in ("query", "key", "value"):
                seen[f"d_{name}"] = optax.tree.norm(gradients["blocks"]["attention"][name])
            updates, moments = ADAMW.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments, seen

        start = time.perf_counter()
        shapes = jax.eval_shape(self.init)
        self.compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*shapes, self.ids).compile()
        self.facts: dict[str, Any] = {"compile_s": time.perf_counter() - start}
        if (memory := self.compiled.memory_analysis()) is not None:
            held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
            self.facts |= {"temp_bytes": memory.temp_size_in_bytes, "peak_bytes": memory.temp_size_in_bytes + held}

    def reset(self) -> None:
        self.state = None  # before there is another
        self.state = self.init()

    def step(self) -> dict[str, jax.Array]:
        *self.state, seen = self.compiled(*self.state, self.ids)
        return seen

    def check(self) -> dict[str, list[float]]:
        """Losses of the first steps, and the norms of attention's gradients in the first."""
        self.reset()
        seen = [jax.device_get(self.step()) for _ in range(CHECKED_STEPS)]
        first = {name: [float(x)] for name, x in seen[0].items()}
        return first | {"loss": [float(x["loss"]) for x in seen]}

    def measure(self, seconds: float) -> dict[str, Any]:
        """Seconds of single steps, after warm-up."""
        self.reset()
        for _ in range(WARM_UP_STEPS):
            jax.block_until_ready(self.step())
        taken, stop = [], time.perf_counter() + seconds
        while len(taken) < MIN_STEPS or time.perf_counter() < stop:
            start = time.perf_counter()
            jax.block_until_ready(self.step())
            taken.append(time.perf_counter() - start)
        self.state = None
        low, median, high = np.percentile(taken, (25, 50, 75))
        return {
            "median_ms": 1e3 * median,
            "min_ms": 1e3 * min(taken),
            "iqr_ms": 1e3 * (high - low),
            "samples": len(taken),
            "tokens_per_s": self.ids[:, :-1].size / median,
        }


# Runs


def prepare(name: str, sizes: Sizes, length: int, batch: int) -> tuple[Trainer | None, dict[str, Any]]:
    """A trainer that has taken its first steps, with half the batch as often as memory runs out; and its facts."""
    short = []
    while batch:
        before, trainer = _device_peak(), None
        try:
            trainer = Trainer(sizes, length, batch, PEERS[name])
            facts = {"batch": batch, "seen": trainer.check(), **trainer.facts, "out_of_memory_at": short}
            trainer.state = None
            return trainer, facts | ({"device_peak_bytes": after} if (after := _device_peak()) > before else {})
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                return None, {"batch": batch, "status": "error", "reason": f"{type(error).__name__}: {error}"[:300]}
        short.append(batch)
        batch //= 2
    return None, {"status": "error", "reason": "out of memory", "out_of_memory_at": short}


def _device_peak() -> int:
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def compare(rows: dict[str, dict[str, Any]]) -> None:
    """Sets each row's status: the last peer with the same batch is what it is compared with."""
    for row in rows.values():
        if "seen" not in row:
            continue
        other, right = next((n, r) for n, r in reversed(rows.items()) if "seen" in r and r["batch"] == row["batch"])
        errors = {
            name: float(np.max(np.abs(np.divide(row["seen"][name], right["seen"][name]) - 1))) for name in row["seen"]
        }
        row |= {"compared_with": None if right is row else other, "errors": errors}
        row["status"] = "ok" if all(e <= BOUND for e in errors.values()) else "wrong"


def run_length(sizes: Sizes, length: int, limits: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Checks every peer against the others, then times those that train alike."""
    prepared = {name: prepare(name, sizes, length, max(1, limits.tokens // length)) for name in limits.peers}
    rows = {name: row for name, (_, row) in prepared.items()}
    compare(rows)
    for trainer, row in prepared.values():
        if row["status"] == "ok" and trainer is not None:
            row |= trainer.measure(limits.seconds)
    return rows


def progress(name: str, length: int, row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"T={length} {name}: {row['status']}, {row.get('reason') or row['errors']}"
    planned = f"{row['peak_bytes'] / 2**30:.2f} GiB planned" if "peak_bytes" in row else "memory unknown"
    text = f"T={length} {name}: {row['tokens_per_s']:.0f} tokens/s, {row['median_ms']:.1f} ms, {planned}"
    short = f", out of memory at batch {row['out_of_memory_at']}" if row["out_of_memory_at"] else ""
    found = f"; apart from {row['compared_with']} by {max(row['errors'].values()):.1e}" if row["compared_with"] else ""
    return f"{text}, batch {row['batch']}{short}{found}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="T (default: 2048 8192)")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--tokens", type=int, default=16384, help="in a step, of all sequences (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--seconds", type=float, default=3.0, help="to time each cell for (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines file to append to")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    limits = parse(argv)
    sizes = Sizes(limits.layers, limits.width, limits.heads, limits.vocabulary)
    out = limits.out or default_path()
    out.parent.mkdir(parents=True, exist_ok=True)
    common = environment()
    common["versions"] |= {"flax": flax.__version__, "optax": optax.__version__}
    failed = False
    for length in limits.lengths:
        for name, row in run_length(sizes, length, limits).items():
            model = {**dataclasses.asdict(sizes), "T": length, "dtype": "bfloat16", "param_dtype": "float32"}
            with out.open("a") as file:
                file.write(json.dumps({"model": model, "mode": "training_step", "peer": name, **row, **common}) + "\n")
            print(progress(name, length, row), flush=True)
            failed |= row["status"] == "wrong" or (name == "ours" and row["status"] != "ok")
    print(f"written to {out}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
