"""``python -m benchmarks tune``: walks the tiles of each kernel on this GPU and keeps the fastest in a table."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterable, Sequence

import jax

import pallas_flash as pf
from pallas_flash import devices
from pallas_flash.kernels.triton import tiles

from . import peers, timing
from .workloads import Workload

BACKWARD = ("dq", "dkv", "dk", "dv", "dscore")


def tune(ws: Iterable[Workload], kernels: Sequence[str], seconds: float, path: pathlib.Path | None) -> pf.TileTable:
    """The table at ``path`` with the winners of these workloads, saved after each; ``seconds`` for each kernel.

    A workload that keeps its tile is not entered. Forward and backward are timed apart.
    """
    path = path or tiles.table_path(devices.current())
    table = pf.TileTable.load(path) if path.exists() else pf.TileTable([], _measured())
    for w in ws:
        print(f"== {w.name}", flush=True)
        (q, k, v, do), extras = timing.inputs(w), peers.extras(w)
        attention = peers.PEERS["triton"](w)
        if "forward" in kernels:
            table = _better(table, seconds, ("forward",), attention, q, k, v, extras)
        backward = tuple(kernel for kernel in kernels if kernel in BACKWARD)
        if backward:
            _, pullback = jax.jit(functools.partial(timing.with_pullback, attention, w))(q, k, v, extras)
            table = _better(table, seconds * len(backward), backward, lambda pull, do: pull(do), pullback, do)
        table.save(path)
    return table


def _better(table: pf.TileTable, seconds: float, kernels: tuple[str, ...], fn: Callable, *args) -> pf.TileTable:
    say = functools.partial(print, flush=True)
    won = pf.autotune(fn, *args, kernels=kernels, seconds=seconds, progress=say)
    here = jax.devices()[0].device_kind in table.origin
    origin = table.origin if here or not won.entries else f"{_measured()} in part; the rest {table.origin}"
    return pf.TileTable((won | table).entries, origin)


def _measured() -> str:
    return f"measured on {jax.devices()[0].device_kind}"
