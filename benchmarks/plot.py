"""What do the results say? Draws README's figures from result files, and lists where we lose.

`python -m benchmarks.plot benchmarks/results/nvidia-h200/*.jsonl --out docs`
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

from benchmarks.peers import PEERS

Row = dict[str, Any]
PASSES = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "forward and backward"}
OURS = [name for name, peer in PEERS.items() if peer.is_ours]
"""In the order in which one of them stands for us: as dispatched first."""

HEAD_DIMS = (64, 128, 256)


def load(paths: Iterable[pathlib.Path]) -> list[Row]:
    """The rows of `benchmarks.run` in result files, in order; rows of features and masks are not its."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [row for row in rows if row.get("peer") in PEERS and row.get("mode") in PASSES and "feature" not in row]


def one_run(rows: list[Row], commit: str | None = None) -> list[Row]:
    """The rows of one commit: numbers of different runs do not compare, for clocks differ.

    Args:
        rows: In the order in which they were measured.
        commit: How it begins; None: the last that has rows of ours and of others.

    Returns:
        Of each case, mode and peer the last row.

    Raises:
        ValueError: There is none.
    """
    kinds: dict[str, set[bool]] = {}
    for row in rows:
        kinds.setdefault(row["commit"], set()).add(PEERS[row["peer"]].is_ours)
    compared = [name for name, kind in kinds.items() if kind == {True, False} and name.startswith(commit or "")]
    if not compared:
        raise ValueError(f"expected rows of ours and of others of one commit {commit or ''}, got {sorted(kinds)}")
    cells = {(row["case"]["name"], row["mode"], row["peer"]): row for row in rows if row["commit"] == compared[-1]}
    return list(cells.values())


def losses(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Our row and the fastest other, in cells where that is faster, the largest loss first."""
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["status"] == "ok":
            cells.setdefault((row["case"]["name"], row["mode"]), {})[row["peer"]] = row
    found = []
    for cell in cells.values():
        ours = next((cell[name] for name in OURS if name in cell), None)
        others = [row for name, row in cell.items() if name not in OURS]
        if ours and others and (best := max(others, key=lambda row: row["tflops"]))["tflops"] > ours["tflops"]:
            found.append((ours, best))
    return sorted(found, key=lambda pair: pair[0]["tflops"] / pair[1]["tflops"])


def table(pairs: list[tuple[Row, Row]]) -> str:
    """Of `losses`, in Markdown."""
    lines = ["| case | pass | ours | TFLOP/s | faster | TFLOP/s | ours / faster |", "|---|---|---|---:|---|---:|---:|"]
    for ours, best in pairs:
        speeds = [f"{row['peer']} | {row['tflops']:.4g}" for row in (ours, best)]
        ratio = ours["tflops"] / best["tflops"]
        lines.append(f"| {ours['case']['name']} | {PASSES[ours['mode']]} | {speeds[0]} | {speeds[1]} | {ratio:.2f} |")
    return "\n".join(lines) if pairs else "No other is faster in any cell."


def series(rows: list[Row], mode: str, H: int, is_causal: bool) -> dict[str, list[tuple[int, float]]]:
    """Peer → its (T, TFLOP/s), of self-attention in bfloat16 with as many key/value heads as query heads."""
    plain = {"H": H, "Hv": H, "is_causal": is_causal, "dtype": "bfloat16", "local_window_size": None}
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        case = row["case"]
        fits = case.items() >= plain.items() and case["T"] == case["S"] and case["K"] == case["N"]
        if fits and case["B"] * case["T"] == 16_384 and row["mode"] == mode and row["status"] == "ok":
            found.setdefault(row["peer"], []).append((case["T"], row["tflops"]))
    return {peer: sorted(found[peer]) for peer in PEERS if peer in found}


def draw(rows: list[Row], mode: str, path: pathlib.Path) -> None:
    """TFLOP/s by length: a row for each mask, a column for each head dim, a line for each peer."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.5), layout="constrained")
    panels = figure.subplots(2, len(HEAD_DIMS), sharex=True, sharey=True)
    lines = {}
    for is_causal, line in zip((False, True), panels, strict=True):
        for H, axes in zip(HEAD_DIMS, line, strict=True):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.grid(alpha=0.3)
            axes.set_title(f"H = {H}, {'causal' if is_causal else 'no mask'}")
            for peer, points in series(rows, mode, H, is_causal).items():
                place = list(PEERS).index(peer)
                style = {"color": colormaps["tab20"](place % 20), "marker": "os^Dv"[place % 5], "markersize": 4}
                width = 2.5 if peer in OURS else 1.2
                (lines[peer],) = axes.plot(*zip(*points, strict=True), label=peer, linewidth=width, **style)
    panels[0, 0].set_ylim(bottom=0)
    figure.supxlabel("T = S (16,384 tokens)")
    figure.supylabel("TFLOP/s")
    device, jax, commit = rows[0]["device"], rows[0]["versions"]["jax"], rows[0]["commit"][:8]
    figure.suptitle(f"{PASSES[mode]}, bfloat16, N·H = 2048: {device}, jax {jax}, {commit}")
    figure.legend(handles=list(lines.values()), loc="outside right upper")
    FigureCanvasAgg(figure).print_figure(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("paths", nargs="+", type=pathlib.Path, help="result files, oldest first")
    parser.add_argument("--commit", help="whose run to show; by default the last with rows of ours and of others")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs"), help="folder of the figures")
    options = parser.parse_args(argv)
    try:
        rows = one_run(load(options.paths), options.commit)
    except ValueError as error:
        sys.exit(str(error))
    for mode, name in PASSES.items():
        if any(series(rows, mode, H, is_causal) for H in HEAD_DIMS for is_causal in (False, True)):
            path = options.out / f"speed-{name.replace(' ', '-')}.png"
            draw(rows, mode, path)
            print(f"written to {path}")
    print(f"\nWhere another is faster, commit {rows[0]['commit'][:8]}:\n\n{table(losses(rows))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
