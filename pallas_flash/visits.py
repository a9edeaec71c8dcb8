"""Which tiles a kernel visits and in which order: all that it knows of a mask besides the test of a pair."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .masks import Mask, kv_tile_ranges, q_tile_ranges, tile_states
from .spans import Tiles


class Visits(NamedTuple):
    """For each tile of the own side, the tiles of the other side.

    A mask whose allowed tiles lie side by side is a range.  One with holes is a list, the way of block-sparse
    FlashAttention (arXiv:2205.14135, section 3.3): first the tiles that it allows entirely, then those to be tested.
    Both are as large as the number of tiles, or of pairs of tiles: never of pairs.

    Attributes:
      bounds: int32 [B or 1, N or 1, tiles, 4]: first, first full, end of full, end; places in ``order`` where there
        is one, else tiles.
      order: int32 [B or 1, N or 1, tiles, tiles of the other side], or None.
      states: int8, shaped like ``order``: 0 forbidden, 1 to be tested, 2 allowed entirely; None without an order.
    """

    bounds: Any
    order: Any = None
    states: Any = None

    def as_states(self, count: int) -> Any:
        """``states`` of ``count`` tiles of the other side, also of ranges."""
        if self.states is not None:
            return self.states
        first, full, full_end, end = (bound[..., None] for bound in np.moveaxis(np.asarray(self.bounds), -1, 0))
        tile = np.arange(count)
        return ((first <= tile) & (tile < end)).astype(np.int8) + ((full <= tile) & (tile < full_end))


def kv_visits(m: Mask, q_len: int, kv_len: int, block_q: int, block_kv: int, q_offset: Any) -> Visits:
    """For each tile of queries its tiles of keys."""
    if not m.has_holes:
        return Visits(kv_tile_ranges(m, q_len, kv_len, block_q, block_kv, q_offset))
    return _listed(tile_states(m, *_sides(q_len, kv_len, block_q, block_kv, q_offset)), kv_len % block_kv > 0)


def q_visits(m: Mask, q_len: int, kv_len: int, block_q: int, block_kv: int, q_offset: Any) -> Visits:
    """For each tile of keys its tiles of queries."""
    if not m.has_holes:
        return Visits(q_tile_ranges(m, q_len, kv_len, block_q, block_kv, q_offset))
    states = tile_states(m, *_sides(q_len, kv_len, block_q, block_kv, q_offset))
    return _listed(states.swapaxes(-1, -2), q_len % block_q > 0)


def _sides(q_len: int, kv_len: int, block_q: int, block_kv: int, q_offset: Any) -> tuple[Tiles, Tiles]:
    return Tiles(q_len, block_q, q_offset), Tiles(kv_len, block_kv, other_offset=q_offset)


def _listed(states: Any, short_tail: bool) -> Visits:
    if short_tail:  # whoever takes a tile whole does not look where it ends
        states = states.at[..., -1].min(1)
    order = jnp.argsort(-states, axis=-1, stable=True).astype(jnp.int32)
    full, end = ((states >= least).sum(-1, dtype=jnp.int32) for least in (2, 1))
    return Visits(jnp.stack([jnp.zeros_like(full), jnp.zeros_like(full), full, end], axis=-1), order, states)
