"""Packed sequences: attention within each is the oracle's of each alone, and nothing else reaches it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import checks
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from test_attention import IMPLEMENTATIONS

from pallas_flash import flash_attention_varlen, vjp
from pallas_flash.testing import error, tolerance


@dataclasses.dataclass(frozen=True)
class Packed(Case):
    """A case whose one batch entry holds sequences: sequence i is queries q[i] … q[i + 1] - 1 and likewise keys."""

    B: int = 1
    N: int = 4
    K: int = 2
    H: int = 16
    q: tuple[int, ...] = ()
    k: tuple[int, ...] = ()
    bottom_right: bool = False

    @property
    def offsets(self) -> np.ndarray:
        """Position of each sequence's first query among its keys."""
        given = np.diff(self.k) - np.diff(self.q) if self.bottom_right else self.query_offset
        return np.broadcast_to(np.asarray(given, np.int32), (len(self.q) - 1,))

    def options(self, for_oracle: bool = False) -> dict[str, Any]:
        """For the oracle a mask, in which sequences are told apart one by one."""
        within = {"is_causal": self.is_causal, "local_window_size": self.local_window_size}
        if not for_oracle:
            return {**within, "query_offset": self.offsets}
        mask = np.zeros((self.T, self.S), bool)
        for i, offset in enumerate(self.offsets):
            rows, columns = (slice(starts[i], starts[i + 1]) for starts in (self.q, self.k))
            sizes = self.q[i + 1] - self.q[i], self.k[i + 1] - self.k[i]
            mask[rows, columns] = oracle.kept(1, 1, *sizes, query_offset=offset, **within)[0, 0]
        return {"mask": mask}

    def attention(self, implementation: str) -> Callable:
        """(query, key, value) → output and residual, of arrays with a batch axis of size 1."""
        options = IMPLEMENTATIONS[implementation] | self.options()
        attend = functools.partial(flash_attention_varlen, return_residual=True, **options)

        def run(*tensors):
            out, residual = attend(*(x[0] for x in tensors), np.array(self.q), np.array(self.k))
            return out[None], residual[None]

        return run


CASES = [
    Packed("packed_causal", T=77, q=(0, 20, 50, 77), k=(0, 20, 50, 77), is_causal=True),
    Packed("packed_128", T=128, N=8, q=(0, 40, 90, 128), k=(0, 40, 90, 128), is_causal=True),
    Packed("packed_top_left", T=60, S=90, q=(0, 5, 40, 60), k=(0, 30, 50, 90), is_causal=True),
    Packed("packed_bottom_right", T=60, S=90, q=(0, 5, 40, 60), k=(0, 30, 50, 90), is_causal=True, bottom_right=True),
    Packed("packed_window", T=100, q=(0, 70, 100), k=(0, 70, 100), local_window_size=(9, 4)),
    Packed("packed_window_left", T=64, S=80, q=(0, 40, 64), k=(0, 20, 80), local_window_size=(None, 2),
           bottom_right=True),
    Packed("packed_empty", T=64, S=70, q=(0, 0, 30, 30, 64, 64), k=(0, 10, 10, 50, 70, 70)),
    Packed("packed_padding", T=80, S=75, Hv=24, q=(7, 20, 60), k=(3, 40, 66), is_causal=True, query_offset=(11, -3)),
    Packed("packed_nothing", T=40, S=33, q=(20, 20), k=(0, 33)),
    Packed("packed_single_tokens", T=40, N=2, K=2, q=tuple(range(41)), k=tuple(range(41))),
    Packed("packed_few_keys", T=256, S=3, N=2, K=1, H=32, q=(0, 76, 110, 256), k=(0, 1, 2, 3), is_causal=True,
           magnitude=3.0),
    Packed("packed_bf16", T=90, H=32, dtype="bfloat16", q=(0, 33, 90), k=(0, 33, 90), is_causal=True),
]  # fmt: skip
"""`packed_128` is the report jax PR39521, `packed_few_keys` flash-attention#443."""


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_matches_oracle(implementation, case):
    checks.check(case, case.attention(implementation))


