"""Which plan, and from where? The user's own, else for each kernel the fastest blocks that were measured and fit."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from pallas_flash import records
from pallas_flash.families import FAMILIES, Family
from pallas_flash.masks import Band, Both, Lengths, Mask
from pallas_flash.plan import Sizes
from pallas_flash.problem import Problem
from pallas_flash.records import Table


class Device(NamedTuple):
    """A GPU: its name as JAX calls it, and its compute capability (90 for 9.0)."""

    kind: str
    capability: int


class Choice(NamedTuple):
    """A plan.

    Attributes:
        plan: That of the implementation: blocks of each kernel.
        origins: Kernel → where its blocks come from.
        sizes: What it depends on.
        device: What it is for.
        ms: Of all kernels that a call launches, forward and backward, as autotuning measured them; None: it did not.
    """

    plan: Any
    origins: Mapping[str, str]
    sizes: Sizes
    device: Device
    ms: float | None = None


def of(implementation: str, problem: Problem, device: Device, dots: str) -> Choice:
    """The plan of a problem on a device, with dots computed as of `Sizes`."""
    found = sizes(problem, dots)
    if isinstance(problem.plan, FAMILIES[implementation].plan):
        return Choice(problem.plan, dict.fromkeys(problem.plan.kernels, "the argument plan"), found, device)
    tuned = records.shipped(device.kind), records.shipped(records.REFERENCE)
    return choose(implementation, found, device, records.users(), tuned)


@functools.lru_cache(maxsize=1024)
def choose(
    implementation: str, sizes: Sizes, device: Device, cache: Table | None, tuned: tuple[Table | None, Table | None]
) -> Choice:
    """The plan of measured blocks: of users' `cache`, of the device's own table, of the reference device's.

    Where these do not fit, or what was measured elsewhere would spill, smaller ones are taken; if none does, the
    smallest, of which kernels say what it lacks.
    """
    family = FAMILIES[implementation]
    chosen: dict[str, _Option] = {}
    for kernel in family.plan.__dataclass_fields__:
        options = [x.fitted(family, kernel, sizes) for x in _options(family, kernel, sizes, device, cache, tuned)]
        good = [x for x in options if x.is_good(family, kernel, sizes, device.capability)]
        chosen[kernel] = (*good, *options[-1:], _Option(None, ""))[0]
    plan = family.plan(**{kernel: option.blocks for kernel, option in chosen.items()})
    times = [ms for kernel in plan.kernels if (ms := chosen[kernel].ms) is not None]
    total = sum(times) if len(times) == len(plan.kernels) else None
    return Choice(plan, {kernel: chosen[kernel].origin for kernel in plan.kernels}, sizes, device, total)


class _Option(NamedTuple):
    """Blocks, where they come from, whether they ran on this device, and their time."""

    blocks: Any
    origin: str
    ran_here: bool = False
    ms: float | None = None

    def fitted(self, family: Family, kernel: str, sizes: Sizes) -> "_Option":
        """No larger than the sequences need."""
        return self._replace(blocks=family.fitted(kernel, self.blocks, sizes))

    def is_good(self, family: Family, kernel: str, sizes: Sizes, capability: int) -> bool:
        """Whether it fits, and does not spill where that is not known."""
        call = kernel, self.blocks, sizes, capability
        return family.fits(*call) and (self.ran_here or not family.spills(*call))


def _options(
    family: Family, kernel: str, sizes: Sizes, device: Device, cache: Table | None,
    tuned: tuple[Table | None, Table | None],
) -> list[_Option]:  # fmt: skip
    """Best first."""
    options = []
    if cache and (found := cache.exact(device.kind, family.name, kernel, sizes)):
        options.append(_Option(found.blocks, f"autotune ({cache.name})", True, found.ms))
    own, reference = tuned
    if own and (found := own.nearest(family.name, kernel, sizes)):
        options.append(_Option(found.blocks, f"the tuned table {own.name}", True))
    elif reference and (found := reference.nearest(family.name, kernel, sizes)):
        options.append(_Option(found.blocks, f"a heuristic (as on an {records.REFERENCE})"))
    if options:
        options += [_Option(blocks, "a heuristic (what fits)") for blocks in family.smaller(options[-1].blocks)]
    return options


def sizes(problem: Problem, dots: str) -> Sizes:
    """What the choice depends on."""
    leaves = jax.tree.leaves((problem.mask, problem.score))
    arrays = [x for x in leaves if x.ndim == 4 and x.shape[2] > 1 and x.shape[3] > 1]
    return Sizes(
        problem.T,
        problem.S,
        problem.H,
        problem.Hv,
        dots,
        read=sum(x.dtype.itemsize for x in arrays),
        mask=_described(problem.mask),
        G=problem.G,
        heads=problem.B * problem.N,
        features=_features(problem),
    )


def _described(mask: Mask) -> str:
    """The band in words, then what else hides scores."""
    parts = [each for each in _parts(mask) if not isinstance(each, Lengths) or each.q_len is not each.k_len]
    bands = [_band(each) for each in parts if isinstance(each, Band)]
    return " ".join((*(bands or ["full"]), *sorted(type(x).__name__.lower() for x in parts if not isinstance(x, Band))))


def _parts(mask: Mask) -> list[Mask]:
    """What is composed with `&`."""
    return [*_parts(mask.first), *_parts(mask.second)] if isinstance(mask, Both) else [mask]


def _band(band: Band) -> str:
    if band.lo is not None:
        found = f"window {band.lo} {band.hi}"
    else:
        found = "full" if band.hi is None else f"causal {band.hi}" if band.hi else "causal"
    return found if band.offset is None else f"{found} moved"


def _features(problem: Problem) -> tuple[str, ...]:
    """What kernels compute beside attention."""
    terms = {_term(each.function) if each.is_built_in else "modifier" for each in problem.score.terms}
    flags = {
        "deterministic": problem.deterministic,
        "dropout": problem.dropout is not None,
        "sinks": problem.sinks is not None,
        "traced scale": problem.scale is not None,
    }
    return tuple(sorted(terms | {name for name, given in flags.items() if given}))


def _term(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__).lower()
