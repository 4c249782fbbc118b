"""Which blocks fit a GPU, which would spill there, and which are worth trying? For each family of kernels."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pallas_flash import plan as plans
from pallas_flash.plan import AnyBlocks, AnyPlan, Blocks, MosaicBlocks, MosaicPlan, Plan, Sizes, padded, whole


class Family(NamedTuple):
    """What the choice of blocks has to know of an implementation's kernels.

    Attributes:
        name: Of the implementation.
        plan, blocks: Classes.
        width: Head dim → columns of its tile.
        fits: Kernel, blocks, sizes and compute capability → whether shared memory suffices.
        spills: The same → whether registers do not, as far as an estimate can tell.
        fitted: Kernel, blocks and sizes → the blocks, no larger than the sequences need.
        smaller: What is tried in the place of blocks that do not fit or spill, in order.
        candidates: Kernel → blocks worth trying, whether they fit or not.
    """

    name: str
    plan: type[AnyPlan]
    blocks: type[AnyBlocks]
    width: Callable[[int], int]
    fits: Callable[[str, Any, Sizes, int], bool]
    spills: Callable[[str, Any, Sizes, int], bool]
    fitted: Callable[[str, Any, Sizes], Any]
    smaller: Callable[[Any], Iterator[Any]]
    candidates: Callable[[str], Iterator[Any]]


def _fits(kernel: str, blocks: Blocks, sizes: Sizes, capability: int) -> bool:
    return plans.shared_memory(kernel, blocks, sizes, capability) <= plans.available(capability)


def _spills(kernel: str, blocks: Blocks, sizes: Sizes, capability: int) -> bool:
    """By the float32 values that a thread holds: sums, and the scores of a step.

    Of its 255 registers operands need some too where they do not come from shared memory: on GPUs that are no Hopper,
    and on Blackwell in tiles of fewer than 64 rows. The bounds follow from what ptxas spilled (docs/performance.md).
    """
    stay, stream = (blocks.block_q, blocks.block_k) if kernel != "dkv" else (blocks.block_k, blocks.block_q)
    H, Hv = padded(sizes.H), padded(sizes.Hv)
    columns = {"forward": Hv + stream, "dq": H + stream, "dkv": H + Hv + 2 * stream}[kernel]
    most = 200 if capability == 90 else 165 if plans.has_tensor_memory(capability) and stay >= 64 else 150
    return stay * columns > most * 32 * blocks.num_warps


def _fitted(kernel: str, blocks: Blocks, sizes: Sizes) -> Blocks:
    del kernel
    block_q, block_k = min(blocks.block_q, padded(sizes.T)), min(blocks.block_k, padded(sizes.S))
    return dataclasses.replace(blocks, block_q=block_q, block_k=block_k)


def _smaller(blocks: Blocks) -> Iterator[Blocks]:
    """The same with twice the warps, then smaller tiles, with as many and twice as many."""
    if blocks.num_warps < 8:
        yield dataclasses.replace(blocks, num_warps=8)
    for block_q, block_k, num_stages in ((64, 64, 2), (64, 32, 2), (32, 32, 2), (32, 32, 1), (32, 16, 1)):
        for num_warps in (4, 8):
            yield Blocks(block_q, block_k, num_warps, num_stages)
    yield Blocks(16, 16, 4, 1)


def _candidates(kernel: str) -> Iterator[Blocks]:
    del kernel
    tiles = [*itertools.product((32, 64, 128), repeat=2), (32, 16)]
    return (Blocks(*tile, *rest) for tile, *rest in itertools.product(tiles, (4, 8), (1, 2, 3)))


TRITON = Family(
    "triton",
    Plan,
    Blocks,
    width=lambda H: min(max(64, padded(H)), 256),
    fits=_fits,
    spills=_spills,
    fitted=_fitted,
    smaller=_smaller,
    candidates=_candidates,
)


def _mosaic_fits(kernel: str, blocks: MosaicBlocks, sizes: Sizes, capability: int) -> bool:
    return capability == 90 and plans.mosaic_misfit(kernel, blocks, sizes.H, sizes.Hv) is None


def _mosaic_fitted(kernel: str, blocks: MosaicBlocks, sizes: Sizes) -> MosaicBlocks:
    stays = kernel in ("forward", "dq")
    return dataclasses.replace(blocks, block_q=min(blocks.block_q, whole(max(sizes.T, 1)))) if stays else blocks


def _mosaic_candidates(kernel: str) -> Iterator[MosaicBlocks]:
    block_q = (64, 128, 192) if kernel in ("forward", "dq") else (64, 128)
    block_k = (128,) if kernel == "backward" else (64, 128)
    return (MosaicBlocks(*each) for each in itertools.product(block_q, block_k, (1, 2, 3, 4)))


MOSAIC_GPU = Family(
    "mosaic_gpu",
    MosaicPlan,
    MosaicBlocks,
    width=whole,
    fits=_mosaic_fits,
    spills=lambda kernel, blocks, sizes, capability: False,
    fitted=_mosaic_fitted,
    smaller=lambda blocks: iter(()),
    candidates=_mosaic_candidates,
)
FAMILIES = {family.name: family for family in (TRITON, MOSAIC_GPU)}
