"""Attention layers for Flax that compute with pallas_flash.

Import the module for the Flax API that you use: `flax_layers.nnx`. Each imports nothing of pallas_flash but its public
functions, so that it doubles as an example of how to build a layer on them.
"""
