"""Which plan is the fastest here? Blocks of each kernel are tried on the GPU that is there, and the best are kept."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, core

from pallas_flash import api, arguments, dispatch, records
from pallas_flash.choice import Choice
from pallas_flash.dispatch import Implementation
from pallas_flash.families import FAMILIES
from pallas_flash.plan import AnyBlocks, AnyPlan
from pallas_flash.problem import Problem
from pallas_flash.records import Record
from pallas_flash.search import Measurement, Search, Timer, Trial, ranked, seconds, size

GROUPS = (1, 2, 4, 8, 16)
"""Head groups that are tried with the best blocks."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The outcome of `autotune`; printed, a table.

    Attributes:
        implementation: Name of the fastest.
        plan: Its plan, for the argument `plan` of `flash_attention`.
        plans: Name → plan of each implementation that accepts the call.
        before: Name → plan that a call would have taken.
        measurements: Everything that was tried, in order; the fastest twice.
        path: Of the file in which the plans were stored.
    """

    implementation: str
    plan: AnyPlan
    plans: Mapping[str, AnyPlan]
    before: Mapping[str, AnyPlan]
    measurements: tuple[Measurement, ...]
    path: pathlib.Path

    def __str__(self) -> str:
        times = dict(ranked(self.measurements))
        rows = [["kernel", "fastest", "ms", "before", "ms", "tried", "rejected"]]
        for name, kernel in dict.fromkeys(each.trial[:2] for each in self.measurements):
            trials = [Trial(name, kernel, getattr(plans[name], kernel)) for plans in (self.plans, self.before)]
            shown = [cell for each in trials for cell in (str(each.blocks), _shown(times.get(each)))]
            reasons = {each.trial: each.reason for each in self.measurements if each.trial[:2] == (name, kernel)}
            rejected = sum(reason is not None for reason in reasons.values())
            rows.append([f"{name} {kernel}", *shown, str(len(reasons)), str(rejected)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"{self.implementation} is the fastest; stored in {self.path}"])


def _shown(ms: float | None) -> str:
    """A time; None: it was rejected."""
    return "-" if ms is None else f"{ms:.4g}"


def autotune(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    gradients: bool = True,
    candidates: Sequence[AnyPlan] | None = None,
    cache: str | os.PathLike | None = None,
    progress: bool = True,
    timer: Timer | None = None,
    **options: Any,
) -> Tuning:
    """Finds the fastest plan for a call of `flash_attention` on the current GPU, and keeps it for later calls.

    Each kernel is tried alone, so that candidates add up and do not multiply; many are compiled on all cores of the
    host, then timed. What does not compile, does not fit or gives another result is rejected. What was found goes
    to a file, in which later calls of the same problem find it, in this process and others: the same kind of device,
    versions of jax and pallas_flash, lengths, head dims, dtype, masks and features. Only batch entries and heads may be
    more or fewer. A function that `jax.jit` has traced keeps the plan that it was traced with.

    Args:
        query, key, value: As for `flash_attention`, on one device; or `jax.ShapeDtypeStruct`s, in whose place standard
            normal numbers are drawn.
        bias, mask: As for `flash_attention`.
        gradients: Whether to tune the kernels of the gradients too.
        candidates: Plans whose blocks are tried, each kernel's alone, beside the current ones: of the kernels that the
            current plan launches. None: of what fits the device, each tile with the warps and stages most like the
            current ones, then others with the fastest tiles.
        cache: File to store in, made if need be; it may be one that is shipped, or a table of the library. None: the
            one that the environment variable PALLAS_FLASH_CACHE names, or else pallas_flash/plans.json in the user's
            cache folder. Later calls read that one only.
        progress: Whether to show a progress bar, if tqdm is installed.
        timer: (function without arguments, `Trial`) → seconds that a call of the function takes. None: the median of
            samples by the host's clock.
        **options: Keywords of `flash_attention` except `plan`. `implementation` tunes one; None tunes all with kernels
            that accept the call.

    Returns:
        The fastest plan, and a report of what was measured.

    Raises:
        TypeError, ValueError: An argument is wrong, as of `flash_attention`; arrays are traced, or on several devices;
            the file holds something else; or no blocks of a kernel could be timed.
        NotImplementedError: There is no GPU, or no implementation with a plan accepts the call; with the reasons.
    """
    _check(gradients, candidates, cache, progress, timer, options)
    path = records.users_path() if cache is None else pathlib.Path(cache)
    if path.exists():
        records.read(path)
    problem, tensors = _inputs(query, key, value, bias=bias, mask=mask, **options)
    contenders = _contenders(problem, candidates)
    searches = [x for each in contenders for x in _searches(each, problem, tensors, gradients, candidates)]
    step = _bar(sum(search.steps for search in searches), progress)
    return _concluded([(search, search.run(timer or seconds, step)) for search in searches], path)


def _check(gradients, candidates, cache, progress, timer, options: dict[str, Any]) -> None:
    for name, flag in (("gradients", gradients), ("progress", progress)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: expected a Python bool, got {arguments.describe(flag)}; pass True or False")
    if "plan" in options:
        raise TypeError("plan: expected none, for autotune finds it; pass plans to try as candidates")
    plans = tuple(family.plan for family in FAMILIES.values())
    if candidates is not None and not _is_list(candidates, plans):
        raise TypeError(
            f"candidates: expected a list of plans, got {arguments.describe(candidates)}; None tries a grid"
        )
    if not isinstance(cache, str | os.PathLike | None):
        raise TypeError(
            f"cache: expected the path of a file, got {arguments.describe(cache)}; None takes {records.users_path()}"
        )
    if timer is not None and not callable(timer):
        raise TypeError(f"timer: expected a function, got {arguments.describe(timer)}; None times on the device")


def _is_list(xs: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(xs, tuple | list) and all(isinstance(x, kinds) for x in xs)


def _inputs(query, key, value, **keywords: Any) -> tuple[Problem, tuple[Array, ...]]:
    """The problem, and query, key and value with one batch axis."""
    tensors = [
        _drawn(seed, x) if isinstance(x, jax.ShapeDtypeStruct) else arguments.array(name, x)
        for seed, (name, x) in enumerate((("query", query), ("key", key), ("value", value)))
    ]
    problem, _ = api.problem_of(*tensors, **keywords)
    for leaf in jax.tree.leaves((tensors, problem)):
        if isinstance(leaf, core.Tracer):
            raise TypeError("autotune: expected arrays, got a tracer; call it outside of jit, grad and vmap")
        if len(leaf.devices()) > 1:
            raise ValueError(
                f"autotune: expected arrays on one device, got one on {len(leaf.devices())}; pass a device's part, or "
                "jax.ShapeDtypeStructs of its shape"
            )
    if problem.is_empty:
        raise ValueError(
            f"autotune: expected something to compute, got {problem.B} batch entries of {problem.T} queries and "
            f"{problem.S} keys; pass the shapes that you will use"
        )
    return problem, tuple(x.reshape(problem.B, *x.shape[-3:]) for x in tensors)


def _drawn(seed: int, like: Any) -> Array:
    """Standard normal numbers."""
    return jax.random.normal(jax.random.key(seed), like.shape, jnp.float32).astype(like.dtype)


def _contenders(problem: Problem, candidates: Sequence[AnyPlan] | None) -> list[Implementation]:
    """The implementations with plans that accept the problem, and of which there are candidates."""
    if not problem.interpret and jax.default_backend() != "gpu":
        raise NotImplementedError(
            f"autotune: expected a GPU to measure on, got the backend {jax.default_backend()!r}; run it where the "
            "kernels will run, and copy its file"
        )
    asked = [each for each in dispatch.implementations() if problem.implementation in (None, each.name)]
    reasons = {each.name: each.refusal(problem) or (None if each.planned else "it has no plan") for each in asked}
    found = [each for each in asked if not reasons[each.name]]
    if not found:
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NotImplementedError(f"autotune: no implementation with a plan accepts this call: {told}")
    if candidates is None:
        return found
    kinds = {each.name: FAMILIES[each.name].plan for each in found}
    if not any(isinstance(plan, tuple(kinds.values())) for plan in candidates):
        named = " or ".join(kind.__name__ for kind in kinds.values())
        raise ValueError(f"candidates: expected some {named}, got {candidates!r}; None tries a grid")
    return [each for each in found if any(isinstance(plan, kinds[each.name]) for plan in candidates)]


def _searches(
    implementation: Implementation, problem: Problem, tensors: tuple[Array, ...], gradients: bool,
    candidates: Sequence[AnyPlan] | None,
) -> Iterator[Search]:  # fmt: skip
    """Those of an implementation's kernels, forward first."""
    assert implementation.planned is not None
    now = implementation.planned(problem)
    problem = dataclasses.replace(problem, implementation=implementation.name, plan=now.plan)
    kernels = now.plan.kernels if gradients else now.plan.kernels[:1]
    residuals = _residuals(implementation, problem, tensors) if gradients else ()
    for kernel in kernels:
        current = getattr(now.plan, kernel)
        if candidates is None:
            tiles, variants = _grid(implementation, kernel, now)
            groups = tuple(n for n in GROUPS if n <= problem.N and n != current.head_group)
        else:
            plans = [plan for plan in candidates if isinstance(plan, type(now.plan))]
            tiles, variants, groups = [blocks for plan in plans if (blocks := getattr(plan, kernel))], [], ()
        seen = tensors if kernel == kernels[0] else (*tensors, *residuals)
        tiles = tuple(dict.fromkeys((current, *tiles)))
        yield Search(implementation, kernel, problem, seen, now, tiles, tuple(variants), groups)


