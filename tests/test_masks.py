"""Masks by properties: what is kept, visited and skipped is what the formula of one score says, either way round."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_flash import masks
from pallas_flash.masks import Band, LastFirst, Lengths, Mask, Span, Visit
from pallas_flash.tile import Tile

SIZE = 24
"""Largest number of rows or columns drawn; kept matrices are computed at this size, so that JAX compiles them once."""

properties = settings(max_examples=150, deadline=None, derandomize=True, database=None)

distances = st.none() | st.integers(-SIZE - 3, SIZE + 3)
lengths = st.none() | st.integers(0, SIZE)


@st.composite
def bands(draw, nonempty: bool = False) -> Band:
    lo, hi = draw(distances), draw(distances)
    if nonempty and lo is not None and hi is not None:
        lo, hi = min(lo, hi), max(lo, hi)
    return Band(lo, hi, draw(st.none() | st.integers(-SIZE, SIZE)))


@st.composite
def compositions(draw) -> Mask:
    """What the library builds: `Lengths & Band` with lo <= hi, alone or inside further `Lengths`, either way round."""
    mask = Lengths(draw(lengths), draw(lengths)) & draw(bands(nonempty=True))
    if draw(st.booleans()):
        mask = Lengths(draw(lengths), draw(lengths)) & mask
    return mask.T if draw(st.booleans()) else mask


@st.composite
def rectangles(draw, from_zero: bool = False) -> tuple[Span, Span]:
    """Some rows, at least one, and columns, perhaps none."""
    first = draw(st.integers(0, SIZE - 1))
    rows = Span(first, draw(st.integers(first + 1, SIZE)))
    first = 0 if from_zero else draw(st.integers(0, SIZE))
    return rows, Span(first, draw(st.integers(first, SIZE)))


any_mask = compositions() | bands() | st.builds(Lengths, lengths, lengths)
exact_mask = compositions() | bands(nonempty=True) | st.builds(Lengths, lengths, lengths)
blocks = st.integers(1, 9)


def formula(mask: Mask, row: int, column: int) -> bool:
    """Whether one score is kept (eqs. 21 and 22)."""
    if isinstance(mask, Band):
        distance = column - row - (mask.offset or 0)
        return (mask.lo is None or mask.lo <= distance) and (mask.hi is None or distance <= mask.hi)
    if isinstance(mask, Lengths):
        return (mask.q_len is None or row < mask.q_len) and (mask.k_len is None or column < mask.k_len)
    return formula(mask.first, row, column) and formula(mask.second, row, column)


def kept(mask: Mask) -> np.ndarray:
    """What `formula` keeps: bool [SIZE, SIZE]."""
    return np.array([[formula(mask, row, column) for column in range(SIZE)] for row in range(SIZE)])


def inside(mask: Mask, rows: Span, columns: Span) -> np.ndarray:
    """What is kept of a rectangle."""
    return kept(mask)[rows.lo : rows.hi, columns.lo : columns.hi]


def assert_python_ints(*numbers) -> None:
    assert all(type(number) is int for number in numbers), numbers


@properties
@given(any_mask)
def test_keep_is_the_formula_in_both_orientations(mask):
    expected = kept(mask)
    for transposed, matrix in ((False, expected), (True, expected.T)):
        keep = mask.keep(Tile.at(0, SIZE, 0, SIZE, transposed))
        np.testing.assert_array_equal(True if keep is None else np.broadcast_to(keep, matrix.shape), matrix)


@properties
@given(any_mask)
def test_transpose(mask):
    assert mask == mask.T.T
    np.testing.assert_array_equal(kept(mask.T), kept(mask).T)
    swapped = mask.T.keep(Tile(*reversed(Tile.at(0, SIZE, 0, SIZE)[:2])))  # rows of mask.T are the keys of mask
    np.testing.assert_array_equal(True if swapped is None else np.broadcast_to(swapped, (SIZE, SIZE)), kept(mask))


@properties
@given(any_mask, rectangles(from_zero=True), blocks)
def test_visit_is_sound(mask, rectangle, block):
    """Everything kept lies in a visited block, and a block in the full range is kept whole."""
    rows, columns = rectangle
    start, full_start, full_end, end = masks.visit(mask, rows, columns, block)
    assert_python_ints(start, full_start, full_end, end)
    assert 0 <= start <= full_start <= full_end <= end
    matrix = inside(mask, rows, columns)
    needed = {column // block for column in np.flatnonzero(matrix.any(0))}
    assert needed <= set(range(start, end))
    for j in range(full_start, full_end):
        assert (j + 1) * block <= columns.hi
        assert matrix[:, j * block : (j + 1) * block].all()


@properties
@given(exact_mask, rectangles(from_zero=True), blocks)
def test_visit_is_complete(mask, rectangle, block):
    """Every visited block holds something kept, and every block that is kept whole is in the full range."""
    rows, columns = rectangle
    start, full_start, full_end, end = masks.visit(mask, rows, columns, block)
    matrix = inside(mask, rows, columns)
    for j in range(start, end):
        cells = matrix[:, j * block : (j + 1) * block]
        assert cells.any()
        assert (cells.all() and cells.shape[1] == block) == (full_start <= j < full_end)


@properties
@given(exact_mask, rectangles())
def test_narrow_is_the_bounding_rectangle(mask, rectangle):
    rows, columns = rectangle
    narrow_rows, narrow_columns = mask.narrow(rows, columns)
    assert_python_ints(*narrow_rows, *narrow_columns)
    matrix = inside(mask, rows, columns)
    if matrix.any():
        some_rows, some_columns = np.flatnonzero(matrix.any(1)), np.flatnonzero(matrix.any(0))
        assert narrow_rows == (rows.lo + some_rows[0], rows.lo + some_rows[-1] + 1)
        assert narrow_columns == (columns.lo + some_columns[0], columns.lo + some_columns[-1] + 1)
    else:
        assert narrow_rows.lo >= narrow_rows.hi or narrow_columns.lo >= narrow_columns.hi


@properties
@given(any_mask, rectangles())
def test_every_is_exact(mask, rectangle):
    rows, columns = rectangle
    span = mask.every(rows, columns)
    assert_python_ints(*span)
    whole = {columns.lo + column for column in np.flatnonzero(inside(mask, rows, columns).all(0))}
    assert set(range(*span)) == whole


@properties
@given(any_mask, st.integers(0, SIZE), st.integers(0, SIZE))
def test_used_holds_all_that_is_kept(mask, T, S):
    rows, columns = masks.used(mask, T, S)
    for row, column in np.argwhere(kept(mask)[:T, :S]):
        assert rows.lo <= row < rows.hi and columns.lo <= column < columns.hi


@pytest.mark.parametrize("bounds", [(2, 5), (0, 4), (3, 3), (5, 2)])
def test_span(bounds):
    ids = jnp.arange(7)
    np.testing.assert_array_equal(Span(*bounds).holds(ids), [bounds[0] <= n < bounds[1] for n in range(7)])
    assert Span(*bounds).is_whole(4) == (bounds == (0, 4))
    assert not Span(jnp.int32(0), 4).is_whole(4)  # traced: not known


EDGES = [(None, None), (None, 0), (-3, None), (-5, 2), (4, 9)]
"""Distances of bands, static as in the library."""


def answers(block: int, offset, q_len, k_len, first, last) -> list:
    """All that masks with these bounds answer about rows first … last-1, in both orientations.

    A Python int as offset moves the distances themselves, which means the same.
    """
    rows, columns, found = Span(first, last), Span(0, SIZE - 3), []
    for lo, hi in EDGES:
        if isinstance(offset, int):
            band = Band(*(None if edge is None else edge + offset for edge in (lo, hi)))
        else:
            band = Band(lo, hi, offset)
        for each in (Lengths(q_len, k_len) & band, (Lengths(None, k_len) & band).T):
            found += [masks.visit(each, rows, columns, block), masks.used(each, SIZE, SIZE - 5)]
            found += [each.narrow(rows, columns), each.every(rows, columns)]
    return found


def test_traced_bounds_give_the_same_answers():
    block, count = 4, 64
    rng = np.random.default_rng(0)
    first, last = np.sort(rng.integers(0, SIZE, (2, count)), axis=0)
    lengths = rng.integers(0, SIZE + 1, (2, count))
    drawn = np.stack([rng.integers(-SIZE, SIZE, count), *lengths, first, last + 1], axis=1).astype(np.int32)
    traced = jax.jit(jax.vmap(lambda bounds: answers(block, *bounds)))(drawn)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(traced)]
    for n, bounds in enumerate(drawn.tolist()):
        assert jax.tree.leaves(answers(block, *bounds)) == [leaf[n] for leaf in leaves]


@pytest.mark.parametrize("offset", [-4, 0, 3])
@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_offset_moves_a_band(edges, offset):
    mask = Band(*edges, jnp.int32(offset))
    moved = Band(*(None if edge is None else edge + offset for edge in edges))
    for each, same in ((mask, moved), (mask.T, moved.T)):
        keep = each.keep(Tile.at(0, SIZE, 0, SIZE))
        np.testing.assert_array_equal(True if keep is None else keep, kept(same))
    assert (mask.T.T.lo, mask.T.T.hi, mask.T.T.offset) == (*edges, offset)


@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("block", [1, 3, 8])
def test_traced_rows_of_a_static_mask(block, wide):
    """As in a kernel: a program's rows are traced, all else is known. What is traced is int32 under enable_x64 too."""
    variants = [
        Lengths(17, 13),
        Lengths(17, 13) & Band(-5, 2),
        Lengths() & Band(None, 0),
        Lengths(20, None) & Band(-5, 2),
        Lengths(None, 22) & Band(3, None),
    ]
    firsts = np.arange(0, SIZE, 4, dtype=np.int32)

    def visits(first) -> list[Visit]:
        seen = [masks.visit(mask, Span(first, first + 4), Span(0, SIZE), block) for mask in variants]
        assert all(isinstance(end, int) or end.dtype == jnp.int32 for end in jax.tree.leaves(seen))
        return seen

    with jax.enable_x64(wide):
        traced = jax.jit(jax.vmap(visits))(firsts)
    for n, first in enumerate(firsts):
        assert jax.tree.map(lambda leaf, n=n: int(leaf[n]), traced) == visits(int(first))


