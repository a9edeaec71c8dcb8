"""Block sizes, warps and pipeline stages of each Triton kernel, and the rule that picks them."""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

from ...devices import Device
from ...problem import Problem
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

    def __str__(self) -> str:
        held = ", held in registers" if self.registers else ""
        return f"{self.block_q}x{self.block_kv}, {self.num_warps} warps, {self.stages} stages{held}"


# Winners of sweeps on an H200 (notes in docs/performance.md), by padded head dim, for 16-bit inputs.
_DQ = {
    64: Tile(128, 64, 4, 3),
    128: Tile(64, 64, 4, 3, registers=True),
    256: Tile(64, 64, 4, 2),
    512: Tile(64, 32, 8, 1),
}
_TILES = {
    "forward": {
        64: Tile(128, 64, 8, 3),
        128: Tile(64, 64, 4, 3, registers=True),
        256: Tile(128, 64, 8, 2),
        512: Tile(64, 32, 8, 1),
    },
    "dq": _DQ,
    "dkv": {
        64: Tile(64, 64, 4, 3, registers=True),
        128: Tile(64, 64, 4, 2),
        256: Tile(64, 32, 4, 2),
        512: Tile(32, 32, 8, 1),
    },
    "dscore": _DQ,
}
# float32 has twice the bytes and, with TF32 or its triple product, twice the registers per element.
_DQ_FLOAT32 = {64: Tile(64, 32, 4, 3), 128: Tile(64, 32, 8, 3), 256: Tile(32, 32, 4, 2), 512: Tile(32, 16, 8, 1)}
_TILES_FLOAT32 = {
    "forward": {64: Tile(64, 32, 8, 3), 128: Tile(64, 64, 8, 3), 256: Tile(64, 32, 8, 2), 512: Tile(32, 16, 8, 1)},
    "dq": _DQ_FLOAT32,
    "dkv": {64: Tile(32, 32, 4, 3), 128: Tile(32, 32, 4, 2), 256: Tile(32, 16, 4, 2), 512: Tile(32, 16, 8, 1)},
    "dscore": _DQ_FLOAT32,
}


def choose(problem: Problem, kernel: str, device: Device) -> Tile:
    """The tile of ``kernel`` ("forward", "dq", "dkv" or "dscore"), shrunk until it fits the problem and the device.

    Raises:
      ValueError: not even the smallest tile fits the device's shared memory.
    """
    dim = max(padded_dim(d, problem.dtype) for d in (problem.head_dim, problem.v_head_dim))
    wide = problem.dtype == "float32"
    table = (_TILES_FLOAT32 if wide else _TILES)[kernel]
    tile = table[next((d for d in table if dim <= d), 512)]
    walked = 0 if problem.narrow else problem.q_len if kernel == "dkv" else problem.kv_len
    if kernel == "dkv" and 64 < dim <= 128 and problem.group > 1 and not wide:
        tile = Tile(64, 128, 8, 3)  # the loop over the group costs the other tile 376 bytes of spills
    if kernel == "forward" and dim == 128 and walked > 8192 and not problem.packed and not wide:
        # Larger tiles read less through L2 and draw less power, which is what limits a long run of long rows.
        plain = problem.mask == "no mask" and not problem.scores
        tile = Tile(256, 64, 16, 3) if plain else Tile(128, 64, 8, 3, registers=True)
    if kernel == "dscore" or (kernel != "dq" and walked <= 2048):
        # Too few steps to earn the way there: 278 instead of 293 TFLOP/s at 1k.
        tile = dataclasses.replace(tile, registers=False)
    tile = dataclasses.replace(
        tile,
        block_q=min(tile.block_q, max(16, pl.next_power_of_2(problem.q_len))),
        block_kv=min(tile.block_kv, max(16, pl.next_power_of_2(problem.kv_len))),
    )
    if min(tile.block_q, tile.block_kv) <= 32 and tile.num_warps > 4 and dim <= 128:
        tile = dataclasses.replace(tile, num_warps=4)
    while (smaller := _smaller(tile)) is not None and not fits(problem, kernel, tile, device):
        tile = smaller
    if not fits(problem, kernel, tile, device):
        raise ValueError(f"no tile of the {kernel} kernel fits {device.shared_memory} bytes of shared memory")
    return tile


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
    own, other = (tile.block_kv, tile.block_q) if kernel == "dkv" else (tile.block_q, tile.block_kv)
    return (own + tile.stages * other) * dims * size + scores
