"""Decoders built like Llama 3 and like Gemma 2, with the nnx layer, in sizes for a CPU and for a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from flax_layers.nnx import FlashMultiHeadAttention
from flax_layers.rope import Llama3Scaling, RoPE
from pallas_flash import RESIDUAL_NAMES


@dataclasses.dataclass(frozen=True)
class Design:
    """What a decoder is made of.

    Attributes:
        windows: Of the layers in turn: how many positions each sees, its own included; None: all before it.
        logits_soft_cap: Of attention's logits.
        final_soft_cap: Of those of the next token.
        scale: Multiplies scores; None: 1/sqrt(head_dim).
        activation: Of the gate in the perceptron.
        sandwich: Whether what a sublayer returns is normalised too.
        tied: Whether the embedding is the head, and scaled by sqrt(width) at the input.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    rope: RoPE
    vocabulary: int = 257  # bytes, and one that begins a document
    windows: tuple[int | None, ...] = (None,)
    logits_soft_cap: float | None = None
    final_soft_cap: float | None = None
    scale: float | None = None
    activation: str = "silu"
    sandwich: bool = False
    tied: bool = False


LLAMA = functools.partial(Design, rope=RoPE(theta=500_000.0, scaling=Llama3Scaling(factor=32.0)))
GEMMA = functools.partial(
    Design, rope=RoPE(), logits_soft_cap=50.0, final_soft_cap=30.0, activation="gelu", sandwich=True, tied=True
)
DESIGNS = {
    "llama3-tiny": LLAMA(layers=2, width=64, heads=4, kv_heads=2, head_dim=16, hidden=160),
    "llama3-small": LLAMA(layers=16, width=1024, heads=16, kv_heads=4, head_dim=64, hidden=3072),
    "gemma2-tiny": GEMMA(
        layers=2, width=64, heads=4, kv_heads=2, head_dim=16, hidden=160, windows=(16, None), scale=16**-0.5
    ),
    "gemma2-small": GEMMA(
        layers=16, width=1024, heads=8, kv_heads=4, head_dim=128, hidden=3072, windows=(1024, None), scale=128**-0.5
    ),
}
"""By what they are built like, and their size; those of 300 million parameters are for a GPU."""


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) · up(x))."""

    def __init__(self, design: Design, dtype, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.gate, self.up = (linear(design.width, design.hidden) for _ in range(2))
        self.down = linear(design.hidden, design.width)
        self.activation = getattr(jax.nn, design.activation)

    def __call__(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention, then the perceptron, each on the normalised stream and added back to it."""

    def __init__(self, design: Design, window: int | None, dtype, rngs: nnx.Rngs):
        norm = functools.partial(nnx.RMSNorm, design.width, dtype=dtype, rngs=rngs)
        self.norm_1, self.norm_2 = norm(), norm()
        self.after_1, self.after_2 = (norm(), norm()) if design.sandwich else (None, None)
        self.attention = FlashMultiHeadAttention(
            design.heads, design.width, qkv_features=design.heads * design.head_dim, num_kv_heads=design.kv_heads,
            use_bias=False, is_causal=True, local_window_size=None if window is None else (window - 1, 0),
            rope=design.rope, logits_soft_cap=design.logits_soft_cap, scale=design.scale, dtype=dtype, rngs=rngs,
        )  # fmt: skip
        self.mlp = GatedMLP(design, dtype, rngs)

    def __call__(self, x, positions=None, segment_ids=None, lengths=None, decode=False):
        y = self.attention(
            self.norm_1(x), input_positions=positions, query_segment_ids=segment_ids, query_seq_lengths=lengths,
            decode=decode,
        )  # fmt: skip
        x = x + (y if self.after_1 is None else self.after_1(y))
        y = self.mlp(self.norm_2(x))
        return x + (y if self.after_2 is None else self.after_2(y))


class Decoder(nnx.Module):
    """Tokens int32 [B, T] to logits of the next one, float32 [B, T, vocabulary].

    Args:
        design: What it is made of.
        dtype: Of activations; parameters are float32.
        remat: Whether to recompute each block in the backward pass, all but what attention's kernels gave.
    """

    def __init__(self, design: Design, dtype=jnp.float32, remat: bool = False, *, rngs: nnx.Rngs):
        self.design, self.remat = design, remat
        init = nnx.initializers.normal(design.width**-0.5)
        self.embed = nnx.Embed(design.vocabulary, design.width, dtype=dtype, embedding_init=init, rngs=rngs)
        windows = (design.windows[n % len(design.windows)] for n in range(design.layers))
        self.blocks = nnx.List([Block(design, window, dtype, rngs) for window in windows])
        self.norm = nnx.RMSNorm(design.width, dtype=dtype, rngs=rngs)
        head = functools.partial(nnx.Linear, design.width, design.vocabulary, use_bias=False, dtype=dtype, rngs=rngs)
        self.head = None if design.tied else head()

    def __call__(self, ids, positions=None, segment_ids=None, lengths=None, decode=False):
        """Positions and segments [B, T] of packed documents; lengths [B] of padded prompts, into the cache."""

        def through(block, x):
            return block(x, positions, segment_ids, lengths, decode)

        if self.remat and not decode:
            policy = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
            through = nnx.remat(through, policy=policy)
        x = self.embed(ids) * (self.design.width**0.5 if self.design.tied else 1)
        for block in self.blocks:
            x = through(block, x)
        x = self.norm(x)
        logits = (self.embed.attend(x) if self.head is None else self.head(x)).astype(jnp.float32)
        cap = self.design.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def init_cache(self, batch: int, length: int) -> None:
        for block in self.blocks:
            block.attention.init_cache((batch, length, self.design.width))