ORDERED = [Visit(*ends) for ends in itertools.combinations_with_replacement(range(5), 4)]
"""Every start <= full_start <= full_end <= end up to 4."""


def trail(seen: Visit, skip: int | None = None) -> tuple:
    """How often `step` ran, which block came when, and whether as an edge; at most 8 times.

    `skip` None: by `walk`, else by `walk_by_turn`.
    """
    empty = jnp.int32(0), jnp.full(8, -1, jnp.int32), jnp.full(8, False)

    def step(block, carry, edge: bool):
        count, order, edges = carry
        return count + 1, order.at[count].set(block), edges.at[count].set(edge)

    if skip is None:
        return seen.walk(step, empty)
    return seen.walk_by_turn(lambda t, carry, edge: step(seen.block(t), carry, edge), empty, skip)


def expected_trail(seen: Visit, backwards: bool = False) -> tuple[list[int], list[bool]]:
    full = list(range(seen.full_start, seen.full_end))[:: -1 if backwards else 1]
    edges = [*range(seen.start, seen.full_start), *range(seen.full_end, seen.end)]
    return edges + full, [True] * len(edges) + [False] * len(full)


every_walk = pytest.mark.parametrize("skip", [None, 0, 1], ids=["walk", "by_turn", "by_turn_but_one"])


