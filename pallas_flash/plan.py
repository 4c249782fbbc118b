"""What block sizes? Frozen plans, and the heuristics that choose one for a device and a problem's sizes."""

import dataclasses
import functools
from typing import NamedTuple

SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""KiB that one thread block may use, by compute capability (CUDA C++ Programming Guide, "Compute Capabilities")."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How one kernel is cut.

    Attributes:
        block_q: Queries per tile, a power of two >= 16.
        block_k: Keys per tile, a power of two >= 16.
        num_warps: Warps per program, a power of two up to 16.
        num_stages: Depth of the ring of loads in flight, >= 1.

    Raises:
        ValueError: A field is out of its range.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self):
        for name, low, high in (("block_q", 16, 1024), ("block_k", 16, 1024), ("num_warps", 1, 16)):
            n = getattr(self, name)
            if not isinstance(n, int) or not low <= n <= high or n & (n - 1):
                raise ValueError(f"{name}: expected a power of two from {low} to {high}, got {n!r}; plan=None picks one")
        if not isinstance(self.num_stages, int) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages: expected an int from 1 to 8, got {self.num_stages!r}; plan=None picks one")

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_k} w{self.num_warps} s{self.num_stages}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Block sizes of the three Triton kernels.

    Attributes:
        forward: Of the output.
        dq: Of the query's gradient.
        dkv: Of the gradients of key and value.
        head_group: Heads whose programs run side by side, so that what they share stays in the L2 cache; lowered to the
            largest divisor of the number of heads.

    Raises:
        ValueError: `head_group` is below 1.
    """

    forward: Blocks
    dq: Blocks
    dkv: Blocks
    head_group: int = 1

    def __post_init__(self):
        if not isinstance(self.head_group, int) or self.head_group < 1:
            raise ValueError(f"head_group: expected an int >= 1, got {self.head_group!r}; plan=None picks one")

    def __str__(self) -> str:
        return f"forward {self.forward}, dq {self.dq}, dkv {self.dkv}, head group {self.head_group}"


class Sizes(NamedTuple):
    """What the choice of a plan depends on: lengths, head dims, bytes per element, and whether part of the tiles is cut."""

    T: int
    S: int
    H: int
    Hv: int
    itemsize: int
    grows: bool


def padded(width: int) -> int:
    """The power of two, at least 16, that a tile needs for `width` columns: Triton's dots take no other size."""
    return max(16, 1 << (width - 1).bit_length())


def shared_memory(kernel: str, blocks: Blocks, sizes: Sizes) -> int:
    """Bytes of shared memory: what stays in place once, what streams past `num_stages` times.

    Agrees with what the compiler reports for 128x128, 128x64 (forward) and 64x128 (dkv) at H = 128 on Hopper.
    """
    both = padded(sizes.H) + padded(sizes.Hv)
    fixed, moving = (blocks.block_q, blocks.block_k) if kernel != "dkv" else (blocks.block_k, blocks.block_q)
    fixed_width = padded(sizes.H) if kernel == "forward" else both
    return sizes.itemsize * (fixed * fixed_width + blocks.num_stages * moving * both)


# Preferences per kernel and padded head dim, best first; the first that fits the device's shared memory is taken. The
# leading entries for 2-byte elements were measured on an H200 (benchmarks/results); the rest are smaller steps down.
_FORWARD = {
    64: ((128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
    128: ((128, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
    256: ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 1), (16, 16, 4, 1)),
}
_DQ = {
    64: ((128, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
    128: ((128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
    256: ((128, 64, 8, 1), (64, 32, 4, 1), (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
}
_DKV = {
    64: ((64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2)),
    128: ((64, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 1)),
    256: ((32, 64, 8, 1), (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
}
_GROWING = {
    ("forward", 64): (64, 128, 4, 2),
    ("dkv", 128): (64, 64, 4, 2),
}
"""What is better when later rows have more keys (causal), tried before the preferences."""


@functools.cache
def choose(capability: int, sizes: Sizes) -> Plan | str:
    """The plan for a GPU of this compute capability (90 for 9.0), or the reason why there is none."""
    available = 1024 * SHARED_MEMORY.get(capability, 99)
    chosen = {}
    for kernel, preferences in (("forward", _FORWARD), ("dq", _DQ), ("dkv", _DKV)):
        width = min(max(64, padded(sizes.H), padded(sizes.Hv)), 256)
        options = list(preferences[width])
        if sizes.grows and (kernel, width) in _GROWING:
            options.insert(0, _GROWING[kernel, width])
        if sizes.itemsize > 2:  # twice the bytes and registers per element: the first choices spill
            options = options[1:]
        options = [_shortened(Blocks(*option), sizes) for option in options]
        fitting = [blocks for blocks in options if shared_memory(kernel, blocks, sizes) <= available]
        if not fitting:
            needed = shared_memory(kernel, options[-1], sizes)
            return f"the {kernel} kernel needs {needed} bytes of shared memory, the device has {available}; use a smaller head dim"
        chosen[kernel] = fitting[0]
    return Plan(**chosen)


def _shortened(blocks: Blocks, sizes: Sizes) -> Blocks:
    """No larger than the sequences need."""
    return dataclasses.replace(
        blocks, block_q=min(blocks.block_q, padded(sizes.T)), block_k=min(blocks.block_k, padded(sizes.S))
    )
