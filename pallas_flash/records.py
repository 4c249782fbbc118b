"""What was measured? Files of the fastest blocks: the tables that come with the library, and those of users."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from pallas_flash.families import FAMILIES
from pallas_flash.plan import AnyBlocks, Sizes
from pallas_flash.version import __version__

FORMAT = "pallas_flash plans 1"
"""What a file calls its own format."""

VARIABLE = "PALLAS_FLASH_CACHE"
"""Environment variable that names the file of users' records."""

REFERENCE = "NVIDIA H200"
"""The device whose table is complete, and serves others as far as it fits them."""

TUNED = pathlib.Path(__file__).with_name("tuned")


@dataclasses.dataclass(frozen=True)
class Record:
    """The fastest blocks that were found for a kernel.

    Attributes:
        device: `device_kind` of the GPU, as JAX calls it.
        jax, pallas_flash: Versions.
        implementation, kernel: What it is of.
        sizes: Of the problem.
        blocks: The fastest.
        ms: Their time, milliseconds; None: not kept.
    """

    device: str
    jax: str
    pallas_flash: str
    implementation: str
    kernel: str
    sizes: Sizes
    blocks: AnyBlocks
    ms: float | None = None

    @classmethod
    def now(cls, device: str, implementation: str, kernel: str, sizes: Sizes, blocks, ms: float | None) -> "Record":
        """Of the versions that run."""
        return cls(device, jax.__version__, __version__, implementation, kernel, sizes, blocks, ms)

    @property
    def key(self) -> tuple:
        """Of two records with the same key, the later replaces the earlier."""
        return self.device, self.jax, self.pallas_flash, self.implementation, self.kernel, self.sizes

    def applies(self, device: str, implementation: str, kernel: str, sizes: Sizes) -> bool:
        """Whether it was measured on such a device with the versions that run, for the problem but its heads.

        Batches and meshes change how many heads there are, and the best blocks hardly.
        """
        ours = Record.now(device, implementation, kernel, sizes._replace(heads=self.sizes.heads), self.blocks, None)
        return self.key == ours.key

    def row(self) -> dict[str, Any]:
        """For JSON."""
        found = {name: x for name, x in vars(self).items() if x is not None}
        defaults = Sizes._field_defaults
        sizes = {name: x for name, x in self.sizes._asdict().items() if name not in defaults or x != defaults[name]}
        return {**found, "sizes": sizes, "blocks": dataclasses.asdict(self.blocks)}

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> "Record":
        """Of `row`. Raises a KeyError, TypeError or ValueError if it is none."""
        sizes, blocks = Sizes(**row["sizes"]), FAMILIES[row["implementation"]].blocks(**row["blocks"])
        found = cls(**{**row, "sizes": sizes._replace(features=tuple(sizes.features)), "blocks": blocks})
        texts = (found.device, found.jax, found.pallas_flash, found.kernel, found.sizes.dots, found.sizes.mask)
        numbers = [x for x in found.sizes if isinstance(x, int)]
        if not all(isinstance(x, str) for x in (*texts, *found.sizes.features)) or len(numbers) != 7:
            raise TypeError("a name is no string, or a size no integer")
        if min(numbers) < 0 or not (found.ms is None or (isinstance(found.ms, int | float) and found.ms > 0)):
            raise ValueError("a size or a time is negative")
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """The records of a file; equal to itself alone, so that what depends on it can be cached.

    Attributes:
        records: What is in it.
        name: Of the file, to tell where a plan comes from.
    """

    records: tuple[Record, ...]
    name: str

    def exact(self, device: str, implementation: str, kernel: str, sizes: Sizes) -> Record | None:
        """What was measured for the problem; among several numbers of heads, for the nearest."""
        found = [each for each in self.records if each.applies(device, implementation, kernel, sizes)]
        return min(found, key=lambda each: _ratio(each.sizes.heads, sizes.heads), default=None)

    def nearest(self, implementation: str, kernel: str, sizes: Sizes) -> Record | None:
        """What was measured for the most similar problem with tiles of the same width, with whatever versions."""
        family = FAMILIES[implementation]

        def traits(x: Sizes) -> tuple:
            return x.dots, family.width(max(x.H, x.Hv))

        kinds = [each for each in self.records if (each.implementation, each.kernel) == (implementation, kernel)]
        found = [each for each in kinds if traits(each.sizes) == traits(sizes)]
        return min(found, key=lambda each: _distance(each.sizes, sizes), default=None)


