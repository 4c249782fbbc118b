"""Where plans come from: tables of what was measured, files of users, and what fits where neither has a word."""

import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hatchling.builders.wheel import WheelBuilder
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_flash import Blocks, MosaicBlocks, api, choice, explain, flash_attention, plan, records
from pallas_flash.choice import Device
from pallas_flash.families import FAMILIES, TRITON
from pallas_flash.plan import Sizes
from pallas_flash.records import Record, Table

ROOT = pathlib.Path(__file__).parents[1]
H200 = Device("NVIDIA H200", 90)
CAPABILITIES = {"nvidia-h200": 90}
ABSENT = {
    "NVIDIA A100-SXM4-80GB": 80,
    "NVIDIA L4": 89,
    "NVIDIA GeForce RTX 4090": 89,
    "NVIDIA H100 80GB HBM3": 90,
    "NVIDIA B200": 100,
}
SIZES = Sizes(4096, 4096, 128, 128, "half", mask="causal", heads=32)
OTHER = Blocks(64, 32, 8, 1)


def record(sizes=SIZES, blocks=OTHER, device=H200.kind, implementation="triton", kernel="forward", **changes):
    return dataclasses.replace(Record.now(device, implementation, kernel, sizes, blocks, 1.0), **changes)


def table(*found, name="file"):
    return Table(found, name)


def chosen(sizes=SIZES, device=H200, cache=None, implementation="triton"):
    tuned = records.shipped(device.kind), records.shipped(records.REFERENCE)
    return choice.choose(implementation, sizes, device, cache, tuned)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The file of users' records, which is not there yet."""
    path = tmp_path / "deep" / "plans.json"
    monkeypatch.setenv("PALLAS_FLASH_CACHE", str(path))
    return path


def on(kind):
    """Compiling for a GPU that is not there."""
    abstract = AbstractDevice(kind, None, platform="cuda")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract))


def shapes(T=4096, N=16, K=16, H=128, dtype="bfloat16", B=2):
    return [jax.ShapeDtypeStruct((B, T, heads, H), dtype) for heads in (N, K, K)]


# Tables.


def is_beyond_the_estimate(kernel, sizes):
    """These blocks ran, but `plan.shared_memory` is an upper bound for three products, and takes them for too large."""
    return (kernel, sizes.dots) == ("dq", "tf32x3") and sizes.H > 128


@pytest.mark.parametrize("dots", ["half", "tf32", "tf32x3"])
@pytest.mark.parametrize("H", [8, 64, 80, 96, 128, 192, 256])
def test_the_reference_table_is_complete(H, dots):
    """For every width, and it fits the device it was measured on."""
    sizes = SIZES._replace(H=H, Hv=H, dots=dots)
    expected = dict.fromkeys(("forward", "dq", "dkv"), "the tuned table nvidia-h200.json")
    if is_beyond_the_estimate("dq", sizes):
        expected["dq"] = "a heuristic (what fits)"
    assert chosen(sizes).origins == expected
    if dots == "half":
        mosaic = chosen(sizes, implementation="mosaic_gpu")
        assert set(mosaic.origins.values()) == {"the tuned table nvidia-h200.json"}
        assert mosaic.plan.kernels == (("forward", "backward") if H <= 128 else ("forward", "dq", "dkv"))


@pytest.mark.parametrize("path", sorted(records.TUNED.glob("*.json")), ids=lambda path: path.stem)
def test_tuned_tables(path):
    """Each is of one device, that of its name, and says the same however often it is written."""
    found = records.read(path).records
    assert {records.slug(each.device) for each in found} == {path.stem}
    assert len({each.key for each in found}) == len(found)
    for each in found:
        assert each.kernel in FAMILIES[each.implementation].plan.__dataclass_fields__
        fits = FAMILIES[each.implementation].fits(each.kernel, each.blocks, each.sizes, CAPABILITIES[path.stem])
        assert fits != is_beyond_the_estimate(each.kernel, each.sizes)


def test_tuned_tables_are_as_they_are_written(tmp_path):
    for path in records.TUNED.glob("*.json"):
        records.add(tmp_path / path.name, reversed(records.read(path).records))
        assert (tmp_path / path.name).read_text() == path.read_text()


def test_tuned_tables_are_in_the_wheel(tmp_path):
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = {f"pallas_flash/tuned/{path.name}" for path in records.TUNED.glob("*.json")}
    assert names and names <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("kind", ABSENT)
