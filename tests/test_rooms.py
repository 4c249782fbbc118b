"""Each file imports only from rooms below it (design.md, section 3), names no foreign compiler, and stays short."""

import ast
import importlib.util
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LIBRARY = "pallas_flash"

TRITON = [
    "cells",
    "kernels.clean",
    "kernels.grid",
    "kernels.triton.launch",
    "lists",
    "masks",
    "plan",
    "problem",
    "softmax",
    "weights",
]
MOSAIC = [
    "cells",
    "kernels.grid",
    "kernels.mosaic_gpu.launch",
    "kernels.mosaic_gpu.pipeline",
    "kernels.mosaic_gpu.where",
    "lists",
    "plan",
    "problem",
    "softmax",
    "weights",
]
MAY_IMPORT = {
    "elementary": [],
    "tile": ["elementary"],
    "varying": [],
    "cells": [],
    "masks": ["cells", "tile"],
    "patterns": ["cells", "masks", "tile", "varying"],
    "survey": ["cells", "masks", "patterns"],
    "softmax": ["elementary"],
    "score": ["elementary", "softmax", "tile"],
    "dropout": ["elementary", "tile"],
    "modifiers": [],
    "arguments": ["modifiers"],
    "position": ["arguments"],
    "logits": ["arguments", "dropout", "modifiers", "score", "tile"],
    "version": [],
    "plan": [],
    "families": ["plan"],
    "records": ["families", "plan", "version"],
    "choice": ["families", "masks", "plan", "problem", "records"],
    "problem": ["arguments", "cells", "logits", "masks", "modifiers", "patterns", "plan", "survey", "tile"],
    "lists": ["cells", "masks", "patterns", "problem"],
    "weights": ["masks", "problem", "score", "softmax", "tile"],
    "xla": ["cells", "lists", "masks", "patterns", "softmax", "problem", "score", "tile", "varying"],
    "kernels": [],
    "kernels.clean": ["lists", "problem"],
    "kernels.device": ["choice", "problem"],
    "kernels.grid": ["masks"],
    "kernels.triton.launch": [
        "cells",
        "choice",
        "elementary",
        "kernels.device",
        "kernels.grid",
        "lists",
        "masks",
        "plan",
        "problem",
        "tile",
        "varying",
    ],
    "kernels.triton.forward": TRITON,
    "kernels.triton.backward": TRITON,
    "kernels.triton.d_score": [*(room for room in TRITON if room != "masks"), "score"],
    "kernels.triton": [
        "kernels.triton.launch",
        "kernels.triton.forward",
        "kernels.triton.backward",
        "kernels.triton.d_score",
    ],
    "kernels.mosaic_gpu.ptx": [],
    "kernels.mosaic_gpu.primitives": ["masks", "patterns", "problem", "score", "tile"],
    "kernels.mosaic_gpu.operands": [
        "choice",
        "kernels.device",
        "kernels.mosaic_gpu.primitives",
        "plan",
        "problem",
        "softmax",
    ],
    "kernels.mosaic_gpu.pipeline": ["kernels.mosaic_gpu.ptx", "kernels.grid", "lists", "masks", "problem"],
    "kernels.mosaic_gpu.where": [
        "elementary",
        "kernels.mosaic_gpu.pipeline",
        "kernels.mosaic_gpu.ptx",
        "problem",
        "tile",
    ],
    "kernels.mosaic_gpu.launch": [
        "kernels.grid",
        "kernels.mosaic_gpu.pipeline",
        "lists",
        "masks",
        "plan",
        "problem",
        "varying",
    ],
    "kernels.mosaic_gpu.forward": [*MOSAIC, "kernels.clean", "kernels.mosaic_gpu.operands"],
    "kernels.mosaic_gpu.backward_together": MOSAIC,
    "kernels.mosaic_gpu.backward_alone": MOSAIC,
    "kernels.mosaic_gpu.backward": [
        "kernels.clean",
        "kernels.mosaic_gpu.backward_alone",
        "kernels.mosaic_gpu.backward_together",
        "kernels.mosaic_gpu.operands",
        "kernels.mosaic_gpu.pipeline",
        "problem",
        "softmax",
    ],
    "kernels.mosaic_gpu": [
        "kernels.mosaic_gpu.backward",
        "kernels.mosaic_gpu.forward",
        "kernels.mosaic_gpu.launch",
        "kernels.mosaic_gpu.operands",
    ],
    "dispatch": ["choice", "plan", "problem"],
    "split": ["problem"],
    "partitioning": ["dispatch", "patterns", "problem", "score", "split", "tile", "varying"],
    "vjp": ["dispatch", "partitioning", "problem", "softmax"],
    "api": ["arguments", "dispatch", "logits", "modifiers", "plan", "problem", "split", "survey", "tile", "vjp"],
    "search": ["choice", "dispatch", "families", "plan", "problem"],
    "autotune": ["api", "arguments", "choice", "dispatch", "families", "plan", "problem", "records", "search"],
    "varlen": ["arguments", "dispatch", "modifiers", "patterns", "problem", "vjp"],
    "export": ["dispatch"],
    "testing": ["", "api", "softmax"],
    "": [
        "api",
        "autotune",
        "dispatch",
        "export",
        "modifiers",
        "plan",
        "position",
        "records",
        "search",
        "softmax",
        "survey",
        "varlen",
        "version",
        "vjp",
    ],
}
"""Room → rooms whose modules it may import; "" is the package itself, its public names. A file without a row fails."""