def _residuals(implementation: Implementation, problem: Problem, tensors: tuple[Array, ...]) -> tuple[Array, ...]:
    """lse, a drawn cotangent do, and delta."""
    out, lse = jax.jit(implementation.forward)(problem, *tensors)
    do = _drawn(3, out)
    return lse, do, jnp.swapaxes(jnp.sum(out.astype(jnp.float32) * do.astype(jnp.float32), -1), 1, 2)


def _grid(implementation: Implementation, kernel: str, now: Choice) -> tuple[list[AnyBlocks], list[AnyBlocks]]:
    """What fits and hardly spills, with the current head group: of each tile the likest the current; and the rest."""
    family, current = FAMILIES[implementation.name], getattr(now.plan, kernel)
    found: dict[tuple[int, int], list[AnyBlocks]] = {}
    for blocks in family.candidates(kernel):
        blocks = family.fitted(kernel, dataclasses.replace(blocks, head_group=current.head_group), now.sizes)
        call = kernel, blocks, now.sizes, now.device.capability
        if family.fits(*call) and not family.spills(*call) and blocks not in found.setdefault(size(blocks), []):
            found[size(blocks)].append(blocks)
    for each in found.values():
        each.sort(key=lambda blocks: _unlike(blocks, current))
    return [first for first, *_ in found.values()], [blocks for _, *rest in found.values() for blocks in rest]


