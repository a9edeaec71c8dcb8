"""Block sizes, warps and pipeline stages of each Triton kernel, and who picks them: a table, then a rule that fits."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator

from jax.experimental import pallas as pl

from ...devices import Device
from ...problem import Problem
from ...tile_table import Fields, Situation, TileTable, active, listener
from .tile_math import padded_dim


@dataclasses.dataclass(frozen=True)
class Tile:
    """How one kernel cuts the scores: ``block_q`` queries by ``block_kv`` keys per step.

    ``num_warps`` warps of 32 threads share a tile; ``stages`` tiles of the walked side are in flight at once. With
    ``registers`` the side that stays is read from registers instead of shared memory.
    """

    block_q: int
    block_kv: int
    num_warps: int
    stages: int
    registers: bool = False

    def __post_init__(self) -> None:
        blocks = (self.block_q, self.block_kv, self.num_warps)
        if any(n < 1 or n & (n - 1) for n in blocks) or min(blocks[:2]) < 16 or self.num_warps > 32 or self.stages < 1:
            raise ValueError(
                f"a tile's block_q and block_kv are powers of two from 16, its num_warps one up to 32, its stages at "
                f"least 1; got {dataclasses.asdict(self)}"
            )

    def __str__(self) -> str:
        held = ", held in registers" if self.registers else ""
        return f"{self.block_q}x{self.block_kv}, {self.num_warps} warps, {self.stages} stages{held}"

    def fields(self) -> Fields:
        """As a :class:`TileTable` keeps it."""
        return tuple(sorted((name, int(value)) for name, value in dataclasses.asdict(self).items()))

    @classmethod
    def of(cls, fields: Fields) -> Tile:
        values = dict(fields)
        names = {field.name for field in dataclasses.fields(cls)}
        if set(values) != names:
            raise ValueError(f"a tile in a table has {', '.join(sorted(names))}; got {', '.join(sorted(values))}")
        registers = bool(values.pop("registers"))
        return cls(**values, registers=registers)


def choose(problem: Problem, kernel: str, device: Device) -> Tile:
    """The tile of ``kernel`` (of ``tile_table.KERNELS``), shrunk until it fits the problem and the device.

    Raises:
      ValueError: not even the smallest tile fits the device's shared memory, or none is known for such head dims.
    """
    return choose_with_origin(problem, kernel, device)[0]


def take(problem: Problem, kernel: str, device: Device) -> Tile:
    """:func:`choose` for a kernel that is going to run: whoever tunes hears of it."""
    asked = listener()
    if asked is not None and (wanted := situation(problem, kernel)) not in asked.candidates:
        asked.candidates[wanted] = tuple(tile.fields() for tile in candidates(problem, kernel, device))
    return choose(problem, kernel, device)


def choose_with_origin(problem: Problem, kernel: str, device: Device) -> tuple[Tile, str]:
    """:func:`choose`, and where the tile is from, in words."""
    wanted = situation(problem, kernel)
    for table in active():
        entry = table.close(wanted)
        if entry is not None:
            return _fitting(problem, kernel, device, Tile.of(entry.tile)), table.origin
    table = shipped(device)
    entry = table.nearest(wanted)
    if entry is None:
        raise ValueError(
            f"no tile of the {kernel} kernel is known for D={wanted.dim} in {problem.dtype} on {device.kind}"
        )
    return _fitting(problem, kernel, device, Tile.of(entry.tile)), table.origin


def situation(problem: Problem, kernel: str) -> Situation:
    """What decides the tile of a kernel."""
    p = problem
    plain = p.mask == "no mask" and not p.scores
    mask = "window" if p.narrow else "packed" if p.packed else "full" if plain else "masked"
    over_queries = kernel in _OVER_QUERIES
    length = p.q_len if over_queries else p.kv_len
    bits = 32 if p.dtype == "float32" else 16
    return Situation("triton", kernel, bits, _dim(p), mask, over_queries and p.group > 1, length)


_OVER_QUERIES = ("dkv", "dk", "dv")  # kernels whose programs own keys and walk queries


def _dim(problem: Problem) -> int:
    return max(padded_dim(d, problem.dtype) for d in (problem.head_dim, problem.v_head_dim))


@functools.cache
def shipped(device: Device) -> TileTable:
    """The table that the package holds for a GPU, or for the one most like it."""
    return TileTable.load(table_path(device))


def table_path(device: Device) -> pathlib.Path:
    """Where that table is."""
    known = "sm_90" if device.interpret else _ARCHITECTURES.get(device.capability)
    # What is not known yet is newer; a table for little shared memory serves it too.
    return pathlib.Path(__file__).parent / "tables" / f"{known or 'sm_86'}.json"


# Which table serves which compute capability: as much shared memory, and the same instructions for products.
_ARCHITECTURES = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_80", (8, 9): "sm_86", (9, 0): "sm_90"}
_ARCHITECTURES |= {(10, 0): "sm_100", (10, 3): "sm_100", (12, 0): "sm_86", (12, 1): "sm_86"}


def candidates(problem: Problem, kernel: str, device: Device) -> list[Tile]:
    """Tiles worth a measurement: they fit shared memory, and by estimate their sums and scores fit registers."""
    found = dict.fromkeys(_clipped(problem, tile) for tile in _sensible(problem, kernel))
    return [tile for tile in found if _plausible(problem, kernel, tile) and fits(problem, kernel, tile, device)]


def _sensible(problem: Problem, kernel: str) -> Iterator[Tile]:
    wide = _dim(problem) > 128 or problem.dtype == "float32"  # its rows need smaller blocks or more threads
    for own in (32, 64, 128) if wide else (64, 128, 256):  # of the side that stays
        for other in (16, 32, 64) if wide else (32, 64, 128):
            block_q, block_kv = (other, own) if kernel in _OVER_QUERIES else (own, other)
            # A tensor-core product has 16 rows a warp; two warps share them where sums need more registers.
            for num_warps in sorted({max(4, own // rows) for rows in ((8, 16, 32) if wide else (16, 32))}):
                for stages in (1, 2, 3) if wide else (2, 3):
                    yield Tile(block_q, block_kv, num_warps, stages)
                    yield Tile(block_q, block_kv, num_warps, stages, registers=True)


_MOST_REGISTERS = 230  # of 255, the rest being addresses and statistics; with 16 warps a thread has half of them


def _plausible(problem: Problem, kernel: str, tile: Tile) -> bool:
    if tile.registers and kernel == "dscore":
        return False  # holds nothing over its steps
    return registers_per_thread(problem, kernel, tile) <= _MOST_REGISTERS * 8 // max(8, tile.num_warps)


def registers_per_thread(problem: Problem, kernel: str, tile: Tile) -> int:
    """32-bit registers for sums, scores and held operands: a lower bound of what ptxas will need."""
    p, threads = problem, 32 * tile.num_warps
    size = 4 if p.dtype == "float32" else 2
    qk_dim, v_dim = (padded_dim(d, p.dtype) for d in (p.head_dim, p.v_head_dim))
    scores = tile.block_q * tile.block_kv
    if kernel == "forward":
        numbers, held = tile.block_q * v_dim + scores, tile.block_q * qk_dim
    elif kernel == "dkv":
        numbers, held = tile.block_kv * (qk_dim + v_dim) + 2 * scores, tile.block_kv * (qk_dim + v_dim)
    elif kernel == "dk":
        numbers, held = tile.block_kv * qk_dim + 2 * scores, tile.block_kv * (qk_dim + v_dim)
    elif kernel == "dv":
        numbers, held = tile.block_kv * v_dim + scores, tile.block_kv * qk_dim
    else:
        numbers, held = tile.block_q * qk_dim + 2 * scores, tile.block_q * (qk_dim + v_dim)
    return (numbers + (held * size // 4 if tile.registers else 0)) // threads


def _fitting(problem: Problem, kernel: str, device: Device, tile: Tile) -> Tile:
    tile = _clipped(problem, tile)
    while (smaller := _smaller(tile)) is not None and not fits(problem, kernel, tile, device):
        tile = smaller
    if not fits(problem, kernel, tile, device):
        raise ValueError(f"no tile of the {kernel} kernel fits {device.shared_memory} bytes of shared memory")
    return tile


def _clipped(problem: Problem, tile: Tile) -> Tile:
    tile = dataclasses.replace(
        tile,
        block_q=min(tile.block_q, max(16, pl.next_power_of_2(problem.q_len))),
        block_kv=min(tile.block_kv, max(16, pl.next_power_of_2(problem.kv_len))),
    )
    few = min(tile.block_q, tile.block_kv) <= 32 and _dim(problem) <= 128
    return dataclasses.replace(tile, num_warps=min(4, tile.num_warps)) if few else tile


def _smaller(tile: Tile) -> Tile | None:
    if tile.stages > 2:
        return dataclasses.replace(tile, stages=tile.stages - 1)
    if tile.block_kv > 32:
        return dataclasses.replace(tile, block_kv=tile.block_kv // 2)
    if tile.block_q > 32:
        return dataclasses.replace(tile, block_q=tile.block_q // 2)
    if tile.stages > 1:
        return dataclasses.replace(tile, stages=1)
    if tile.block_kv > 16:
        return dataclasses.replace(tile, block_kv=16)
    if tile.block_q > 16:
        return dataclasses.replace(tile, block_q=16)
    return None


def fits(problem: Problem, kernel: str, tile: Tile, device: Device) -> bool:
    """Whether the estimate of shared memory stays within the device's limit."""
    return shared_memory(problem, kernel, tile) <= device.shared_memory


