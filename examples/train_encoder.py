"""Trains a bidirectional encoder in linen on padded batches: to fill in masked bytes, then to tell code from prose.

Padding is told by lengths alone: no mask is built, and blocks of padding are skipped. Dropout of attention is fused.

Run it: python examples/train_encoder.py                                                        (a minute on a CPU)
        python examples/train_encoder.py --width 768 --layers 12 --heads 12 --length 2048       (on a GPU, in bfloat16)
"""

import argparse
from collections.abc import Callable

import data
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from tqdm import tqdm

from flax_layers.linen import FlashMultiHeadAttention
from flax_layers.rope import RoPE

VOCABULARY, MASK = 258, 257  # bytes, the token that begins a document, and the one in place of what is hidden


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on the normalised stream and added back to it."""

    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x, lengths, deterministic):
        attention = FlashMultiHeadAttention(self.heads, rope=RoPE(), dropout_rate=self.dropout, dtype=x.dtype)
        norm, dense = (lambda: nn.LayerNorm(dtype=x.dtype)), (lambda width: nn.Dense(width, dtype=x.dtype))
        x = x + attention(
            norm()(x), query_seq_lengths=lengths, key_value_seq_lengths=lengths, deterministic=deterministic
        )
        return x + dense(x.shape[-1])(nn.gelu(dense(4 * x.shape[-1])(norm()(x))))


class Encoder(nn.Module):
    """Tokens int32 [B, T] of which `lengths` [B] count, to vectors [B, T, width]."""

    width: int
    layers: int
    heads: int
    dropout: float = 0.1

    @nn.compact
    def __call__(self, ids, lengths, deterministic=True):
        dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
        x = nn.Embed(VOCABULARY, self.width, dtype=dtype)(ids)
        for _ in range(self.layers):
            x = Block(self.heads, self.dropout)(x, lengths, deterministic)
        return nn.LayerNorm(dtype=dtype)(x)


class MaskedModel(nn.Module):
    """Logits of each byte, float32 [B, T, VOCABULARY]."""

    encoder: Encoder

    @nn.compact
    def __call__(self, ids, lengths, deterministic=True):
        return nn.Dense(VOCABULARY, name="head")(self.encoder(ids, lengths, deterministic).astype(jnp.float32))


class Classifier(nn.Module):
    """Logits of prose and code, float32 [B, 2], of the mean of what counts."""

    encoder: Encoder

    @nn.compact
    def __call__(self, ids, lengths, deterministic=True):
        x = self.encoder(ids, lengths, deterministic).astype(jnp.float32)
        counts = jnp.arange(ids.shape[1]) < lengths[:, None]
        return nn.Dense(2, name="head")(x.mean(1, where=counts[..., None]))


# The two tasks: batches, and their losses


def masked_batch(batch: int, length: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Prose and code, 15 % of which is hidden."""
    ids, lengths = data.padded(data.prose() + data.code(), batch, length, rng)
    hidden = (rng.random(ids.shape) < 0.15) & (np.arange(length) < lengths[:, None])
    return {"ids": np.where(hidden, MASK, ids), "lengths": lengths, "targets": ids, "weights": hidden}


def labelled_batch(batch: int, length: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Pieces of prose and of code."""
    halves = [data.padded(documents, batch // 2, length, rng) for documents in (data.prose(), data.code())]
    ids, lengths = (np.concatenate(parts) for parts in zip(*halves, strict=True))
    targets = np.repeat(np.arange(2), batch // 2)
    return {"ids": ids, "lengths": lengths, "targets": targets, "weights": np.ones(len(ids), bool)}


@jax.jit
def train_step(state: TrainState, batch: dict[str, jax.Array], key: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step on the mean cross-entropy of what has weight."""

    def loss_of(params):
        rngs = {"dropout": jax.random.fold_in(key, state.step)}
        logits = state.apply_fn({"params": params}, batch["ids"], batch["lengths"], False, rngs=rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.average(losses, weights=batch["weights"])

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def train(state: TrainState, make: Callable, steps: int, options: argparse.Namespace, name: str) -> TrainState:
    rng, key, losses = np.random.default_rng(options.seed), jax.random.key(options.seed), []
    with tqdm(range(steps), desc=name, mininterval=1) as bar:
        for _ in bar:
            state, loss = train_step(state, make(options.batch, options.length, rng), key)
            losses.append(float(loss))
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    tenth = max(1, steps // 10)
    print(f"{name}: loss {np.mean(losses[:tenth]):.3f} to {np.mean(losses[-tenth:]):.3f}")
    return state


def finer(params, rate: float) -> optax.GradientTransformation:
    """A tenth of the learning rate for what was trained before."""
    labels = {name: "encoder" if name == "encoder" else "head" for name in params}
    return optax.multi_transform({"encoder": optax.adamw(rate / 10), "head": optax.adamw(rate)}, labels)


def accuracy(state: TrainState, options: argparse.Namespace) -> float:
    """Of 256 pieces of the same texts, drawn anew."""
    batch = labelled_batch(256, options.length, np.random.default_rng((options.seed, 1)))
    logits = jax.jit(state.apply_fn)({"params": state.params}, batch["ids"], batch["lengths"])
    return float((logits.argmax(-1) == batch["targets"]).mean())


def main(argv: list[str] | None = None) -> float:
    """The accuracy, 0 … 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of the longest piece (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--masked-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100, help="of the finer training (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)

    encoder = Encoder(options.width, options.layers, options.heads)
    example = labelled_batch(2, options.length, np.random.default_rng(0))
    key, shapes = jax.random.key(options.seed), (example["ids"], example["lengths"])
    model = MaskedModel(encoder)
    state = TrainState.create(
        apply_fn=model.apply, params=jax.jit(model.init)(key, *shapes)["params"], tx=optax.adamw(options.rate)
    )
    state = train(state, masked_batch, options.masked_steps, options, "masked bytes")

    model = Classifier(encoder)
    params = jax.jit(model.init)(key, *shapes)["params"] | {"encoder": state.params["encoder"]}
    state = TrainState.create(apply_fn=model.apply, params=params, tx=finer(params, options.rate))
    state = train(state, labelled_batch, options.steps, options, "code or prose")
    right = accuracy(state, options)
    print(f"accuracy: {right:.1%}")
    return right


if __name__ == "__main__":
    main()