def _unlike(blocks: AnyBlocks, current: AnyBlocks) -> int:
    """How much their numbers differ; of blocks of one tile, those of warps and stages."""
    pairs = zip(dataclasses.astuple(blocks), dataclasses.astuple(current), strict=True)
    return sum(abs(a - b) for a, b in pairs)


def _concluded(found: list[tuple[Search, list[Measurement]]], path: pathlib.Path) -> Tuning:
    """Stores the fastest blocks, and reports."""
    before, plans, totals, kept = {}, {}, {}, []
    for search, measurements in found:
        name, kernel, now = search.implementation.name, search.kernel, search.now
        trial, ms = ranked(measurements)[0]
        before[name] = now.plan
        plans[name] = dataclasses.replace(plans.get(name, now.plan), **{kernel: trial.blocks})
        totals[name] = totals.get(name, 0.0) + ms
        kept.append(Record.now(now.device.kind, name, kernel, now.sizes, trial.blocks, ms))
    records.add(path, kept)
    best = min(totals, key=lambda name: totals[name])
    return Tuning(best, plans[best], plans, before, tuple(each for _, tried in found for each in tried), path)


def _bar(total: int, progress: bool) -> Callable[[], Any]:
    """What to call after each of so many steps."""
    try:
        from tqdm import tqdm
    except ImportError:
        return lambda: None
    return tqdm(total=total, desc="autotune", unit="step", disable=not progress).update
