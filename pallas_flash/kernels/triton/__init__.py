"""Pallas kernels lowered to Triton: every NVIDIA GPU from Ampere on."""

from pallas_flash.kernels.triton.backward import backward as backward
from pallas_flash.kernels.triton.d_score import d_score as d_score
from pallas_flash.kernels.triton.forward import forward as forward
from pallas_flash.kernels.triton.launch import TARGET as TARGET
from pallas_flash.kernels.triton.launch import planned as planned
from pallas_flash.kernels.triton.launch import refusal as refusal
