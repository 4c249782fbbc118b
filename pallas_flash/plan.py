"""What block sizes? Frozen plans, and the heuristics that choose one for a device and a problem's sizes."""

import dataclasses
import functools
from typing import NamedTuple

SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""KiB that one thread block may use, by compute capability (CUDA C++ Programming Guide, "Compute Capabilities")."""


KERNELS = ("forward", "dq", "dkv")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How one kernel is cut.

    Attributes:
        block_q: Queries per tile, a power of two >= 16.
        block_k: Keys per tile, a power of two >= 16.
        num_warps: Warps per program, a power of two up to 16.
        num_stages: Depth of the ring of loads in flight, 1 to 8.
        head_group: Heads whose programs run side by side, so that what they read stays in the L2 cache; lowered to the
            largest divisor of the number of heads. From 1.

    Raises:
        ValueError: A field is out of its range.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2
    head_group: int = 1

    def __post_init__(self):
        for name, low, high in (("block_q", 16, 1024), ("block_k", 16, 1024), ("num_warps", 1, 16)):
            n = getattr(self, name)
            if not isinstance(n, int) or not low <= n <= high or n & (n - 1):
                raise ValueError(
                    f"{name}: expected a power of two from {low} to {high}, got {n!r}; plan=None picks one"
                )
        for name, high in (("num_stages", 8), ("head_group", 1024)):
            n = getattr(self, name)
            if not isinstance(n, int) or not 1 <= n <= high:
                raise ValueError(f"{name}: expected an int from 1 to {high}, got {n!r}; plan=None picks one")

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_k} w{self.num_warps} s{self.num_stages} g{self.head_group}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Block sizes of the three Triton kernels.

    Attributes:
        forward: Of the output.
        dq: Of the query's gradient.
        dkv: Of the gradients of key and value.

    Raises:
        TypeError: A field is no `Blocks`.
    """

    forward: Blocks
    dq: Blocks
    dkv: Blocks

    def __post_init__(self):
        _check(Blocks, {kernel: getattr(self, kernel) for kernel in KERNELS})

    def __str__(self) -> str:
        return f"forward {self.forward}, dq {self.dq}, dkv {self.dkv}"


@dataclasses.dataclass(frozen=True)
class MosaicBlocks:
    """How one Mosaic-GPU kernel is cut.

    Attributes:
        block_q: Queries per tile, a multiple of 64 up to 192.
        block_k: Keys per tile, 64 or 128.
        num_stages: Tiles of each operand in flight, 1 to 8.
        head_group: As in `Blocks`.

    Raises:
        ValueError: A field is out of its range.
    """

    block_q: int
    block_k: int
    num_stages: int = 2
    head_group: int = 1

    def __post_init__(self):
        ranges = {"block_q": (64, 128, 192), "block_k": (64, 128), "num_stages": range(1, 9)}
        for name, allowed in {**ranges, "head_group": range(1, 1025)}.items():
            if not isinstance(n := getattr(self, name), int) or isinstance(n, bool) or n not in allowed:
                raise ValueError(f"{name}: expected one of {allowed}, got {n!r}; plan=None picks one")

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_k} s{self.num_stages} g{self.head_group}"


@dataclasses.dataclass(frozen=True)
class MosaicPlan:
    """Block sizes of the Mosaic-GPU kernels.

    Attributes:
        forward: Of the output; one to three warp groups of 64 queries each.
        backward: Of all gradients in one kernel, for head dims up to 128: two warp groups of 64 keys each, `block_q`
            64 or 128, `block_k` 128. None: each gradient has a kernel of its own.
        dq: Of the query's gradient alone; one to three warp groups of 64 queries.
        dkv: Of the gradients of key and value, each alone; one or two warp groups of 64 keys.

    Raises:
        TypeError: A field is no `MosaicBlocks`.
        ValueError: A field has blocks that its kernel does not take.
    """

    forward: MosaicBlocks
    backward: MosaicBlocks | None
    dq: MosaicBlocks
    dkv: MosaicBlocks

    def __post_init__(self):
        optional = {} if self.backward is None else {"backward": self.backward}
        _check(MosaicBlocks, {"forward": self.forward, **optional, "dq": self.dq, "dkv": self.dkv})
        if self.backward and (self.backward.block_k != 128 or self.backward.block_q > 128):
            raise ValueError(
                f"backward: expected block_q 64 or 128 and block_k 128, got {self.backward}; plan=None picks one"
            )
        if self.dkv.block_q > 128:
            raise ValueError(f"dkv: expected block_q 64 or 128, got {self.dkv}; plan=None picks one")

    def __str__(self) -> str:
        gradients = f"backward {self.backward}" if self.backward else f"dq {self.dq}, dk and dv {self.dkv}"
        return f"forward {self.forward}, {gradients}"


