"""Which tiles a kernel visits and in which order: all that it knows of a mask besides the test of a pair."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .masks import Mask, tile_states
from .spans import Tiles, shift


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


def kv_visits(m: Mask, q_len: int, kv_len: int, block_q: int, block_kv: int, q_offset: Any) -> Visits:
    """For each tile of queries its tiles of keys."""
    if not m.has_holes:
        return Visits(kv_tile_ranges(m, q_len, kv_len, block_q, block_kv, q_offset))
    states = _states(m, q_len, kv_len, block_q, block_kv, q_offset)
    return _listed(states, kv_len % block_kv > 0)


def q_visits(m: Mask, q_len: int, kv_len: int, block_q: int, block_kv: int, q_offset: Any) -> Visits:
    """For each tile of keys its tiles of queries."""
    if not m.has_holes:
        return Visits(q_tile_ranges(m, q_len, kv_len, block_q, block_kv, q_offset))
    states = _states(m, q_len, kv_len, block_q, block_kv, q_offset)
    return _listed(states.swapaxes(-1, -2), q_len % block_q > 0)


def kv_tile_ranges(m: Mask, q_len: int, kv_len: int, block_q: int, block_kv: int, q_offset: Any) -> Any:
    """For each tile of queries its tiles of keys: int32 [B or 1, N or 1, q tiles, 4] (see ``Tiles.to_tiles``)."""
    q = Tiles(q_len, block_q, q_offset)
    return _spread(Tiles(kv_len, block_kv).to_tiles(m.kv_range(q)), q.count)


def q_tile_ranges(m: Mask, q_len: int, kv_len: int, block_q: int, block_kv: int, q_offset: Any) -> Any:
    """For each tile of keys its tiles of queries: int32 [B or 1, N or 1, kv tiles, 4]."""
    kv = Tiles(kv_len, block_kv, other_offset=q_offset)
    rows = shift(m.q_range(kv), -kv.per_batch(q_offset))  # "no bound" is far enough away to survive the shift
    return _spread(Tiles(q_len, block_q).to_tiles(rows), kv.count)


def _states(m: Mask, q_len: int, kv_len: int, block_q: int, block_kv: int, q_offset: Any) -> jax.Array:
    return tile_states(m, Tiles(q_len, block_q, q_offset), Tiles(kv_len, block_kv, other_offset=q_offset))


def _listed(states: jax.Array, short_tail: bool) -> Visits:
    if short_tail:  # whoever takes a tile whole does not look where it ends
        states = states.at[..., -1].min(1)
    order = jnp.argsort(-states, axis=-1, stable=True).astype(jnp.int32)
    full, end = ((states >= least).sum(-1, dtype=jnp.int32) for least in (2, 1))
    return Visits(jnp.stack([jnp.zeros_like(full), jnp.zeros_like(full), full, end], axis=-1), order, states)


def _spread(of_tiles: Any, count: int) -> Any:
    shape = (*of_tiles.shape[:2], count, 4)
    return np.broadcast_to(of_tiles, shape) if isinstance(of_tiles, np.ndarray) else jnp.broadcast_to(of_tiles, shape)
