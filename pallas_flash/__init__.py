"""Exact attention for JAX on NVIDIA GPUs: FlashAttention as Pallas kernels, one pure function."""

from pallas_flash.api import block_mask as block_mask
from pallas_flash.api import dropout_mask as dropout_mask
from pallas_flash.api import explain as explain
from pallas_flash.api import flash_attention as flash_attention
from pallas_flash.autotune import Tuning as Tuning
from pallas_flash.autotune import autotune as autotune
from pallas_flash.dispatch import Explanation as Explanation
from pallas_flash.export import export as export
from pallas_flash.modifiers import MaskModifier as MaskModifier
from pallas_flash.modifiers import ScoreModifier as ScoreModifier
from pallas_flash.plan import Blocks as Blocks
from pallas_flash.plan import MosaicBlocks as MosaicBlocks
from pallas_flash.plan import MosaicPlan as MosaicPlan
from pallas_flash.plan import Plan as Plan
from pallas_flash.position import relative_position_bias as relative_position_bias
from pallas_flash.records import merge_plans as merge_plans
from pallas_flash.search import Measurement as Measurement
from pallas_flash.search import Trial as Trial
from pallas_flash.softmax import merge as merge
from pallas_flash.survey import BlockMask as BlockMask
from pallas_flash.varlen import flash_attention_varlen as flash_attention_varlen
from pallas_flash.version import __version__ as __version__
from pallas_flash.vjp import RESIDUAL_NAMES as RESIDUAL_NAMES
