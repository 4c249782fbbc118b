"""How fast is PyTorch? A process of its own, for JAX and PyTorch bring different CUDA libraries; it shares the GPU.

It reads a request a line, JSON, from its standard input, and answers each with a line on its standard output
(`worker.py` is the other side). Arrays travel as .npz files of float32, in which bfloat16 and float16 are exact.
"""

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.timing import measure

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(q, k, v, *, implementation: str, scale: float | None, is_causal: bool):
    """Of [B, T, N, H] as JAX has it, seen by PyTorch as [B, N, T, H] without a copy."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(BACKENDS[implementation]):
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


def program_for(mode: str, attend: Callable, q, k, v, do) -> Callable[[], dict[str, Any]]:
    """The function of one mode, which returns its results by name. `bwd` has the forward's residuals at hand."""
    if mode == "fwd":
        return torch.no_grad()(lambda: {"out": attend(q, k, v)})
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def gradients(out, **options):
        found = torch.autograd.grad(out, inputs, do, **options)
        return dict(zip(("dq", "dk", "dv"), found, strict=True))

    if mode == "bwd":
        out = attend(*inputs)
        return lambda: gradients(out, retain_graph=True)

    def forward_backward():
        out = attend(*inputs)
        return {"out": out, **gradients(out)}

    return forward_backward


def lasted(program: Callable[[], Any], calls: int) -> float:
    """Seconds of the device, between two events around the calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        program()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


class Session:
    """Answers requests; between `prepare` and `measure` it keeps the program."""

    def prepare(self, inputs: str, results: str, dtype: str, mode: str, **options: Any) -> dict[str, Any]:
        """Runs a program once and writes its results."""
        self.program = None
        torch.cuda.empty_cache()
        with np.load(inputs) as arrays:
            q, k, v, do = (torch.from_numpy(arrays[n]).to("cuda", getattr(torch, dtype)) for n in ("q", "k", "v", "do"))
        self.program = program_for(mode, functools.partial(attention, **options), q, k, v, do)
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        found = {name: x.detach().float().cpu().numpy() for name, x in self.program().items()}
        facts = {"first_call_s": time.perf_counter() - start, "peak_bytes": torch.cuda.max_memory_allocated()}
        np.savez(results, **found)
        return facts

    def measure(self, seconds: float, samples: int) -> dict[str, Any]:
        """Times the program that was prepared."""
        return measure(functools.partial(lasted, self.program), seconds, samples)


def answer(session: Session, request: dict[str, Any]) -> dict[str, Any]:
    """What to reply to a request; what PyTorch raises becomes a reply too."""
    try:
        return {"status": "ok", **getattr(session, request.pop("do"))(**request)}
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        refused = "No available kernel" in lines[0] or "No viable backend" in lines[0]
        return {"status": "refused" if refused else "error", "reason": f"{type(error).__name__}: {lines[0][:300]}"}


def main() -> None:
    replies, sys.stdout = sys.stdout, sys.stderr  # whatever prints must not mix with replies
    session = Session()
    print(json.dumps({"version": torch.__version__, "gpu": torch.cuda.is_available()}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(session, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