def _check(kind: type, fields: dict[str, object]) -> None:
    """That the fields of a plan are blocks of its kind."""
    for kernel, blocks in fields.items():
        if not isinstance(blocks, kind):
            raise TypeError(f"{kernel}: expected a pallas_flash.{kind.__name__}, got {blocks!r}; plan=None picks one")


class Sizes(NamedTuple):
    """What the choice of a plan depends on: lengths, head dims, how the dots are computed, and what each score reads.

    `dots` is "half" for 2-byte inputs, and for float32 "tf32" or "tf32x3" (three products). `read` are the bytes of
    bias, mask and the like for one score.
    """

    T: int
    S: int
    H: int
    Hv: int
    dots: str
    read: int = 0


def padded(width: int) -> int:
    """The power of two, at least 16, that a tile needs for `width` columns: Triton's dots take no other size."""
    return max(16, 1 << (width - 1).bit_length())


def shared_memory(kernel: str, blocks: Blocks, sizes: Sizes) -> int:
    """Bytes of shared memory: what stays in place once, what streams past `num_stages` times.

    For "half" it is what the compiler takes on Hopper; for the others an upper bound, since tf32x3 keeps the high and
    the low part of what it splits.
    """
    both = padded(sizes.H) + padded(sizes.Hv)
    fixed, moving = (blocks.block_q, blocks.block_k) if kernel != "dkv" else (blocks.block_k, blocks.block_q)
    fixed_width = padded(sizes.H) if kernel == "forward" else both
    itemsize = {"half": 2, "tf32": 4, "tf32x3": 8}[sizes.dots]
    vectors = 8 * blocks.num_stages * moving if kernel == "dkv" else 0  # log-sum-exp and delta, float32
    # What scores read comes ahead of them, and for the transposed kernel one array at a time is turned.
    turned = 4 if kernel == "dkv" and sizes.read else 0
    scores = fixed * moving * ((blocks.num_stages - 1) * sizes.read + turned)
    return itemsize * (fixed * fixed_width + blocks.num_stages * moving * both) + vectors + scores


# The best blocks per dots, kernel and padded head dim, as measured on an H200 ("half" at T = 8192, the others at 4096).
_BEST = {
    "half": {
        "forward": {64: (128, 64, 8, 3, 4), 128: (128, 64, 4, 2, 4), 256: (128, 64, 8, 2, 4)},
        "dq": {64: (128, 64, 4, 3, 8), 128: (128, 64, 8, 3, 4), 256: (64, 64, 4, 2)},
        "dkv": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 64, 8, 2)},
    },
    "tf32": {
        "forward": {64: (128, 32, 4, 2), 128: (32, 64, 4, 2), 256: (32, 32, 4, 2)},
        "dq": {64: (128, 32, 4, 1), 128: (128, 32, 8, 1), 256: (32, 32, 4, 1)},
        "dkv": {64: (64, 64, 4, 1), 128: (32, 32, 4, 2), 256: (64, 32, 8, 1)},
    },
    "tf32x3": {
        "forward": {64: (128, 32, 4, 1), 128: (32, 64, 4, 1), 256: (32, 32, 4, 1)},
        "dq": {64: (64, 64, 4, 1), 128: (32, 64, 4, 1), 256: (32, 32, 4, 1)},
        "dkv": {64: (64, 32, 4, 1), 128: (32, 32, 4, 1), 256: (32, 16, 4, 1)},
    },
}
# What is tried next where shared memory is too small for them.
_SMALLER = ((64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1))


@functools.cache
def choose(capability: int, sizes: Sizes) -> Plan:
    """The plan for a GPU of this compute capability (90 for 9.0); `shortage` says whether it fits."""
    width = min(max(64, padded(sizes.H), padded(sizes.Hv)), 256)
    chosen = {}
    for kernel in KERNELS:
        options = [_shortened(Blocks(*option), sizes) for option in (_BEST[sizes.dots][kernel][width], *_SMALLER)]
        fitting = [each for each in options if shared_memory(kernel, each, sizes) <= available(capability)]
        chosen[kernel] = fitting[0] if fitting else options[-1]
    return Plan(**chosen)


