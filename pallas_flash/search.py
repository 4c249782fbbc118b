"""Which blocks are the fastest for one kernel? Trials on the device that is there, checked and timed."""

import collections
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_flash.choice import Choice
from pallas_flash.dispatch import Implementation
from pallas_flash.families import FAMILIES
from pallas_flash.plan import AnyBlocks
from pallas_flash.problem import Problem

BEST_TILES = 2
"""Other numbers of warps and stages are tried for so many of the fastest tiles."""

FINALISTS = 3
"""As many of the fastest are timed a second time: clocks change while others are compiled."""

GAIN = 0.99
"""What is not faster than the current blocks by this factor does not take their place: two runs differ by as much."""

SAMPLES, SAMPLE_SECONDS = 5, 0.02

EPSILON = {"bfloat16": 2**-7, "float16": 2**-10, "tf32": 2**-10, "tf32x3": 2**-20}
"""Of the rounded probabilities, by the dtype of inputs of 2 bytes, else by the dots."""

TOLERANCE = 4
"""Epsilons by which results with other blocks may differ, in norm: on an H200, in bfloat16, an eighth was seen."""


class Trial(NamedTuple):
    """One kernel with some blocks."""

    implementation: str
    kernel: str
    blocks: AnyBlocks


class Measurement(NamedTuple):
    """What became of a trial.

    Attributes:
        trial: The kernel and its blocks.
        ms: Milliseconds of a launch, with what XLA does around it; None: it was rejected.
        reason: Why it was rejected; None: it was not.
    """

    trial: Trial
    ms: float | None
    reason: str | None = None


Timer = Callable[[Callable[[], Any], Trial], float]
"""(function without arguments, what it runs) → seconds that a call takes."""


@dataclasses.dataclass(frozen=True)
class Search:
    """The trials of one kernel.

    Attributes:
        implementation, kernel: What is tuned.
        problem: Resolved, with the plan that a call would take.
        tensors: What the kernel takes.
        now: The choice that has this plan.
        tiles: Blocks to try, the current ones first.
        variants: Blocks to try if their tile is one of the fastest.
        groups: Head groups to try with the best of all.
    """

    implementation: Implementation
    kernel: str
    problem: Problem
    tensors: tuple[Array, ...]
    now: Choice
    tiles: tuple[AnyBlocks, ...]
    variants: tuple[AnyBlocks, ...]
    groups: tuple[int, ...]

    @property
    def steps(self) -> int:
        """How many there are: blocks to compile, and to try; where tiles have fewer variants, some are skipped."""
        return 2 * (len(self.tiles) + self._most_variants + len(self.groups))

    @property
    def _most_variants(self) -> int:
        return sum(n for _, n in collections.Counter(map(size, self.variants)).most_common(BEST_TILES))

    def run(self, timer: Timer, step: Callable[[], Any]) -> list[Measurement]:
        """Tries tiles, variants of the fastest, then head groups.

        Raises what the current blocks raise; a ValueError if nothing could be timed.
        """
        programs = self._compiled(self.tiles, step)
        expected = programs[self.tiles[0]]()

        def tried(blocks: AnyBlocks) -> Measurement:
            return self._tried(blocks, programs[blocks], expected, timer)

        def counted(many: Iterable[AnyBlocks]) -> Iterator[Measurement]:
            for blocks in many:
                yield tried(blocks)
                step()

        found = [*counted(self.tiles)]
        if not ranked(found):
            raise ValueError(
                f"autotune: expected some blocks of the {self.implementation.name} {self.kernel} kernel to run, got: "
                f"{found[0].reason}; pass other candidates, or name another implementation"
            )
        variants = self._variants(found)
        for _ in range(2 * (self._most_variants - len(variants))):
            step()
        programs |= self._compiled(variants, step)
        found += counted(variants)
        grouped = [dataclasses.replace(ranked(found)[0][0].blocks, head_group=group) for group in self.groups]
        programs |= self._compiled(grouped, step)
        found += counted(grouped)
        return found + [tried(trial.blocks) for trial, _ in ranked(found)[:FINALISTS]]

    def _variants(self, found: list[Measurement]) -> list[AnyBlocks]:
        best = list(dict.fromkeys(size(trial.blocks) for trial, _ in ranked(found)))[:BEST_TILES]
        return [blocks for blocks in self.variants if size(blocks) in best]

    def _compiled(self, many: Iterable[AnyBlocks], step: Callable[[], Any]) -> dict[AnyBlocks, Callable[[], Any]]:
        """The kernel with each of the blocks, side by side and before any of them is timed; to call, it may raise."""
        compute = jax.jit(functools.partial(_computed, self.implementation, self.kernel))
        found = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for blocks in many:
                plan = dataclasses.replace(self.problem.plan, **{self.kernel: blocks})
                args = dataclasses.replace(self.problem, plan=plan), *self.tensors
                try:
                    started = pool.submit(compute.lower(*args).compile)
                    started.add_done_callback(lambda _: step())
                    found[blocks] = functools.partial(_called, started, args)
                except Exception as error:  # of compilers, which have many
                    found[blocks] = functools.partial(_raised, error)
                    step()
        return found

    def _tried(self, blocks: AnyBlocks, program: Callable[[], Any], expected: Any, timer: Timer) -> Measurement:
        trial = Trial(self.implementation.name, self.kernel, blocks)
        now = self.now
        if not FAMILIES[trial.implementation].fits(self.kernel, blocks, now.sizes, now.device.capability):
            return Measurement(trial, None, "it needs more shared memory than the device has")
        try:
            off, most = float(difference(program(), expected)), self._tolerance
            if not off <= most:
                return Measurement(trial, None, f"its result differs by {off:.2g} of its norm, {most:.2g} is allowed")
            return Measurement(trial, 1e3 * timer(program, trial))
        except Exception as error:  # of compilers and drivers
            return Measurement(trial, None, f"{type(error).__name__}: {str(error).strip().partition('\n')[0][:200]}")

    @property
    def _tolerance(self) -> float:
        dots = self.now.sizes.dots
        return TOLERANCE * EPSILON[self.problem.dtype if dots == "half" else dots]