LAYERS_MAY_IMPORT = {
    "": [],
    "rope": [],
    "cache": [],
    "attention_fn": [],
    "attend": ["cache", "rope"],
    "linen": ["attend", "attention_fn", "cache", "rope"],
    "nnx": ["attend", "attention_fn", "cache", "rope"],
}
"""The same for the rooms of flax_layers, beside the public names of the library; neither API knows the other."""

MAY_LOAD = {"dispatch": ["kernels.mosaic_gpu", "kernels.triton", "xla"]}
"""Room → rooms that it imports by name when first used."""

PIPELINE, PTX = "kernels.mosaic_gpu.pipeline", "kernels.mosaic_gpu.ptx"
INTERNALS = {
    "jax._src": ["kernels.mosaic_gpu.primitives", "kernels.triton.launch"],
    "jax.experimental.pallas.triton": ["kernels.device", "kernels.triton.launch"],
    "jax.experimental.pallas.mosaic_gpu": [
        PIPELINE,
        "kernels.mosaic_gpu.launch",
        PTX,
        "kernels.mosaic_gpu.where",
        "kernels.mosaic_gpu.forward",
        "kernels.mosaic_gpu.backward_together",
        "kernels.mosaic_gpu.backward_alone",
    ],
    "jax.experimental.mosaic": [PTX],
    "jaxlib": [PTX],
}
"""Modules below the public API of JAX → the rooms that use them."""

SYNCHRONISATION = {"Barrier", "ClusterBarrier", "barrier_arrive", "barrier_wait", "set_max_registers", "inline_mgpu"}
"""What only the pipeline and its PTX name; named barriers are inline PTX, for which there is no other way."""

NAMES_COMPILERS = {"dispatch", "problem", "api", "plan", "families", ""}
"""Rooms outside kernels/ that name implementations."""


