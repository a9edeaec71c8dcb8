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

RESULTS = pathlib.Path(__file__).parent / "results"
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "torch", "tokamax", "dew-flash-attn-cu13")
_PACKAGES += ("flash-attn3-jax", "jax-linear-attention", "flax")


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
    """Markdown: one line per workload and direction, a column per peer: TFLOP/s (and error where it is large)."""
    rows = results["rows"]
    peers = list(dict.fromkeys(r["peer"] for r in rows if "us" in r))
    lines = ["| workload | direction | " + " | ".join(peers) + " |", "|---" * (len(peers) + 2) + "|"]
    for workload, direction in dict.fromkeys((r["workload"], r["direction"]) for r in rows):
        cells = {r["peer"]: r for r in rows if (r["workload"], r["direction"]) == (workload, direction)}
        lines.append(f"| {workload} | {direction} | " + " | ".join(_cell(cells.get(p)) for p in peers) + " |")
    where = f"{results['device']}, JAX {results['versions'].get('jax')}, commit {results['commit'][:10]}"
    lines += ["", f"TFLOP/s (microseconds). {where}, {results['date'][:10]}; `{results['command']}`"]
    return "\n".join(lines)


def _cell(r: dict[str, Any] | None) -> str:
    if r is None or "us" not in r:
        return "-"
    wrong = f" **error {r['error']:.0e}**" if r.get("error") is not None and not r["error"] < 0.03 else ""
    return f"{r['tflops']:.0f} ({r['us']:.0f}){wrong}"


def insert(document: pathlib.Path) -> None:
    """Replaces the text between ``<!-- table:NAME -->`` and ``<!-- /table -->`` by results/NAME.json's table."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- table:{name} -->\n{table(read(RESULTS / f'{name}.json'))}\n<!-- /table -->"

    text = document.read_text()
    document.write_text(re.sub(r"<!-- table:([\w-]+) -->.*?<!-- /table -->", fill, text, flags=re.S))


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
    """TFLOP/s over sequence length, a panel per head dim and mask."""
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


def plot_memory(results: dict[str, Any], path: pathlib.Path) -> None:
    """Temporary memory of value_and_grad over sequence length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 4))
    for peer in dict.fromkeys(r["peer"] for r in results["rows"]):
        line = [(r["length"], r["temp_bytes"] / 2**20) for r in results["rows"] if r["peer"] == peer]
        axis.loglog(*zip(*sorted(line), strict=True), marker="o", label=peer)
    axis.set(xlabel="sequence length", ylabel="temporary memory of value_and_grad, MiB", title=results["device"])
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
