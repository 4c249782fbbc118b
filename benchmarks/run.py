"""How fast, against whom? Times the `BENCHMARK` cases of tests/cases.py: `python -m benchmarks.run --help`."""

import os

# Compiled programs of many peers follow each other in one process, and some libraries allocate outside of JAX.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import dataclasses
import datetime
import fnmatch
import functools
import importlib.metadata
import json
import math
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import reference, timing
from benchmarks.peers import PEERS, Attention, Peer
from pallas_flash.records import slug
from tests.cases import BENCHMARK, Case

MODES = ("fwd", "bwd", "fwd_bwd")
ROOT = pathlib.Path(__file__).parents[1]

TINY = 1024  # Of so few tokens, launches are what takes time.


class Refused(Exception):
    """The peer raised NotImplementedError while tracing: it does not take this case, and says why."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function with its arguments. The object that is checked is the one that is timed."""

    call: Callable[[], Any]
    facts: dict[str, float | int]


def compile_program(function: Callable, *args) -> Program:
    """Traces, lowers and compiles ahead of time, and notes the seconds and the bytes that XLA plans."""
    start = time.perf_counter()
    try:
        traced = jax.jit(function).trace(*args)
    except NotImplementedError as e:
        raise Refused(_first_line(e)) from e
    lowered = traced.lower()
    middle = time.perf_counter()
    compiled = lowered.compile()
    facts = {"trace_s": middle - start, "compile_s": time.perf_counter() - middle}
    if (memory := compiled.memory_analysis()) is not None:
        facts["temp_bytes"] = memory.temp_size_in_bytes
        facts["peak_bytes"] = sum(
            (memory.temp_size_in_bytes, memory.output_size_in_bytes, memory.argument_size_in_bytes)
        )
    return Program(functools.partial(compiled, *args), facts)


def _gradients(vjp, do):
    return dict(zip(("dq", "dk", "dv"), vjp(do), strict=True))


def program_for(mode: str, attention: Attention, q, k, v, do) -> Program:
    """The program of one mode, which returns its results by name. `bwd` takes the forward's residuals as arguments."""
    if mode == "fwd":
        return compile_program(lambda q, k, v: {"out": attention(q, k, v)}, q, k, v)
    if mode == "bwd":
        _, vjp = compile_program(lambda q, k, v: jax.vjp(attention, q, k, v), q, k, v).call()
        return compile_program(_gradients, vjp, do)

    def forward_backward(q, k, v, do):
        out, vjp = jax.vjp(attention, q, k, v)
        return {"out": out, **_gradients(vjp, do)}

    return compile_program(forward_backward, q, k, v, do)


def _seconds(program: Program, calls: int) -> float:
    """Seconds between two clock reads: enqueue all, then wait for the last."""
    start = time.perf_counter()
    for _ in range(calls):
        result = program.call()
    jax.block_until_ready(result)
    return time.perf_counter() - start


def measure(program: Program, seconds: float, max_samples: int) -> dict[str, Any]:
    """Milliseconds per call, by the host's clock."""
    return timing.measure(functools.partial(_seconds, program), seconds, max_samples)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A case with its inputs and what a correct peer returns for the slices `chosen`."""

    case: Case
    inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    chosen: np.ndarray
    expected: dict[str, jax.Array]

    @classmethod
    def prepare(cls, case: Case, gradients: bool) -> "Workload":
        inputs, chosen = reference.draw(case), reference.slices(case)
        return cls(case, inputs, chosen, reference.reference(case, inputs, chosen, gradients))

    def check(self, results: dict[str, jax.Array]) -> dict[str, Any]:
        """Errors by name of result, and status `ok` or `wrong`."""
        errors = reference.errors(self.case, results, self.expected, self.chosen)
        passed = all(e <= reference.BOUNDS[self.case.dtype] for e in errors.values())  # False for NaN
        shown = {n: e if math.isfinite(e) else str(e) for n, e in errors.items()}
        return {"status": "ok" if passed else "wrong", "errors": shown, "compared_slices": len(self.chosen)}


def time_whole(workload: Workload, mode: str, attention: Attention, limits: argparse.Namespace) -> dict[str, Any]:
    """Compiles, checks, and only if the results are right times the program of a mode."""
    program = program_for(mode, attention, *workload.inputs)
    row = {"method": "direct", **program.facts, **workload.check(program.call())}
    return row | measure(program, limits.seconds, limits.samples) if row["status"] == "ok" else row


def time_difference(workload: Workload, attention: Attention, limits: argparse.Namespace) -> dict[str, Any]:
    """The backward as fwd_bwd minus fwd, for a peer whose residuals cannot be arguments of a compiled function."""
    forward = time_whole(workload, "fwd", attention, limits)
    both = time_whole(workload, "fwd_bwd", attention, limits)
    for row in (forward, both):
        if row["status"] != "ok":
            return row | {"method": "difference"}
    difference = {n: both[n] - forward[n] for n in ("median_ms", "min_ms")}
    return both | difference | {"iqr_ms": both["iqr_ms"] + forward["iqr_ms"], "method": "difference"}


def time_elsewhere(workload: Workload, mode: str, peer: Peer, limits: argparse.Namespace) -> dict[str, Any]:
    """In the peer's own process, on the same inputs; checked here before it is timed there."""
    process = peer.worker()
    row = process.prepare(workload.case, workload.inputs, mode, implementation=peer.implementation)
    if row["status"] != "ok":
        return row
    row |= {"method": "process", **workload.check(row.pop("results"))}
    return row | process.measure(limits.seconds, limits.samples) if row["status"] == "ok" else row