def test_devices_without_a_table(kind):
    """What fits them: shared memory and registers bound the blocks."""
    for H, dots, T in itertools.product((64, 128, 256), ("half", "tf32"), (100, 4096)):
        sizes = SIZES._replace(T=T, S=T, H=H, Hv=H, dots=dots)
        found = chosen(sizes, Device(kind, ABSENT[kind]))
        assert all(origin.startswith("a heuristic") for origin in found.origins.values())
        for kernel in found.plan.kernels:
            blocks = getattr(found.plan, kernel)
            assert TRITON.fits(kernel, blocks, sizes, ABSENT[kind])
            assert not TRITON.spills(kernel, blocks, sizes, ABSENT[kind])


def test_where_nothing_fits_the_smallest_is_told_of():
    sizes = SIZES._replace(H=256, Hv=256, dots="tf32x3")
    found = chosen(sizes, Device("NVIDIA L4", 89))
    assert found.plan.dq == Blocks(16, 16, 4, 1) and plan.shortage(found.plan, 89, sizes)


SPILLED = [
    (90, 128, "forward", Blocks(128, 64, 4, 2), 36),
    (90, 128, "dkv", Blocks(64, 64, 4, 2), 0),
    (90, 128, "dq", Blocks(128, 64, 8, 3), 0),
    (80, 64, "dq", Blocks(128, 64, 4, 3), 8),
    (80, 64, "dkv", Blocks(64, 64, 4, 3), 0),
    (80, 128, "forward", Blocks(128, 64, 4, 2), 236),
    (80, 128, "forward", Blocks(128, 64, 8, 2), 0),
    (80, 128, "dkv", Blocks(64, 64, 4, 2), 72),
    (80, 128, "dkv", Blocks(64, 64, 8, 2), 0),
    (80, 256, "forward", Blocks(64, 64, 4, 2), 168),
    (80, 256, "forward", Blocks(64, 64, 8, 2), 0),
    (80, 256, "dkv", Blocks(64, 32, 4, 2), 136),
    (80, 256, "dkv", Blocks(64, 32, 8, 2), 0),
    (80, 256, "dq", Blocks(64, 32, 4, 2), 0),
    (89, 256, "forward", Blocks(64, 32, 4, 2), 20),
    (89, 256, "dkv", Blocks(32, 32, 4, 2), 0),
    (100, 64, "dq", Blocks(128, 64, 4, 3), 0),
    (100, 128, "forward", Blocks(128, 64, 4, 2), 188),
    (100, 128, "forward", Blocks(128, 64, 8, 2), 0),
    (100, 256, "forward", Blocks(128, 64, 8, 2), 0),
    (100, 256, "dq", Blocks(64, 64, 4, 2), 0),
    (100, 256, "dkv", Blocks(64, 32, 4, 2), 136),
]
"""Capability, H, kernel, blocks, and the bytes that ptxas 13.0 spills in the causal kernel that jaxlib 0.11.2 makes."""


@pytest.mark.parametrize(("capability", "H", "kernel", "blocks", "spilled"), SPILLED)
def test_registers(capability, H, kernel, blocks, spilled):
    """The estimate leaves out what spills more than 40 bytes; the fastest kernel at H = 128 on an H200 spills 36."""
    sizes = SIZES._replace(H=H, Hv=H)
    assert TRITON.spills(kernel, blocks, sizes, capability) == (spilled > 40)


BLACKWELL = [
    (64, "forward", Blocks(128, 64, 8, 3), 66560),
    (128, "forward", Blocks(128, 64, 4, 2), 98336),
    (256, "forward", Blocks(64, 64, 8, 2), 164896),
    (64, "dq", Blocks(128, 64, 4, 3), 91136),
    (128, "dq", Blocks(128, 64, 8, 3), 181248),
    (256, "dq", Blocks(64, 64, 4, 2), 230400),
    (64, "dkv", Blocks(64, 64, 4, 3), 83968),
    (64, "dkv", Blocks(64, 64, 4, 1), 32776),
    (128, "dkv", Blocks(64, 64, 8, 2), 132096),
    (256, "dkv", Blocks(64, 64, 8, 2), 263168),
    (256, "dkv", Blocks(32, 64, 8, 1), 98312),
]
"""H, kernel, blocks, and the bytes of shared memory that XLA of jaxlib 0.11.2 asks for, compiling for a B200."""