@pytest.mark.parametrize("name", ["packed_padding", "packed_top_left", "packed_empty"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_takes_no_part_may_hold_nan_and_inf(implementation, name):
    """Tokens outside of every sequence, keys of sequences without queries, and keys after the causal edge."""
    case = next(case for case in CASES if case.name == name)
    mask = case.options(for_oracle=True)["mask"]
    rows, columns = (~part for part in (mask.any(1), mask.any(0)))
    assert columns.any()
    q, k, v, do, dlse = checks.inputs(case)
    run = checks.evaluator(case.attention(implementation))
    clean = run(q, k, v, do, dlse)
    for fill in (jnp.nan, jnp.inf):
        spoiled_q, spoiled_do = (x.at[:, rows].set(fill) for x in (q, do))
        spoiled_k, spoiled_v = (x.at[:, columns].set(fill) for x in (k, v))
        found = run(spoiled_q, spoiled_k, spoiled_v, spoiled_do, dlse)
        for ours, right in zip(found, clean, strict=True):
            assert np.array_equal(ours, right)
    assert not found[2][:, rows].any() and not any(x[:, columns].any() for x in found[3:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packings_never_recompile(implementation):
    """keras#21808: 20 packings of one shape compile once, with and without a jit around."""
    options = {name: value for name, value in IMPLEMENTATIONS[implementation].items() if name != "plan"}
    attend = functools.partial(flash_attention_varlen, is_causal=True, **options)
    x = jnp.ones((30, 2, 8))
    attend(x[:8], x[:8], x[:8], *[jnp.array([0, 8])] * 2)  # JAX's interpreter changes its configuration on first use

    @jax.jit
    def run(q, k):
        return attend(x, x, x, q, k, query_offset=jnp.diff(k) - jnp.diff(q))

    draw = np.random.default_rng(0)
    packings = [np.sort(draw.integers(0, 31, (2, 5)), 1).astype(np.int32) for _ in range(20)]
    before = vjp.attended._cache_size()
    for q, k in packings:
        attend(x, x, x, q, k).block_until_ready()
    assert vjp.attended._cache_size() == before + 1
    for q, k in packings:
        run(q, k).block_until_ready()
    assert run._cache_size() == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packings_in_vmap(implementation):
    """Mapped packings with keys and values in common give what a loop gives."""
    attend = functools.partial(flash_attention_varlen, is_causal=True, **IMPLEMENTATIONS[implementation])
    draw = np.random.default_rng(0)
    q, k, do = (jnp.asarray(draw.standard_normal(s), jnp.float32) for s in ((3, 40, 2, 16), (40, 1, 16), (40, 2, 16)))
    starts = jnp.array([[0, 20, 40], [5, 5, 33], [0, 1, 2]])

    def gradient(q, k, starts):
        return jax.grad(lambda q, k: jnp.sum(attend(q, k, k, starts, starts) * do), (0, 1))(q, k)

    mapped = jax.jit(jax.vmap(gradient, (0, None, 0)))(q, k, starts)
    for i in range(3):
        for ours, right in zip(mapped, jax.jit(gradient)(q[i], k, starts[i]), strict=True):
            right = np.asarray(right)  # both may be off by the rounding floor
            assert error(ours[i], right) <= 2 * tolerance(0.0, right, "float32")


def test_lengths_beyond_the_arrays_are_cut():
    """Padding a batch's starts with the largest number is a habit; there is nothing to attend to there."""
    x = jnp.ones((10, 1, 8))
    out = flash_attention_varlen(x, x, x, np.array([0, 4, 2**31 - 1]), np.array([0, 4, 2**31 - 1]), is_causal=True)
    np.testing.assert_allclose(out, 1, rtol=1e-6)
