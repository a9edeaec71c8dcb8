"""``python -m benchmarks run | memory | train | tune | sass | list | report``: workloads x implementations."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from . import peers, reference, report, timing, tuning, workloads


def run(args: argparse.Namespace) -> None:
    """Writes the JSON after every cell, so that a run that is cut short leaves what it measured."""
    results: dict[str, Any] = {**report.provenance(), "error_is": reference.STATEMENT, "rows": []}
    directions = ("forward", "backward") if args.direction == "both" else (args.direction,)
    started = time.perf_counter()
    for w, names in ((w, peers.find(args.peers)) for w in workloads.find(args.workloads)):
        case = None
        for peer in names:
            if time.perf_counter() - started > args.budget:
                results.setdefault("not_run", []).append(
                    f"{w.name}, {peer}: the budget of {args.budget:.0f} s was spent"
                )
                continue
            case = case or timing.Case.of(w)
            rows = timing.run(case, peer, directions)
            results["rows"] += rows
            for r in rows:
                print(f"{r['workload']:18} {r['direction']:9} {peer:16} " + summary(r), flush=True)
            save(args, results)
    save(args, results)
    if not results["rows"]:
        raise SystemExit("nothing was run: the budget was spent before the first cell")
    print("\n" + report.table(results) + "\n" + report.refusals(results))
    if args.plot:
        report.plot(results, args.plot)


def save(args: argparse.Namespace, results: dict[str, Any]) -> None:
    if args.out:
        report.write(args.out, results)


def summary(r: dict[str, Any]) -> str:
    if "refused" in r:
        return f"refused: {r['refused']}"
    return f"{r['us']:10.1f} us {r['tflops']:8.2f} TFLOP/s, spread {r['spread']:.1%}, error {r['error']:.1e}"


def memory(args: argparse.Namespace) -> None:
    results: dict[str, Any] = {**report.provenance(), "rows": []}
    for peer in peers.find(args.peers):
        for length in (int(x) for x in args.lengths.split(",")):
            w = dataclasses.replace(workloads.cell(args.dim, length, True), batch=1, dtype=args.dtype)
            try:
                r = timing.memory(w, peer)
                print(f"{peer:16} S={length:7} {r['temp_bytes'] / 2**20:12.1f} MiB", flush=True)
            except Exception as error:  # out of memory, not on this device, not installed: the row says which
                reason = peers.reason(error)
                r = {"workload": w.name, "peer": peer, "length": length, "refused": reason}
                print(f"{peer:16} S={length:7} refused: {reason}", flush=True)
            results["rows"].append(r)
            save(args, results)
    if args.plot:
        report.plot(results, args.plot)


def show(args: argparse.Namespace) -> None:
    for group, members in workloads.GROUPS.items():
        print(f"{group}: {', '.join(w.name for w in members)}")
    print(f"peers: {', '.join(peers.NAMES)}")


def write_report(args: argparse.Namespace) -> None:
    for path in args.results:
        results = report.read(path)
        print(report.table(results))
        if args.plot:
            report.plot(results, args.plot)
    for document in args.write:
        report.insert(document)


def train(args: argparse.Namespace) -> None:
    from . import training  # needs flax and optax, which the other commands do not

    results: dict[str, Any] = {**report.provenance(), "rows": []}
    for name in args.sizes.split(","):
        for length in (int(x) for x in args.lengths.split(",")):
            for peer in peers.find(args.peers):
                shape = training.size(name, length, args.tokens)
                try:
                    r = training.row(name, shape, peer)
                    said = f"{r['tokens_per_second']:12,.0f} tokens/s, spread {r['spread']:.1%}, loss {r['loss']:.4f}"
                except Exception as error:  # out of memory, not on this device: the row says which
                    reason = peers.reason(error)
                    r = {"workload": f"{name}-{workloads.label(length)}", "peer": peer, "refused": reason,
                         "direction": "training step"}  # fmt: skip
                    said = f"refused: {reason}"
                results["rows"].append(r)
                print(f"{r['workload']:18} {peer:16} {said}", flush=True)
                save(args, results)
    print("\n" + report.table(results))


def tune(args: argparse.Namespace) -> None:
    table = tuning.tune(workloads.find(args.workloads), args.kernels.split(","), args.seconds, args.into)
    print(table)


def sass(arguments: list[str]) -> int:
    """See sass.py; the CPU is the backend, and XLA writes PTX down."""
    with tempfile.TemporaryDirectory() as dump:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_emitter_re=ptx"
        environment = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "XLA_FLAGS": flags}
        command = [sys.executable, "-m", "benchmarks.sass", "--dump", dump, *arguments]
        return subprocess.call(command, env=os.environ | environment)


def main() -> None:
    if sys.argv[1:2] == ["sass"]:
        raise SystemExit(sass(sys.argv[2:]))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run", help="measure times")
    command.add_argument("--workloads", default="smoke", help="groups or names, comma-separated")
    command.add_argument("--peers", default="triton,jax.nn cudnn", help="comma-separated, or all")
    command.add_argument("--direction", choices=("forward", "backward", "both"), default="both")
    command.add_argument("--budget", type=float, default=1e9, help="seconds after which no new cell starts")
    command.add_argument("--out", type=pathlib.Path, help="JSON file")
    command.add_argument("--plot", type=pathlib.Path, help="PNG file")
    command.set_defaults(run=run)
    command = commands.add_parser("memory", help="temporary memory over sequence length")
    command.add_argument("--dim", type=int, default=128)
    command.add_argument("--dtype", default="bfloat16")
    command.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768,65536,131072")
    command.add_argument("--peers", default="triton,xla")
    command.add_argument("--out", type=pathlib.Path)
    command.add_argument("--plot", type=pathlib.Path)
    command.set_defaults(run=memory)
    command = commands.add_parser("train", help="tokens per second of a GPT's training step")
    command.add_argument("--sizes", default="gpt2-small,gpt2-medium", help="comma-separated, or smoke")
    command.add_argument("--lengths", default="1024,4096,16384")
    command.add_argument("--tokens", type=int, default=workloads.TOKENS, help="of a step")
    command.add_argument("--peers", default="triton,jax.nn cudnn,jax.nn xla")
    command.add_argument("--out", type=pathlib.Path, help="JSON file")
    command.set_defaults(run=train)
    command = commands.add_parser("tune", help="the fastest tile of each kernel, into a table")
    command.add_argument("--workloads", default="cells", help="groups or names, comma-separated")
    command.add_argument("--kernels", default="forward,dq,dkv", help="comma-separated, of forward, dq, dkv, dscore")
    command.add_argument("--seconds", type=float, default=120.0, help="for each kernel of each workload")
    command.add_argument("--into", type=pathlib.Path, help="JSON table to make or to add to; the one that we ship if "
                         "left out")  # fmt: skip
    command.set_defaults(run=tune)
    commands.add_parser("sass", help="registers and spills, without a GPU; see python -m benchmarks sass --help")
    commands.add_parser("list", help="workloads and peers").set_defaults(run=show)
    command = commands.add_parser("report", help="tables from JSON")
    command.add_argument("results", nargs="*", type=pathlib.Path)
    command.add_argument("--write", nargs="*", type=pathlib.Path, default=[], help="documents whose tables to renew")
    command.add_argument("--plot", type=pathlib.Path, help="PNG file: TFLOP/s, or memory, over sequence length")
    command.set_defaults(run=write_report)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
