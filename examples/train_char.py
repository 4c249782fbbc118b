"""Trains a small character-level Transformer twice, with dense attention and with flash attention, and compares them.

The text is the reference documentation that every CPython carries, so nothing is downloaded. Both models start from
the same parameters and see the same batches; all that differs is `attention_fn`. Afterwards the Pallas kernels
themselves are checked on what the trained model really feeds to attention: compiled if there is a GPU, else interpreted
on the CPU.

Run it: python examples/train_char.py     (about two minutes on two CPU cores)
"""

import argparse
import functools
import re
import sys
import time
from pydoc_data.topics import topics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from flax_layers.nnx import FlashMultiHeadAttention
from pallas_flash import flash_attention
from pallas_flash.testing import compare

LAYERS, WIDTH, HEADS = 2, 64, 2
T, BATCH = 128, 8  # characters in a window, windows in a batch
LEARNING_RATE = 1e-2
ATTENTION = {"dense": jax.nn.dot_product_attention, "flash": flash_attention}


# The text, as integers


class Text(NamedTuple):
    """Characters as indices into `alphabet`: int32 [characters]."""

    alphabet: list[str]
    train: np.ndarray
    held_out: np.ndarray

    def decode(self, ids) -> str:
        return "".join(self.alphabet[n] for n in ids)


def read_text() -> Text:
    """CPython's documentation, runs of spaces made one; every 20th topic is held out."""
    pages = [re.sub(" +", " ", topics[name]) for name in sorted(topics)]
    index = {character: n for n, character in enumerate(sorted(set("".join(pages))))}

    def encode(pages: list[str]) -> np.ndarray:
        return np.array([index[character] for character in "\n".join(pages)], np.int32)

    held_out = pages[10::20]
    return Text(list(index), encode([page for page in pages if page not in held_out]), encode(held_out))


