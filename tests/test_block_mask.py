"""A block mask made before tells what to visit, and changes nothing else; it is printed and drawn."""

import dataclasses
import functools

import checks
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import SMALL, Case
from test_attention import IMPLEMENTATIONS

from pallas_flash import BlockMask, Blocks, Plan, block_mask, flash_attention, flash_attention_varlen

CELLS_OF_64 = Plan(Blocks(64, 64), Blocks(64, 64), Blocks(64, 64))
LARGE_TILES = Plan(Blocks(128, 32), Blocks(32, 128), Blocks(16, 64))


def named(name: str) -> Case:
    return next(case for case in SMALL if case.name == name)


def made(case: Case, *only: str) -> BlockMask:
    """Of `only` some of the case's masks, or all."""
    options = {name: x for name, x in case.options().items() if name in only or (not only and name != "scale")}
    return block_mask(case.T, case.S, batch=(case.B,), heads=case.N, **options)


@pytest.mark.parametrize("name", ["mask_block_holes", "mask_empty_rows", "modifiers_segments", "masks_of_every_kind"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_matches_oracle(implementation, name):
    """With tiles smaller than a cell, made of all masks."""
    case = named(name)
    options = IMPLEMENTATIONS[implementation] | case.options()
    checks.check(case, functools.partial(flash_attention, return_residual=True, block_mask=made(case), **options))


@pytest.mark.parametrize("name", ["mask_block_holes", "mask_per_head_gqa_causal", "modifiers_segments"])
def test_is_the_call_without_it(name):
    """Bit for bit with tiles of 64 squared, which are visited in the same order; made of what it is passed with."""
    case = named(name)
    attention = functools.partial(
        flash_attention, return_residual=True, interpret=True, plan=CELLS_OF_64, **case.options()
    )
    surveyed = functools.partial(attention, block_mask=made(case, "mask", "mask_modifiers"))
    arrays = checks.inputs(case)
    for ours, right in zip(*(checks.evaluator(f)(*arrays) for f in (surveyed, attention)), strict=True):
        np.testing.assert_array_equal(ours, right)


def test_tiles_larger_than_a_cell():
    case = dataclasses.replace(named("mask_sparse"), T=200, S=150)
    options = {"interpret": True, "plan": LARGE_TILES} | case.options()
    checks.check(case, functools.partial(flash_attention, return_residual=True, block_mask=made(case), **options))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_is_an_argument_of_jit(implementation):
    """A pytree: other masks of the same shape do not compile anew, and its arrays are no constants."""
    case = Case("block_mask_jit", T=130, H=16)
    q, k, v, *_ = checks.inputs(case)

    @jax.jit
    def run(mask, blocks):
        return flash_attention(q, k, v, mask=mask, block_mask=blocks, **IMPLEMENTATIONS[implementation])

    flash_attention(q, k, v, **IMPLEMENTATIONS[implementation])  # loads what JAX imports late, which spoils its caches
    draw = np.random.default_rng(0)
    for _ in range(3):
        mask = draw.random((130, 130)) < 0.02
        mask[: draw.integers(130)] = False
        right = oracle.attend(q, k, v, mask=mask)[0]
        found = run(mask, block_mask(130, 130, mask=mask))
        np.testing.assert_allclose(found, right, rtol=0, atol=8 * np.finfo(np.float32).eps * np.abs(right).max())
    assert run._cache_size() == 1


def test_cells_and_participants():
    """Of 64 squared, within the arrays; batch entries and heads only where masks differ."""
    mask = np.zeros((2, 1, 130, 200), bool)
    mask[0, 0, :64, 64:128] = True
    mask[1, 0, 129, 199] = True
    blocks = block_mask(130, 200, batch=(2,), heads=3, mask=mask)
    assert blocks.cells.shape[0] == 2 and blocks.cells.dtype == np.int8 and (blocks.T, blocks.S) == (130, 200)
    np.testing.assert_array_equal(
        blocks.cells[:, 0], [[[0, 2, 0, 0], [0] * 4, [0] * 4], [[0] * 4, [0] * 4, [0, 0, 0, 1]]]
    )
    np.testing.assert_array_equal(blocks.queries, mask.any((1, 3)))
    np.testing.assert_array_equal(blocks.keys, mask.any((1, 2)))
    assert np.isclose(blocks.share, 2 / 24)


def test_text():
    blocks = block_mask(130, 200, mask=np.tri(130, 200, dtype=bool))
    assert str(blocks).splitlines() == [
        "130 queries x 200 keys in cells of 64 squared, 50.0% visited",
        "▒···",
        "█▒··",
        "▒▒▒·",
    ]


def test_text_of_long_sequences_is_at_most_64_wide():
    def causal(tile):
        return tile.k_ids <= tile.q_ids

    title, *lines = str(block_mask(5000, 5000, mask_modifiers=(causal,))).splitlines()
    assert "cells of 128 squared" in title and len(lines) == 40 and {len(line) for line in lines} == {40}
    assert lines[0] == "▒" + "·" * 39 and lines[-2] == "█" * 38 + "▒·"


@pytest.mark.parametrize("queries,keys", [(0, 10), (10, 0), (1, 1)])
def test_few_tokens(queries, keys):
    """Also none: the text has a title, and a call gives zeros."""
    blocks = block_mask(queries, keys, mask=np.ones((1, 1), bool))
    assert str(blocks).startswith(f"{queries} queries x {keys} keys") and 0 <= blocks.share <= 1
    q, k = jnp.ones((1, queries, 1, 8)), jnp.ones((1, keys, 1, 8))
    out = flash_attention(q, k, k, mask=np.ones((1, 1), bool), block_mask=blocks)
    assert out.shape == q.shape and (out == min(keys, 1)).all()


def test_picture(tmp_path):
    from matplotlib.image import imread

    mask = np.zeros((2, 3, 128, 128), bool)
    mask[1, 2, :64] = True
    blocks = block_mask(128, 128, batch=(2,), heads=3, mask=mask)
    blocks.draw(tmp_path / "first.png")
    blocks.draw(str(tmp_path / "last.png"), b=1, n=2)
    first, last = (imread(tmp_path / f"{name}.png") for name in ("first", "last"))
    assert min(first.shape[:2]) > 300 and first.shape == last.shape and not np.array_equal(first, last)


def test_other_lengths_are_refused():
    """pytorch#139462: made for (128, 256) and used at (2, 2), it gave zeros for all batch entries but the first."""
    blocks = block_mask(128, 256, mask=np.ones((128, 256), bool))
    q = jnp.ones((2, 2, 1, 8))
    with pytest.raises(ValueError, match=r"expected one for 2 queries and 2 keys, got one for 128 and 256"):
        flash_attention(q, q, q, mask=np.ones((2, 2), bool), block_mask=blocks)


def test_varlen_has_none():
    """What arrays say there is one interval of keys for each query, found out in linear time."""
    with pytest.raises(TypeError, match="block_mask"):
        flash_attention_varlen(*[jnp.ones((4, 1, 8))] * 3, *[jnp.array([0, 4])] * 2, block_mask=None)
