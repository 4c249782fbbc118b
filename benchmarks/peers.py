"""Against whom? Each peer says which cases it cannot run, and turns the others into a function of q, k, v."""

import dataclasses
import functools
import importlib
import importlib.util
import math
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import worker
from benchmarks.reference import band
from benchmarks.worker import Worker
from tests.cases import Case

type Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

_MHA = "jax.experimental.pallas.ops.gpu.attention"

# Peers import these, but not on the way that is timed: tokamax takes xprof's kernel statistics for its own benchmarks,
# flash_attn3_jax takes einops for vmap. Where they are not installed, an empty module stands in.
_STANDINS = {"tokamax": ("xprof.cli.tools", "get_kernel_stats_tool"), "flash_attn3_jax": ("einops", "rearrange")}


def _stand_in(path: str, attribute: str) -> None:
    parts = path.split(".")
    if importlib.util.find_spec(parts[0]) is not None:
        return
    names = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    sys.modules.update({name: types.ModuleType(name) for name in names})
    setattr(sys.modules[path], attribute, None)


@functools.cache
def _import_failure(module: str) -> str | None:
    """Why `module` cannot be imported, whatever the exception: a broken shared library is a missing peer too."""
    try:
        if module in _STANDINS and module not in sys.modules:
            _stand_in(*_STANDINS[module])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # jax's mha announces on import that it is deprecated
            importlib.import_module(module)
    except Exception as e:
        return f"cannot import {module}: {type(e).__name__}: {e}"
    return None


@dataclasses.dataclass(frozen=True)
class Peer:
    """An implementation of attention to time.

    Attributes:
        name: column of the table.
        package: distribution whose version a row records.
        module: what must be importable.
        limits: case -> why it cannot run it, or None.
        build: (case, choice) -> function of q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv]; None: it has a `worker`.
        needs_gpu: refuse on other backends.
        choices: settings to build with, of which the fastest counts.
        explain: (case, q, k, v) -> what was chosen, as `pallas_flash.explain` returns it; ours only.
        modes: what it computes.
        worker: makes the process that computes it, with `implementation` there.
        implementation: see `worker`.
    """

    name: str
    package: str
    module: str
    limits: Callable[[Case], str | None]
    build: Callable[[Case, Any], Attention] | None
    needs_gpu: bool = True
    choices: tuple[Any, ...] = (None,)
    explain: Callable[..., Any] | None = None
    modes: tuple[str, ...] = ("fwd", "bwd", "fwd_bwd")
    worker: Callable[[], Worker] | None = None
    implementation: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.package == "pallas_flash"

    def refusal(self, case: Case, mode: str) -> str | None:
        """Why this peer cannot run the case, or None."""
        if self.needs_gpu and jax.default_backend() != "gpu":
            return f"needs a GPU, the backend is {jax.default_backend()}"
        if mode not in self.modes:
            return f"computes {', '.join(self.modes)} only"
        failure = _import_failure(self.module) if self.worker is None else None
        return failure or self.limits(case) or (self.worker().refusal() if self.worker else None)

    def attention(self, case: Case, choice: Any = None) -> Attention:
        """The function to time, built with one of `choices`."""
        return self.build(case, choice)


def _outside(case: Case, options: set[str]) -> str | None:
    """The options of a case which are not among `options`; and rows without keys, which only ours defines as 0."""
    unknown = sorted(case.options().keys() - options)
    if unknown:
        return f"has no {', '.join(unknown)}"
    lower, upper = band(case)
    return "rows without keys are not 0 there" if (upper <= lower).any() else None


_NN_OPTIONS = {"scale", "is_causal", "local_window_size", "query_seq_lengths", "key_value_seq_lengths"}


def _bounded(case: Case) -> dict[str, Any]:
    """Options with the window as a pair of ints, which is what jax.nn and tokamax take."""
    options = case.options()
    if case.local_window_size is not None:
        options["local_window_size"] = _window(case, unbounded=max(case.T, case.S))
    return options


def _window(case: Case, unbounded: int) -> tuple[int, int]:
    window = case.local_window_size
    left, right = (window, window) if window is None or isinstance(window, int) else window
    return (unbounded if left is None else left, unbounded if right is None else right)


def _ours(name: str, implementation: str | None, needs_gpu: bool, **options) -> Peer:
    options["implementation"] = implementation

    def build(case, choice):
        import pallas_flash

        return functools.partial(pallas_flash.flash_attention, **options, **case.options())

    def explain(case, q, k, v):
        import pallas_flash

        return pallas_flash.explain(q, k, v, **options, **case.options())

    return Peer(name, "pallas_flash", "pallas_flash", lambda case: None, build, needs_gpu, explain=explain)


def _jax_nn(implementation: str) -> Peer:
    def limits(case):
        if case.Hv != case.H:
            return "value must have the head dim of query"
        if implementation == "cudnn" and case.dtype == "float32":
            return "bfloat16 and float16 only"
        windowed = case.local_window_size is not None
        if implementation == "cudnn" and windowed and not case.is_causal and _window(case, -1)[1] != 0:
            return "no right window unless causal"
        return _outside(case, _NN_OPTIONS)

    def build(case, choice):
        return functools.partial(jax.nn.dot_product_attention, implementation=implementation, **_bounded(case))

    return Peer(f"jax_{implementation}", "jax", "jax", limits, build, needs_gpu=implementation == "cudnn")


