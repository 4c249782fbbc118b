"""Tuning finds the fastest blocks of each kernel, keeps what computes the same, and later calls take it from a file."""

import dataclasses
import functools
import inspect
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec
from test_lowering import _is_returned, _operations, launches, lowered, on, shapes

from pallas_flash import (
    Blocks,
    MosaicBlocks,
    MosaicPlan,
    Plan,
    autotune,
    dispatch,
    explain,
    flash_attention,
    merge_plans,
    records,
    search,
)
from pallas_flash.api import problem_of
from pallas_flash.families import FAMILIES
from pallas_flash.search import Measurement, Search, Trial

A, B = Blocks(16, 32), Blocks(32, 16)
PLANS = [Plan(blocks, blocks, blocks) for blocks in (A, B)]
TILE = MosaicBlocks(64, 128)
OPTIONS = {"interpret": True, "candidates": PLANS, "progress": False}
CAUSAL = {"interpret": True, "is_causal": True, "scale": np.array(0.3, np.float32)}  # a traced one
FORWARD = OPTIONS | {"gradients": False, "candidates": PLANS[:1]}
FASTEST = {"forward": A, "dq": B, "dkv": A}


def tensors(T=40, n=1):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((n, T, heads, 16), np.float32)) for heads in (4, 2, 2)]


def timer(run, trial):
    """1 ms for the blocks of `FASTEST`, 2 for others."""
    run()
    return 1e-3 if trial.blocks == FASTEST[trial.kernel] else 2e-3


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The file of users' records, which is not there yet."""
    path = tmp_path / "plans.json"
    monkeypatch.setenv("PALLAS_FLASH_CACHE", str(path))
    return path