def size(blocks: AnyBlocks) -> tuple[int, int]:
    """Queries and keys of a tile."""
    return blocks.block_q, blocks.block_k


def _called(program: Future, args: tuple[Any, ...]) -> Any:
    return program.result()(*args)


def _raised(error: Exception) -> Any:
    raise error


def _computed(implementation: Implementation, kernel: str, problem: Problem, *tensors: Array) -> Any:
    """What a kernel computes; XLA drops the others."""
    if kernel == "forward":
        return implementation.forward(problem, *tensors)
    assert implementation.backward is not None
    dq, dk, dv, *_ = implementation.backward(problem, *tensors)
    return {"dq": (dq,), "dkv": (dk, dv), "backward": (dq, dk, dv)}[kernel]


@jax.jit
def difference(found: tuple[Array, ...], expected: tuple[Array, ...]) -> Array:
    """How far the farthest of some arrays is off, in norm and relative to it; equal infinities are not."""

    def norm(x: Array) -> Array:
        return jnp.sqrt(jnp.sum(jnp.square(x)))

    def relative(x: Array, ref: Array) -> Array:
        x, ref = x.astype(jnp.float32), ref.astype(jnp.float32)
        off = norm(jnp.where(x == ref, 0, x - ref))
        return off / jnp.maximum(norm(jnp.where(jnp.isfinite(ref), ref, 0)), jnp.finfo(jnp.float32).tiny)

    return jnp.max(jnp.stack([relative(*pair) for pair in zip(found, expected, strict=True)]))


def seconds(run: Callable[[], Any], trial: Trial) -> float:
    """The median over samples of the time of a call, of as many together as launches hide behind."""
    del trial
    calls = 1
    while (lasted := _lasted(run, calls)) < SAMPLE_SECONDS:
        calls = min(10 * calls, math.ceil(1.2 * calls * SAMPLE_SECONDS / lasted))
    return statistics.median(_lasted(run, calls) for _ in range(SAMPLES)) / calls


def _lasted(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(calls)][-1])
    return time.perf_counter() - start


def ranked(measurements: Iterable[Measurement]) -> list[tuple[Trial, float]]:
    """Trials with their smaller time, the fastest first; the first of all goes before what is hardly faster."""
    measurements = list(measurements)
    times: dict[Trial, float] = {}
    for trial, ms, _ in measurements:
        if ms is not None:
            times[trial] = min(ms, times.get(trial, ms))
    return sorted(times.items(), key=lambda item: item[1] * (GAIN if item[0] == measurements[0].trial else 1))
