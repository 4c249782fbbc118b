"""Who can do it? The implementations, in order of preference, and the choice among them."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping

from pallas_flash.choice import Choice
from pallas_flash.plan import MosaicPlan, Plan
from pallas_flash.problem import Problem


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes:
        name: As in the argument `implementation`.
        refusal: problem → why it is refused, forward or backward; None: accepted.
        forward: problem, q, k, v → output [B, T, N, Hv] and natural log-sum-exp [B, N, T].
        backward: problem, q, k, v, lse, do, delta → dq, dk, dv, and for a traced scale its gradient [B].
            None: `forward` is differentiated by JAX.
        d_score: The same → gradients of the operands of `problem.score`, in its structure. With `backward` only.
        planned: problem → block sizes, of one that it accepts; None: it has none.
        deferral: problem → why the next implementation is faster, where both accept; None: it is not.
        target: Name of the custom call that its kernels become; None: it has none.
    """

    name: str
    refusal: Callable[[Problem], str | None]
    forward: Callable
    backward: Callable | None = None
    d_score: Callable | None = None
    planned: Callable[[Problem], Choice] | None = None
    deferral: Callable[[Problem], str | None] = lambda problem: None
    target: str | None = None


@functools.cache
def implementations() -> tuple[Implementation, ...]:
    """All of them, fastest first. Imported on first use: kernels whose compiler JAX comes without are refused."""
    xla = importlib.import_module("pallas_flash.xla")
    hopper = _kernels("mosaic_gpu", "pallas_flash.kernels.mosaic_gpu")
    triton = _kernels("triton", "pallas_flash.kernels.triton")
    hopper = dataclasses.replace(hopper, d_score=triton.d_score)
    return hopper, triton, Implementation("xla", xla.refusal, xla.forward)


def _kernels(name: str, package: str) -> Implementation:
    try:
        kernels = importlib.import_module(package)
    except ImportError as error:
        reason = f"its kernels cannot be imported ({error}); install jax and jaxlib of a supported version"
        return Implementation(name, lambda problem: reason, lambda *tensors: None)
    has = {name: getattr(kernels, name) for name in ("d_score", "deferral") if hasattr(kernels, name)}
    has |= {"planned": kernels.planned, "target": kernels.TARGET}
    return Implementation(name, kernels.refusal, kernels.forward, kernels.backward, **has)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation a call takes, and why the others do not.

    Attributes:
        implementation: Name of the chosen one.
        refusals: Name → reason, for each that refuses, or leaves the call to a faster one.
        plan: Its block sizes; None: it has none.
        origins: Kernel → where its block sizes come from: the argument `plan`, a file of `autotune`, a tuned table of
            the library, or a heuristic.
        sharding: Of arrays that are sharded: array, or axis → how it is split over the mesh, or that it is gathered.
    """

    implementation: str
    refusals: Mapping[str, str]
    plan: Plan | MosaicPlan | None
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sharding: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        rows = [("implementation", "", "why")]
        for each in implementations():
            reason = self.refusals.get(each.name, "accepts")
            if each.name != self.implementation:
                rows.append((each.name, "", reason))
            else:
                rows.append((each.name, "chosen", str(self.plan) if self.plan else reason))
                rows += [("", "", origin) for origin in self._origins()]
        rows += [(name, "", how) for name, how in self.sharding.items()]
        return "\n".join(f"{name:<15} {mark:<7} {why}" for name, mark, why in rows)

    def _origins(self) -> list[str]:
        """Where the plan comes from, a line for each place."""
        places = list(dict.fromkeys(self.origins.values()))
        of = {place: [kernel for kernel, origin in self.origins.items() if origin == place] for place in places}
        return [f"from {place}" if len(places) == 1 else f"{', '.join(of[place])} from {place}" for place in places]


def chosen(problem: Problem) -> Implementation:
    """The implementation that `resolve` filled in."""
    return next(each for each in implementations() if each.name == problem.implementation)


def explain(problem: Problem) -> Explanation:
    """What `resolve` decides, with the reasons; raises as it does."""
    refusals = {each.name: reason for each in implementations() if (reason := each.refusal(problem))}
    candidates = [each for each in implementations() if problem.implementation in (None, each.name)]
    accepting = [each for each in candidates if each.name not in refusals]
    if not accepting:
        reasons = "; ".join(f"{each.name}: {refusals[each.name]}" for each in candidates)
        raise NotImplementedError(f"implementation={problem.implementation!r} refuses this call: {reasons}")
    best, *others = accepting
    if others and others[0].backward and (reason := _slower(problem, best, others[0])):
        refusals[best.name], best = reason, others[0]
    if not best.planned:
        return Explanation(best.name, refusals, None)
    choice = best.planned(problem)
    return Explanation(best.name, refusals, choice.plan, choice.origins)


def _slower(problem: Problem, best: Implementation, other: Implementation) -> str | None:
    """Why the other implementation is faster, as measured if both were tuned for the problem; None: it is not."""
    ours = best.planned(problem).ms if best.planned else None
    others = other.planned(problem).ms if ours is not None and other.planned else None
    if ours is None or others is None:
        return best.deferral(problem)
    if others < ours:
        return f"tuned, it takes {ours:.4g} ms and {other.name} {others:.4g}; name it, or a plan of it, to take it"


def resolve(problem: Problem) -> Problem:
    """`problem` with its implementation and plan filled in, for forward and backward together.

    Raises:
        NotImplementedError: The named implementation refuses, or all do; with the reasons.
    """
    choice = explain(problem)
    return dataclasses.replace(problem, implementation=choice.implementation, plan=choice.plan)
