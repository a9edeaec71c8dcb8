"""Where a tile stands: the only things a mask sees of the hardware.

A mask is asked two questions.  ``allows(q, kv)`` gets two *spans*, runs of tokens along the two sides of one tile
of scores, shaped so that they broadcast against each other.  ``kv_range`` / ``q_range`` get *tiles*, all tiles
along one side at once, and answer with a :class:`Range` for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LOW, HIGH = -(2**30), 2**30  # stand for "no bound"; far from int32's ends so that offsets can be added


@dataclasses.dataclass(frozen=True)
class Span:
    """A run of tokens along one side of a tile; each tier has its own subclass.

    Attributes:
      row: int32 rows in the array, shaped to broadcast over the tile.
      index: int32 absolute positions (row plus the query offset), shaped alike.
      batch, head: the batch row and the query head of this tile, int32, broadcastable to ``index``.
      watch: sees every read of an array, ``watch(kind, array, load, entry)``, and says what it gives.
    """

    row: jax.Array
    index: jax.Array
    batch: Any
    head: Any
    watch: Callable[..., jax.Array] | None = dataclasses.field(default=None, kw_only=True)

    def take(self, per_token: Any) -> jax.Array:
        """Values of an array [B or 1, length] at these tokens, shaped like ``index``."""
        return self._read("token", per_token, lambda: self._take(per_token))

    def per_batch(self, values: Any) -> jax.Array:
        """Value of an array [B or 1] for this batch row, broadcastable to ``index``."""
        return self._read("batch", values, lambda: self._per_batch(values))

    def per_head(self, values: Any) -> jax.Array:
        """Value of an array [N or 1] or [B or 1, N or 1] for this query head, broadcastable to ``index``."""
        return self._read("head", values, lambda: self._per_head(values))

    def take_pairs(self, kv: Any, pairs: Any) -> jax.Array:
        """Of queries: the tile with keys ``kv`` of an array [B or 1, N or 1, T or 1, S or 1]; a size of 1 stays 1."""
        return self._read("pairs", pairs, lambda: self._take_pairs(kv, pairs))

    def look_up(self, table: Any, entry: jax.Array) -> jax.Array:
        """Values of an array [N or 1, entries] at this query head and int ``entry``, which is clipped to its bounds."""
        entry = jnp.clip(entry, 0, table.shape[1] - 1).astype(jnp.int32)
        return self._read("table", table, lambda: self._look_up(table, entry), entry)

    def _read(self, kind: str, array: Any, load: Callable[[], jax.Array], entry: Any = None) -> jax.Array:
        return load() if self.watch is None else self.watch(kind, array, load, entry)

    def _take(self, per_token: Any) -> jax.Array:
        raise NotImplementedError

    def _per_batch(self, values: Any) -> jax.Array:
        raise NotImplementedError

    def _per_head(self, values: Any) -> jax.Array:
        raise NotImplementedError

    def _take_pairs(self, kv: Any, pairs: Any) -> jax.Array:
        raise NotImplementedError

    def _look_up(self, table: Any, entry: jax.Array) -> jax.Array:
        raise NotImplementedError


class Range(NamedTuple):
    """A promise about the other side of a tile, in positions.

    No pair outside ``[lo, hi)`` is allowed, and every pair inside ``[full_lo, full_hi)`` is.  Each field is an int
    or an int array that broadcasts to [batch, heads, tiles].  ``full_lo >= full_hi`` promises no full part.
    """

    lo: Any = LOW
    full_lo: Any = HIGH
    full_hi: Any = LOW
    hi: Any = HIGH


EVERYTHING = Range(LOW, LOW, HIGH, HIGH)
NO_PROMISE = Range()


def lib(*values: Any) -> Any:
    """numpy where all values are known now, jax.numpy where one is an array on a device or traced."""
    return jnp if any(isinstance(v, jax.Array) for v in jax.tree.leaves(values)) else np


def intersect(a: Range, b: Range) -> Range:
    """What two promises say about pairs that both masks allow."""
    xp = lib(a, b)
    return Range(
        xp.maximum(a.lo, b.lo),
        xp.maximum(a.full_lo, b.full_lo),
        xp.minimum(a.full_hi, b.full_hi),
        xp.minimum(a.hi, b.hi),
    )


def unite(a: Range, b: Range) -> Range:
    """What two promises say about pairs that at least one mask allows: the hull, and the larger full part."""
    xp = lib(a, b)
    a_empty, b_empty = xp.asarray(a.lo) >= xp.asarray(a.hi), xp.asarray(b.lo) >= xp.asarray(b.hi)
    lo = xp.where(a_empty, b.lo, xp.where(b_empty, a.lo, xp.minimum(a.lo, b.lo)))
    hi = xp.where(a_empty, b.hi, xp.where(b_empty, a.hi, xp.maximum(a.hi, b.hi)))
    a_size, b_size = xp.subtract(a.full_hi, a.full_lo), xp.subtract(b.full_hi, b.full_lo)
    first_lo = xp.where(a_size >= b_size, a.full_lo, b.full_lo)
    first_hi = xp.where(a_size >= b_size, a.full_hi, b.full_hi)
    touching = (a_size > 0) & (b_size > 0)
    touching &= xp.maximum(a.full_lo, b.full_lo) <= xp.minimum(a.full_hi, b.full_hi)
    full_lo = xp.where(touching, xp.minimum(a.full_lo, b.full_lo), first_lo)
    full_hi = xp.where(touching, xp.maximum(a.full_hi, b.full_hi), first_hi)
    return Range(lo, full_lo, full_hi, hi)


def places(ordered: jax.Array, values: jax.Array, side: str) -> jax.Array:
    """``jnp.searchsorted`` as int32, by counting where that is not too many comparisons.

    Its default, a binary search, is a loop of small kernels on a GPU, and a sort of thousands costs more than many
    an attention.
    """
    method = "compare_all" if ordered.size * values.size <= 2**28 else "sort"
    return jnp.searchsorted(ordered, values, side=side, method=method).astype(jnp.int32)


def hull(some: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First place that is True and one behind the last: bool [..., places] to int32 [...]; 0 and 0 where none is."""
    place = jnp.arange(some.shape[-1], dtype=jnp.int32)
    hi = jnp.where(some, place + 1, 0).max(-1)
    return jnp.minimum(jnp.where(some, place, HIGH).min(-1), hi), hi


