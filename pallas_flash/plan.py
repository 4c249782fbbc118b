"""What block sizes? Frozen plans, what they depend on, and how much shared memory they need."""

import dataclasses
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
        _check(Blocks, vars(self))

    @property
    def kernels(self) -> tuple[str, ...]:
        """Those that a call launches."""
        return ("forward", "dq", "dkv")

    def __str__(self) -> str:
        return f"forward {self.forward}, dq {self.dq}, dkv {self.dkv}"


@dataclasses.dataclass(frozen=True)
class MosaicBlocks:
    """How one Mosaic-GPU kernel is cut.

    Attributes:
        block_q: Queries per tile, a multiple of 64 up to 192.
        block_k: Keys per tile, 64 or 128.
        num_stages: Tiles of each operand in flight, 1 to 8.
        head_group: As in `Blocks`; for gradients of keys and values a part of a group counts as a head.

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

    @property
    def kernels(self) -> tuple[str, ...]:
        """Those that a call launches."""
        return ("forward", "backward") if self.backward else ("forward", "dq", "dkv")

    def __str__(self) -> str:
        gradients = f"backward {self.backward}" if self.backward else f"dq {self.dq}, dk and dv {self.dkv}"
        return f"forward {self.forward}, {gradients}"


AnyBlocks = Blocks | MosaicBlocks
AnyPlan = Plan | MosaicPlan


def _check(kind: type, fields: dict[str, object]) -> None:
    """That the fields of a plan are blocks of its kind."""
    for kernel, blocks in fields.items():
        if not isinstance(blocks, kind):
            raise TypeError(f"{kernel}: expected a pallas_flash.{kind.__name__}, got {blocks!r}; plan=None picks one")


class Sizes(NamedTuple):
    """What the choice of a plan depends on.

    Attributes:
        T, S, H, Hv: Lengths and head dims.
        dots: "half" for 2-byte inputs, and for float32 "tf32" or "tf32x3" (three products).
        read: Bytes of bias, mask and the like for one score.
        mask: The kinds of masks: "causal", "window -5 0" or "full", and what hides further scores.
        G: Query heads per key/value head.
        heads: Batch entries times query heads.
        features: What else kernels compute, in alphabetical order: terms of scores, dropout, sinks and the like.
    """

    T: int
    S: int
    H: int
    Hv: int
    dots: str
    read: int = 0
    mask: str = "full"
    G: int = 1
    heads: int = 1
    features: tuple[str, ...] = ()


def padded(width: int) -> int:
    """The power of two, at least 16, that a tile needs for `width` columns: Triton's dots take no other size."""
    return max(16, 1 << (width - 1).bit_length())


def shared_memory(kernel: str, blocks: Blocks, sizes: Sizes, capability: int = 90) -> int:
    """Bytes of shared memory: what stays in place once, what streams past `num_stages` times.

    For "half" it is what the compiler takes on Hopper; for the others an upper bound, since tf32x3 keeps the high and
    the low part of what it splits. For Blackwell's tensor memory the compiler turns what streams past in a copy of its
    own, and takes up to 1 KiB more.
    """
    H, both = padded(sizes.H), padded(sizes.H) + padded(sizes.Hv)
    fixed, moving = (blocks.block_q, blocks.block_k) if kernel != "dkv" else (blocks.block_k, blocks.block_q)
    fixed_width = H if kernel == "forward" else both
    itemsize = {"half": 2, "tf32": 4, "tf32x3": 8}[sizes.dots]
    vectors = 8 * blocks.num_stages * moving if kernel == "dkv" else 0  # log-sum-exp and delta, float32
    # What scores read comes ahead of them, and for the transposed kernel one array at a time is turned.
    turned = 4 if kernel == "dkv" and sizes.read else 0
    scores = fixed * moving * ((blocks.num_stages - 1) * sizes.read + turned)
    needed = itemsize * (fixed * fixed_width + blocks.num_stages * moving * both) + vectors + scores
    if not has_tensor_memory(capability):
        return needed
    turned = {"forward": 0, "dq": H, "dkv": both}[kernel] if blocks.num_stages > 1 else 0
    return needed + itemsize * moving * turned + 1088


def has_tensor_memory(capability: int) -> bool:
    """Whether it is one of Blackwell's GPUs for data centres."""
    return 100 <= capability < 120


def shortage(plan: Plan, capability: int, sizes: Sizes) -> str | None:
    """Which kernel needs more shared memory than the GPU has; None: the plan fits."""
    for kernel in plan.kernels:
        needed = shared_memory(kernel, getattr(plan, kernel), sizes, capability)
        if needed > available(capability):
            return (
                f"the {kernel} kernel needs {needed} bytes of shared memory, the device has {available(capability)}; "
                "use a smaller head dim, smaller blocks or implementation='xla'"
            )


def available(capability: int) -> int:
    """Bytes of shared memory that one thread block may use."""
    return 1024 * SHARED_MEMORY.get(capability, 99)


def whole(n: int, boxes: int = 1) -> int:
    """`n` up to whole boxes (or as many at a time) of 64, in which the Mosaic-GPU kernels move and compute."""
    return -(-n // (64 * boxes)) * 64 * boxes


def mosaic_shortage(plan: MosaicPlan, H: int, Hv: int) -> str | None:
    """Which Mosaic-GPU kernel the head dims are too large for; None: the plan fits a Hopper GPU."""
    return next(filter(None, (mosaic_misfit(kernel, getattr(plan, kernel), H, Hv) for kernel in plan.kernels)), None)


def mosaic_misfit(kernel: str, blocks: MosaicBlocks, H: int, Hv: int) -> str | None:
    """Why a Mosaic-GPU kernel with these blocks does not take these head dims; None: it does."""
    if kernel == "backward" and max(H, Hv) > 128:
        return f"the backward kernel takes head dims up to 128, got {max(H, Hv)}; use a plan with backward=None"
    width = {"forward": Hv, "dq": H}.get(kernel, 0)
    if blocks.block_q > 128 and width > 192:  # ptxas: insufficient registers (128)
        return f"with block_q={blocks.block_q} the {kernel} kernel sums head dims up to 192, got {width}; use 128"
    spare = mosaic_spare(kernel, blocks, whole(H), whole(Hv))
    if spare < 0:
        return (
            f"the {kernel} kernel needs {_MOSAIC_LIMIT - spare} bytes of shared memory, the device has "
            f"{_MOSAIC_LIMIT}; use smaller blocks, fewer stages or plan=None"
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
