"""A process of its own that computes attention without JAX: it is sent inputs, and sends back results and times."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.cases import Case

ROOT = pathlib.Path(__file__).parents[1]


class Failed(Exception):
    """The process does not start, or ended."""


@dataclasses.dataclass
class Worker:
    """The process, started with the first request, and again if it ended.

    Attributes:
        command: What to start in the project's root.
    """

    command: list[str]

    def __post_init__(self):
        self._process: subprocess.Popen | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        self._errors = pathlib.Path(self._folder.name, "stderr")
        self._sent: tuple[Any, ...] = ()
        self.version: str | None = None

    def refusal(self) -> str | None:
        """Why it cannot compute anything; None: it can."""
        try:
            return None if self._started()["gpu"] else "finds no GPU"
        except Failed as error:
            return str(error)

    def prepare(self, case: Case, inputs: tuple[Any, ...], mode: str, **options: Any) -> dict[str, Any]:
        """Runs a mode of a case once. The reply has the `results` by name if its status is ok."""
        paths = {name: f"{self._folder.name}/{name}.npz" for name in ("inputs", "results")}
        if not any(a is b for a, b in zip(self._sent, inputs, strict=False)):
            arrays = (np.asarray(x.astype(jnp.float32)) for x in inputs)
            np.savez(paths["inputs"], **dict(zip(("q", "k", "v", "do"), arrays, strict=True)))
            self._sent = inputs
        given = {"scale": case.scale, "is_causal": case.is_causal}
        reply = self._request(do="prepare", **paths, mode=mode, dtype=case.dtype, **given, **options)
        if reply["status"] == "ok":
            with np.load(paths["results"]) as found:
                reply["results"] = {name: jnp.asarray(found[name]) for name in found.files}
        return reply

    def measure(self, seconds: float, samples: int) -> dict[str, Any]:
        """Times what was prepared."""
        return self._request(do="measure", seconds=seconds, samples=samples)

    def _started(self) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            with self._errors.open("w") as errors:
                pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
                self._process = subprocess.Popen(self.command, cwd=ROOT, text=True, **pipes)
            self._hello = self._reply()
            self.version = self._hello["version"]
        return self._hello

    def _request(self, **request: Any) -> dict[str, Any]:
        try:
            self._started()
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return self._reply()
        except (BrokenPipeError, Failed) as error:
            return {"status": "error", "reason": str(error) or "the process ended"}

    def _reply(self) -> dict[str, Any]:
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._process.communicate()
        lines = self._errors.read_text().strip().splitlines() or [f"exit code {self._process.returncode}"]
        raise Failed(f"{self.command[-1]}: {lines[-1][:300]}")

    def close(self) -> None:
        """Ends the process, for good."""
        if self._process is not None:
            self._process.communicate()
        self._folder.cleanup()


def torch() -> Worker:
    """PyTorch's, of the Python that PALLAS_FLASH_TORCH names, or of this one."""
    return Worker([os.environ.get("PALLAS_FLASH_TORCH", sys.executable), "-m", "benchmarks.torch_worker"])