@pytest.mark.parametrize(("H", "kernel", "blocks", "asked"), BLACKWELL)
def test_shared_memory_of_blackwell(H, kernel, blocks, asked):
    """A bound, and a close one."""
    estimate = plan.shared_memory(kernel, blocks, SIZES._replace(H=H, Hv=H), 100)
    assert asked <= estimate <= asked + 2048


def test_nearest_is_of_the_same_kind():
    """The mask, groups and features outweigh lengths that differ little, and lengths that differ much outweigh them."""
    base = SIZES._replace(mask="full", T=8192, S=8192)
    found = {
        "full": base,
        "causal": base._replace(mask="causal"),
        "short": base._replace(T=512, S=512),
        "grouped": base._replace(G=8),
        "biased": base._replace(features=("add_bias",), read=2),
        "h80": base._replace(H=80, Hv=80),
        "h64": base._replace(H=64, Hv=64),
        "tf32": base._replace(dots="tf32"),
    }
    names = {record(sizes): name for name, sizes in found.items()}

    def nearest(**changes):
        return names[table(*names).nearest("triton", "forward", base._replace(**changes))]

    assert nearest() == "full"
    assert nearest(T=4096, S=4096) == "full"
    assert nearest(T=300, S=300) == "short"
    assert nearest(mask="causal 5 segments") == "causal"
    assert nearest(mask="window -1023 0") == "full"
    assert nearest(mask="causal", T=2048, S=2048) == "causal"
    assert nearest(mask="causal", T=512, S=512) == "short"
    assert nearest(G=4) == "grouped"
    assert nearest(features=("alibi",), read=2) == "biased"
    assert nearest(H=96, Hv=72) == "h80"
    assert nearest(H=32, Hv=16) == "h64"
    assert nearest(dots="tf32", mask="causal") == "tf32"
    assert table(*names).nearest("triton", "forward", base._replace(H=256)) is None
    assert table(*names).nearest("triton", "dq", base) is None


# What the choice depends on.


CALLS = {
    "full": {},
    "causal": {"is_causal": True},
    "causal 5": {"is_causal": True, "query_offset": 5},
    "causal moved": {"is_causal": True, "query_offset": jnp.int32(5)},
    "window -3 2": {"local_window_size": (3, 2)},
    "window -3 0": {"local_window_size": (3, 2), "is_causal": True},
    "window -3 None": {"local_window_size": (3, None)},
    "full lengths": {"key_value_seq_lengths": np.array([3, 4])},
    "full dense": {"mask": np.ones((8, 8), bool)},
    "causal modified segments": {
        "is_causal": True,
        "mask_modifiers": (lambda tile: tile.q_ids > 1,),
        "query_segment_ids": np.zeros((2, 8), int),
        "key_value_segment_ids": np.zeros((2, 8), int),
    },
}


def sizes_of(shape=(2, 8, 4, 16), kv_heads=2, **options):
    """What the choice depends on."""
    query, key = (jax.ShapeDtypeStruct((*shape[:2], n, shape[3]), "float32") for n in (shape[2], kv_heads))
    return choice.sizes(api.problem_of(query, key, key, **options)[0], "tf32")


@pytest.mark.parametrize("described", CALLS)
def test_masks_are_described(described):
    assert sizes_of(**CALLS[described]).mask == described


def test_features_are_named():
    def modify(score, tile):
        return score

    found = sizes_of(
        bias=np.zeros((8, 8), np.float32), alibi_slopes=np.zeros(4), logits_scale=np.ones(4), logits_soft_cap=3.0,
        sinks=np.zeros(4, np.float32), dropout_rate=0.1, dropout_key=jax.random.key(0), deterministic=True,
        score_modifiers=(modify,), scale=jnp.float32(1),
    )  # fmt: skip
    expected = "add_bias alibi deterministic dropout modifier sinks softcap times traced scale"
    assert " ".join(found.features) == expected
    assert found._replace(features=(), read=0) == sizes_of()
    assert found.read == 4
    assert sizes_of() == Sizes(8, 8, 16, 16, "tf32", G=2, heads=8)


# Users' files.


