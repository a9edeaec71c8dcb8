"""Results: JSON files in benchmarks/results, tables and plots made from them."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
from importlib import metadata
from typing import Any

import jax

LARGEST_ERROR = 0.03  # bfloat16 attention is within a third of it, gradients included
RESULTS = pathlib.Path(__file__).parent / "results"
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "torch", "tokamax", "dew-flash-attn-cu13")
_PACKAGES += ("flash-attn3-jax", "jax-linear-attention", "flax", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


def provenance() -> dict[str, Any]:
    """What a number needs beside it: command, date, commit, device, versions."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": "python -m benchmarks " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": jax.devices()[0].device_kind,
        "python": sys.version.split()[0],
        "versions": versions,
    }


def commit() -> str:
    """The commit of the working tree, or PALLAS_FLASH_COMMIT where the copy has no repository."""
    if given := os.environ.get("PALLAS_FLASH_COMMIT"):
        return given
    git = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def write(path: pathlib.Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def table(results: dict[str, Any]) -> str:
    """Markdown: a line per workload and direction, a column per peer. Wrong numbers are flagged beside their time."""
    if "length" in results["rows"][0]:
        return _memory_table(results)
    rows = results["rows"]
    columns = list(dict.fromkeys(r["peer"] for r in rows if "us" in r))
    lines = ["| workload | direction | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for workload, direction in dict.fromkeys((r["workload"], r["direction"]) for r in rows):
        cells = {r["peer"]: r for r in rows if (r["workload"], r["direction"]) == (workload, direction)}
        lines.append(f"| {workload} | {direction} | " + " | ".join(_cell(cells.get(p)) for p in columns) + " |")
    unit = (
        "Tokens per second (milliseconds)" if any("tokens_per_second" in r for r in rows) else "TFLOP/s (microseconds)"
    )
    return "\n".join([*lines, "", f"{unit}. {_source(results)}"])


def _memory_table(results: dict[str, Any]) -> str:
    rows = results["rows"]
    columns = list(dict.fromkeys(r["peer"] for r in rows))
    sizes = {(r["length"], r["peer"]): r.get("temp_bytes") for r in rows}
    lines = ["| length | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for length in dict.fromkeys(r["length"] for r in rows):
        found = (sizes.get((length, peer)) for peer in columns)
        lines.append(f"| {length} | " + " | ".join("-" if s is None else f"{s / 2**20:.1f}" for s in found) + " |")
    return "\n".join([*lines, "", f"Temporary memory of `value_and_grad`, MiB. {_source(results)}"])


def _source(results: dict[str, Any]) -> str:
    where = f"{results['device']}, JAX {results['versions'].get('jax')}, commit {results['commit'][:10]}"
    return f"{where}, {results['date'][:10]}; `{results['command']}`"


def refusals(results: dict[str, Any]) -> str:
    """A line for each peer and reason, with the workloads that it holds for."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for r in results["rows"]:
        if "refused" in r:
            found.setdefault((r["peer"], r["refused"]), {})[r["workload"]] = None
    return "\n".join(f"{peer}: {reason} ({', '.join(names)})" for (peer, reason), names in found.items())


def _cell(r: dict[str, Any] | None) -> str:
    if r is None or "us" not in r:
        return "-"
    if "tokens_per_second" in r:
        return f"{r['tokens_per_second']:,.0f} ({r['us'] / 1000:.0f})"
    wrong = "" if r.get("error") is None or r["error"] < LARGEST_ERROR else f" **error {r['error']:.0e}**"
    return f"{r['tflops']:.0f} ({r['us']:.0f}){wrong}"


def insert(document: pathlib.Path) -> None:
    """Replaces the text between ``<!-- table:NAME -->`` and ``<!-- /table -->`` by results/NAME.json's table.

    Raises:
      SystemExit: the document has no such place.
    """

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- table:{name} -->\n{table(read(RESULTS / f'{name}.json'))}\n<!-- /table -->"

    text, count = re.subn(r"<!-- table:([\w-]+) -->.*?<!-- /table -->", fill, document.read_text(), flags=re.S)
    if not count:
        raise SystemExit(f"{document}: no <!-- table:NAME --> ... <!-- /table --> in it")
    document.write_text(text)


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
    """TFLOP/s over sequence length, a panel per head dim, mask and direction; or memory over sequence length."""
    if "length" in results["rows"][0]:
        return _plot_memory(results, path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pattern = re.compile(r"d(\d+)-(causal|full)-(\d+)(k?)$")
    points: dict[tuple[int, str, str], dict[str, list[tuple[int, float]]]] = {}
    for r in results["rows"]:
        found = pattern.match(r["workload"])
        if found and "us" in r:
            length = int(found[3]) * (1024 if found[4] else 1)
            panel = points.setdefault((int(found[1]), found[2], r["direction"]), {})
            panel.setdefault(r["peer"], []).append((length, r["tflops"]))
    if not points:
        raise SystemExit("these results hold no grid of sequence lengths to draw")
    panels = sorted(points)
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.5), squeeze=False)
    for axis, key in zip(axes[0], panels, strict=True):
        for peer, line in points[key].items():
            axis.plot(*zip(*sorted(line), strict=True), marker="o", label=peer)
        axis.set(title=f"D={key[0]}, {key[1]}, {key[2]}", xlabel="sequence length", xscale="log", ylim=(0, None))
        axis.xaxis.set_major_formatter("{x:.0f}")
    axes[0][0].set_ylabel("TFLOP/s")
    axes[0][0].legend()
    figure.suptitle(results["device"])
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_memory(results: dict[str, Any], path: pathlib.Path) -> None:
    """Temporary memory of value_and_grad over sequence length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 4))
    for peer in dict.fromkeys(r["peer"] for r in results["rows"]):
        line = [(r["length"], r["temp_bytes"] / 2**20) for r in results["rows"]
                if r["peer"] == peer and "temp_bytes" in r]  # fmt: skip
        if line:
            axis.loglog(*zip(*sorted(line), strict=True), marker="o", label=peer)
    axis.set(xlabel="sequence length", ylabel="temporary memory of value_and_grad, MiB", title=results["device"])
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
