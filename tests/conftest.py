"""Shape annotations are checked while tests run, and only then; there are eight virtual CPU devices to split over."""

import os

from jaxtyping import install_import_hook

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["PALLAS_FLASH_CACHE"] = "/nowhere/plans.json"  # plans that someone tuned here change no test
install_import_hook(["pallas_flash", "flax_layers"], "beartype.beartype")
