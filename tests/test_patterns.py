"""Masks that read arrays, by properties: cells to visit, their lists, and what takes part, against brute force."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_flash import lists, patterns
from pallas_flash.cells import ALL, NONE, SOME, Cells, Span
from pallas_flash.masks import Band, Lengths, Mask
from pallas_flash.patterns import Dense, Intervals, Modified, Segments, Surveyed, found, regrouped
from pallas_flash.problem import Problem
from pallas_flash.score import Score
from pallas_flash.tile import Tile

CELLS = [Cells(2, 3, 20, 24, 8, 4), Cells(1, 2, 13, 9, 4, 8), Cells(3, 1, 7, 30, 16, 4)]
"""Cells that end with the arrays, and beyond them."""
SEEDS = range(8)
every_cells = pytest.mark.parametrize("cells", CELLS, ids=lambda cells: f"{cells.T}x{cells.S}")


def ids(draw, B: int, size: int, first: int = 0) -> np.ndarray:
    """Few segments, the same id several times in a row."""
    return np.repeat(draw.integers(first, 4, (B, size)), 3, axis=1)[:, :size]


def segments(q_ids: np.ndarray, k_ids: np.ndarray, shared: bool = False) -> tuple[Mask, np.ndarray]:
    keep = (q_ids[:, None, :, None] == k_ids[:, None, None, :]) & (q_ids >= 0)[:, None, :, None]
    return Segments(jnp.int32(q_ids[:, None, :, None]), jnp.int32(k_ids[:, None, None]), shared), keep


def any_segments(draw, c: Cells):
    return segments(ids(draw, c.B, c.T, -1), ids(draw, 1, c.S, -2))


def sorted_segments(draw, c: Cells):
    """Of self-attention, as far as both reach; without padding."""
    all_ids = np.sort(draw.integers(0, 4, (c.B, max(c.T, c.S))), 1)
    return segments(all_ids[:, : c.T], all_ids[:, : c.S])


def shared_segments(draw, c: Cells):
    all_ids = ids(draw, c.B, max(c.T, c.S), -1)
    return segments(all_ids[:, : c.T], all_ids[:, : c.S], shared=c.T == c.S)


def intervals(draw, c: Cells):
    """Some are empty, of length 0 or turned round; some are everything."""
    lo, hi = draw.integers(0, c.S + 1, (2, c.B, 1, c.T, 1))
    lo, hi = np.where(draw.random(lo.shape) < 0.3, 0, lo), np.where(draw.random(lo.shape) < 0.3, c.S, hi)
    keep = (np.arange(c.S) >= lo) & (np.arange(c.S) < hi)
    return Intervals(jnp.int32(lo), jnp.int32(hi), jnp.asarray(keep.any((1, 2)))), keep


def _dense(draw, *shape: int):
    mask = draw.random(shape) < draw.choice([0.03, 0.5, 0.97])  # blocks are often empty or whole
    return Dense(jnp.asarray(mask)), mask


def dense(draw, c: Cells):
    return _dense(draw, c.B, 1, c.T, c.S)


def dense_by_head(draw, c: Cells):
    """Of keys alone."""
    return _dense(draw, 1, c.N, 1, c.S)


def function(tile, limit, flags):
    return (tile.q_ids + tile.k_ids + 2 * tile.head + tile.batch < limit) | flags


def modified(draw, c: Cells):
    limit, flags = draw.integers(0, 50, (c.B, 1, c.T, 1)), draw.random((1, c.N, 1, c.S)) < 0.2
    b, n, t, s = np.ix_(*map(np.arange, (c.B, c.N, c.T, c.S)))
    mask = Modified(function, (jnp.int32(limit), jnp.asarray(flags)), (False, True))
    return mask, (t + s + 2 * n + b < limit) | flags


PATTERNS = {
    f.__name__: f for f in (any_segments, sorted_segments, shared_segments, intervals, dense, dense_by_head, modified)
}


def together(draw, c: Cells):
    """Masks of all kinds at once."""
    (mask, keep), (other, other_keep), (third, third_keep) = (f(draw, c) for f in (any_segments, dense, modified))
    lengths, offset = draw.integers(0, (c.T + 1, c.S + 1), (c.B, 2)).T, draw.integers(-5, 5, c.B)
    t, s = np.arange(c.T)[:, None], np.arange(c.S)
    inside = (t < lengths[0].reshape(-1, 1, 1, 1)) & (s < lengths[1].reshape(-1, 1, 1, 1))
    band = Band(-12, 3, jnp.int32(offset))
    distance = s - t - offset.reshape(-1, 1, 1, 1)
    keep = keep & other_keep & third_keep & inside & (distance >= -12) & (distance <= 3)
    return Lengths(*map(jnp.int32, lengths)) & band & mask & other & third, keep


every_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
every_mask = pytest.mark.parametrize("pattern", [*PATTERNS.values(), together], ids=lambda f: f.__name__)


def drawn(pattern, cells: Cells):
    """Masks with what they keep [B, N, T, S]."""
    for seed in SEEDS:
        mask, keep = pattern(np.random.default_rng(seed), cells)
        yield mask, np.broadcast_to(keep, (cells.B, cells.N, cells.T, cells.S))


def in_cells(keep: np.ndarray, cells: Cells) -> np.ndarray:
    """[B, N, rows, columns, block_q, block_k]; False beyond the arrays."""
    rows, columns = cells.shape
    ends = (rows * cells.block_q - cells.T, columns * cells.block_k - cells.S)
    keep = np.pad(keep, ((0, 0), (0, 0), *((0, end) for end in ends)))
    return keep.reshape(*keep.shape[:2], rows, cells.block_q, columns, cells.block_k).swapaxes(3, 4)


def right_status(keep: np.ndarray, cells: Cells) -> np.ndarray:
    """What is kept of each cell."""
    split = in_cells(keep, cells)
    return np.where(split.any((4, 5)), np.where(split.all((4, 5)), ALL, SOME), NONE)


jitted_found = jax.jit(found, static_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def participants(mask: Mask, cells: Cells):
    return mask.participants(cells)


def assert_sound(status: np.ndarray, right: np.ndarray) -> None:
    assert (right[status == NONE] == NONE).all(), "a cell is skipped of which something is kept"
    assert (right[status == ALL] == ALL).all(), "a cell is taken for whole of which something is not kept"


@every_cells
@every_mask
def test_status_is_sound(pattern, cells):
    for mask, keep in drawn(pattern, cells):
        status = np.broadcast_to(jitted_found(mask, cells), (cells.B, cells.N, *cells.shape))
        assert_sound(status, right_status(keep, cells))


@every_cells
@pytest.mark.parametrize("pattern", [intervals, dense, dense_by_head, modified], ids=lambda f: f.__name__)
def test_status_is_exact(pattern, cells):
    for mask, keep in drawn(pattern, cells):
        np.testing.assert_array_equal(
            np.broadcast_to(jitted_found(mask, cells), (cells.B, cells.N, *cells.shape)), right_status(keep, cells)
        )


def test_status_of_sorted_segments_is_exact():
    """Without padding and where blocks end with the arrays."""
    cells = Cells(2, 1, 24, 24, 8, 4)
    for mask, keep in drawn(sorted_segments, cells):
        np.testing.assert_array_equal(jitted_found(mask, cells), right_status(keep[:, :1], cells))


def test_padding_alone_is_skipped():
    cells = Cells(1, 1, 16, 16, 4, 4)
    q_ids, k_ids = np.array([[-1] * 4 + [0] * 4 + [-2] * 4 + [2**31 - 1] * 4] * 2)
    mask, keep = segments(q_ids[None], k_ids[None])
    np.testing.assert_array_equal(jitted_found(mask, cells), right_status(keep, cells))


@every_cells
@every_mask
def test_keep_of_a_tile_is_that_of_all(pattern, cells):
    """A tile, upright and transposed, reads its part of the arrays."""
    q_start, k_start, size_q, size_k = cells.T // 3, 3, 4, 5

    def at(mask: Mask, transposed: bool):
        def read(array):
            for axis, start, size in ((2, q_start, size_q), (3, k_start, size_k)):
                if array.shape[axis] > 1:
                    array = lax.dynamic_slice_in_dim(array, start, size, axis)
            return jnp.swapaxes(array, 2, 3) if transposed else array

        mask = jax.tree.map(lambda leaf: leaf.reshape(-1, 1, 1, 1) if leaf.ndim == 1 else leaf, mask)
        batch, head = np.ogrid[: cells.B, : cells.N]
        tile = Tile.at(q_start, size_q, k_start, size_k, transposed)
        return mask.keep(tile._replace(batch=batch[..., None, None], head=head[..., None, None], read=read))

    run = jax.jit(at, static_argnums=1)
    for mask, keep in drawn(pattern, cells):
        part = keep[:, :, q_start : q_start + size_q, k_start : k_start + size_k]
        for transposed, right in ((False, part), (True, part.swapaxes(2, 3))):
            np.testing.assert_array_equal(np.broadcast_to(run(mask, transposed), right.shape), right)


@every_cells
@every_pattern
def test_participants(pattern, cells):
    """What takes part in some score of some head, by each mask alone."""
    for mask, keep in drawn(pattern, cells):
        for found_part, right in zip(participants(mask, cells), (keep.any((1, 3)), keep.any((1, 2))), strict=True):
            np.testing.assert_array_equal(np.broadcast_to(found_part, right.shape), right)


@every_cells
def test_participants_of_all_together(cells):
    """All that take part, at least."""
    for mask, keep in drawn(together, cells):
        for found_part, right in zip(participants(mask, cells), (keep.any((1, 3)), keep.any((1, 2))), strict=True):
            assert (np.broadcast_to(found_part, right.shape) >= right).all()


@every_mask
@pytest.mark.parametrize("cells,blocks", list(zip(CELLS, [(8, 8), (2, 16), (16, 4)], strict=True)), ids=str)
def test_regrouped_is_sound(cells, blocks, pattern):
    """From cells of 4 squared to larger and smaller ones; within the arrays it loses nothing where one is larger."""
    old, new = (dataclasses.replace(cells, block_q=q, block_k=k) for q, k in ((4, 4), blocks))
    ones = jnp.ones((1, cells.T), bool), jnp.ones((1, cells.S), bool)

    @jax.jit
    def run(mask):
        status = found(mask, old)
        surveyed = Surveyed(mask, status.astype(jnp.int8), *ones, 4)
        return regrouped(status, 4, blocks, new.shape), found(surveyed, new)

    for mask, keep in drawn(pattern, cells):
        right = right_status(keep, new)
        status, within = (np.broadcast_to(x, right.shape) for x in run(mask))
        assert_sound(within, right)
        assert (right[status == NONE] == NONE).all()
        if min(blocks) >= 4 and pattern in (dense, modified, intervals):
            np.testing.assert_array_equal(status == NONE, right == NONE)


def posed(mask: Mask, cells: Cells, deterministic: bool) -> Problem:
    return Problem(
        mask=mask, score=Score(), sinks=None, dropout=None, scale=None, static_scale=1.0, B=cells.B, T=cells.T,
        S=cells.S, N=cells.N, K=cells.N, H=8, Hv=8, dtype="float32", precision=lax.Precision.DEFAULT,
        deterministic=deterministic, implementation=None, plan=None, interpret=False,
    )  # fmt: skip


def log_of_visits(mask: Mask, cells: Cells, by_query: bool, at_least_one: bool):
    """For each block of rows: what its walk steps over, 2·block + whether `keep` is needed, -1 after the end.

    And how many later blocks of rows visit each column, if they are counted.
    """
    count = cells.shape[1] if by_query else cells.shape[0]
    listed = lists.listed(posed(mask, cells, deterministic=True), cells.block_q, cells.block_k, by_query).mask

    def at(*place):
        seen = lists.visit(listed, Span(0, 1), Span(0, 1), 1, place)
        seen = seen.at_least_one() if at_least_one else seen

        def step(j, carry, edge):
            t, log = carry
            return t + 1, log.at[t].set(2 * j + edge)

        steps, log = seen.walk(step, (0, jnp.full(count + 1, -1, jnp.int32)))
        columns = jnp.arange(count)
        later = columns if by_query else lists.later(listed, Span(0, 1), cells.S, cells.block_k, place, columns)
        return log, steps == seen.steps, later

    places = np.indices((cells.B, cells.N, cells.shape[0 if by_query else 1])).reshape(3, -1)
    return jax.vmap(at)(*places)


@every_cells
@every_mask
@pytest.mark.parametrize("by_query", [True, False], ids=["queries", "keys"])
def test_visits_are_what_the_status_says(by_query, pattern, cells):
    """Every block of rows steps over its blocks once, in order, those that need `keep` first."""
    run = jax.jit(functools.partial(log_of_visits, cells=cells, by_query=by_query, at_least_one=False))
    for mask, _ in drawn(pattern, cells):
        status = np.broadcast_to(jitted_found(mask, cells), (cells.B, cells.N, *cells.shape))
        status = status if by_query else status.swapaxes(2, 3)
        logs, as_said, laters = run(mask)
        assert as_said.all()
        for place, log, later in zip(np.ndindex(status.shape[:3]), logs, laters, strict=True):
            right = [2 * j + (kind == SOME) for kind in (SOME, ALL) for j in np.flatnonzero(status[place] == kind)]
            np.testing.assert_array_equal(log[: len(right) + 1], [*right, -1])
            if not by_query:
                b, n, i = place
                visited = status[b, n] != NONE
                np.testing.assert_array_equal(later[visited[i]], visited[i + 1 :].sum(0)[visited[i]])


def test_at_least_one_block_is_visited():
    """Where there is none, one of which nothing is kept, with `keep`; else as before."""
    cells = CELLS[0]
    for mask in (Dense(jnp.zeros((1, 1, 1, 1), bool)), together(np.random.default_rng(0), cells)[0]):
        before, after = (log_of_visits(mask, cells, True, flag)[0] for flag in (False, True))
        for was, now in zip(np.asarray(before), np.asarray(after), strict=True):
            assert np.array_equal(was, now) or (was[0] == -1 and now[0] % 2 == 1 and now[1] == -1)
        assert (np.asarray(after)[:, 0] >= 0).all()


@pytest.mark.parametrize("swapped", [False, True])
def test_listed_masks_reach_to_the_end_of_the_last_block(swapped):
    """Beyond the arrays nothing is kept; bytes stand for booleans; if swapped, keys come before queries."""
    cells = CELLS[0]
    ends = [n * block for n, block in zip(cells.shape, (cells.block_q, cells.block_k), strict=True)]

    def upright(array):
        return jnp.swapaxes(array, 2, 3) if swapped and 1 not in array.shape[2:] else array

    @jax.jit
    def run(mask):
        listed = lists.listed(posed(mask, cells, False), cells.block_q, cells.block_k, True, swapped).mask
        assert listed.later is None
        for leaf in jax.tree.leaves(listed.mask):
            assert leaf.dtype != bool
            assert leaf.ndim == 1 or all(n in (1, end) for n, end in zip(upright(leaf).shape[2:], ends, strict=True))
        listed = jax.tree.map(lambda leaf: leaf.reshape(-1, 1, 1, 1) if leaf.ndim == 1 else leaf, listed)
        batch, head = (x[..., None, None] for x in np.ogrid[: cells.B, : cells.N])
        return listed.keep(Tile.at(0, ends[0], 0, ends[1])._replace(batch=batch, head=head, read=upright))

    for mask, keep in drawn(together, cells):
        right = np.pad(keep, ((0, 0), (0, 0), (0, ends[0] - cells.T), (0, ends[1] - cells.S)))
        np.testing.assert_array_equal(run(mask), right)


def test_masks_that_read_nothing_are_not_listed():
    cells = CELLS[0]
    problem = posed(Lengths(None, jnp.full(cells.B, 9)) & Band(None, 0), cells, True)
    assert lists.listed(problem, 8, 4, True).mask is problem.mask


def test_found_is_within_the_arrays():
    """A cell that reaches beyond them is never whole."""
    for cells in CELLS:
        status = np.asarray(found(Dense(jnp.ones((1, 1, 1, 1), bool)), cells))[0, 0]
        whole = np.outer(*((np.arange(n) + 1) * block <= size for n, block, size in (
            (cells.shape[0], cells.block_q, cells.T), (cells.shape[1], cells.block_k, cells.S))))  # fmt: skip
        np.testing.assert_array_equal(status, np.where(whole, ALL, SOME))


def test_patterns_are_their_own_transposes():
    """Tiles carry indices, so that `keep` serves both orientations."""
    for pattern in PATTERNS.values():
        mask, _ = pattern(np.random.default_rng(0), CELLS[0])
        assert mask.T is mask and mask.reads and isinstance(mask, patterns.Pattern)
