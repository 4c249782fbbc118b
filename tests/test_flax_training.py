"""Training with `FlashMultiHeadAttention`: losses as with Flax's layer, kernels in the program, remat by name."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_flax_layers import FEATURES, FLAX, OURS, SIZES, assert_close, draw, every_api, layer_of, parameters
from test_lowering import kernels, launches, lower, on

from benchmarks import training
from flax_layers.rope import RoPE
from pallas_flash import RESIDUAL_NAMES

B, T, VOCABULARY, STEPS = 4, 16, 11, 200
SEEDS = range(3)


def batches() -> np.ndarray:
    """int32 [STEPS, B, T + 1]: each token is the one three before it plus one, or now and then any."""
    draw = np.random.default_rng(0)
    ids = draw.integers(VOCABULARY, size=(STEPS, B, T + 1))
    for t in range(3, T + 1):
        follows = draw.random((STEPS, B)) < 0.9
        ids[..., t] = np.where(follows, (ids[..., t - 3] + 1) % VOCABULARY, ids[..., t])
    return ids


def losses(attend, params) -> np.ndarray:
    """[STEPS], of a model of one attention layer between an embedding and its transpose."""
    adam = optax.adam(1e-2)

    def loss_of(params, ids):
        x = params["embed"][ids[:, :-1]] + params["position"]
        x = x + attend(params["attention"], x)
        logits = x @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    def step(state, ids):
        params, optimizer = state
        loss, gradients = jax.value_and_grad(loss_of)(params, ids)
        updates, optimizer = adam.update(gradients, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer), loss

    run = jax.jit(lambda state, ids: jax.lax.scan(step, state, ids)[1])
    return np.asarray(run((params, adam.init(params)), batches()))


def nudged(params, seed: int):
    """Each number by at most one rounding."""
    draw = np.random.default_rng(seed)
    ulps = jax.tree.map(lambda x: x * draw.choice([-1, 0, 1], x.shape) * 2.0**-24, params)
    return jax.tree.map(lambda x, ulp: (x + ulp).astype(np.float32), params, ulps)


@every_api
def test_losses_of_200_steps_are_those_of_flax(api):
    """Apart by at most twice what one rounding of the initial parameters does to Flax's, and a rounding of the loss."""
    sizes, causal = {"out_features": FEATURES}, nn.make_causal_mask(jnp.ones((B, T)))
    ours = layer_of(api, is_causal=True, **sizes)
    flax_layer = layer_of(api, FLAX, **sizes)
    params = {"attention": parameters(api, **sizes)}
    params |= {"embed": 0.5 * draw(VOCABULARY, FEATURES, seed=1), "position": 0.5 * draw(T, FEATURES, seed=2)}

    def flax(params, x):
        return flax_layer(params, x, mask=causal)

    right = losses(flax, params)
    assert right[-20:].mean() < 0.7 * right[:20].mean()  # it learns
    rounding = max(np.abs(losses(flax, nudged(params, seed)) - right).max() for seed in SEEDS)
    assert 0 < rounding < 1e-3
    assert np.abs(losses(ours, params) - right).max() <= 2 * rounding + 2.0**-23 * right.max()


OPTIONS = {
    "qkv_features": 256, "num_kv_heads": 2, "is_causal": True, "rope": RoPE(), "use_sinks": True,
    "logits_soft_cap": 30.0, "local_window_size": (255, 0),
}  # fmt: skip
KERNELS = {
    jnp.bfloat16: ("mosaic_gpu", {"flash_forward", "flash_backward"}),
    jnp.float32: ("__gpu$xla.gpu.triton", {"flash_forward", "flash_dq", "flash_dkv"}),
}


def step_of(api: str, classes=OURS, **options):
    """(parameters, x) → their gradients."""
    layer = layer_of(api, classes, **options)
    return jax.grad(lambda params, x: jnp.sum(layer(params, x).astype(jnp.float32) ** 2))


def arguments(api: str):
    params = jax.eval_shape(lambda: parameters(api, **OPTIONS))
    return params, jax.ShapeDtypeStruct((2, 1024, FEATURES), jnp.float32)


