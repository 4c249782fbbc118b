"""What is shown to readers runs: the smallest example, and the code blocks of README and docs."""

import pathlib
import re
import runpy

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def test_minimal_flash(capsys):
    """It prints a line of errors for each mask, and checks them itself."""
    runpy.run_path(str(ROOT / "examples" / "minimal_flash.py"), run_name="__main__")
    assert "causal" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "docs/flax.md", "docs/scores.md"])
def test_code_blocks(page):
    """The Python blocks, one after the other in one namespace; what they assert holds."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    namespace: dict = {}
    for block in blocks:
        exec(block, namespace)
    assert len(blocks) >= 3 and namespace["out"].shape == namespace["query"].shape