def _distance(measured: Sizes, asked: Sizes) -> float:
    """How far problems are apart, in doublings of the lengths.

    Where what was measured has the same kind of mask, groups or features, its lengths may be so many times others.
    """
    kind, wanted = (x.mask.split()[0] for x in (measured, asked))
    mask = 0 if kind == wanted else 2 if kind == "full" else 3
    features = 2 * (measured.features != asked.features) + (measured.read != asked.read)
    lengths = max(_ratio(measured.T, asked.T), _ratio(measured.S, asked.S))
    widths = _ratio(measured.H, asked.H) + _ratio(measured.Hv, asked.Hv)
    grouped = (measured.G > 1) != (asked.G > 1)
    return mask + features + 2 * grouped + lengths + 4 * widths + 0.1 * _ratio(measured.heads, asked.heads)


def _ratio(a: int, b: int) -> float:
    """How many doublings lie between two sizes."""
    return abs(math.log2(max(a, 1) / max(b, 1)))


def read(path: pathlib.Path) -> Table:
    """The table of a file.

    Raises:
        ValueError: It holds something else, or cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"no {FORMAT!r} as its format")
        return Table(tuple(map(Record.of_row, content["plans"])), str(path))
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise ValueError(
            f"{path}: expected a file that pallas_flash.autotune wrote, got something else ({error!r}); delete it and "
            f"tune again, or name another file in the environment variable {VARIABLE}"
        ) from error


def add(path: pathlib.Path, records: Iterable[Record]) -> None:
    """Adds records to a file, in the place of those with the same key. Safe for several processes at once.

    Raises:
        ValueError: As of `read`.
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        kept = {each.key: each for each in (*(read(path).records if path.exists() else ()), *records)}
        rows = ",\n  ".join(json.dumps(kept[key].row(), ensure_ascii=False) for key in sorted(kept))
        text = f'{{\n "format": {json.dumps(FORMAT)},\n "plans": [\n  {rows}\n ]\n}}\n'
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)  # whoever reads meanwhile sees the old file or the new one


def merge_plans(into: str | os.PathLike, *sources: str | os.PathLike) -> None:
    """Adds the plans of files that `autotune` wrote to another, which is made if need be.

    Of plans for the same device, versions and problem, those of the last source stay.

    Args:
        into: The file to add to: one to ship with a project, or a table of the library (`pallas_flash/tuned`).
        sources: The files to read.

    Raises:
        ValueError: One of them holds something else, or a source is missing.
        OSError: The file cannot be written.
    """
    add(pathlib.Path(into), [each for source in sources for each in read(pathlib.Path(source)).records])


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """One process at a time, by a file beside `path`."""
    import fcntl  # no system that CUDA is for comes without it, but JAX runs on one that does

    with open(f"{path}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def shipped(device: str) -> Table | None:
    """The table that comes with the library for this kind of device."""
    path = TUNED / f"{slug(device)}.json"
    return dataclasses.replace(read(path), name=path.name) if path.exists() else None


def slug(device: str) -> str:
    """Its name as that of a file: "NVIDIA H200" → "nvidia-h200"."""
    return re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")


def users_path() -> pathlib.Path:
    """Where users' records are: the file that the environment variable names, or one in their cache folder."""
    return pathlib.Path(_users_path())


def _users_path() -> str:  # a string, for every call asks
    if named := os.environ.get(VARIABLE):
        return named
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "pallas_flash/plans.json")


def users() -> Table | None:
    """Users' records as the file is now; None: there is none.

    Raises:
        ValueError: The file is none of records, and the environment variable names it. The one in the cache folder is
            ignored then, with a warning.
    """
    path = _users_path()
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return _read_once(path, (stat.st_ino, stat.st_mtime_ns, stat.st_size), named=bool(os.environ.get(VARIABLE)))


@functools.lru_cache(maxsize=8)
def _read_once(path: str, state: tuple[int, ...], named: bool) -> Table | None:
    del state
    try:
        return read(pathlib.Path(path))
    except ValueError as error:
        if named:
            raise
        warnings.warn(f"tuned plans are ignored: {error}", stacklevel=2)
        return None
