"""Trains a decoder on packed documents, in nnx, with checkpoints from which it goes on exactly where it stopped.

Rows hold several documents, told apart by segment ids, so that no token is padding; positions start anew in each.

Run it: python examples/train_gpt.py                                                   (minutes on a CPU)
        python examples/train_gpt.py --model llama3-small --length 8192 --batch 4      (on a GPU, in bfloat16)
"""

import argparse
import pathlib
import time

import data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from models import DESIGNS, Decoder
from tqdm import tqdm


def loss_of(model: Decoder, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy, in nats, of the tokens whose next one belongs to the same document."""
    logits = model(batch["ids"], batch["positions"], batch["segment_ids"])
    counts = batch["targets"] >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["targets"], 0))
    return (losses * counts).sum() / counts.sum()


@nnx.jit
def train_step(model: Decoder, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


def build(name: str, remat: bool = False, seed: int = 0) -> Decoder:
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    return nnx.jit(lambda: Decoder(DESIGNS[name], dtype, remat, rngs=nnx.Rngs(seed)))()


def optimizer_of(model: Decoder, rate: float, steps: int) -> nnx.Optimizer:
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
    return nnx.Optimizer(model, adamw, wrt=nnx.Param)


def open_checkpoints(folder: pathlib.Path, name: str, every: int = 1) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)
    return ocp.CheckpointManager((folder / name).absolute(), options=options)


def save(checkpoints: ocp.CheckpointManager, step: int, last: bool, **nodes: nnx.Module) -> None:
    """If it is time for it, or the last one."""
    states = {name: ocp.args.StandardSave(nnx.to_pure_dict(nnx.state(node))) for name, node in nodes.items()}
    checkpoints.save(step, args=ocp.args.Composite(**states), force=last)


def restore(checkpoints: ocp.CheckpointManager, **nodes: nnx.Module) -> int:
    """Loads the latest checkpoint, if there is one; returns the number of steps that had been taken."""
    if (step := checkpoints.latest_step()) is None:
        return 0
    shapes = {name: ocp.args.StandardRestore(nnx.to_pure_dict(nnx.state(node))) for name, node in nodes.items()}
    restored = checkpoints.restore(step, args=ocp.args.Composite(**shapes))
    for name, node in nodes.items():
        nnx.update(node, restored[name])
    return step


def load(folder: pathlib.Path, name: str) -> Decoder:
    """A trained model, without its optimizer."""
    model = build(name)
    with open_checkpoints(folder, name) as checkpoints:
        if not restore(checkpoints, model=model):
            raise SystemExit(f"{folder / name}: no checkpoint; run train_gpt.py --model {name} --checkpoints {folder}")
    return model


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-tiny", choices=DESIGNS)
    parser.add_argument("--steps", type=int, default=300, help="of the whole schedule (default: %(default)s)")
    parser.add_argument("--stop", type=int, help="stop after this many, as if interrupted")
    parser.add_argument("--length", type=int, default=256, help="tokens in a row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="rows in a batch (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--remat", action="store_true", help="recompute blocks in the backward pass")
    parser.add_argument("--checkpoints", type=pathlib.Path, default=pathlib.Path("runs"), help="folder to go on from")
    parser.add_argument("--save-every", type=int, default=100, help="steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[float]:
    """The losses of the steps that were taken."""
    options = parse(argv)
    model = build(options.model, options.remat, options.seed)
    optimizer = optimizer_of(model, options.rate, options.steps)
    documents, losses, begin = data.prose(), [], time.perf_counter()
    with open_checkpoints(options.checkpoints, options.model, options.save_every) as checkpoints:
        first, last = restore(checkpoints, model=model, optimizer=optimizer), options.stop or options.steps
        with tqdm(range(first, last), desc=options.model, mininterval=1) as bar:
            for step in bar:
                rng = np.random.default_rng((options.seed, step))  # of the step alone: a restart sees the same batches
                batch = data.packed(documents, options.batch, options.length, rng)
                losses.append(float(train_step(model, optimizer, batch)))
                bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
                save(checkpoints, step + 1, step + 1 == last, model=model, optimizer=optimizer)
    if not losses:
        print(f"{options.checkpoints / options.model} holds {first} steps of {last}: nothing left to do")
        return losses
    rate = len(losses) * options.batch * options.length / (time.perf_counter() - begin)
    print(f"steps {first + 1} to {last}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {rate:,.0f} tokens/s")
    return losses


if __name__ == "__main__":
    main()