def test_a_file_round_trips(tmp_path):
    """And a later record of the same key takes the place of an earlier one."""
    path = tmp_path / "plans.json"
    found = [
        record(),
        record(SIZES._replace(features=("alibi", "sinks"), read=3, G=4)),
        record(implementation="mosaic_gpu", kernel="backward", blocks=MosaicBlocks(64, 128), ms=None),
    ]
    records.add(path, found)
    assert set(records.read(path).records) == set(found)
    replaced = dataclasses.replace(found[0], blocks=Blocks(32, 32), ms=0.5)
    records.add(path, [replaced])
    assert set(records.read(path).records) == {replaced, *found[1:]}


KEYS = {
    "another device": {"device": "NVIDIA H100 80GB HBM3"},
    "another version of jax": {"jax": "0.10.0"},
    "another version of ours": {"pallas_flash": "0.0.9"},
    "another kernel": {"kernel": "dq"},
    "another length": {"sizes": SIZES._replace(T=4095)},
    "another mask": {"sizes": SIZES._replace(mask="causal 1")},
    "groups": {"sizes": SIZES._replace(G=2)},
    "other dots": {"sizes": SIZES._replace(dots="tf32")},
    "a bias": {"sizes": SIZES._replace(features=("add_bias",), read=2)},
}


@pytest.mark.parametrize("change", KEYS)
def test_what_was_measured_otherwise_is_not_taken(change):
    measured = chosen(cache=table(record()))
    assert (measured.plan.forward, measured.origins["forward"]) == (OTHER, "autotune (file)")
    assert measured.origins["dq"] == "the tuned table nvidia-h200.json"
    assert chosen(cache=table(record(**KEYS[change]))).plan.forward == chosen().plan.forward != OTHER


def test_the_nearest_number_of_heads_is_taken():
    """Batches and meshes change it."""
    few, many = (record(SIZES._replace(heads=n), Blocks(64, 64, w)) for n, w in ((4, 4), (4096, 8)))
    found = [chosen(SIZES._replace(heads=n), cache=table(few, many)).plan.forward for n in (1, 16, 1024)]
    assert found == [few.blocks, few.blocks, many.blocks]


def test_a_record_that_does_not_fit_is_not_taken():
    assert chosen(cache=table(record(blocks=Blocks(128, 128, 8, 8)))).plan == chosen().plan


def test_dispatch_takes_users_records(cache):
    """As soon as the file says so; another problem is not touched."""
    with on("NVIDIA H200"):
        before = explain(*shapes(), is_causal=True, implementation="triton")
        records.add(cache, [record()])
        after = explain(*shapes(), is_causal=True, implementation="triton")
        half = explain(*shapes(B=1), is_causal=True, implementation="triton")
        other = explain(*shapes(), implementation="triton")
        records.add(cache, [record(blocks=Blocks(64, 64, 8, 1))])
        again = explain(*shapes(), is_causal=True, implementation="triton")
    assert after.plan == half.plan == dataclasses.replace(before.plan, forward=OTHER)
    assert after.origins["forward"] == f"autotune ({cache})"
    assert f"forward from autotune ({cache})\n" in str(after) and "dq, dkv from the tuned table" in str(after)
    assert other.origins["forward"] == "the tuned table nvidia-h200.json"
    assert again.plan.forward == Blocks(64, 64, 8, 1)


@pytest.mark.parametrize(
    "times,best", [((1.0, 2.0), "mosaic_gpu"), ((2.0, 1.0), "triton"), ((2.0, None), "mosaic_gpu")]
)
def test_the_faster_implementation_is_taken(cache, times, best):
    """Where both were measured, forward and backward."""
    plans = {"mosaic_gpu": MosaicBlocks(64, 128), "triton": Blocks(64, 64)}
    for (name, blocks), ms in zip(plans.items(), times, strict=True):
        kernels = ("forward", "backward") if name == "mosaic_gpu" else ("forward", "dq", "dkv")
        records.add(cache, [record(implementation=name, kernel=k, blocks=blocks, ms=ms) for k in kernels])
    with on("NVIDIA H200"):
        found = explain(*shapes(), is_causal=True)
        named = explain(*shapes(), is_causal=True, implementation="mosaic_gpu")
    assert (found.implementation, named.implementation) == (best, "mosaic_gpu")
    assert ("it takes 4 ms and triton 3;" in found.refusals.get("mosaic_gpu", "")) == (best == "triton")