def trails(
    seen: list[Visit], skip: int | None, known: int = 0, change: Callable = lambda seen: seen, kind: type = Visit
) -> list[tuple]:
    """Blocks and flags of each walk, with traced ends but the first `known`, which are 0."""
    ends = [jnp.asarray(column, jnp.int32) for column in zip(*seen, strict=True)]
    traced = jax.jit(jax.vmap(lambda *ends: trail(change(kind(*[0] * known, *ends)), skip)))(*ends[known:])
    return [(order[:count].tolist(), edges[:count].tolist()) for count, order, edges in zip(*traced, strict=True)]


@every_walk
@pytest.mark.parametrize("known", [0, 2], ids=["traced", "beginning_known"])
def test_walk_visits_each_block_once_edges_first(known, skip):
    walks = [seen for seen in ORDERED if not any(seen[:known])]
    assert len(walks) == {0: 70, 2: 15}[known]
    for seen, found in zip(walks, trails(walks, skip, known), strict=True):
        blocks, flags = expected_trail(seen)
        assert found == (blocks[skip or 0 :], flags[skip or 0 :])
        assert sorted(blocks) == list(range(seen.start, seen.end))


def test_turns_of_a_static_walk():
    """The t-th block, and how many there are, as Python ints."""
    for seen in ORDERED:
        blocks, flags = expected_trail(seen)
        turns = [seen.block(t) for t in range(seen.steps)]
        assert_python_ints(seen.edges, seen.steps, *turns)
        assert (turns, seen.edges, seen.has_edges) == (blocks, sum(flags), any(flags))
        backwards = [LastFirst(*seen).block(t) for t in range(seen.steps)]
        assert backwards == blocks[: seen.edges] + blocks[seen.edges :][::-1]


def test_rows_that_end_alike_begin_there():
    """Keys under a causal mask: the last query attends to all. Not so queries, nor within a window."""
    rows, columns = Span(32, 48), Span(0, 128)
    causal, window = Band(None, 0), Band(-20, 0)
    kinds = [
        type(masks.visit(mask, rows, columns, 16)) for mask in (causal.T, Lengths(None, 100) & causal.T, causal, window)
    ]
    assert kinds == [LastFirst, LastFirst, Visit, Visit]