def shortage(plan: Plan, capability: int, sizes: Sizes) -> str | None:
    """Which kernel needs more shared memory than the GPU has; None: the plan fits."""
    for kernel in KERNELS:
        needed = shared_memory(kernel, getattr(plan, kernel), sizes)
        if needed > available(capability):
            return (
                f"the {kernel} kernel needs {needed} bytes of shared memory, the device has {available(capability)}; "
                "use a smaller head dim, smaller blocks or implementation='xla'"
            )


def available(capability: int) -> int:
    """Bytes of shared memory that one thread block may use."""
    return 1024 * SHARED_MEMORY.get(capability, 99)


def _shortened(blocks: Blocks, sizes: Sizes) -> Blocks:
    """No larger than the sequences need."""
    return dataclasses.replace(
        blocks, block_q=min(blocks.block_q, padded(sizes.T)), block_k=min(blocks.block_k, padded(sizes.S))
    )


def whole(n: int, boxes: int = 1) -> int:
    """`n` up to whole boxes (or as many at a time) of 64, in which the Mosaic-GPU kernels move and compute."""
    return -(-n // (64 * boxes)) * 64 * boxes


# Forward, backward, dq and dkv by padded head dim, as measured on an H200 at T = 8192.
_MOSAIC = {
    64: ((192, 128, 2, 8), (128, 128, 2, 8), (128, 128, 2, 8), (128, 128, 2, 8)),
    128: ((128, 128, 2, 4), (64, 128, 2, 4), (128, 128, 2, 8), (128, 128, 2, 8)),
    192: ((128, 64, 2, 4), None, (128, 64, 2, 8), (64, 128, 2, 8)),
    256: ((128, 64, 2, 8), None, (128, 64, 1, 8), (64, 128, 1, 8)),
}


@functools.cache
def choose_mosaic(T: int, H: int, Hv: int, grows: bool = False) -> MosaicPlan:
    """The plan of the Mosaic-GPU kernels for a Hopper GPU; `grows` as of a mask (`masks.Mask.grows`)."""
    width = whole(max(H, Hv))
    forward, backward, dq, dkv = (blocks and MosaicBlocks(*blocks) for blocks in _MOSAIC[width])
    forward, dq = (dataclasses.replace(x, block_q=min(x.block_q, whole(max(T, 1)))) for x in (forward, dq))
    if grows:  # the tiles that run side by side differ in length, and drift apart
        forward, backward = (x and dataclasses.replace(x, head_group=8) for x in (forward, backward))
    return MosaicPlan(forward, backward, dq, dkv)


def mosaic_shortage(plan: MosaicPlan, H: int, Hv: int) -> str | None:
    """Which Mosaic-GPU kernel the head dims are too large for; None: the plan fits a Hopper GPU."""
    if plan.backward and max(H, Hv) > 128:
        return f"the backward kernel takes head dims up to 128, got {max(H, Hv)}; use a plan with backward=None"
    H, Hv = whole(H), whole(Hv)
    for kernel in ("forward", *(("backward",) if plan.backward else ("dq", "dkv"))):
        spare = mosaic_spare(kernel, getattr(plan, kernel), H, Hv)
        if spare < 0:
            return (
                f"the {kernel} kernel needs {_MOSAIC_LIMIT - spare} bytes of shared memory, the device has "
                f"{_MOSAIC_LIMIT}; "
                "use smaller blocks, fewer stages or plan=None"
            )


def mosaic_spare(kernel: str, blocks: MosaicBlocks, H: int, Hv: int) -> int:
    """Bytes of shared memory that a kernel leaves free, of padded head dims; negative: what it lacks."""
    return _MOSAIC_LIMIT - _mosaic_shared_memory(kernel, blocks, H, Hv)


_MOSAIC_LIMIT = available(90) - 2048  # barriers, and what aligning the buffers costs


def _mosaic_shared_memory(kernel: str, blocks: MosaicBlocks, H: int, Hv: int) -> int:
    """Bytes of tiles of 2-byte elements, and of vectors and sums of float32."""
    block_q, block_k, stages = blocks.block_q, blocks.block_k, blocks.num_stages
    if kernel == "forward":
        output = 0 if Hv == H else block_q * Hv
        return 2 * (block_q * H + stages * block_k * (H + Hv) + output) + 4 * block_q
    if kernel == "backward":
        H = H if block_q > 64 else whole(H, 2)
        return 2 * ((block_k + stages * block_q) * (H + Hv) + 2 * block_k * block_q) + 4 * block_q * (H + 2 * stages)
    stay, stream = (block_q, block_k) if kernel == "dq" else (block_k, block_q)
    return 2 * (stay * (H + Hv) + stream * (2 * H + stages * Hv)) + 8 * (stay if kernel == "dq" else 2 * stream)