def room(path: pathlib.Path) -> str:
    """`pallas_flash/kernels/triton/launch.py` → `kernels.triton.launch`; a package's `__init__.py` has its name."""
    parts = path.relative_to(ROOT / LIBRARY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {room(path): path for path in sorted((ROOT / LIBRARY).rglob("*.py"))}
LAYERS = sorted((ROOT / "flax_layers").rglob("*.py"))
every_room = pytest.mark.parametrize("name", FILES)


def parse(path: pathlib.Path) -> ast.Module:
    """The file without its docstrings, those of attributes included; comments are no part of a tree."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, field, None), list):
                setattr(node, field, [s for s in statements if not _is_text(s)])
    return tree


def _is_text(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def is_module(name: str) -> bool:
    """Whether a dotted name below the library or jax is a module, rather than something inside one."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def imports(path: pathlib.Path) -> Iterator[str]:
    """Full names of the modules that a file imports anything from, wherever in it."""
    package = [*path.relative_to(ROOT).parent.parts]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield full if is_module(full) else source


def loads(path: pathlib.Path) -> Iterator[str]:
    """Names of the library's modules inside strings, with which they can be imported later."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{LIBRARY}."):
            yield node.value


def words(path: pathlib.Path) -> Iterator[str]:
    """Every identifier, imported name and string of a file's code."""
    for node in ast.walk(parse(path)):
        for _, value in ast.iter_fields(node):
            yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str))


def attributes(path: pathlib.Path, module: str) -> set[str]:
    """What a file uses of a module, known by the last part of its name, that it imports."""
    tree = parse(path)
    aliases = [
        alias for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    ]
    names = {alias.asname or alias.name for alias in aliases if alias.name.split(".")[-1] == module}
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
    }


def inner(modules: Iterator[str], package: str = LIBRARY) -> set[str]:
    """The package's rooms among modules."""
    return {m.removeprefix(package).removeprefix(".") for m in modules if m == package or m.startswith(f"{package}.")}


@every_room
def test_imports_only_rooms_below(name):
    assert name in MAY_IMPORT, f"{name} has no row in the table of rooms; say there what it may import"
    assert inner(imports(FILES[name])) <= set(MAY_IMPORT[name])
    assert inner(loads(FILES[name])) <= set(MAY_LOAD.get(name, []))


def test_rooms_are_in_an_order():
    """No room leads back to itself; `testing` stands on top of the package, which does not know it."""
    below, left = {"dispatch": MAY_LOAD["dispatch"]}, dict(MAY_IMPORT)
    while left:
        lowest = [r for r, above in left.items() if not {*above, *below.get(r, [])} & left.keys()]
        assert lowest, f"each of these needs another: {sorted(left)}"
        for name in lowest:
            del left[name]


@pytest.mark.parametrize("path", LAYERS, ids=lambda path: path.stem)
def test_layers_import_layers_below(path):
    name = "" if path.stem == "__init__" else path.stem
    assert name in LAYERS_MAY_IMPORT, f"{name} has no row in the table of layers; say there what it may import"
    assert inner(imports(path), "flax_layers") <= {*LAYERS_MAY_IMPORT[name]}


@pytest.mark.parametrize("path", LAYERS, ids=lambda path: path.stem)
def test_layers_import_public_names_only(path):
    public = {"", *(["testing"] if path.stem == "testing" else [])}
    assert inner(imports(path)) <= public
    assert not [word for word in words(path) if "jax._src" in word or word == "_src"]
    for node in ast.walk(parse(path)):  # also not as an attribute of the package
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == LIBRARY:
            assert node.attr not in MAY_IMPORT


@every_room
@pytest.mark.parametrize("module", INTERNALS)
def test_only_the_launch_layers_reach_into_jax(name, module):
    found = {m for m in [*imports(FILES[name]), *words(FILES[name])] if f"{m}.".startswith(f"{module}.")}
    if module == "jax._src":
        found |= {word for word in words(FILES[name]) if word == "_src"}
    assert bool(found) == (name in INTERNALS[module]), found


@every_room
def test_only_the_pipeline_synchronises(name):
    """The kernels beside it take from Mosaic its matrix products alone; no barriers, copies or layouts."""
    if name not in (PIPELINE, PTX):
        assert not SYNCHRONISATION & set(words(FILES[name]))
        used = attributes(FILES[name], "mosaic_gpu")
        launches = {"kernel", "CompilerParams"} if name == "kernels.mosaic_gpu.launch" else set()
        reads = {"load", "layout_cast"} if name == "kernels.mosaic_gpu.where" else set()
        assert all(attribute.startswith("wgmma") for attribute in used - launches - reads)


