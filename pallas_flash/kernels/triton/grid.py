"""Which tile a program takes: the heavy ones of a causal mask first, the tiles of several heads by turns."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...problem import Problem
from .tiles import Tile

_REACH = 2**31  # bytes, see Grid.of


class Grid(NamedTuple):
    """Programs of a kernel, one for each tile of each batch row and head, on one axis: CUDA's others stop at 65535.

    Programs start in order as others end, so the order decides how long the last of them keep a few multiprocessors
    busy. ``together`` heads take turns, tile by tile from the heaviest: then only light tiles are left for the end,
    where head after head would end with all the tiles, heavy and light, of one head.
    """

    batch: int
    heads: int
    tiles: int
    heavy_last: bool  # of a causal mask, the tile at the end is the heaviest
    together: int

    @classmethod
    def of(cls, p: Problem, heads: int, tiles: int, walked: int, *, heavy_last: bool) -> Grid:
        """The grid of a kernel whose programs walk ``walked`` bytes of their head.

        Programs of one head read the same bytes, one after the other, from L2 if they have not left it. With g heads
        by turns, 264 programs in flight and their places spread evenly, g * (g * walked / 264) bytes are read in
        between: at most 8 MB, a sixth of the L2 of an H200, so that g squared stays below 2**31 / walked. Only packed
        documents take turns: plain causal rows gained nothing by it when measured (docs/performance.md).
        """
        rows = p.batch * heads
        most = min(rows, math.isqrt(_REACH // max(1, walked))) if p.packed else 1
        together = next(g for g in range(max(1, most), 0, -1) if rows % g == 0)
        return cls(p.batch, heads, tiles, heavy_last, together)

    @property
    def size(self) -> int:
        return self.batch * self.heads * self.tiles

    def place(self) -> tuple[Any, Any, Any]:
        """(batch, head, tile) of this program."""
        rest, turn = split(pl.program_id(0), self.together)
        section, tile = split(rest, self.tiles)
        batch, head = split(section * self.together + turn, self.heads)
        return batch, head, (self.tiles - 1 - tile) if self.heavy_last else tile


def q_grid(p: Problem, tile: Tile) -> Grid:
    """One program for each tile of queries; each walks the keys and values that its group of heads shares."""
    walked = p.kv_len * _bytes_per_token(p) // p.group
    return Grid.of(p, p.num_q_heads, pl.cdiv(p.q_len, tile.block_q), walked, heavy_last=True)


def kv_grid(p: Problem, tile: Tile) -> Grid:
    """One program for each tile of keys; each walks the queries of its group of heads. The first keys have the most."""
    walked = p.q_len * _bytes_per_token(p) * p.group
    return Grid.of(p, p.num_kv_heads, pl.cdiv(p.kv_len, tile.block_kv), walked, heavy_last=False)


def split(index: Any, size: Any) -> tuple[Any, Any]:
    """Quotient and remainder of an index that is never negative (jnp.divmod would test its sign)."""
    size = jnp.int32(size)  # a bare int would be 64 bits wide in x64 mode
    return jax.lax.div(index, size), jax.lax.rem(index, size)


def _bytes_per_token(p: Problem) -> int:
    return (p.head_dim + p.v_head_dim) * jnp.dtype(p.dtype).itemsize
