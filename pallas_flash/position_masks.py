"""Masks by position and length, which hold at most a number per batch row."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp

from .checks import as_int_array, as_size, bounded
from .masks import Mask, mask, static
from .spans import EVERYTHING, HIGH, LOW, Range, intersect, lib


@mask
class Causal(Mask):
    """Keys at or before the query's position."""

    def allows(self, q, kv):
        return kv.index <= q.index

    def kv_range(self, q):
        return Range(LOW, LOW, q.lo + 1, q.hi)

    def q_range(self, kv):
        return Range(kv.lo, kv.hi - 1, HIGH, HIGH)


@mask
class Window(Mask):
    """Keys from ``left`` tokens before the position to ``right`` behind it, inclusive; None leaves a side open."""

    left: int | None = static(default=None)
    right: int | None = static(default=None)

    def __post_init__(self):
        for name in ("left", "right"):
            side = getattr(self, name)
            try:
                side = None if side is None else operator.index(side)
            except TypeError:
                raise ValueError(f"{name} of mask Window must be an int or None; got {side!r}") from None
            # Nothing is farther away than this; keeps position arithmetic inside int32.
            object.__setattr__(self, name, None if side is None else max(-(2**29), min(side, 2**29)))

    def allows(self, q, kv):
        allowed = jnp.full((1, 1), True)
        if self.left is not None:
            allowed = allowed & (kv.index >= q.index - self.left)
        if self.right is not None:
            allowed = allowed & (kv.index <= q.index + self.right)
        return allowed

    def kv_range(self, q):
        lo, full_lo = (LOW, LOW) if self.left is None else (q.lo - self.left, q.hi - 1 - self.left)
        full_hi, hi = (HIGH, HIGH) if self.right is None else (q.lo + self.right + 1, q.hi + self.right)
        return Range(lo, full_lo, full_hi, hi)

    def q_range(self, kv):
        lo, full_lo = (LOW, LOW) if self.right is None else (kv.lo - self.right, kv.hi - 1 - self.right)
        full_hi, hi = (HIGH, HIGH) if self.left is None else (kv.lo + self.left + 1, kv.hi + self.left)
        return Range(lo, full_lo, full_hi, hi)


@mask
class Prefix(Mask):
    """The first ``length`` keys, for every query: ``Causal() | Prefix(n)`` is a prefix language model."""

    length: Any  # int32 [B or 1]

    def checked(self, sizes):
        return Prefix(_checked_lengths("length of mask Prefix", self.length))

    def allows(self, q, kv):
        return kv.index < kv.per_batch(self.length)

    def kv_range(self, q):
        length = q.per_batch(self.length)
        return Range(LOW, LOW, length, length)

    def q_range(self, kv):
        xp = lib(length := kv.per_batch(self.length))
        return Range(
            LOW,
            xp.where(kv.hi <= length, LOW, HIGH),
            xp.where(kv.hi <= length, HIGH, LOW),
            xp.where(kv.lo < length, HIGH, LOW),
        )


@mask
class Lengths(Mask):
    """Padding: rows of each batch row from its length on neither see nor are seen.  None leaves a side alone.

    ``q_len`` and ``kv_len`` are int arrays [B or 1], in rows of the arrays (not positions).
    """

    q_len: Any = None
    kv_len: Any = None

    def checked(self, sizes):
        given = vars(self).items()
        return Lengths(*(None if x is None else _checked_lengths(f"{name} of mask Lengths", x) for name, x in given))

    def allows(self, q, kv):
        allowed = jnp.full((1, 1), True)
        if self.q_len is not None:
            allowed = allowed & (q.row < q.per_batch(self.q_len))
        if self.kv_len is not None:
            allowed = allowed & (kv.row < kv.per_batch(self.kv_len))
        return allowed

    def kv_range(self, q):
        return self._range(q, self.q_len, self.kv_len)

    def q_range(self, kv):
        return self._range(kv, self.kv_len, self.q_len)

    @staticmethod
    def _range(side, own_len, other_len):
        bounds = EVERYTHING
        if other_len is not None:
            other_len = side.per_batch(other_len)
            bounds = side.in_positions(Range(LOW, LOW, other_len, other_len))
        if own_len is not None:
            own_len = side.per_batch(own_len)
            inside = side.row_hi <= own_len
            begun = side.row_lo < own_len
            xp = lib(own_len)
            own = Range(LOW, xp.where(inside, LOW, HIGH), xp.where(inside, HIGH, LOW), xp.where(begun, HIGH, LOW))
            bounds = intersect(bounds, own)
        return bounds


def _checked_lengths(name: str, lengths: Any) -> jax.Array:
    lengths = bounded(as_int_array(name, lengths), -(2**29), 2**29)
    if lengths.ndim > 1:
        raise ValueError(f"{name} must have shape [batch or 1]; got {lengths.shape}")
    return lengths


def _chunk_bounds(tiles: Any, size: int) -> Range:
    """Positions of the chunks that a tile touches; it sees all of one that it lies in."""
    xp = lib(tiles.lo)
    first, last = xp.asarray(tiles.lo) // size, (xp.asarray(tiles.hi) - 1) // size
    lo, hi = first * size, (last + 1) * size
    return Range(lo, xp.where(first == last, lo, HIGH), xp.where(first == last, hi, LOW), hi)


@mask
class Chunked(Mask):
    """Positions in the same chunk of ``size``: with ``Causal() &`` before it, Llama 4's local layers."""

    size: int = static()

    def __post_init__(self):
        object.__setattr__(self, "size", as_size("size of mask Chunked", self.size))

    def allows(self, q, kv):
        return q.index // self.size == kv.index // self.size

    def kv_range(self, q):
        return _chunk_bounds(q, self.size)

    def q_range(self, kv):
        return _chunk_bounds(kv, self.size)


@mask
class Dilated(Mask):
    """Keys at a multiple of ``step`` from the position. No tile is skipped: each holds some."""

    step: int = static()

    def __post_init__(self):
        object.__setattr__(self, "step", as_size("step of mask Dilated", self.step))

    def allows(self, q, kv):
        return (q.index - kv.index) % self.step == 0