@every_room
def test_kernels_name_no_feature_of_scores(name):
    """They see a `Score`, whatever its terms are: another one touches none of them."""
    features = {
        "logits_scale",
        "times",
        "bias",
        "add_bias",
        "Alibi",
        "alibi_slopes",
        "SoftCap",
        "logits_soft_cap",
        "score_modifiers",
    }
    if name.startswith("kernels"):
        assert not features & set(words(FILES[name]))
    assert name != "score" or features & set(words(FILES[name]))


@every_room
def test_no_room_but_the_kernels_names_a_compiler(name):
    named = {word for word in words(FILES[name]) if "triton" in word.lower() or "mosaic" in word.lower()}
    assert name.startswith("kernels") or name in NAMES_COMPILERS or not named


@pytest.mark.parametrize("path", [*FILES.values(), *LAYERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= 400


def functions(tree: ast.AST, prefix: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith(prefix)]


def length(function: ast.FunctionDef) -> int:
    return function.end_lineno - function.lineno + 1


SHARED_STEP = {"flash_d_rows", "flash_d_columns", "flash_d_cells"}
"""Kernels of one file whose step is made by its `_step`."""


@pytest.mark.parametrize(
    ("family", "names", "longest", "longest_step"),
    [
        ("triton", {"flash_forward", "flash_dq", "flash_dkv"} | SHARED_STEP, 60, 16),
        ("mosaic_gpu", {"flash_forward", "flash_backward", "flash_alone"}, 100, 32),
    ],
)
def test_kernels_are_short(family, names, longest, longest_step):
    """A Mosaic kernel is two programs: a producer, and a consumer whose step overlaps what is written one by one.

    The step that kernels of one file share, loads and derivative in one, is as long as two.
    """
    rooms = [path for name, path in FILES.items() if name.startswith(f"kernels.{family}")]
    bodies = [body for path in rooms for body in functions(parse(path), "flash_")]
    shared = [maker for path in rooms for maker in functions(parse(path), "_step")]
    assert {body.name for body in bodies} == names
    assert all(length(maker) <= 2 * longest_step for maker in shared)
    for body in bodies:
        assert length(body) <= longest, body.name
        steps = functions(body, "step")
        assert steps or (shared and body.name in SHARED_STEP), f"{body.name} has no step"
        assert all(length(step) <= longest_step for step in steps), body.name
        roles = {role.name for role in functions(body, "produce") + functions(body, "consume")}
        assert roles == ({"produce", "consume"} if family == "mosaic_gpu" else set())


def test_what_these_tests_read(tmp_path, monkeypatch):
    """The reader itself finds imports and words of every form, and no docstrings."""
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    path = tmp_path / LIBRARY / "kernels" / "probe.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        '"""prose"""\nfrom pallas_flash import masks, merge\nfrom ..plan import Plan\nfrom . import triton\n'
        "import pallas_flash.vjp as gradient\nfrom jax.experimental.pallas import triton as plt\n"
        "import jax.experimental.pallas.mosaic_gpu as plgpu\nplgpu.wgmma(plt.load)\n"
        "def f():\n    '''prose'''\n    import jax._src.core\n    return jax._src.x, 'pallas_flash.api'  # prose\n"
        'X = 1\n"""prose"""\n'
    )
    assert inner(imports(path)) == {"masks", "", "plan", "kernels.triton", "vjp"}
    assert {"jax.experimental.pallas.triton", "jax._src.core"} <= set(imports(path))
    assert (attributes(path, "mosaic_gpu"), attributes(path, "triton")) == ({"wgmma"}, {"load"})
    assert list(loads(path)) == ["pallas_flash.api"]
    assert {"Plan", "gradient", "plt", "_src", "x", "pallas_flash.api", "X"} <= set(words(path))
    assert "prose" not in " ".join(words(path))
