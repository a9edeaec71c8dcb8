"""Masks that hold something for every pair, or every block of pairs: only they forbid tiles between allowed ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .checks import Sizes, as_array, as_size, larger, pairwise, refuse_class
from .masks import Mask, by_itself, checked, mask, static, tile_states
from .promotion import usual_promotion
from .spans import HIGH, LOW, Range, Tiles, hull


@mask
class Dense(Mask):
    """Any boolean array that broadcasts to [B, N, q_len, kv_len]; True = attend."""

    array: Any  # [B or 1, N or 1, q_len or 1, kv_len or 1]

    def allows(self, q, kv):
        return q.take_pairs(kv, self.array)

    def checked(self, sizes):
        return Dense(_boolean("the array of mask Dense", self.array, sizes))

    def batch_and_heads(self):
        return _leading(self.array)

    def kv_range(self, q):
        return self._range(q, jnp.asarray(self.array, bool))

    def q_range(self, kv):
        return self._range(kv, jnp.asarray(self.array, bool).swapaxes(-1, -2))

    def tile_states(self, q, kv):
        allowed = jnp.asarray(self.array, bool)

        def reduced(kind):
            along_queries = allowed if allowed.shape[-2] == 1 else _reduce_rows(q, allowed, kind)
            return along_queries if allowed.shape[-1] == 1 else kv.reduce(along_queries, kind)

        return reduced("any").astype(jnp.int8) + reduced("all").astype(jnp.int8)

    @property
    def has_holes(self):
        return np.shape(self.array)[-1] > 1 and np.shape(self.array)[-2] > 1

    @staticmethod
    def _range(side, allowed):
        # [B, N, own, other] -> what each tile of the own side allows at each place of the other side
        if allowed.shape[-2] == 1:
            some, every = allowed, allowed
        else:
            some, every = (_reduce_rows(side, allowed, kind) for kind in ("any", "all"))
        if some.shape[-1] == 1:  # the same answer everywhere on the other side
            some, every = some[..., 0], every[..., 0]
            bounds = Range(LOW, jnp.where(every, LOW, HIGH), jnp.where(every, HIGH, LOW), jnp.where(some, HIGH, LOW))
        else:
            lo, hi = hull(some)
            place = jnp.arange(some.shape[-1], dtype=jnp.int32)
            last_gap = jax.lax.cummax(jnp.where(every, -1, place), axis=every.ndim - 1)
            run = place - last_gap  # length of the run of full places that ends here
            full_hi = jnp.argmax(run, axis=-1).astype(jnp.int32) + 1
            bounds = Range(lo, full_hi - run.max(-1), full_hi, hi)
        return side.in_positions(bounds)


def _reduce_rows(side: Tiles, allowed: jax.Array, kind: str) -> jax.Array:
    """``side.reduce`` along the second axis from the end."""
    return side.reduce(allowed.swapaxes(-1, -2), kind).swapaxes(-1, -2)


@mask
class Blocks(Mask):
    """Block sparsity: query row i sees key row j where ``array[..., i // block_q, j // block_kv]`` is True.

    ``array`` is bool [B or 1, N or 1, blocks of queries, blocks of keys], of which the first two may be missing. Work
    follows the blocks that are True (FlashAttention, arXiv:2205.14135, section 3.3).

    >>> import jax.numpy as jnp
    >>> Blocks(jnp.array([[True, False], [False, True]]), 2, 1).dense(4, 2)[0, 0].astype(int).tolist()
    [[1, 0], [1, 0], [0, 1], [0, 1]]
    """

    array: Any
    block_q: int = static()
    block_kv: int = static()

    def __post_init__(self):
        for name in ("block_q", "block_kv"):
            object.__setattr__(self, name, as_size(f"{name} of mask Blocks", getattr(self, name)))

    def allows(self, q, kv):
        q = dataclasses.replace(q, row=q.row // self.block_q)
        kv = dataclasses.replace(kv, row=kv.row // self.block_kv)
        return q.take_pairs(kv, self.array)

    def checked(self, sizes):
        blocks = sizes._replace(q_len=-(-sizes.q_len // self.block_q), kv_len=-(-sizes.kv_len // self.block_kv))
        array = as_array("the array of mask Blocks", self.array)
        if array.shape[-2:] != (blocks.q_len, blocks.kv_len):
            raise ValueError(
                f"the array of mask Blocks must be [batch or 1, heads or 1, {blocks.q_len}, {blocks.kv_len}]: "
                f"{sizes.q_len} queries in blocks of {self.block_q}, {sizes.kv_len} keys in blocks of {self.block_kv}; "
                f"got shape {array.shape}"
            )
        return dataclasses.replace(self, array=_boolean("the array of mask Blocks", array, blocks))

    def batch_and_heads(self):
        return _leading(self.array)

    def tile_states(self, q, kv):
        return _at(2 * self.array.astype(jnp.int8), self.block_q, self.block_kv, q, kv)

    @property
    def has_holes(self):
        return True


@mask
class BlockMap(Mask):
    """Any mask with a map of its blocks: those without an allowed pair are skipped, those without a forbidden one
    not tested. Make it with :meth:`of`, once for all layers of a step.

    Its own meaning is that of ``mask``; ``states`` are int8 [B or 1, N or 1, blocks of queries, blocks of keys], 0
    nothing allowed, 1 to be tested, 2 all allowed.
    """

    mask: Any
    states: Any
    block_q: int = static()
    block_kv: int = static()
    q_len: int = static()
    kv_len: int = static()
    q_offset: int = static()

    @classmethod
    @usual_promotion
    def of(
        cls,
        mask: Any,
        q_len: int,
        kv_len: int,
        *,
        block_q: int = 64,
        block_kv: int = 64,
        q_offset: int = 0,
        batch: int = 1,
        heads: int = 1,
    ) -> BlockMap:
        """The map of a mask for calls of these lengths.

        Masks of this library answer for whole blocks, at a cost that follows their number. A mask that does not (one
        of your own without ranges, ``Dilated``) is looked at pair by pair, one row of blocks at a time, so that no
        array of q_len x kv_len exists; a boolean array is read as it is.

        Args:
          mask: a :class:`Mask`, or a boolean array that broadcasts to [batch, heads, q_len, kv_len].
          q_len, kv_len: lengths of the calls; others are refused there.
          block_q, block_kv: tokens of a block. Small ones skip more, and cost more to list.
          q_offset: position of query row 0 in the calls, an int.
          batch, heads: of the calls, for masks that ask for them without holding arrays of that size.

        Raises:
          ValueError: a size that is no int of its range, or a mask that does not fit, or that asks for the batch row
            or the head where ``batch`` or ``heads`` is 1.

        >>> from pallas_flash import Causal, Dilated
        >>> m = BlockMap.of(Causal() & Dilated(2), 128, 128)
        >>> m.states[0, 0].tolist()
        [[1, 0], [1, 1]]
        """
        block_q, block_kv = as_size("block_q", block_q), as_size("block_kv", block_kv)
        q_len, kv_len, heads = as_size("q_len", q_len, 0), as_size("kv_len", kv_len, 0), as_size("heads", heads)
        known = isinstance(q_offset, int | np.integer) and not isinstance(q_offset, bool)
        if not known or abs(int(q_offset)) >= 2**29:
            raise ValueError(
                "q_offset of a BlockMap must be an int within +-2**29, known when the map is made; got "
                f"{q_offset!r:.80}"
            )
        q_offset = int(q_offset)
        m, sizes = by_itself(as_mask("the mask of a BlockMap", mask), q_len, kv_len, q_offset, batch, heads)
        q, kv = Tiles(q_len, block_q, q_offset), Tiles(kv_len, block_kv, other_offset=q_offset)
        states = tile_states(m, q, kv) if m.knows_tiles else _looked_at(m, sizes, q, kv)
        return cls(m, states, block_q, block_kv, q_len, kv_len, q_offset)

    def allows(self, q, kv):
        return self.mask.allows(q, kv)

    def kv_range(self, q):
        return self.mask.kv_range(q)

    def q_range(self, kv):
        return self.mask.q_range(kv)

    def tile_states(self, q, kv):
        return _at(self.states, self.block_q, self.block_kv, q, kv)

    def checked(self, sizes):
        for name in ("q_len", "kv_len", "q_offset"):
            made, given = getattr(self, name), getattr(sizes, name)
            if made != given:
                raise ValueError(
                    f"this BlockMap was made for {name}={made} and the call has {name}="
                    f"{'an array' if given is None else given}: make one for it, or give its mask, .mask, alone"
                )
        if self.states.shape[1] not in (1, sizes.heads):
            raise ValueError(f"this BlockMap was made for {self.states.shape[1]} heads and the call has {sizes.heads}")
        blocks = (-(-sizes.q_len // self.block_q), -(-sizes.kv_len // self.block_kv))
        if self.states.shape[2:] != blocks:
            raise ValueError(f"states of a BlockMap must end in {blocks}, its blocks; got shape {self.states.shape}")
        return dataclasses.replace(self, mask=checked(self.mask, sizes))

    def batch_and_heads(self):
        return tuple(map(larger, self.mask.batch_and_heads(), self.states.shape[:2]))

    @property
    def has_holes(self):
        return True


def as_mask(name: str, m: Any) -> Mask:
    """A mask, or a boolean array as one.

    Raises:
      ValueError: neither.
    """
    refuse_class("mask", m, Mask)
    return m if isinstance(m, Mask) else Dense(as_array(name, m, "a Mask or an array"))


def _leading(array: Any) -> tuple[int, int]:
    """Sizes of the batch and of the heads of an array whose first axes may be missing."""
    batch, heads = (1, 1, 1, 1, *np.shape(array))[-4:-2]
    return batch, heads


def _boolean(name: str, array: Any, sizes: Sizes) -> jax.Array:
    array = pairwise(name, array, (sizes.batch,), sizes.heads, sizes.q_len, sizes.kv_len)
    if array.dtype != jnp.bool_:
        raise ValueError(f"{name} must be boolean (True = attend), got {array.dtype}")
    return array


def _at(states: jax.Array, block_q: int, block_kv: int, q: Tiles, kv: Tiles) -> jax.Array:
    """States of blocks as states of tiles of another size."""
    return _along(_along(states, block_q, q, 2), block_kv, kv, 3)


def _along(states: jax.Array, block: int, tiles: Tiles, axis: int) -> jax.Array:
    """States of tiles, each of what the blocks that it touches along one axis say."""
    if block == tiles.block or tiles.count == 0:
        return states
    first, end = tiles.row_lo // block, -(-tiles.row_hi // block)
    touched = first[:, None] + np.arange(max(end - first, default=0))
    touched = np.minimum(touched, end[:, None] - 1)
    of_tiles = jnp.take(states, touched, axis=axis)
    least, most = of_tiles.min(axis + 1), of_tiles.max(axis + 1)
    return jnp.where((most > 0) & (least < 2), 1, most).astype(jnp.int8)


def _looked_at(m: Mask, sizes: Sizes, q: Tiles, kv: Tiles) -> jax.Array:
    """States of all tiles from every pair, one row of tiles at a time."""
    from .kernels.xla import dense_mask  # see Mask.dense

    def twice(m: Mask) -> jax.Array:
        batch, heads = (2 if size == 1 else size for size in sizes[:2])
        return dense_mask(m, batch, heads, jnp.zeros(1, jnp.int32), kv.length, q.offset)

    for name, size, asked in zip(("batch", "heads"), sizes[:2], jax.eval_shape(twice, m).shape[:2], strict=True):
        if size == 1 and asked != 1:
            raise ValueError(
                f"mask {type(m).__name__} asks which of the {name} a query belongs to: give BlockMap.of {name}=, as "
                "many as the calls have"
            )

    def one(start: jax.Array) -> jax.Array:
        rows = jnp.minimum(start + jnp.arange(q.block, dtype=jnp.int32), q.length - 1)
        allowed = dense_mask(m, sizes.batch, sizes.heads, rows, kv.length, q.offset)
        some, every = (kv.reduce(getattr(jnp, kind)(allowed, axis=2), kind) for kind in ("any", "all"))
        return some.astype(jnp.int8) + every.astype(jnp.int8)

    return jnp.moveaxis(jax.lax.map(one, jnp.asarray(q.row_lo)), 0, 2)
