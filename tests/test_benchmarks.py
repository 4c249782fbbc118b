"""The benchmark runner checks before it times, asks other processes, and tells where we lose; tiny cases on a CPU."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from benchmarks import plot, run, timing, tune
from benchmarks.peers import PEERS, Peer
from benchmarks.worker import Worker
from pallas_flash import Blocks, Plan, api, choice, records
from tests.cases import BENCHMARK, Case

CASE = Case("tiny", B=1, T=16, N=2, K=1, H=16, dtype="float32", is_causal=True)
LIMITS = run.parse(["--seconds", "0", "--samples", "5"])

WORKER = """
import json, sys
import numpy as np

def attention(q, k, v):
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = np.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    s = np.where(np.tri(*s.shape[2:]), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v)

def answer(do, implementation="", inputs="", results="", **options):
    if implementation == "refuses":
        return {"status": "refused", "reason": "RuntimeError: No available kernel"}
    if implementation == "dies":
        sys.exit("out of luck")
    if do == "measure":
        return {"status": "ok", "median_ms": 0.5, "min_ms": 0.4, **options}
    assert options == {"mode": "fwd", "dtype": "float32", "scale": None, "is_causal": True}
    given = np.load(inputs)
    np.savez(results, out=attention(*(given[name] for name in "qkv")) * (1.1 if implementation == "errs" else 1))
    return {"status": "ok", "peak_bytes": 7, "first_call_s": 0.25}

print(json.dumps({"version": "1.2", "gpu": True}), flush=True)
for line in sys.stdin:
    print(json.dumps(answer(**json.loads(line))), flush=True)
