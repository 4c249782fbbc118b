"""Attention for Flax that computes with pallas_flash: functions for Flax's own layers, and layers.

Import the module for the Flax API that you use: `flax_layers.linen` or `flax_layers.nnx`. Each imports nothing of
pallas_flash but its public functions, so that it doubles as an example of how to build on them.
"""
