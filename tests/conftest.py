"""Shape annotations are checked while tests run, and only then."""

from jaxtyping import install_import_hook

install_import_hook(["pallas_flash", "flax_layers"], "beartype.beartype")
