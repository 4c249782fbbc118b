"""Continues prompts of several lengths with a model that `train_gpt.py` trained: one pass, then token by token.

The first pass writes all prompts to the cache of keys and values at once, padded at the end; each goes on from its own
length.

Run it: python examples/train_gpt.py && python examples/generate.py "The assert statement" "Class definitions are"
"""

import argparse
import pathlib
import time

import data
import jax
import jax.numpy as jnp
import numpy as np
import train_gpt
from flax import nnx
from models import DESIGNS, Decoder

PROMPTS = ["The assert statement", "A class definition"]


def padded(prompts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [B, T] with zeros behind them, and lengths int32 [B]."""
    rows = [data.tokens(prompt) for prompt in prompts]
    lengths = np.array([len(row) for row in rows], np.int32)
    return np.stack([np.pad(row, (0, lengths.max() - len(row))) for row in rows]), lengths


@nnx.jit
def prefill(model: Decoder, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Writes the prompts to the cache; returns logits [B, vocabulary] of what follows each."""
    logits = model(ids, lengths=lengths, decode=True)
    return logits[jnp.arange(len(ids)), lengths - 1]


@nnx.jit(static_argnames="count")
def decode(model: Decoder, logits: jax.Array, key: jax.Array, count: int, temperature: float) -> jax.Array:
    """int32 [B, count], drawn one after the other."""

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 1))
    def step(carry, key):
        model, logits = carry
        drawn = jax.random.categorical(key, logits / temperature)
        return (model, model(drawn[:, None], decode=True)[:, 0]), drawn

    return step((model, logits), jax.random.split(key, count))[1]


def main(argv: list[str] | None = None) -> list[str]:
    """The prompts with what was drawn after them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", default="llama3-tiny", choices=DESIGNS)
    parser.add_argument("--checkpoints", type=pathlib.Path, default=pathlib.Path("runs"), help="of train_gpt.py")
    parser.add_argument("--count", type=int, default=200, help="tokens to draw (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)

    model = train_gpt.load(options.checkpoints, options.model)
    ids, lengths = padded(options.prompts)
    model.init_cache(len(ids), ids.shape[1] + options.count)
    begin = time.perf_counter()
    logits = prefill(model, ids, lengths)
    drawn = np.asarray(decode(model, logits, jax.random.key(options.seed), options.count, options.temperature))
    seconds = time.perf_counter() - begin
    texts = [prompt + data.text(row) for prompt, row in zip(options.prompts, drawn, strict=True)]
    print(*texts, f"{drawn.size} tokens in {seconds:.1f} s, compilation included", sep="\n\n")
    return texts


if __name__ == "__main__":
    main()
