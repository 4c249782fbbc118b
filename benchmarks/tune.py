"""Which blocks are fastest on this GPU? Tunes the problems of our tables: `python -m benchmarks.tune --help`.

It may be stopped and run again: what is in the file is not tuned again.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import dataclasses
import fnmatch
import itertools
import math
import pathlib
import sys
import time
from typing import Any

import jax

import pallas_flash
from pallas_flash import records
from tests.cases import Case

TOKENS, WIDTH = 16_384, 2_048
MASKS = {"causal": {"is_causal": True}, "full": {}, "window": {"is_causal": True, "local_window_size": (1023, 0)}}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A case, with the precision of its dots."""

    case: Case
    precision: str | None = None

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def key(self) -> tuple:
        """By which its records are known in a file."""
        case, dots = self.case, {None: "half", "default": "tf32", "highest": "tf32x3"}[self.precision]
        mask = "window -1023 0" if case.local_window_size else "causal" if case.is_causal else "full"
        return case.T, case.H, case.N // case.K, mask, dots


def _problem(T: int, H: int, mask: str, G: int = 1, precision: str | None = None) -> Problem:
    """Of as many tokens as in the benchmarks, and as many heads as divide into groups."""
    N = max(8, WIDTH // H // 8 * 8)
    dtype = "bfloat16" if precision is None else "float32"
    name = f"h{H}_{mask}_t{T}" + (f"_gqa{G}" if G > 1 else "") + (f"_{precision}" if precision else "")
    return Problem(Case(name, B=TOKENS // T, T=T, N=N, K=N // G, H=H, dtype=dtype, **MASKS[mask]), precision)


PROBLEMS = [
    *(_problem(*each) for each in itertools.product((8192, 1024), (128, 64, 256), ("causal", "full"))),
    *(_problem(*each, 8) for each in itertools.product((8192, 1024), (128, 64, 256), ("causal",))),
    *(_problem(*each) for each in itertools.product((8192,), (128, 64, 256), ("window",))),
    *(_problem(*each) for each in itertools.product((8192, 1024), (96, 80, 192), ("causal", "full"))),
    *(_problem(*each) for each in itertools.product((8192,), (96, 80, 192), ("window",))),
    *(
        _problem(*each, precision=precision)
        for precision in ("default", "highest")
        for each in itertools.product((4096, 1024), (64, 128, 256), ("causal", "full"))
    ),
]
"""The most common first."""


def tuned(problems: list[Problem], out: pathlib.Path, budget: float = math.inf, **options: Any) -> list[Problem]:
    """Tunes problems that are not in the file, until the budget of seconds is spent; returns those left.

    Args:
        problems: In order.
        out: The file.
        budget: No problem is begun later.
        **options: Of `pallas_flash.autotune`, and more keywords of `flash_attention`.
    """
    stop = time.perf_counter() + budget
    for number, problem in enumerate(problems):
        if is_tuned(problem, out, options.get("implementation"), options.get("interpret", False)):
            continue
        if time.perf_counter() > stop:
            return problems[number:]
        print(f"\n{problem.name}", flush=True)
        print(pallas_flash.autotune(*shapes(problem.case), cache=out, **keywords(problem), **options), flush=True)
    return []


def is_tuned(problem: Problem, path: pathlib.Path, implementation: str | None, interpret: bool = False) -> bool:
    """Whether it was, here and with these versions, for the implementation named, or for all that accept it."""
    device = "interpreter" if interpret else jax.devices()[0].device_kind
    here = device, jax.__version__, pallas_flash.__version__
    found = [x for x in (records.read(path).records if path.exists() else ()) if key(x) == problem.key]
    known = {x.implementation for x in found if (x.device, x.jax, x.pallas_flash) == here}
    if implementation is None:
        refusals = pallas_flash.explain(*shapes(problem.case), **keywords(problem), interpret=interpret).refusals
        return {"mosaic_gpu", "triton"} - refusals.keys() <= known
    return implementation in known


def key(record: records.Record) -> tuple:
    """As `Problem.key`."""
    sizes = record.sizes
    return sizes.T, sizes.H, sizes.G, sizes.mask, sizes.dots


def shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    """Of query, key and value."""
    return [jax.ShapeDtypeStruct((case.B, case.T, heads, case.H), case.dtype) for heads in (case.N, case.K, case.K)]


def keywords(problem: Problem) -> dict[str, Any]:
    """Of `flash_attention`."""
    return problem.case.options() | ({} if problem.precision is None else {"precision": problem.precision})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="file to add plans to")
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="GLOB", help="patterns over names of problems")
    parser.add_argument("--implementation", help="one alone; by default all that accept a problem")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no problem is begun")
    options = parser.parse_args(argv)
    problems = [x for x in PROBLEMS if any(fnmatch.fnmatchcase(x.name, pattern) for pattern in options.cases)]
    if not problems:
        sys.exit(f"no problem matches {options.cases}; there are: {' '.join(x.name for x in PROBLEMS)}")
    left = tuned(problems, options.out, options.budget, implementation=options.implementation)
    if left:
        print(f"\nnot tuned, the budget of {options.budget:g} s was spent:", *(x.name for x in left), sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