@pytest.fixture
def bars(monkeypatch):
    """Progress bars, as they are made."""
    made = []

    class Bar:
        def __init__(self, **options):
            self.options, self.steps = options, 0
            made.append(self)

        def update(self):
            self.steps += 1

    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    return made


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A tuning, the plan before, and a function that was traced before, with its result."""
    path = tmp_path_factory.mktemp("tuned") / "plans.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PALLAS_FLASH_CACHE", str(path))
        flash_attention(*tensors(8), interpret=True)  # JAX's interpreter changes its configuration on first use
        before = explain(*tensors(), **CAUSAL).plan
        jitted = jax.jit(functools.partial(flash_attention, **CAUSAL))
        out = jitted(*tensors())
        return autotune(*tensors(), timer=timer, **(CAUSAL | OPTIONS)), before, jitted, out


def test_each_kernel_is_tuned_alone(tuned):
    """Trials add up: 3 blocks of 3 kernels, the current ones among them, and the fastest again."""
    tuning, before, *_ = tuned
    assert (tuning.implementation, tuning.plan) == ("triton", Plan(**FASTEST))
    assert (dict(tuning.plans), dict(tuning.before)) == ({"triton": tuning.plan}, {"triton": before})
    assert len(tuning.measurements) == 3 * (3 + search.FINALISTS)
    assert tuning.measurements[0] == (("triton", "forward", before.forward), 2.0, None)
    header, *rows, last = str(tuning).splitlines()
    assert header.split() == ["kernel", "fastest", "ms", "before", "ms", "tried", "rejected"]
    assert rows[1].split() == ["triton", "dq", *str(B).split(), "1", *str(before.dq).split(), "2", "3", "0"]
    assert last == f"triton is the fastest; stored in {tuning.path}"


def test_later_calls_take_what_was_found(tuned, monkeypatch):
    """Those of the same problem that are traced from then on; batch entries and heads may be more."""
    tuning, _, jitted, out = tuned
    monkeypatch.setenv("PALLAS_FLASH_CACHE", str(tuning.path))
    found = explain(*tensors(), **CAUSAL)
    assert found.plan == explain(*tensors(n=3), **CAUSAL).plan == tuning.plan
    assert dict(found.origins) == dict.fromkeys(("forward", "dq", "dkv"), f"autotune ({tuning.path})")
    others = explain(*tensors(), interpret=True), explain(*tensors(41), **CAUSAL)
    others += explain(*tensors(), logits_soft_cap=3.0, **CAUSAL), explain(*tensors(), precision="highest", **CAUSAL)
    assert {origin for each in others for origin in each.origins.values()} == {"a heuristic (as on an NVIDIA H200)"}
    assert np.array_equal(jitted(*tensors()), out) and jitted._cache_size() == 1
    planned = flash_attention(*tensors(), plan=tuning.plan, **CAUSAL)
    assert np.array_equal(flash_attention(*tensors(), **CAUSAL), planned)


def test_the_forward_pass_alone(cache):
    tuning = autotune(*tensors(), timer=timer, **FORWARD)
    assert {each.trial.kernel for each in tuning.measurements} == {"forward"}
    assert tuning.plan == dataclasses.replace(tuning.before["triton"], forward=A)
    origins = explain(*tensors(), interpret=True).origins
    assert origins["forward"].startswith("autotune") and not origins["dq"].startswith("autotune")


def test_with_features(cache):
    """They are part of the problem, and the candidates are checked with them."""
    ids = np.arange(24)[None] // 20
    call = dict(
        bias=np.ones((4, 24, 24), np.float32), mask=np.tri(24, dtype=bool), is_causal=True, logits_soft_cap=5.0,
        alibi_slopes=np.ones(4), dropout_rate=0.2, dropout_key=jax.random.key(0), query_segment_ids=ids,
        key_value_segment_ids=ids, score_modifiers=(lambda score, tile: score * 1.5,), return_residual=True,
        sinks=np.ones(4, np.float32),
    )  # fmt: skip
    tuning = autotune(*tensors(24), timer=timer, **call, **FORWARD)
    assert tuning.plan == explain(*tensors(24), interpret=True, **call).plan
    assert tuning.plan.forward == A and not [each for each in tuning.measurements if each.reason]


def test_shapes_will_do(cache):
    drawn = [jax.ShapeDtypeStruct(x.shape, "bfloat16") for x in tensors()]
    assert autotune(*drawn, timer=timer, **FORWARD).plan == explain(*drawn, interpret=True).plan
    assert explain(*drawn, interpret=True).plan.forward == A


ALONE = [
    ("triton", 64, "dq", {"flash_dq"}),
    ("triton", 64, "dkv", {"flash_dkv"}),
    ("mosaic_gpu", 64, "backward", {"flash_backward"}),
    ("mosaic_gpu", 256, "dq", {"flash_dq"}),
    ("mosaic_gpu", 256, "dkv", {"flash_dk", "flash_dv"}),
]


@pytest.mark.parametrize(("name", "H", "kernel", "launched"), ALONE)
def test_programs_have_one_kernel(name, H, kernel, launched):
    """As lowered for an H200, what is returned needs no other, none has a side effect, so that XLA drops the rest."""
    case = Case("alone", T=1024, H=H, dtype="bfloat16", is_causal=True)
    row = jax.ShapeDtypeStruct((case.B, case.N, case.T), "float32")
    with on("H200"):
        problem, _ = problem_of(*shapes(case), implementation=name, is_causal=True)
        problem = dispatch.resolve(problem)
        tensors = [*shapes(case), row, shapes(case)[0], row]
        computed = functools.partial(search._computed, dispatch.chosen(problem), kernel)
        assert kernel in problem.plan.kernels
        calls = _operations(lowered(computed, problem, *tensors).compiler_ir())
    named = [(*launches(str(op)), op) for op in calls if "flash_" in str(op)]
    assert {kernel for kernel, op in named if _is_returned(op)} == launched
    assert all("has_side_effect = true" not in str(op) for _, op in named)


def test_the_grid(cache):
    """Without candidates: the tile that fits the sequences, then other warps and stages, then head groups."""
    seen = []

    def timer(run, trial):
        seen.append(trial.blocks)
        return 1e-3 * (trial.blocks.num_stages == 2) + 1e-4 * (trial.blocks.head_group != 2) + 1e-3

    tuning = autotune(*tensors(T=16), timer=timer, gradients=False, interpret=True, progress=False)
    assert {(each.block_q, each.block_k) for each in seen} == {(16, 16)}
    groups = [each.head_group for each in seen]
    assert tuning.plan.forward == Blocks(16, 16, 4, 1, 2) and groups[:9] == [1] * 6 + [2, 4, 2]


def test_other_warps_and_stages_of_the_fastest_tiles(cache, bars, monkeypatch):
    """Of the two fastest alone, one of which has fewer; each tile comes first with the current ones.

    Nothing is tried twice but the three fastest, and the bar ends where it was told to.
    """
    seen, family = [], FAMILIES["triton"]

    def fits(kernel, blocks, *rest):
        return family.fits(kernel, blocks, *rest) and (blocks.block_k > 16 or blocks.num_stages < 3)

    def timer(run, trial):
        seen.append(trial.blocks)
        return 1e-6 * (trial.blocks.block_q + 2 * trial.blocks.block_k) + 1e-8 * trial.blocks.num_stages

    monkeypatch.setitem(FAMILIES, "triton", family._replace(fits=fits))
    tuning = autotune(*tensors(T=64), timer=timer, gradients=False, interpret=True)
    tiles = {}
    for blocks in seen[: -search.FINALISTS]:
        if blocks.head_group == 1:
            tiles.setdefault((blocks.block_q, blocks.block_k), []).append(blocks)
    tried = {tile: len(found) for tile, found in tiles.items()}
    assert tried == {(32, 16): 4, (32, 32): 6, (64, 32): 1, (32, 64): 1, (64, 64): 1}
    current = tuning.before["triton"].forward
    assert {found[0].num_stages for found in tiles.values()} == {current.num_stages}
    assert {found[0].num_warps for found in tiles.values()} == {current.num_warps}
    assert tuning.plan.forward.num_stages == 1 and len(seen) == len({*seen}) + search.FINALISTS
    assert [(bar.options["total"], bar.steps) for bar in bars] == [(2 * (5 + 10 + 2),) * 2]


def test_the_grid_has_what_was_found_by_hand():
    for record in records.shipped("NVIDIA H200").records:
        tiles = FAMILIES[record.implementation].candidates(record.kernel)
        assert dataclasses.replace(record.blocks, head_group=1) in list(tiles), record


def test_what_fails_is_rejected(cache):
    """With the reason."""

    def timer(run, trial):
        if trial.blocks == A:
            raise RuntimeError("RESOURCE_EXHAUSTED: shared memory\nand more")
        return 1e-3 if trial.blocks == B else 2e-3

    tuning = autotune(*tensors(), timer=timer, **(FORWARD | {"candidates": PLANS}))
    assert tuning.plan.forward == B
    rejected = [each for each in tuning.measurements if each.reason]
    assert rejected == [(("triton", "forward", A), None, "RuntimeError: RESOURCE_EXHAUSTED: shared memory")]
    assert str(tuning).splitlines()[1].split()[-2:] == ["3", "1"]


def faulty(problem, q, k, v, *rest, implementation):
    """Wrong with the blocks A, NaN with B."""
    out, lse = implementation.forward(problem, q, k, v)
    blocks = problem.plan.forward
    return jnp.where(blocks == A, 1.1, jnp.where(blocks == B, jnp.nan, 1.0)) * out, lse


def test_current_blocks_that_fail(cache):
    """They are shown without a time; if nothing runs, it is an error."""

    def fails(run, trial):
        if trial.blocks == before:
            raise RuntimeError("busy")
        return 1e-3

    before = explain(*tensors(), **CAUSAL).plan.forward
    tuning = autotune(*tensors(), timer=fails, **(FORWARD | CAUSAL))
    assert str(tuning).splitlines()[1].split()[-3:] == ["-", "2", "1"]

    def breaks(run, trial):
        raise RuntimeError("busy")

    with pytest.raises(ValueError, match=r"triton forward kernel to run, got: RuntimeError: busy; pass other"):
        autotune(*tensors(), timer=breaks, **(FORWARD | CAUSAL))


def test_what_computes_something_else_is_rejected(cache):
    """However fast."""
    triton = dispatch.implementations()[1]
    wrong = dataclasses.replace(triton, forward=functools.partial(faulty, implementation=triton))
    problem, _ = problem_of(*tensors(), interpret=True)
    now = triton.planned(problem)
    problem = dataclasses.replace(problem, implementation="triton", plan=now.plan)
    found = Search(wrong, "forward", problem, tuple(tensors()), now, (now.plan.forward, A, B), (), ()).run(timer, list)
    reasons = {each.trial.blocks: each.reason for each in found}
    assert reasons[A].startswith("its result differs by 0.1 of its norm, 0.0039 is allowed")
    assert reasons[B].startswith("its result differs by nan of its norm")
    assert reasons[now.plan.forward] is None


def test_the_difference_of_results():
    """Of the worst array; the residuals of rows without keys, -inf, are equal."""
    x = jnp.array([3.0, 4.0, -jnp.inf])
    assert search.difference((x,), (x,)) == 0
    assert np.allclose(search.difference((x[:2] * 1.1, x), (x[:2], x)), 0.1)
    assert not search.difference((x.at[2].set(0),), (x,)) < 1
    assert not search.difference((x.at[0].set(jnp.nan),), (x,)) < 1


def test_what_is_hardly_faster_is_not_taken():
    first, other = Trial("triton", "forward", A), Trial("triton", "forward", B)

    def fastest(*times):
        return search.ranked([Measurement(first, 1.0), *(Measurement(other, ms) for ms in times)])[0]

    assert fastest(0.995) == (first, 1.0)
    assert fastest(0.98) == fastest(1.5, 0.98) == (other, 0.98)
    assert fastest(None) == (first, 1.0)


def test_the_default_timer():
    calls = []

    def run():
        time.sleep(2e-3)
        calls.append(None)
        return jnp.ones(())

    assert 2e-3 <= search.seconds(run, Trial("triton", "forward", A)) < 2e-2
    assert len(calls) > search.SAMPLES * search.SAMPLE_SECONDS / 2e-2


def test_the_default_timer_in_use(cache):
    tuning = autotune(*tensors(), **FORWARD)
    assert all(each.ms > 0 for each in tuning.measurements)


# The file.


def test_a_file_to_ship(cache, tmp_path):
    """Tuned into a file of a project, or merged into one."""
    shipped, merged = tmp_path / "project" / "plans.json", tmp_path / "all.json"
    autotune(*tensors(), timer=timer, cache=shipped, **FORWARD)
    autotune(*tensors(24), timer=timer, cache=str(cache), **FORWARD)
    lengths = [{each.sizes.T for each in records.read(path).records} for path in (shipped, cache)]
    merge_plans(merged, shipped, cache)
    assert lengths == [{40}, {24}] and len(records.read(merged).records) == 2
    merge_plans(cache, merged)
    assert explain(*tensors(), interpret=True).plan.forward == A
    with pytest.raises(
        ValueError, match=r"gone\.json: expected a file that pallas_flash\.autotune wrote, got something"
    ):
        merge_plans(merged, tmp_path / "gone.json")


def test_a_foreign_file_is_refused_before_anything_is_measured(tmp_path):
    path = tmp_path / "plans.json"
    path.write_text("{}")

    def timer(run, trial):
        raise AssertionError

    with pytest.raises(ValueError, match=rf"^{path}: expected a file that pallas_flash\.autotune wrote"):
        autotune(*tensors(), timer=timer, cache=path, **OPTIONS)


# Progress.


@pytest.mark.parametrize("progress", [True, False])
def test_progress(cache, bars, progress):
    """A step for each program to compile, and to try; those timed again are not counted."""
    autotune(*tensors(), timer=timer, **FORWARD | {"progress": progress})
    assert [(bar.options["total"], bar.steps, bar.options["disable"]) for bar in bars] == [(4, 4, not progress)]


def test_progress_without_tqdm(cache, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    autotune(*tensors(), timer=timer, **(FORWARD | {"progress": True}))
    assert capsys.readouterr() == ("", "")


# Misuse.


WRONG = {
    "gradients": ({"gradients": 1}, TypeError, "gradients: expected a Python bool, got int 1; pass True or False"),
    "progress": (
        {"progress": None},
        TypeError,
        "progress: expected a Python bool, got NoneType None; pass True or False",
    ),
    "plan": ({"plan": PLANS[0]}, TypeError, "plan: expected none, .*; pass plans to try as candidates"),
    "a plan": (
        {"candidates": PLANS[0]},
        TypeError,
        r"candidates: expected a list of plans, got Plan .*; None tries a grid",
    ),
    "blocks": ({"candidates": [A]}, TypeError, r"candidates: expected a list of plans, got list .*; None tries a grid"),
    "no plans": (
        {"candidates": []},
        ValueError,
        r"candidates: expected some Plan, got \[\]; None tries a",
    ),
    "plans of others": (
        {"candidates": [MosaicPlan(TILE, TILE, TILE, TILE)]},
        ValueError,
        r"candidates: expected some Plan, got \[MosaicPlan.*; None tries a grid",
    ),
    "cache": (
        {"cache": 3},
        TypeError,
        r"cache: expected the path of a file, got int 3; None takes /nowhere/plans\.json",
    ),
    "timer": ({"timer": 3}, TypeError, "timer: expected a function, got int 3; None times on the device"),
    "an option": ({"blocks": A}, TypeError, "unexpected keyword argument 'blocks'"),
    "a refusal": (
        {"implementation": "mosaic_gpu"},
        NotImplementedError,
        "no implementation with a plan accepts this call: mosaic_gpu: its kernels do not run in interpret mode",
    ),
    "no plan": ({"implementation": "xla"}, NotImplementedError, "accepts this call: xla: interpret=True runs"),
    "no GPU": (
        {"interpret": False},
        NotImplementedError,
        "autotune: expected a GPU to measure on, got the backend 'cpu'; run it where the kernels will run, and copy",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_misuse(mistake):
    options, error, message = WRONG[mistake]
    with pytest.raises(error, match=message):
        inspect.unwrap(autotune)(*tensors(), **{"timer": timer, **OPTIONS, **options})


def test_a_gpu_that_is_not_there():
    """Its name is enough to compile for it, not to measure."""
    gpu = AbstractDevice("NVIDIA H200", None, platform="cuda")
    mesh = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu))
    with mesh, pytest.raises(NotImplementedError, match="expected a GPU to measure on"):
        autotune(*tensors())


def test_nothing_to_compute():
    with pytest.raises(ValueError, match="expected something to compute, got 1 batch entries of 0 queries and 0 keys"):
        autotune(*tensors(0), timer=timer, **OPTIONS)


def test_traced():
    @jax.jit
    def inside(q, k, v):
        autotune(q, k, v, timer=timer, **OPTIONS)

    with pytest.raises(TypeError, match="autotune: expected arrays, got a tracer; call it outside of jit"):
        inside(*tensors())


def test_on_several_devices():
    mesh = jax.make_mesh((2,), ("x",))
    q, k, v = (jax.device_put(x, NamedSharding(mesh, PartitionSpec("x"))) for x in tensors(n=2))
    with pytest.raises(ValueError, match="expected arrays on one device, got one on 2; pass a device's part, or jax"):
        autotune(q, k, v, timer=timer, **OPTIONS)