@pytest.mark.parametrize("kind", [Visit, LastFirst])
@every_walk
def test_at_least_one_block(skip, kind):
    """An empty walk gets some block, as an edge; the others stay as they are."""
    backwards = kind is LastFirst and skip is not None
    found_trails = trails(ORDERED, skip, change=Visit.at_least_one, kind=kind)
    for seen, (found, edges) in zip(ORDERED, found_trails, strict=True):
        blocks, flags = expected_trail(seen, backwards) if seen.steps else (None, [True])
        assert edges == flags[skip or 0 :]
        assert len(found) == len(edges) and (blocks is None or found == blocks[skip or 0 :])


@properties
@given(any_mask, rectangles(from_zero=True), blocks)
def test_the_one_block_of_an_empty_walk_keeps_nothing(mask, rectangle, block):
    """As a kernel sees it, with a bound only where the last block is ragged; also among the columns beyond the end."""
    rows, columns = rectangle
    mask = Lengths(None, columns.hi if columns.hi % block else None) & mask
    seen = masks.visit(mask, rows, columns, block)
    if not seen.steps and columns.hi:
        first = seen.at_least_one().block(0) * block
        assert not any(formula(mask, r, c) for r in range(*rows) for c in range(first, first + block))


def flags_compiled(build: Callable[..., Visit], *arguments, by_turn: bool = False) -> set[bool]:
    """The values of `edge` that `walk` (or `walk_by_turn`) traces code for."""
    flags = set()

    def step(block, carry, edge: bool):
        flags.add(edge)
        return carry + block

    def run(*arguments):
        seen = build(*arguments)
        return (seen.walk_by_turn if by_turn else seen.walk)(step, jnp.int32(0))

    jax.eval_shape(run, *arguments)
    return flags


@every_walk
@pytest.mark.parametrize("seen", ORDERED[::3], ids=str)
def test_walk_with_static_ends(seen, skip):
    count, order, edges = jax.jit(lambda: trail(seen, skip))()
    blocks, flags = expected_trail(seen)
    assert (order[:count].tolist(), edges[:count].tolist()) == (blocks[skip or 0 :], flags[skip or 0 :])
    assert flags_compiled(lambda: seen) == set(flags)


@pytest.mark.parametrize("by_turn", [False, True], ids=["walk", "by_turn"])
@pytest.mark.parametrize(
    ("mask", "S", "compiled"),
    [
        (Lengths(), SIZE, {False}),
        (Lengths() & Band(None, None), SIZE, {False}),
        (Lengths(None, 23) & Band(None, None), SIZE, {True, False}),
        (Lengths() & Band(None, 0), SIZE, {True, False}),
    ],
    ids=str,
)
def test_what_is_static_compiles_no_code(mask, S, compiled, by_turn):
    """Rows are traced, as in a kernel."""

    def seen(first) -> Visit:
        return masks.visit(mask, Span(first, first + 8), Span(0, S), 8)

    assert flags_compiled(seen, jnp.int32(0), by_turn=by_turn) == compiled


def test_traced_lengths_leave_the_beginning_static():
    """So that no code is compiled for edges on the left."""

    def seen(length) -> Visit:
        visit = masks.visit(Lengths(None, length) & Band(None, None), Span(0, 8), Span(0, SIZE), 8)
        assert_python_ints(visit.start, visit.full_start)
        return visit

    assert [jax.jit(seen)(length) for length in (0, 5, 16, 21)] == [
        (0, 0, 0, 0),
        (0, 0, 0, 1),
        (0, 0, 2, 2),
        (0, 0, 2, 3),
    ]


@pytest.mark.parametrize(
    ("mask", "grows"),
    [
        (Band(None, 0), True),
        (Band(None, 7), True),
        (Band(0, None), False),
        (Band(-3, 0), False),
        (Band(None, None), False),
        (Lengths(5, 7), False),
        (Lengths(None, 20) & Band(None, 0), True),
        (Lengths(None, 20) & Band(-9, 0), False),
        (Lengths() & (Lengths() & Band(None, 0)), True),
    ],
    ids=str,
)
def test_grows(mask, grows):
    assert mask.grows is grows
    counts = kept(mask).sum(1)
    if grows:
        assert not mask.T.grows
        assert (np.diff(counts) >= 0).all() and counts[-1] > counts[0]


def test_a_mask_is_a_pytree_with_static_distances():
    mask = Lengths(jnp.int32(3), None) & Band(-2, 0, jnp.int32(5))
    leaves, structure = jax.tree.flatten(mask)
    assert leaves == [3, 5]
    assert hash(structure) == hash(jax.tree.structure(Lengths(jnp.int32(4), None) & Band(-2, 0, jnp.int32(1))))
    assert structure != jax.tree.structure(Lengths(jnp.int32(3), None) & Band(-1, 0, jnp.int32(5)))