def attempt(workload: Workload, mode: str, peer: Peer, choice: Any, limits: argparse.Namespace) -> dict[str, Any]:
    """One peer with one choice; whatever it raises becomes a status and a reason."""
    chosen = {} if choice is None else {"choice": choice}
    try:
        attention = peer.attention(workload.case, choice)
        try:
            row = time_whole(workload, mode, attention, limits)
        except TypeError:  # what jit raises for residuals that are not arrays
            if mode != "bwd":
                raise
            row = time_difference(workload, attention, limits)
        return chosen | row | (_plan(workload, peer) if peer.explain else {})
    except Refused as e:
        return chosen | {"status": "refused", "reason": str(e)}
    except Exception as e:
        return chosen | {"status": "error", "reason": _first_line(e)}


def run_cell(workload: Workload, mode: str, peer: Peer, limits: argparse.Namespace) -> dict[str, Any]:
    """What was measured for one peer, with the fastest of its choices."""
    if reason := peer.refusal(workload.case, mode):
        return {"status": "refused", "reason": reason}
    if peer.worker:
        rows = [time_elsewhere(workload, mode, peer, limits)]
    else:
        rows = [attempt(workload, mode, peer, choice, limits) for choice in peer.choices]
    row = min((r for r in rows if r["status"] == "ok"), key=lambda r: r["median_ms"], default=rows[0])
    if row["status"] == "ok":
        row["tflops"] = reference.flops(workload.case, mode) / row["median_ms"] * 1e-9
    return row