def shared_memory(problem: Problem, kernel: str, tile: Tile) -> int:
    """Bytes of shared memory that Triton allocates, estimated: resident tiles, plus the walked side per stage."""
    size = 4 if problem.dtype == "float32" else 2
    if problem.precision == "highest" and problem.dtype == "float32":
        size = 8  # the triple TF32 product keeps a rounded and a remainder half of each operand
    qk_dim, v_dim = (padded_dim(d, problem.dtype) for d in (problem.head_dim, problem.v_head_dim))
    dims = qk_dim + v_dim
    scores = tile.block_q * tile.block_kv * size
    if kernel == "forward":
        resident = tile.block_q * qk_dim * size
        walked = tile.block_kv * dims * size
        return resident + tile.stages * walked
    if kernel in ("dk", "dv"):
        own = tile.block_kv * (dims if kernel == "dk" else qk_dim)
        return (own + tile.stages * tile.block_q * dims) * size + 2048  # lse and delta
    own, other = (tile.block_kv, tile.block_q) if kernel == "dkv" else (tile.block_q, tile.block_kv)
    # Half of a 16-bit tile that is read both ways goes through shared memory again (16 of 112 kB at D = 512 on sm_89).
    twice = other * qk_dim if kernel == "dkv" and size == 2 else 0
    return (own + tile.stages * other) * dims * size + scores + twice