def _tokamax(implementation: str) -> Peer:
    def build(case, choice):
        import tokamax

        return functools.partial(tokamax.dot_product_attention, implementation=implementation, **_bounded(case))

    limits = functools.partial(_outside, options=_NN_OPTIONS)
    return Peer(f"tokamax_{implementation}", "tokamax", "tokamax", limits, build)


def _mha_limits(case: Case) -> str | None:
    if case.Hv != case.H or case.N != case.K:
        return "key and value must have the heads and head dim of query"
    if case.T % 16 or case.S % 16:
        return "sequence lengths must be multiples of the block sizes"
    if case.T != case.S:
        return "backward needs equal sequence lengths"
    return _outside(case, {"scale", "is_causal"})


def _mha_build(case: Case, choice: tuple[int, ...] | None) -> Attention:
    mha = importlib.import_module(_MHA)
    blocks = mha.BlockSizes.get_default() if choice is None else mha.BlockSizes(*choice)
    scale = case.H**-0.5 if case.scale is None else case.scale
    # Positional, since mha is a custom_vjp whose static arguments are counted by position.
    return lambda q, k, v: mha.mha(q, k, v, None, scale, case.is_causal, blocks)


# block_q, block_k; q and key/value block of dkv, the same of dq: backward asks T // block_q_dq == S // block_kv_dkv.
# None is its default, 128, 128 and four times 32.
_MHA_BLOCKS = (None, (128, 64, 64, 64, 64, 64), (64, 64, 64, 128, 128, 64), (64, 32, 32, 64, 64, 32))


def _flash_attn3_limits(case: Case) -> str | None:
    if case.dtype == "float32":
        return "bfloat16 and float16 only"
    if case.H > 128 or case.Hv != case.H:
        return "the wheel is built for head dims up to 128, the same for value"
    if case.T != case.S and (case.is_causal or case.local_window_size is not None):
        return "masks are aligned to the last query"
    return _outside(case, {"scale", "is_causal", "local_window_size"})


def _flash_attn3_build(case: Case, choice: Any) -> Attention:
    import flash_attn3_jax

    scale = 1.0 / math.sqrt(case.H) if case.scale is None else float(case.scale)
    window = (-1, -1) if case.local_window_size is None else _window(case, unbounded=-1)
    return functools.partial(
        flash_attn3_jax.flash_mha, softmax_scale=scale, is_causal=case.is_causal, window_size=window
    )


def _triton_language_limits(case: Case) -> str | None:
    if case.dtype == "float32" or case.Hv != case.H or case.H & (case.H - 1):
        return "bfloat16 and float16 only, head dims that are powers of two, the same for value"
    if case.is_causal and case.T != case.S:
        return "causal with equal lengths only"
    return _outside(case, {"scale", "is_causal"})


def _triton_language_build(case: Case, choice: tuple[int, int, int, int]) -> Attention:
    from benchmarks import triton_language

    scale = case.H**-0.5 if case.scale is None else case.scale
    return functools.partial(triton_language.attention, scale=scale, is_causal=case.is_causal, blocks=choice)


# block_q, block_k, warps, stages
_TRITON_LANGUAGE_BLOCKS = ((128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 8, 2))

_torch_worker = functools.cache(worker.torch)


def _torch(implementation: str) -> Peer:
    def limits(case):
        if implementation != "efficient" and case.dtype == "float32":
            return "bfloat16 and float16 only"
        if case.is_causal and case.T != case.S:
            return "causal with equal lengths only"
        return _outside(case, {"scale", "is_causal"})

    name = f"torch_{implementation}"
    return Peer(name, "torch", "torch", limits, None, worker=_torch_worker, implementation=implementation)


PEERS = {
    peer.name: peer
    for peer in (
        _ours("ours", None, needs_gpu=False),
        _ours("ours_mosaic_gpu", "mosaic_gpu", needs_gpu=True),
        _ours("ours_deterministic", "mosaic_gpu", needs_gpu=True, deterministic=True),
        _ours("ours_triton", "triton", needs_gpu=True),
        _ours("ours_xla", "xla", needs_gpu=False),
        _jax_nn("xla"),
        _jax_nn("cudnn"),
        Peer("pallas_mha", "jax", _MHA, _mha_limits, _mha_build, choices=_MHA_BLOCKS),
        _tokamax("triton"),
        _tokamax("mosaic_gpu"),
        Peer("flash_attn3_jax", "flash-attn3-jax", "flash_attn3_jax", _flash_attn3_limits, _flash_attn3_build),
        Peer(
            "triton_language",
            "jax-triton",
            "benchmarks.triton_language",
            _triton_language_limits,
            _triton_language_build,
            choices=_TRITON_LANGUAGE_BLOCKS,
            modes=("fwd",),
        ),
        *map(_torch, ("flash", "cudnn", "efficient")),
    )
}