@every_api
@pytest.mark.parametrize("dtype", KERNELS, ids=lambda dtype: dtype.__name__)
def test_program_of_a_training_step_has_the_kernels(api, dtype):
    """Lowered for an H200: custom calls of forward and backward kernels, and nothing as large as T×S."""
    target, names = KERNELS[dtype]
    with on("H200"):
        text = lower(step_of(api, dtype=dtype, **OPTIONS), *arguments(api))
    assert launches(text).keys() == names and text.count(f"custom_call @{target}") == len(names)
    assert "1024x1024x" not in text


def test_program_of_a_step_of_the_cache_has_the_kernel():
    """A token and a prompt, with every option that Gemma, Llama and gpt-oss have."""
    options = {**OPTIONS, "is_causal": False, "dtype": jnp.bfloat16}
    layer = OURS["linen"](**{**SIZES, **options}, decode=True)
    variables = jax.eval_shape(layer.init, jax.random.key(0), jax.ShapeDtypeStruct((2, 2048, FEATURES), jnp.float32))
    for length in (1, 512):
        with on("H200"):
            x = jax.ShapeDtypeStruct((2, length, FEATURES), jnp.float32)
            text = lower(lambda variables, x: layer.apply(variables, x, mutable="cache"), variables, x)
        assert launches(text).keys() == {"flash_forward"}


@every_api
@pytest.mark.parametrize(("saved", "forwards"), [(RESIDUAL_NAMES, 1), ((), 2)], ids=["saved", "recomputed"])
def test_remat_saves_by_name(api, saved, forwards):
    """Flax's own remat with a policy that knows the residuals' names: one forward kernel, else two."""
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    call = nnx.remat(lambda layer, x: OURS["nnx"].__call__(layer, x), policy=policy)
    classes = {
        "linen": nn.remat(OURS["linen"], policy=policy),
        "nnx": type("Remat", (OURS["nnx"],), {"__call__": call}),
    }
    with on("H200"):
        traced = jax.jit(step_of(api, classes, dtype=jnp.bfloat16, **OPTIONS)).trace(*arguments(api))
    assert kernels(traced.jaxpr).count("flash_forward") == forwards


def test_scans_over_layers():
    """Stacked parameters, as large models have them: three layers in a scan are three layers one after the other."""
    x, options = draw(B, T, FEATURES), {"is_causal": True, "num_kv_heads": 2, "rope": RoPE(), "use_sinks": True}
    options |= {**SIZES, "out_features": FEATURES}

    class Layer(nn.Module):
        """As `nn.scan` wants it."""

        @nn.compact
        def __call__(self, x, _):
            return OURS["linen"](**options, name="attention")(x), None

    layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    variables = layers.init(jax.random.key(0), x, None)
    (scanned, _), stacked = layers.apply(variables, x, None), variables["params"]["attention"]
    assert_close(scanned, one_by_one("linen", stacked, x, options))

    make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: OURS["nnx"](**options, in_features=FEATURES, rngs=rngs)))
    layers = make(nnx.Rngs(0))
    through = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    stacked = nnx.to_pure_dict(nnx.state(layers, nnx.Param))
    assert_close(through(x, layers), one_by_one("nnx", stacked, x, options))


def one_by_one(api: str, stacked, x, options):
    layer = jax.jit(layer_of(api, **options))
    for n in range(3):
        x = layer(jax.tree.map(lambda p, n=n: p[n], stacked), x)
    return x


def test_benchmark_times_what_trains_alike(tmp_path, monkeypatch):
    """Ours and Flax's; a peer that forgets the mask is found out, and not timed."""

    def forgetful(query, key, value, **_):
        return jax.nn.dot_product_attention(query, key, value)

    monkeypatch.setitem(training.PEERS, "jax_cudnn", forgetful)
    sizes = dict(lengths=64, tokens=128, layers=1, width=32, heads=2, vocabulary=64, seconds=0)
    given = [f"--{name}={size}" for name, size in sizes.items()]
    assert training.main([*given, f"--out={tmp_path / 'rows.jsonl'}"]) == 1
    rows = {row["peer"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    assert {peer: row["status"] for peer, row in rows.items()} == {"ours": "ok", "jax_cudnn": "wrong", "flax": "ok"}
    assert {peer for peer, row in rows.items() if "tokens_per_s" in row} == {"ours", "flax"}
    assert rows["ours"]["compared_with"] == "flax" and rows["ours"]["samples"] == training.MIN_STEPS