def windows(ids: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """int32 [count, T + 1]: windows of the text that start anywhere."""
    starts = rng.integers(len(ids) - T, size=count)
    return ids[starts[:, None] + np.arange(T + 1)]


# The model


class Block(nnx.Module):
    """Attention, then a two-layer perceptron, each on the normalised stream and added back to it."""

    def __init__(self, attention_fn, rngs: nnx.Rngs):
        self.norm_1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = FlashMultiHeadAttention(HEADS, WIDTH, is_causal=True, attention_fn=attention_fn, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Transformer(nnx.Module):
    """Characters int32 [B, T] to logits of the next one, float32 [B, T, characters]."""

    def __init__(self, characters: int, attention_fn, rngs: nnx.Rngs):
        self.embed = nnx.Embed(characters, WIDTH, embedding_init=nnx.initializers.normal(0.3), rngs=rngs)
        self.blocks = nnx.List([Block(attention_fn, rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, characters, rngs=rngs)

    def __call__(self, ids):
        angles = jnp.arange(ids.shape[1])[:, None] * 10_000.0 ** -jnp.linspace(0, 1, WIDTH // 2)
        x = self.embed(ids) + 0.3 * jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)  # where each one is
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# Training


def loss_of(model: Transformer, batch: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats a character, of predicting each next character of int32 [B, T + 1]."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:]).mean()


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


class Run(NamedTuple):
    """A trained model and what was seen on the way."""

    model: Transformer
    losses: np.ndarray
    held_out: float
    step_seconds: float
    peak_bytes: int | None


def train(name: str, text: Text, steps: int, seed: int) -> Run:
    """Trains a new model with the attention of that name; `seed` decides all else."""
    model = Transformer(len(text.alphabet), ATTENTION[name], nnx.Rngs(seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, steps // 10, steps, LEARNING_RATE / 20)
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.01))
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)
    rng = np.random.default_rng(seed)
    losses, seconds = [], []
    with tqdm(range(steps), desc=f"training with {name} attention", mininterval=1, file=sys.stdout) as bar:
        for _ in bar:
            begin = time.perf_counter()
            losses.append(float(train_step(model, optimizer, windows(text.train, BATCH, rng))))
            seconds.append(time.perf_counter() - begin)
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    held_out = float(nnx.jit(loss_of)(model, windows(text.held_out, 64, np.random.default_rng(seed))))
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return Run(model, np.array(losses), held_out, float(np.median(seconds)), peak)


@nnx.jit(static_argnames="count")
def sample(model: Transformer, prompt: jax.Array, key: jax.Array, count: int, temperature: float = 0.7) -> jax.Array:
    """int32 [count]: characters drawn one by one after `prompt` [T], the whole window being recomputed for each."""

    def step(window, key):
        drawn = jax.random.categorical(key, model(window[None])[0, -1] / temperature).astype(window.dtype)
        return jnp.append(window[1:], drawn), drawn

    return jax.lax.scan(step, prompt, jax.random.split(key, count))[1]


# Comparing


def print_curves(runs: dict[str, Run]) -> None:
    dense, flash = runs["dense"].losses, runs["flash"].losses
    print("\nTraining loss (nats a character)\n  step    dense    flash   flash - dense")
    shown = sorted({*range(0, len(dense), max(1, len(dense) // 10)), len(dense) - 1})
    for n in shown:
        print(f"{n + 1:6d} {dense[n]:8.4f} {flash[n]:8.4f}      {flash[n] - dense[n]:+.1e}")
    print(f"largest difference at any step: {np.abs(flash - dense).max():.1e}")
    print(f"held-out loss: dense {runs['dense'].held_out:.4f}, flash {runs['flash'].held_out:.4f}")
    for name, run in runs.items():
        if run.peak_bytes is not None:
            print(f"{name}: {1e3 * run.step_seconds:.2f} ms a step, peak memory {run.peak_bytes / 2**20:.1f} MiB")


def plot_curves(runs: dict[str, Run], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, sharex=True, height_ratios=(3, 1), figsize=(7, 6), layout="constrained")
    steps = np.arange(1, len(runs["dense"].losses) + 1)
    top.plot(steps, runs["dense"].losses, label="jax.nn.dot_product_attention", linewidth=4, color="tab:orange")
    top.plot(steps, runs["flash"].losses, label="pallas_flash.flash_attention", linewidth=1, color="tab:blue")
    top.set(title="Character-level Transformer, same seed", ylabel="training loss (nats a character)")
    top.legend()
    bottom.plot(steps, runs["flash"].losses - runs["dense"].losses, linewidth=1, color="tab:gray")
    bottom.set(xlabel="step", ylabel="flash - dense")
    figure.savefig(path, dpi=150)
    print(f"curves saved to {path}")


def attention_inputs(model: Transformer, ids: np.ndarray) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """Query, key and value [B, T, N, H] of every layer, caught by an `attention_fn` that takes notes."""
    seen = []

    def record(query, key, value, **options):
        seen.append((query, key, value))
        return flash_attention(query, key, value, **options)

    model = nnx.clone(model)
    for block in model.blocks:
        block.attention.attention_fn = record
    model(ids)
    return seen


@jax.jit
def magnitudes(query, key, value, d_out) -> list[jax.Array]:
    """The largest absolute value of output, dq, dk and dv."""
    out, pull = jax.vjp(functools.partial(jax.nn.dot_product_attention, is_causal=True), query, key, value)
    return [jnp.abs(x).max() for x in (out, *pull(d_out))]


def check_kernels(inputs: list[tuple[jax.Array, jax.Array, jax.Array]]) -> bool:
    """Prints how far the kernels are from jax.nn.dot_product_attention, layer by layer; returns whether near enough."""
    kernels = {"implementation": "triton"} if jax.default_backend() == "gpu" else {"interpret": True}
    print(f"\nPallas kernels, {kernels}, against jax.nn.dot_product_attention on what the trained layers attend to")
    print("layer  array  largest error  of largest value  tolerance")
    passed = True
    for layer, arrays in enumerate(inputs):
        d_out = jax.random.normal(jax.random.key(layer), arrays[0].shape)
        rows = compare(*arrays, d_out, is_causal=True, **kernels)
        for row, magnitude in zip(rows, magnitudes(*arrays, d_out), strict=True):
            passed &= row.ok
            errors = f"{row.error:14.1e} {row.error / magnitude:17.1e} {row.tolerance:10.1e}"
            print(f"{layer:5d}  {row.name:5} {errors}  {'OK' if row.ok else 'FAIL'}")
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--out", default="demo_loss.png", help="where to save the loss curves (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, batches and samples (default: %(default)s)")
    options = parser.parse_args()

    jax.config.update("jax_default_matmul_precision", "highest")  # on GPUs too: TF32 would drown what we look for
    text = read_text()
    device = jax.local_devices()[0]
    print(f"{len(text.train):,} characters of text, {len(text.alphabet)} different ones; on {device.device_kind}")
    # flash first: the device's peak counter only ever rises, so what needs less memory must come first.
    runs = {name: train(name, text, options.steps, options.seed) for name in ("flash", "dense")}
    print_curves(runs)
    plot_curves(runs, options.out)

    prompt = text.held_out[:T]
    drawn = sample(runs["flash"].model, prompt, jax.random.key(options.seed), 300)
    print(f"\nSampled after “…{text.decode(prompt[-40:])}”:\n{text.decode(np.asarray(drawn))}")

    held_out = windows(text.held_out, 2, np.random.default_rng(options.seed))[:, :-1]
    if not check_kernels(attention_inputs(runs["flash"].model, held_out)):
        sys.exit("the kernels are out of tolerance")


if __name__ == "__main__":
    main()
