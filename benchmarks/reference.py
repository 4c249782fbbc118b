"""What is the right answer, and how much work is it? Inputs, dense float32 reference and FLOPs of a case."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases import Case

# Relative error ‖x − ref‖/‖ref‖ of the worst (batch, key/value head) slice. Sanity bounds: they show that a peer
# computes the same function, not that it computes it well (correct bf16 kernels measure about 3e-3); tests/ judge that.
# float32 leaves room for the TF32 dots that GPUs do by default.
BOUNDS = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 4e-3}

# Scores [T, S] the reference computes per case before it samples slices instead of visiting all.
MAX_SCORES = 2**31


def band(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The keys each query keeps, which for every option of a `Case` is one interval.

    Returns:
        lower, upper: [B, T] int64; query t of entry b attends to keys lower <= s < upper, to none if upper <= lower.
    """
    if case.mask or case.segments or case.modifiers:
        raise NotImplementedError(f"{case.name}: masks that read arrays are timed by benchmarks/masks.py")
    position = np.arange(case.T) + np.reshape(case.query_offset, (-1, 1))
    lower = np.zeros((case.B, case.T), np.int64)
    upper = np.full((case.B, case.T), case.S, np.int64)
    if case.is_causal:
        upper = np.minimum(upper, position + 1)
    if case.local_window_size is not None:
        window = case.local_window_size
        left, right = (window, window) if isinstance(window, int) else window
        lower = lower if left is None else np.maximum(lower, position - left)
        upper = upper if right is None else np.minimum(upper, position + right + 1)
    if case.key_value_seq_lengths is not None:
        upper = np.minimum(upper, np.reshape(case.key_value_seq_lengths, (-1, 1)))
    if case.query_seq_lengths is not None:
        upper = np.where(np.arange(case.T) < np.reshape(case.query_seq_lengths, (-1, 1)), upper, 0)
    return lower, upper


def flops(case: Case, mode: str) -> int:
    """Counted work: two matmuls per kept (query, key) pair forward, 2.5 times that backward (five matmuls)."""
    lower, upper = band(case)
    forward = 2 * case.N * (case.H + case.Hv) * int(np.maximum(upper - lower, 0).sum())
    return int(forward * {"fwd": 1, "bwd": 2.5, "fwd_bwd": 3.5}[mode])


@functools.partial(jax.jit, static_argnums=0)
def draw(case: Case) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Standard normal query (times `magnitude`), key, value and output cotangent, drawn on the device from the name."""
    shapes = (
        (case.B, case.T, case.N, case.H),
        (case.B, case.S, case.K, case.H),
        (case.B, case.S, case.K, case.Hv),
        (case.B, case.T, case.N, case.Hv),
    )
    keys = jax.random.split(jax.random.key(zlib.crc32(case.name.encode())), len(shapes))
    q, k, v, do = (jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=True))
    return tuple(x.astype(case.dtype) for x in (q * case.magnitude, k, v, do))


def slices(case: Case) -> np.ndarray:
    """The (batch, key/value head) pairs to compare, [n, 2] int32: all, or evenly spread ones up to `MAX_SCORES`."""
    total = case.B * case.K
    scores = case.T * case.S * case.N // case.K
    count = min(total, max(1, MAX_SCORES // max(scores, 1)))
    chosen = np.unique(np.linspace(0, total - 1, count).round().astype(np.int32))
    return np.stack(np.divmod(chosen, case.K), axis=1).astype(np.int32)


def _head(q, k, v, lower, upper, scale):
    """Dense attention of one head in float32: q [T, H], k [S, H], v [S, Hv] -> [T, Hv]; rows without keys give 0."""
    s = scale * jnp.einsum("th,sh->ts", q, k, precision="highest")
    key_ids = jnp.arange(k.shape[0])
    s = jnp.where((key_ids >= lower[:, None]) & (key_ids < upper[:, None]), s, -jnp.inf)
    m = jax.lax.stop_gradient(jnp.max(s, axis=1, keepdims=True))
    p = jnp.exp(s - jnp.where(jnp.isfinite(m), m, 0.0))
    l = jnp.sum(p, axis=1, keepdims=True)  # noqa: E741
    return jnp.einsum("ts,sh->th", p, v, precision="highest") / jnp.where(l == 0.0, 1.0, l)


def _grouped(x, chosen, kv_heads):
    """The chosen slices of x [B, T, N, H] as float32 [n, T, G, H]."""
    B, T, N, H = x.shape
    grouped = x.reshape(B, T, kv_heads, N // kv_heads, H)
    return grouped[chosen[:, 0], :, chosen[:, 1]].astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="gradients")
def _dense(q, k, v, do, lower, upper, scale, chosen, *, gradients):
    def one_slice(pair):
        b, h = pair
        heads = [jnp.moveaxis(_grouped(x, pair[None], k.shape[2])[0], 1, 0) for x in (q, do)]
        k_slice, v_slice = k[b, :, h].astype(jnp.float32), v[b, :, h].astype(jnp.float32)

        def one_head(operands):
            q_head, do_head = operands
            attend = functools.partial(_head, lower=lower[b], upper=upper[b], scale=scale)
            if not gradients:
                return {"out": attend(q_head, k_slice, v_slice)}
            out, vjp = jax.vjp(attend, q_head, k_slice, v_slice)
            return {"out": out, **dict(zip(("dq", "dk", "dv"), vjp(do_head), strict=True))}

        results = jax.lax.map(one_head, tuple(heads))
        per_key = {name: x.sum(0, keepdims=True) for name, x in results.items() if name in ("dk", "dv")}
        return {name: jnp.moveaxis(x, 0, 1) for name, x in (results | per_key).items()}

    return jax.lax.map(one_slice, chosen)


def reference(case: Case, inputs, chosen: np.ndarray, gradients: bool) -> dict[str, jax.Array]:
    """Attention of the chosen slices, one head at a time so that only a [T, S] buffer exists.

    Args:
        inputs: q, k, v, do as `draw` gives them, already rounded to the dtype of the case.
        chosen: [n, 2] int32, the (batch, key/value head) pairs.
        gradients: also return dq, dk and dv.

    Returns:
        float32 arrays by name: out [n, T, G, Hv], dq [n, T, G, H], dk [n, S, 1, H], dv [n, S, 1, Hv].
    """
    lower, upper = (bound.astype(np.int32) for bound in band(case))
    scale = np.float32(case.H**-0.5 if case.scale is None else case.scale)
    return _dense(*inputs, lower, upper, scale, chosen, gradients=gradients)


@functools.partial(jax.jit, static_argnames="kv_heads")
def _worst(x, expected, chosen, *, kv_heads):
    def norm(y):
        return jnp.sqrt(jnp.sum(jnp.square(y), axis=(1, 2, 3)))

    scale = jnp.maximum(norm(expected), jnp.finfo(jnp.float32).tiny)
    return jnp.max(norm(_grouped(x, chosen, kv_heads) - expected) / scale)


def errors(case: Case, results: dict[str, jax.Array], expected: dict[str, jax.Array], chosen) -> dict[str, float]:
    """Relative error of each result in its worst slice; NaN anywhere in a compared slice gives NaN."""
    return {n: float(_worst(x, expected[n], chosen, kv_heads=case.K)) for n, x in results.items()}