def test_interpreted_kernels_take_users_records(cache):
    """And a jitted function keeps the plan that it was traced with."""
    q = jnp.ones((1, 40, 2, 16))
    attend = jax.jit(lambda q: flash_attention(q, q, q, interpret=True))

    def grids(function):
        return [e.params["grid_mapping"].grid for e in _calls(function.trace(q).jaxpr)]

    before = grids(attend)
    sizes = Sizes(40, 40, 16, 16, "tf32", heads=2)
    records.add(cache, [record(sizes, Blocks(16, 16), device="interpreter")])
    assert grids(attend) == before
    assert grids(jax.jit(lambda q: flash_attention(q, q, q, interpret=True))) == [(1, 3, 2)] != before


def _calls(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        for inner in jax.tree.leaves([*equation.params.values()]):
            if hasattr(inner, "eqns"):
                yield from _calls(inner)


ROW = record().row()
FOREIGN = {
    "nothing": "",
    "no json": "{",
    "a list": "[]",
    "another format": json.dumps({"format": "pallas_flash plans 0", "plans": []}),
    "no plans": json.dumps({"format": records.FORMAT}),
    **{
        name: json.dumps({"format": records.FORMAT, "plans": [ROW | change]})
        for name, change in {
            "an unknown implementation": {"implementation": "cuda"},
            "an unknown field": {"speed": 3},
            "blocks of another kind": {"implementation": "mosaic_gpu"},
            "blocks out of range": {"blocks": ROW["blocks"] | {"block_q": 17}},
            "a size that is none": {"sizes": ROW["sizes"] | {"T": "4096"}},
            "a negative size": {"sizes": ROW["sizes"] | {"T": -1}},
            "a device that is none": {"device": 3},
            "a negative time": {"ms": -1.0},
        }.items()
    },
    "not UTF-8": "{}",
}


@pytest.mark.parametrize("content", FOREIGN)
def test_foreign_files_are_refused(cache, content):
    """With the remedy where the user named the file, also by whoever would write to it; it stays as it is."""
    cache.parent.mkdir()
    written = FOREIGN[content].encode("utf-16" if content == "not UTF-8" else "utf-8")
    cache.write_bytes(written)
    expected = rf"^{cache}: expected a file that pallas_flash\.autotune wrote, got .*; delete it and tune again, or"
    with on("NVIDIA H200"), pytest.raises(ValueError, match=f"{expected} name .* PALLAS_FLASH_CACHE$"):
        explain(*shapes())
    with pytest.raises(ValueError, match=expected):
        records.add(cache, [record()])
    assert cache.read_bytes() == written and len(list(cache.parent.iterdir())) == 2


def test_a_folder_is_no_file(cache):
    cache.mkdir(parents=True)
    with on("NVIDIA H200"), pytest.raises(ValueError, match=r"got something else .*IsADirectoryError"):
        explain(*shapes())


def test_a_foreign_file_in_the_cache_folder_is_ignored(tmp_path, monkeypatch):
    """With a warning, once."""
    monkeypatch.delenv("PALLAS_FLASH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "pallas_flash" / "plans.json"
    assert records.users_path() == path and records.users() is None
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.warns(UserWarning, match=rf"^tuned plans are ignored: {path}: expected .*; delete it and tune again"):
        assert records.users() is None
    assert records.users() is None
    monkeypatch.setenv("PALLAS_FLASH_CACHE", str(path))
    with pytest.raises(ValueError, match="JSONDecodeError"):
        records.users()


def test_the_cache_folder_is_that_of_the_user(monkeypatch):
    for name in ("PALLAS_FLASH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(records.users_path()) == "/home/someone/.cache/pallas_flash/plans.json"


WRITER = """
import sys
from pallas_flash import records
from test_plans import SIZES, record
for i in range(20):
    records.add(records.users_path(), [record(SIZES._replace(T=1000 * int(sys.argv[1]) + i))])
"""


def test_several_processes_write_at_once(cache):
    """Nothing is lost, and who reads meanwhile sees a whole file."""
    places = [str(ROOT), str(ROOT / "tests")]
    code = f"import sys; sys.path[:0] = {places}\n{WRITER}"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(n)]) for n in (1, 2, 3)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        seen.add(len(found.records) if (found := records.users()) else 0)
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    lengths = {each.sizes.T for each in records.users().records}
    assert lengths == {1000 * n + i for n in (1, 2, 3) for i in range(20)} and max(seen) <= 60
    assert {path.name for path in cache.parent.iterdir()} == {"plans.json", "plans.json.lock"}
