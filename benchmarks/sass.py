"""``python -m benchmarks sass``: what ptxas says of our kernels, on a machine without a GPU.

JAX compiles for a GPU that is only described (a compile-only topology), XLA writes the PTX of every kernel down, and
ptxas tells registers, spills and whether it serialised tensor-core products. Needs the CUDA plugin of JAX installed
(``pip install .[cuda13]`` or ``.[cuda12]``), no driver. ``__main__`` starts this as a process of its own, because its
environment must be set before JAX is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from . import peers, timing, workloads
from .workloads import Workload

H200 = """
threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
clock_rate_ghz: 1.98 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
"""


def compile_gradient(w: Workload) -> None:
    """Compiles forward and backward of a workload on the triton tier; XLA leaves the PTX in ``--dump``."""
    config = f'gpu_device_info {{ {H200} }} platform_name: "CUDA" device_description_str: "NVIDIA H200"'
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=config)
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
    device = AbstractDevice("NVIDIA H200", 132, "cuda")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(gradient).trace(*shapes).lower(lowering_platforms=("cuda",))
    lowered.compile()


def assembled(w: Workload, ptxas: str, dump: pathlib.Path) -> list[dict[str, Any]]:
    """What ptxas says of each of our kernels in the folder ``dump``, which is emptied."""
    rows = []
    for path in sorted(dump.iterdir()):
        text = path.read_text() if path.suffix == ".ptx" else ""
        path.unlink()
        for name in re.findall(r"\.entry (flash_\w+?)(?:_\d+)?\(", text):
            command = [ptxas, "-arch=sm_90a", "-v", "-", "-o", os.devnull]
            said = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stderr
            numbers = {
                "registers": r"Used (\d+) registers",
                "spill_stores": r"(\d+) bytes spill stores",
                "spill_loads": r"(\d+) bytes spill loads",
            }
            row = {key: int(found[1]) if (found := re.search(rule, said)) else 0 for key, rule in numbers.items()}
            warnings = sorted(set(re.findall(r"\(C75\d\d\)|C75\d\d", said)))  # serialised wgmma
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sass", description=__doc__)
    parser.add_argument("--workloads", default="cells", help="groups or names, comma-separated")
    parser.add_argument("--dump", type=pathlib.Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    parser.add_argument("--strict", action="store_true", help="fail where a kernel spills or serialises wgmma")
    args = parser.parse_args()
    ptxas, rows = find_ptxas(), []
    print(f"{'workload':18} {'kernel':16} registers  spills: stores, loads  wgmma")
    for w in workloads.find(args.workloads):
        compile_gradient(w)
        for r in assembled(w, ptxas, args.dump):
            rows.append(r)
            spills = f"{r['spill_stores']:6} B {r['spill_loads']:6} B"
            print(f"{r['workload']:18} {r['kernel']:16} {r['registers']:9}  {spills:>21}  {r['wgmma']:5} "
                  + ", ".join(r["warnings"]), flush=True)  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps({"jax": jax.__version__, "rows": rows}, indent=1) + "\n")
    bad = [r for r in rows if r["spill_stores"] or r["warnings"]]
    if args.strict and bad:
        raise SystemExit(f"{len(bad)} kernels spill or serialise their products")


if __name__ == "__main__":
    main()
