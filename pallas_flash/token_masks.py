"""Masks that hold a number for every token: ids of documents, runs of keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .checks import as_int_array
from .masks import Mask, mask
from .spans import HIGH, LOW, Range, Tiles, hull, places


@mask
class Segments(Mask):
    """Tokens see each other where their ids are equal, contiguous or not; a negative id is padding.

    ``q_ids`` is int32 [B or 1, q_len], ``kv_ids`` int32 [B or 1, kv_len].
    """

    q_ids: Any
    kv_ids: Any

    def allows(self, q, kv):
        q_ids = q.take(self.q_ids)
        return (q_ids == kv.take(self.kv_ids)) & (q_ids >= 0)

    def kv_range(self, q):
        return self._range(q, self.q_ids, self.kv_ids)

    def q_range(self, kv):
        return self._range(kv, self.kv_ids, self.q_ids)

    def tile_states(self, q, kv):
        some, every = _shared(q, self.q_ids, kv, self.kv_ids)
        return (some.astype(jnp.int8) + every.astype(jnp.int8))[:, None]

    def checked(self, sizes):
        ids = []
        for name, length in (("q_ids", sizes.q_len), ("kv_ids", sizes.kv_len)):
            ids.append(as_int_array(f"{name} of mask Segments", getattr(self, name)))
            if ids[-1].ndim != 2 or ids[-1].shape[1] != length:
                shape = ids[-1].shape
                raise ValueError(f"{name} of mask Segments must have shape [batch or 1, {length}]; got {shape}")
        return Segments(*_narrow(*ids))

    @staticmethod
    def _range(side, own, other):
        runs = Tiles(other.shape[1], _RUN)
        some, every = _shared(side, own, runs, other)
        lo, hi = hull(some)
        full_lo, full_hi = hull(every)
        gapless = every.sum(-1) == full_hi - full_lo
        bounds = (lo, jnp.where(gapless, full_lo, hi), jnp.where(gapless, full_hi, lo), hi)
        return side.in_positions(Range(*(_RUN * bound[:, None, :] for bound in bounds)))


_RUN = 16  # tokens of the other side that are judged together: the least that a kernel's tile holds


def _shared(own: Tiles, own_ids: Any, other: Tiles, other_ids: Any) -> tuple[jax.Array, jax.Array]:
    """Whether two tiles may share an id, and whether they hold one and the same: bool [B, own tiles, other tiles].

    By the least and largest id of each: no sort, which costs a GPU a fifth of the attention itself.
    """
    own_min, own_max = (x[..., :, None] for x in _id_bounds(own, own_ids))
    other_min, other_max = (x[..., None, :] for x in _id_bounds(other, other_ids))
    some = (own_min <= other_max) & (other_min <= own_max)
    every = (own_min == own_max) & (other_min == own_min) & (other_max == own_max)
    every &= own.reduce(own_ids, "min")[..., :, None] >= 0
    return some, every & (other.reduce(other_ids, "min")[..., None, :] >= 0)


def _id_bounds(tiles: Tiles, ids: Any) -> tuple[jax.Array, jax.Array]:
    """Least and largest id, paddings aside, of each tile: int32 [B, tiles]; the least is larger where there is none."""
    ids = jnp.asarray(ids, jnp.int32)
    return tiles.reduce(jnp.where(ids < 0, HIGH, ids), "min"), tiles.reduce(jnp.where(ids < 0, LOW, ids), "max")


def _narrow(q_ids: jax.Array, kv_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Segment ids as int32; ids that may not fit become their rank among those of their batch row."""
    if all(x.dtype.itemsize < 4 or x.dtype == jnp.int32 for x in (q_ids, kv_ids)):
        return q_ids.astype(jnp.int32), kv_ids.astype(jnp.int32)
    rows = max(q_ids.shape[0], kv_ids.shape[0])
    both = jnp.concatenate([jnp.broadcast_to(x, (rows, x.shape[1])) for x in (q_ids, kv_ids)], axis=1)
    rank = jax.vmap(lambda row: places(jnp.sort(row), row, "left"))(both)
    rank = jnp.where(both < 0, -1, rank)
    return rank[:, : q_ids.shape[1]], rank[:, q_ids.shape[1] :]


@mask
class KeyRanges(Mask):
    """Query i sees the keys in rows ``first[i]`` to ``last[i]``, the last one not included.

    ``first`` and ``last`` are int32 [B or 1, q_len], each non-decreasing along the queries: documents packed end to
    end, each with a causal mask or a window of its own, in one mask.
    """

    first: Any
    last: Any

    def checked(self, sizes):
        m = KeyRanges(*(as_int_array(f"{name} of mask KeyRanges", x) for name, x in vars(self).items()))
        if not all(x.ndim == 2 and x.shape[1] == sizes.q_len for x in (m.first, m.last)):
            raise ValueError(
                f"first and last of mask KeyRanges must have shape [batch or 1, {sizes.q_len}]; got {m.first.shape} "
                f"and {m.last.shape}"
            )
        return m

    def allows(self, q, kv):
        return (kv.row >= q.take(self.first)) & (kv.row < q.take(self.last))

    def kv_range(self, q):
        rows = (
            q.reduce(self.first, "min"),
            q.reduce(self.first, "max"),
            q.reduce(self.last, "min"),
            q.reduce(self.last, "max"),
        )
        return q.in_positions(Range(*(bound[:, None, :] for bound in rows)))

    def q_range(self, kv):
        # In order, so the queries that see a key, and those that see a whole tile, are runs.
        def place(ends, bounds, side):
            return jax.vmap(lambda x: places(x, bounds, side))(ends)

        lo, hi = jnp.asarray(kv.row_lo), jnp.asarray(kv.row_hi)
        rows = (
            place(self.last, lo, "right"),
            place(self.last, hi, "left"),
            place(self.first, lo, "right"),
            place(self.first, hi, "left"),
        )
        return kv.in_positions(Range(*(bound[:, None, :] for bound in rows)))
