"""Pallas kernels for Hopper: TMA, wgmma and specialised warp groups, through Mosaic GPU."""

from pallas_flash.kernels.mosaic_gpu.backward import backward as backward
from pallas_flash.kernels.mosaic_gpu.forward import forward as forward
from pallas_flash.kernels.mosaic_gpu.launch import TARGET as TARGET
from pallas_flash.kernels.mosaic_gpu.operands import deferral as deferral
from pallas_flash.kernels.mosaic_gpu.operands import planned as planned
from pallas_flash.kernels.mosaic_gpu.operands import refusal as refusal