"""


def peer(name, implementation, process):
    """Of a name that the summary knows."""
    elsewhere = {"worker": lambda: process, "implementation": implementation}
    return Peer(name, "torch", "torch", lambda case: None, None, needs_gpu=False, **elsewhere)


@pytest.fixture
def process():
    found = Worker([sys.executable, "-c", WORKER])
    yield found
    found.close()


def rows_of(peers, tmp_path, modes=("fwd",)):
    rows, left = run.run([CASE], list(modes), peers, LIMITS, tmp_path / "rows.jsonl")
    assert not left
    return {(row["mode"], row["peer"]): row for row in rows}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("PALLAS_FLASH_COMMIT", "0123456789")
    monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 1e-4)


def test_another_process(tmp_path, process):
    """It is sent the same inputs; its results are checked here, and only right ones are timed there."""
    made = {"torch_flash": "right", "torch_cudnn": "errs", "torch_efficient": "refuses", "jax_cudnn": "dies"}
    found = rows_of([peer(*names, process) for names in made.items()], tmp_path)
    right, errs, refuses, dies = (found["fwd", name] for name in made)
    assert (right["status"], right["median_ms"], right["peer_version"], right["method"]) == (
        "ok",
        0.5,
        "1.2",
        "process",
    )
    assert right["errors"]["out"] < 1e-6 and right["tflops"] > 0 and right["samples"] == 5
    assert errs["status"] == "wrong" and "median_ms" not in errs and 0.09 < errs["errors"]["out"] < 0.11
    assert (refuses["status"], refuses["reason"]) == ("refused", "RuntimeError: No available kernel")
    assert (dies["status"], dies["reason"].split(": ")[-1]) == ("error", "out of luck")
    again = rows_of([peer("torch_flash", "right", process)], tmp_path)["fwd", "torch_flash"]
    assert again["status"] == "ok"
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["status"] for row in written] == ["ok", "wrong", "refused", "error", "ok"]
    text = run.summary([right, errs, dies])
    assert "first call, s  torch_flash" in text and "us a call  torch_flash" in text and " 0.25" in text


def test_a_process_that_does_not_start(tmp_path):
    process = Worker([sys.executable, "-c", "import nothing_like_this"])
    row = rows_of([peer("torch_flash", "right", process)], tmp_path)["fwd", "torch_flash"]
    process.close()
    assert (row["status"], row["reason"].split(": ")[-1]) == ("refused", "No module named 'nothing_like_this'")


def test_without_a_gpu(tmp_path):
    """Every peer but the two that need none says so."""
    found = rows_of([PEERS[name] for name in PEERS if name not in ("ours", "ours_xla", "jax_xla")], tmp_path)
    assert {row["status"] for row in found.values()} == {"refused"}
    assert {row["reason"] for row in found.values()} == {"needs a GPU, the backend is cpu"}


def test_peers_in_this_process(tmp_path):
    """Compared with the reference, timed, and with what was planned; first calls and launches are in the summary."""
    found = rows_of([PEERS["ours_xla"], PEERS["jax_xla"]], tmp_path, ("fwd", "bwd"))
    assert {row["status"] for row in found.values()} == {"ok"}
    assert all(max(row["errors"].values()) < 1e-5 for row in found.values())
    ours = found["bwd", "ours_xla"]
    assert (ours["implementation"], ours["plan"], ours["origins"]) == ("xla", None, {})
    text = run.summary([*found.values()])
    assert "speed of ours_xla / peer" in text and "first call, s" in text and "us a call" in text
    assert "us a call" not in run.summary([{**row, "case": {**row["case"], "T": 2048}} for row in found.values()])


def test_modes_that_a_peer_lacks():
    kernel = dataclasses.replace(PEERS["triton_language"], needs_gpu=False)
    assert kernel.refusal(CASE, "bwd") == "computes fwd only"


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("torch_flash", CASE, "bfloat16 and float16 only"),
        ("torch_efficient", dataclasses.replace(CASE, S=20), "causal with equal lengths only"),
        ("torch_cudnn", dataclasses.replace(CASE, dtype="bfloat16", local_window_size=3), "has no local_window_size"),
        (
            "triton_language",
            dataclasses.replace(CASE, dtype="bfloat16", H=80, Hv=80),
            "head dims that are powers of two",
        ),
        ("triton_language", dataclasses.replace(CASE, dtype="bfloat16", S=20), "causal with equal lengths only"),
    ],
)
def test_limits_of_peers(name, case, reason):
    assert reason in PEERS[name].limits(case)


def test_cases_cover_the_comparison():
    """16,384 tokens, N·H = 2048, lengths, head dims, causal and full, grouped 8:1; and single short sequences."""
    sizes = {(c.T, c.H, c.is_causal, c.N // c.K) for c in BENCHMARK if c.B * c.T == 16_384 and c.N * c.H == 2048}
    lengths, widths = (512, 1024, 2048, 4096, 8192, 16_384), (64, 128, 256)
    assert {(T, H, c, 1) for T in lengths for H in widths for c in (False, True)} <= sizes
    assert {(T, H, c, 8) for T in (1024, 8192, 16_384) for H in widths for c in (False, True)} <= sizes
    assert {c.T for c in BENCHMARK if c.B * c.T <= run.TINY} == {16, 128, 512}
    assert len({c.name for c in BENCHMARK}) == len(BENCHMARK)


def test_measure():
    """The median of samples that last long enough, in milliseconds per call."""
    times = iter([1e-5, 1e-4 * 1.3, *(n * 1e-3 for n in (1, 5, 2, 3, 4))])
    found = timing.measure(lambda calls: next(times), 0.0, 9)
    assert (found["calls_per_sample"], found["samples"]) == (10, 5)
    assert np.allclose((found["median_ms"], found["min_ms"], found["iqr_ms"]), (0.3, 0.1, 0.2))


# Figures.


def row(peer, T=8192, tflops=100.0, mode="fwd", commit="aaaa", status="ok", **case):
    fields = dataclasses.asdict(Case(f"h64_t{T}", B=16_384 // T, T=T, N=32, H=64, dtype="bfloat16"))
    return {
        "case": {**fields, **case}, "mode": mode, "peer": peer, "status": status, "tflops": tflops, "commit": commit,
        "device": "NVIDIA H200", "versions": {"jax": "0.11.2"},
    }  # fmt: skip


def test_where_we_lose():
    rows = [
        row("ours", tflops=100), row("jax_cudnn", tflops=120), row("pallas_mha", tflops=110),
        row("ours", 512, 100), row("ours_triton", 512, 300), row("jax_xla", 512, 200),
        row("ours_triton", 1024, 90), row("jax_xla", 1024, 80),
        row("ours", 2048, 90), row("jax_xla", 2048, 900, status="wrong"), row("jax_cudnn", 4096, 500),
    ]  # fmt: skip
    pairs = plot.losses(rows)
    shown = [(ours["peer"], ours["case"]["T"], other["peer"]) for ours, other in pairs]
    assert shown == [("ours", 512, "jax_xla"), ("ours", 8192, "jax_cudnn")]
    assert plot.table(pairs).splitlines()[2:] == [
        "| h64_t512 | forward | ours | 100 | jax_xla | 200 | 0.50 |",
        "| h64_t8192 | forward | ours | 100 | jax_cudnn | 120 | 0.83 |",
    ]
    assert plot.table([]) == "No other is faster in any cell."


def test_rows_of_one_run():
    """The last commit with rows of ours and of others; of a cell its last row."""
    rows = [
        row("ours", commit="aaaa"), row("jax_xla", commit="aaaa"), row("ours", commit="bbbb"),
        row("jax_xla", commit="bbbb"), row("jax_xla", commit="bbbb", tflops=7.0), row("ours", commit="cccc"),
    ]  # fmt: skip
    assert [(r["commit"], r["tflops"]) for r in plot.one_run(rows)] == [("bbbb", 100.0), ("bbbb", 7.0)]
    assert {r["commit"] for r in plot.one_run(rows, "aa")} == {"aaaa"}
    with pytest.raises(
        ValueError, match=r"rows of ours and of others of one commit cc, got \['aaaa', 'bbbb', 'cccc'\]"
    ):
        plot.one_run(rows, "cc")


def test_series():
    """By length; only of plain self-attention that was right."""
    rows = [
        row("ours", 8192, 5.0), row("ours", 512, 3.0), row("jax_xla", 512, 2.0), row("jax_cudnn", 512, status="wrong"),
        row("ours", 1024, 9.0, K=4), row("ours", 2048, 9.0, is_causal=True), row("ours", 4096, 9.0, mode="bwd"),
        row("ours", 4096, 9.0, B=1),
    ]  # fmt: skip
    assert plot.series(rows, "fwd", 64, False) == {"ours": [(512, 3.0), (8192, 5.0)], "jax_xla": [(512, 2.0)]}


def test_figures(tmp_path, capsys):
    """One for each pass that was timed, and the table; rows of features are left aside."""
    rows = [row("ours", T, 100 + T / 100) for T in (512, 8192)] + [row("jax_xla", 512, 200.0)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [*rows, {**row("ours", 512, 1.0), "feature": "alibi"}]))
    assert plot.main([str(path), "--out", str(tmp_path)]) == 0
    assert [each.name for each in tmp_path.glob("*.png")] == ["speed-forward.png"]
    assert (tmp_path / "speed-forward.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[-1] == "| h64_t512 | forward | ours | 105.1 | jax_xla | 200 | 0.53 |"
    with pytest.raises(SystemExit, match="of one commit dd"):
        plot.main([str(path), "--commit", "dd"])


# Tuning.


def test_problems_cover_the_table():
    """Head dims, masks, short and long, grouped or not, float32 in both precisions; keys are those of the records."""
    keys = {problem.key for problem in tune.PROBLEMS}
    assert len(keys) == len(tune.PROBLEMS) == len({problem.name for problem in tune.PROBLEMS})
    masks = ("causal", "full", "window -1023 0")
    assert {(8192, H, 1, mask, "half") for H in (64, 80, 96, 128, 192, 256) for mask in masks} <= keys
    assert {(T, H, 8, "causal", "half") for T in (1024, 8192) for H in (64, 128, 256)} <= keys
    assert {(4096, H, 1, "full", dots) for H in (64, 128, 256) for dots in ("tf32", "tf32x3")} <= keys
    for problem in tune.PROBLEMS:
        posed, _ = api.problem_of(*tune.shapes(problem.case), **tune.keywords(problem))
        sizes = choice.sizes(posed, problem.key[-1])
        assert (sizes.T, sizes.H, sizes.G, sizes.mask) == problem.key[:-1]
        assert posed.precision.name == ("HIGHEST" if problem.precision == "highest" else "DEFAULT")


def test_tuning_goes_on_where_it_was_left(tmp_path, capsys):
    small = [
        tune.Problem(Case(f"t{T}", B=1, T=T, N=2, H=16, is_causal=True), "default") for T in (16, 24, 32)
    ]  # fmt: skip
    blocks, names = Blocks(16, 16), [problem.name for problem in small]
    options = {"interpret": True, "candidates": [Plan(blocks, blocks, blocks)], "timer": lambda run, trial: 1e-3}
    options |= {"gradients": False, "progress": False}
    path = tmp_path / "plans.json"
    assert tune.tuned(small, path, -1.0, **options) == small and not path.exists()
    assert tune.tuned(small[:1], path, **options) == []
    assert tune.tuned(small, path, -1.0, **options) == small[1:]
    assert tune.tuned(small, path, **options) == []
    assert {each.sizes.T for each in records.read(path).records} == {16, 24, 32}
    elsewhere = [dataclasses.replace(each, device="another") for each in records.read(path).records]
    records.add(tmp_path / "others.json", elsewhere)
    assert tune.tuned(small, tmp_path / "others.json", -1.0, **options) == small
    assert [line for line in capsys.readouterr().out.splitlines() if line in names] == names


def test_tuning_of_nothing(tmp_path):
    with pytest.raises(SystemExit, match=r"no problem matches \['h3'\]; there are: h128_causal_t8192"):
        tune.main(["--out", str(tmp_path / "plans.json"), "--cases", "h3"])