def shift(r: Range, offset: Any) -> Range:
    """The same promise with every bound moved by ``offset``."""
    return Range(*(bound + offset for bound in r))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """All tiles along one side, for the ranges of a mask.

    Attributes:
      length: tokens along this side.
      block: tokens per tile; the last tile may be shorter.
      offset: position of row 0 of this side, an int or an int32 array [B].
      other_offset: position of row 0 of the other side.
    """

    length: int
    block: int
    offset: Any = 0
    other_offset: Any = 0

    @property
    def count(self) -> int:
        return -(-self.length // self.block)

    @property
    def row_lo(self) -> Any:
        return np.arange(self.count, dtype=np.int32) * self.block

    @property
    def row_hi(self) -> Any:
        return np.minimum(self.row_lo + self.block, self.length).astype(np.int32)

    @property
    def lo(self) -> Any:
        """First position of each tile."""
        return self.row_lo + self.per_batch(self.offset)

    @property
    def hi(self) -> Any:
        """One behind the last position of each tile."""
        return self.row_hi + self.per_batch(self.offset)

    def per_batch(self, values: Any) -> Any:
        """An int or an array [B or 1] as something that broadcasts to [batch, heads, tiles]."""
        return values if np.ndim(values) == 0 else jnp.asarray(values, jnp.int32)[:, None, None]

    def in_positions(self, rows: Range) -> Range:
        """A range that counts rows of the other side, as one that counts positions."""
        return shift(rows, self.per_batch(self.other_offset))

    def reduce(self, per_token: Any, kind: str) -> jax.Array:
        """``kind`` ("min", "max", "any", "all") of an array [..., length] over each tile: [..., tiles]."""
        neutral = {"min": HIGH, "max": LOW, "any": False, "all": True}[kind]
        padding = [(0, 0)] * (per_token.ndim - 1) + [(0, self.count * self.block - self.length)]
        tiled = jnp.pad(per_token, padding, constant_values=neutral)
        return getattr(jnp, kind)(tiled.reshape(*per_token.shape[:-1], self.count, self.block), axis=-1)

    def to_tiles(self, r: Range) -> Any:
        """Ranges of the *other* side in rows, as int32 [B or 1, N or 1, tiles of the other side, 4] in its tiles.

        Called on the tiles of the side that is walked: a range in tokens becomes a range in tiles of ``block``
        tokens: the four numbers are first tile, first full tile, end of full tiles, end; full part empty where
        there is none.
        """
        xp = lib(r)
        r = Range(*(xp.asarray(bound) for bound in r))
        lo = xp.clip(r.lo, 0, self.length) // self.block
        hi = -(-xp.clip(r.hi, 0, self.length) // self.block)
        full_lo = -(-xp.clip(r.full_lo, 0, self.length) // self.block)
        # The last, short tile counts as full only for whoever need not test its end: nobody.
        full_hi = xp.clip(r.full_hi, 0, self.length) // self.block
        hi = xp.maximum(lo, hi)
        full_lo, full_hi = xp.clip(full_lo, lo, hi), xp.clip(full_hi, lo, hi)
        empty = full_lo >= full_hi
        full_lo, full_hi = xp.where(empty, hi, full_lo), xp.where(empty, hi, full_hi)
        # An empty range becomes zero tiles rather than a tile that holds nothing.
        nothing = r.lo >= r.hi
        bounds = [xp.where(nothing, 0, b) for b in xp.broadcast_arrays(lo, full_lo, full_hi, hi)]
        stacked = xp.stack(bounds, axis=-1).astype(np.int32)
        return stacked.reshape((1,) * (4 - stacked.ndim) + stacked.shape)

    def states(self, bounds: Any) -> Any:
        """Of what :meth:`to_tiles` gave, pair by pair: int8 [..., tiles of the other side, tiles of this one].

        0 where a tile lies outside the range, 2 in its full part, 1 at its edges.
        """
        xp = lib(bounds)
        first, full, full_end, end = (bound[..., None] for bound in xp.moveaxis(bounds, -1, 0))
        tile = xp.arange(self.count, dtype=np.int32)
        return ((first <= tile) & (tile < end)).astype(np.int8) + ((full <= tile) & (tile < full_end)).astype(np.int8)
