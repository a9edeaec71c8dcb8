"""How a program walks the tiles that a mask lets its own tile visit."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...visits import Visits


class Loops(NamedTuple):
    """Which of the two loops over a tile range any program needs; both unless the ranges are known now."""

    full: bool = True
    partial: bool = True
    steps: float = math.inf  # of the loop over full tiles, on average; infinite where nobody knows

    @classmethod
    def of(cls, visits: Visits) -> Loops:
        if not isinstance(visits.bounds, np.ndarray):
            return cls()
        first, full, full_end, end = np.moveaxis(visits.bounds, -1, 0)
        steps = np.maximum(full_end - full, 0)
        return cls(bool(steps.any()), bool(((first < full) | (full_end < end)).any()), float(steps.mean()))


def walk(loops: Loops | None, visits: Visits, own: Any, body: Any, carry: Any) -> Any:
    """Runs ``body(j, carry, masked)`` over what the tile ``own`` = (batch, head, tile) visits: full tiles come first.

    The split (kvax's and FlashAttention-3's) pays for the test of the mask only where it can fail; one loop serves
    both edges because the order of tiles does not matter.  Without ``loops`` nobody hurries: one loop tests all tiles.
    """
    first, full, full_end, end = _of_tile(visits.bounds, own, range(4))
    if loops is None:
        return jax.lax.fori_loop(first, end, lambda i, c: body(_tile_at(visits, own, i), c, True), carry)
    if loops.full:
        carry = jax.lax.fori_loop(full, full_end, lambda i, c: body(_tile_at(visits, own, i), c, False), carry)
    if loops.partial:
        before = full - first

        def edge(i, c):
            return body(_tile_at(visits, own, jnp.where(i < before, first + i, full_end + i - before)), c, True)

        carry = jax.lax.fori_loop(0, before + end - full_end, edge, carry)
    return carry


def first_full(loops: Loops, visits: Visits, own: Any, body: Any, carry: Any) -> Any:
    """Runs ``body(j, carry)`` for the tile that :func:`walk` starts with, if that is one to be taken whole."""
    if not loops.full:
        return carry
    _, full, full_end, _ = _of_tile(visits.bounds, own, range(4))
    stop = jnp.minimum(full + 1, full_end)
    return jax.lax.fori_loop(full, stop, lambda i, c: body(_tile_at(visits, own, i), c), carry)


def visited(visits: Visits, own: Any, other: Any) -> Any:
    """Whether the tile ``own`` = (batch, head, tile) visits a tile of the other side."""
    if visits.states is not None:
        return _of_tile(visits.states, own, [other])[0] > 0
    first, _, _, end = _of_tile(visits.bounds, own, range(4))
    return (first <= other) & (other < end)


def _tile_at(visits: Visits, own: Any, place: Any) -> Any:
    return place if visits.order is None else _of_tile(visits.order, own, [place])[0]


def _of_tile(ref: Any, own: Any, entries: Any) -> list[Any]:
    """Entries of the tile ``own`` = (batch, head, tile) from an array [B or 1, N or 1, tiles, entries]."""
    batch, head, tile = own
    batch = batch if ref.shape[0] > 1 else 0
    head = head if ref.shape[1] > 1 else 0
    return [ref[batch, head, tile, i] for i in entries]


def as_arrays(visits: Visits) -> Visits:
    """What a kernel is given: ranges that are known now are numpy arrays until here."""
    return jax.tree.map(jnp.asarray, visits)
