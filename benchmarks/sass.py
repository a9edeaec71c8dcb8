"""``python -m benchmarks sass``: what ptxas says of our kernels, on a machine without a GPU.

JAX compiles for a GPU that is only described (a compile-only topology), XLA writes the PTX of every kernel down, and
ptxas tells registers, spills and whether it serialised tensor-core products. Needs the CUDA plugin of JAX installed
(``pip install .[cuda13]`` or ``.[cuda12]``), no driver. ``__main__`` starts this as a process of its own, because its
environment must be set before JAX is imported.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import subprocess
import sys
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from pallas_flash.devices import Device
from pallas_flash.kernels.triton import tiles

from . import peers, report, timing, workloads
from .workloads import Workload


class Gpu(NamedTuple):
    """A GPU that is only described: what does not decide which kernels fit is the same for all."""

    device: Device
    ptxas: str  # its name of the architecture
    cores: int

    @property
    def config(self) -> str:
        major, minor = self.device.capability
        most = self.device.shared_memory  # of a block; a core has a kilobyte more, for the system
        described = f"""
            threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
            shared_memory_per_core: {most + 1024} threads_per_core_limit: 2048 core_count: {self.cores}
            fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            memory_bandwidth: 2000000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.5 device_memory_size: 80000000000
            shared_memory_per_block_optin: {most} registers_per_core_limit: 65536
            registers_per_block_limit: 65536 cuda_compute_capability {{ major: {major} minor: {minor} }}"""
        return f'gpu_device_info {{ {described} }} platform_name: "CUDA" device_description_str: "{self.device.kind}"'


GPUS = {
    "sm_80": Gpu(Device("cuda", "NVIDIA A100", (8, 0)), "sm_80", 108),
    "sm_86": Gpu(Device("cuda", "NVIDIA L4", (8, 9)), "sm_89", 58),
    "sm_90": Gpu(Device("cuda", "NVIDIA H200", (9, 0)), "sm_90a", 132),
    "sm_100": Gpu(Device("cuda", "NVIDIA B200", (10, 0)), "sm_100a", 148),
}


def compile_gradient(w: Workload, gpu: Gpu) -> None:
    """Compiles forward and backward of a workload on the triton tier; XLA leaves the PTX in ``--dump``."""
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=gpu.config)
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    attention = peers.PEERS["triton"](w)

    def gradient(q, k, v, do, extras):
        def f(q, k, v, bias):
            return attention(q, k, v, {**extras, "bias": bias})

        out, pullback = jax.vjp(f, q, k, v, extras["bias"])
        return out, pullback(do)[: 4 if w.bias_gradient else 3]

    placed = NamedSharding(mesh, PartitionSpec())
    shapes = jax.eval_shape(lambda: (*timing.inputs(w), peers.extras(w)))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), shapes)
    device = AbstractDevice(gpu.device.kind, gpu.cores, "cuda")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(gradient).trace(*shapes).lower(lowering_platforms=("cuda",))
    lowered.compile()


def assembled(w: Workload, gpu: Gpu, ptxas: str, dump: pathlib.Path) -> list[dict[str, Any]]:
    """What ptxas says of each of our kernels in the folder ``dump``, which is emptied."""
    rows = []
    for path in sorted(dump.iterdir()):
        text = path.read_text() if path.suffix == ".ptx" else ""
        path.unlink()
        for name in re.findall(r"\.entry (flash_\w+?)(?:_\d+)?\(", text):
            command = [ptxas, f"-arch={gpu.ptxas}", "-v", "-", "-o", os.devnull]
            said = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stderr
            numbers = {
                "registers": r"Used (\d+) registers",
                "spill_stores": r"(\d+) bytes spill stores",
                "spill_loads": r"(\d+) bytes spill loads",
            }
            row = {key: int(found[1]) if (found := re.search(rule, said)) else 0 for key, rule in numbers.items()}
            # C7519 only tells that a wait was put in front of a product that reads registers; the others serialise.
            warnings = sorted(set(re.findall(r"C75\d\d", said)) - {"C7519"})
            rows.append({"workload": w.name, "kernel": name, **row, "wgmma": text.count("wgmma.mma_async"),
                         "warnings": warnings})  # fmt: skip
    return rows


def find_ptxas() -> str:
    """ptxas of the pip packages that come with the CUDA plugin.

    Raises:
      SystemExit: there is none.
    """
    for folder in map(pathlib.Path, sys.path):
        for path in sorted(folder.glob("nvidia/**/bin/ptxas")):
            return str(path)
    raise SystemExit("no ptxas among the installed packages: pip install .[cuda13] (no driver is needed)")


def of_tables(gpu: Gpu) -> list[Workload]:
    """A workload for every situation of which the table of a GPU has a tile: together, all tiles that it names."""
    found = {}
    for entry in tiles.shipped(gpu.device).entries:
        s = entry.situation
        heads = max(2, workloads.HIDDEN // s.dim)
        name = f"{s.bits}-bit-d{s.dim}-{s.mask}{'-grouped' if s.grouped else ''}-{workloads.label(s.length)}"
        found[name] = Workload(
            name, 1, s.length, heads, s.dim, kv_heads=heads // 2 if s.grouped else None,
            dtype="float32" if s.bits == 32 else "bfloat16", causal=s.mask != "full",
            window=s.length // 4 if s.mask == "window" else None,
            documents=(s.length,) if s.mask == "packed" else (),
        )  # fmt: skip
    return list(found.values())


def worse(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[str]:
    """Kernels that spill more than they did, or whose tensor-core products are newly serialised, in words.

    Spills that a measurement found to be worth their tile stand in the record; versions of ptxas differ by a few
    bytes.
    """
    known = {(r["gpu"], r["workload"], r["kernel"]): r for r in before}
    complaints = []
    for r in rows:
        old = known.get((r["gpu"], r["workload"], r["kernel"]), {"spill_stores": 0, "warnings": []})
        if r["spill_stores"] > old["spill_stores"] * 1.25 + 64:
            complaints.append(f"{_name(r)} spills {r['spill_stores']} bytes, {old['spill_stores']} in the record")
        new = set(r["warnings"]) - set(old["warnings"])
        if new:
            complaints.append(f"{_name(r)} has its products serialised: {', '.join(sorted(new))}")
        if "refused" in r:
            complaints.append(f"{_name(r)} does not compile: {r['refused']}")
    return complaints


def _name(r: dict[str, Any]) -> str:
    return f"{r['gpu']} {r['workload']} {r['kernel']}"


def _line(r: dict[str, Any]) -> str:
    if "refused" in r:
        return f"{r['gpu']:7} {r['workload']:24} refused: {r['refused']}"
    spills = f"{r['spill_stores']:6} B {r['spill_loads']:6} B"
    numbers = f"{r['registers']:9}  {spills:>21}  {r['wgmma']:5} "
    return f"{r['gpu']:7} {r['workload']:24} {r['kernel']:14} {numbers}" + ", ".join(r["warnings"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sass", description=__doc__)
    parser.add_argument("--workloads", default="tables", help="groups or names, comma-separated; tables: every tile")
    parser.add_argument("--dump", type=pathlib.Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--gpus", default="sm_90", help=f"comma-separated, of {', '.join(GPUS)}")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    parser.add_argument("--strict", type=pathlib.Path, metavar="RECORD", help="fail where a kernel is worse than in it")
    args = parser.parse_args()
    ptxas, rows = find_ptxas(), []
    print(f"{'GPU':7} {'workload':24} {'kernel':14} registers  spills: stores, loads  wgmma")
    for gpu in args.gpus.split(","):
        for w in of_tables(GPUS[gpu]) if args.workloads == "tables" else workloads.find(args.workloads):
            try:
                compile_gradient(w, GPUS[gpu])
                found = assembled(w, GPUS[gpu], ptxas, args.dump)
            except NotImplementedError:  # refused in words, as a user would see
                print(f"{gpu:7} {w.name:24} has no kernel there", flush=True)
                continue
            except jax.errors.JaxRuntimeError as error:  # more shared memory than there is, most often
                found = [{"workload": w.name, "kernel": "", "spill_stores": 0, "warnings": [],
                          "refused": peers.reason(error)}]  # fmt: skip
            for r in found:
                rows.append({"gpu": gpu, **r})
                print(_line(rows[-1]), flush=True)
    if args.out:
        report.write(args.out, {"jax": jax.__version__, "rows": rows})
    if args.strict and (complaints := worse(rows, report.read(args.strict)["rows"])):
        raise SystemExit("\n".join(complaints))


if __name__ == "__main__":
    main()