def _plan(workload: Workload, peer: Peer) -> dict[str, Any]:
    explanation = peer.explain(workload.case, *workload.inputs[:3])
    plan = explanation.plan and dataclasses.asdict(explanation.plan)
    return {"implementation": explanation.implementation, "plan": plan, "origins": dict(explanation.origins)}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit with `+dirty` if files differ from it, results aside: each run changes those itself.

    The environment variable PALLAS_FLASH_COMMIT goes before what git says; a row must name one.
    """
    if named := os.environ.get("PALLAS_FLASH_COMMIT"):
        return named

    def git(*args):
        return subprocess.run(("git", "-C", ROOT, *args), capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
        return git("rev-parse", "HEAD") + ("+dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        sys.exit("no git here: set PALLAS_FLASH_COMMIT to the commit that is measured")


def environment() -> dict[str, Any]:
    """What every row of a run has in common."""
    versions = {name: _version(name) for name in ("jax", "jaxlib", "pallas_flash")}
    return {
        "statistic": "median",
        "device": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit(),
    }


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def default_path() -> pathlib.Path:
    return ROOT / "benchmarks" / "results" / slug(jax.devices()[0].device_kind) / f"{_now():%Y-%m-%d}.jsonl"


def run(cases: list[Case], modes: list[str], peers: list[Peer], limits: argparse.Namespace, out: pathlib.Path):
    """Times every cell, appends each to `out` as it is known, and returns the rows and the cells left over."""
    out.parent.mkdir(parents=True, exist_ok=True)
    common, rows, left, stop = environment(), [], [], time.perf_counter() + limits.budget
    for case in cases:
        workload = None
        for mode, peer in ((m, p) for m in modes for p in peers):
            if time.perf_counter() > stop:
                left.append(f"{case.name} {mode} {peer.name}")
                continue
            try:
                workload = workload or Workload.prepare(case, gradients=set(modes) != {"fwd"})
                result = run_cell(workload, mode, peer, limits)
            except Exception as e:
                result = {"status": "error", "reason": f"reference: {_first_line(e)}"}
            cell = {"case": dataclasses.asdict(case), "mode": mode, "peer": peer.name, **result}
            version = peer.worker().version if peer.worker else _version(peer.package)
            row = {**cell, "peer_version": version, **common, "time": _now().isoformat("T", "seconds")}
            with out.open("a") as file:
                file.write(json.dumps(row, default=str) + "\n")
            print(progress(row), flush=True)
            rows.append(row)
    return rows, left


def progress(row: dict[str, Any]) -> str:
    """One line about a cell."""
    name = f"{row['case']['name']} {row['mode']} {row['peer']}:"
    if row["status"] == "ok":
        worst = max(row["errors"].values())
        return f"{name} {row['tflops']:.4g} TFLOP/s, {row['median_ms']:.3f} ms, error {worst:.1e}"
    return f"{name} {row['status']}, {row.get('reason') or row.get('errors')}"


def table(title: str, rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], str]) -> str:
    """A line per case and mode, a column per peer; a cell without a time shows its status, one not run `.`."""
    cells = {(f"{r['case']['name']} {r['mode']}", r["peer"]): r for r in rows}
    lines, peers = (list(dict.fromkeys(keys)) for keys in zip(*cells, strict=True))
    shown = [[title, *peers]]
    for line in lines:
        known = [cells.get((line, peer)) for peer in peers]
        shown.append([line, *("." if r is None else value(r) if r["status"] == "ok" else r["status"] for r in known)])
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in shown)


def first_call(row: dict[str, Any]) -> float | None:
    """Seconds until a program is ready: to trace and compile it, or elsewhere of the first call; None: unknown."""
    return row["trace_s"] + row["compile_s"] if "compile_s" in row else row.get("first_call_s")


def summary(rows: list[dict[str, Any]]) -> str:
    """TFLOP/s, memory, the first call, launches, and how many times as fast the first of our columns is."""
    tables = [
        table("TFLOP/s (median)", rows, lambda r: f"{r['tflops']:.4g}"),
        table("peak MiB", rows, lambda r: f"{r['peak_bytes'] / 2**20:.4g}" if "peak_bytes" in r else "?"),
        table("first call, s", rows, lambda r: f"{first:.3g}" if (first := first_call(r)) is not None else "?"),
    ]
    if tiny := [r for r in rows if r["case"]["B"] * r["case"]["T"] <= TINY]:
        tables.append(table("us a call", tiny, lambda r: f"{1e3 * r['median_ms']:.4g}"))
    ours = next((r["peer"] for r in rows if PEERS[r["peer"]].is_ours), None)
    speed = {(r["case"]["name"], r["mode"]): r["tflops"] for r in rows if r["peer"] == ours and r["status"] == "ok"}
    compared = [r for r in rows if (r["case"]["name"], r["mode"]) in speed]
    if compared:
        title = f"speed of {ours} / peer"
        tables.append(table(title, compared, lambda r: f"{speed[r['case']['name'], r['mode']] / r['tflops']:.2f}"))
    return "\n\n".join(tables)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="GLOB", help="patterns over case names")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--seconds", type=float, default=1.0, help="time to sample each cell for (default 1)")
    parser.add_argument(
        "--samples", type=int, default=50, help=f"at most this many, at least {timing.MIN_SAMPLES} (default 50)"
    )
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no cell is begun")
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines file to append to")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    limits = parse(argv)
    cases = [c for c in BENCHMARK if any(fnmatch.fnmatchcase(c.name, pattern) for pattern in limits.cases)]
    if not cases:
        sys.exit(f"no case matches {limits.cases}; there are: {' '.join(c.name for c in BENCHMARK)}")
    out = limits.out or default_path()
    rows, left = run(cases, limits.modes, [PEERS[name] for name in limits.peers], limits, out)
    if rows:
        print(f"\n{summary(rows)}\n\nwritten to {out}")
    if left:
        print(f"\nnot run, the budget of {limits.budget:g} s was spent:", *left, sep="\n  ")
    return int(any(PEERS[r["peer"]].is_ours and r["status"] in ("wrong", "error") for r in rows))


if __name__ == "__main__":
    sys.exit(main())
