"""The small cases on all that runs without a GPU: output, residual and gradients against the oracle."""

import functools

import checks
import pytest
from cases import SMALL

from pallas_flash import Blocks, Plan, flash_attention

# Small tiles, so that small problems have many of them; their sizes differ between kernels and orientations.
SMALL_TILES = Plan(Blocks(32, 16, head_group=2), Blocks(16, 32), Blocks(32, 32, head_group=3))
IMPLEMENTATIONS = {
    "xla": {"implementation": "xla"},
    "triton": {"implementation": "triton", "interpret": True, "plan": SMALL_TILES},
}


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_matches_oracle(implementation, case):
    options = IMPLEMENTATIONS[implementation] | case.options()
    checks.check(case, functools.partial(flash_attention, return_residual=True, **options))


@pytest.mark.parametrize(
    "case", [c for c in SMALL if c.name in ("causal_ragged", "lengths_window", "everything")], ids=str
)
def test_xla_in_blocks(case, monkeypatch):
    """Blocks as small as the problem: skipped, partial and full ones, rematerialised."""
    monkeypatch.setattr("pallas_flash.xla.BLOCK", 16)
    attention = functools.partial(flash_attention, return_residual=True, implementation="xla", **case.options())
    checks.check(case, attention)


@pytest.mark.parametrize("case", [c for c in SMALL if c.name in ("causal_ragged", "head_dim_80")], ids=str)
def test_default_plan(case):
    """The tiles that a GPU would get, larger than the problem."""
    options = {"implementation": "triton", "interpret": True} | case.options()
    checks.check(case, functools.partial(flash_attention, return_residual=True, **options))
