"""Shape annotations are checked while tests run, and only then; there are eight virtual CPU devices to split over.

`--share 1/2` runs one half of the tests, `--share 2/2` the other, for two versions of JAX and too little time.
"""

import argparse
import os
import zlib

from jaxtyping import install_import_hook

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["PALLAS_FLASH_CACHE"] = "/nowhere/plans.json"  # plans that someone tuned here change no test
install_import_hook(["pallas_flash", "flax_layers"], "beartype.beartype")


def pytest_addoption(parser):
    parser.addoption("--share", type=_share, default=(1, 1), metavar="K/N", help="run the k-th of n shares")


def _share(text: str) -> tuple[int, int]:
    k, _, n = text.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise argparse.ArgumentTypeError(f"expected K/N with K from 1 to N, got {text!r}; 1/1 runs all")
    return int(k), int(n)


def pytest_collection_modifyitems(config, items):
    """Shares are drawn by name, so that each has tests of every kind."""
    k, n = config.getoption("--share")
    chosen = [zlib.crc32(item.nodeid.encode()) % n == k - 1 for item in items]
    config.hook.pytest_deselected(items=[item for item, mine in zip(items, chosen, strict=True) if not mine])
    items[:] = [item for item, mine in zip(items, chosen, strict=True) if mine]
