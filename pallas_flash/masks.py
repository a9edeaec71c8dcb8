"""Which query may see which key: small pytrees, combined with ``&`` and ``|``.

A mask answers ``allows(q, kv)``, its meaning, used unchanged by every tier, and ``kv_range(q)`` / ``q_range(kv)``,
a promise about work: which part of the other side a tile need look at, and where it need not test
(:class:`pallas_flash.spans.Range`).  The default promises nothing, so a new mask is correct before it is fast.

Arrays in a mask have the batch (or 1) as their first axis.

>>> import jax.numpy as jnp
>>> from pallas_flash import Causal, Window
>>> (Causal() & Window(left=1)).dense(3, 3)[0, 0].astype(int).tolist()
[[1, 0, 0], [1, 1, 0], [0, 1, 1]]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from .checks import Sizes, as_size, check_read, larger
from .promotion import usual_promotion
from .spans import EVERYTHING, NO_PROMISE, Range, Span, Tiles, intersect, unite

_T = TypeVar("_T")


def static(**kwargs: Any) -> Any:
    """A field of a mask that is a compile-time constant rather than an array."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def mask(cls: type[_T]) -> type[_T]:
    """Class decorator: makes a :class:`Mask` subclass a frozen dataclass and a pytree.

    Fields made with :func:`static` are part of the structure; all others are arrays.

    >>> @mask
    ... class EveryOther(Mask):
    ...     step: int = static()
    ...     def allows(self, q, kv):
    ...         return (q.index - kv.index) % self.step == 0
    >>> EveryOther(2).dense(2, 3)[0, 0].tolist()
    [[True, False, True], [False, True, False]]
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    meta = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if not f.metadata.get("static")]
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)


class Mask:
    """Base of all masks.  Subclass with :func:`mask` and define :meth:`allows`."""

    def allows(self, q: Span, kv: Span) -> jax.Array:
        """True where the query may see the key; any shape that broadcasts over the tile."""
        raise NotImplementedError(f"{type(self).__name__} must define allows(q, kv)")

    def kv_range(self, q: Tiles) -> Range:
        """For each tile of queries: positions of the keys that it may see."""
        return NO_PROMISE

    def q_range(self, kv: Tiles) -> Range:
        """For each tile of keys: positions of the queries that may see it."""
        return NO_PROMISE

    def tile_states(self, q: Tiles, kv: Tiles) -> jax.Array:
        """For each pair of tiles: 0 nothing is allowed, 1 to be tested, 2 all is allowed.

        Asked of masks that say ``has_holes``, and of what they are combined with: int8 [B or 1, N or 1, tiles of
        queries or 1, tiles of keys or 1].  The default knows what the range of keys knows.
        """
        return kv.states(kv.to_tiles(self.kv_range(q)))

    @property
    def has_holes(self) -> bool:
        """Whether a range would hold many tiles that are forbidden: kernels are then given a list of tiles."""
        return False

    @property
    def knows_tiles(self) -> bool:
        """Whether it answers for tiles at all; a :class:`BlockMap` looks at each pair of a mask that doesn't."""
        return type(self).kv_range is not Mask.kv_range or type(self).tile_states is not Mask.tile_states

    def batch_and_heads(self) -> tuple[int, int]:
        """Sizes of the batch and of the heads that its arrays have, 1 where they have none."""
        leaves = [np.shape(leaf) for leaf in jax.tree.leaves(self)]
        batches = [shape[0] for shape in leaves if len(shape) in (1, 2, 4)]
        return functools.reduce(larger, batches, 1), functools.reduce(larger, [x[1] for x in leaves if len(x) == 4], 1)

    def checked(self, sizes: Sizes) -> Mask:
        """The mask with its arrays as a call of these sizes needs them: JAX arrays, int32 where they are ints.

        Raises:
          ValueError: an array of another shape or dtype, in a sentence that names it.
        """
        inner = {name: checked(x, sizes) for name, x in vars(self).items() if isinstance(x, Mask)}
        return dataclasses.replace(self, **inner) if inner else self  # type: ignore[type-var]

    __array_ufunc__ = None  # numpy's arrays leave `array & mask` to the mask, which says what is wrong

    def __and__(self, other: Mask) -> Mask:
        return And(self, _a_mask(other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _a_mask(other))

    def __rand__(self, other: Any) -> Mask:
        return And(_a_mask(other), self)

    def __ror__(self, other: Any) -> Mask:
        return Or(_a_mask(other), self)

    @usual_promotion
    def dense(self, q_len: int, kv_len: int, q_offset: Any = 0, *, batch: int = 1, heads: int = 1) -> jax.Array:
        """The mask as a boolean array [B or 1, N or 1, q_len, kv_len] (for tests, pictures and plain attention).

        ``batch`` and ``heads`` matter to masks that ask for them without holding arrays of that size.
        """
        from .kernels.xla import dense_mask  # the dense spans live beside the plain definition

        m, sizes = by_itself(self, q_len, kv_len, q_offset, batch, heads)
        return dense_mask(m, sizes.batch, sizes.heads, jnp.arange(q_len, dtype=jnp.int32), kv_len, q_offset)

    @usual_promotion
    def draw(
        self,
        q_len: int,
        kv_len: int,
        *,
        block_q: int = 16,
        block_kv: int = 16,
        q_offset: Any = 0,
        batch: int = 0,
        head: int = 0,
    ) -> Any:
        """A matplotlib figure of the pairs that are allowed, and of the tiles that are skipped, tested or taken whole.

        >>> from pallas_flash import Causal, Window
        >>> figure = (Causal() & Window(left=20)).draw(64, 64)
        >>> figure.axes[0].get_xlabel()
        'key'
        """
        from .picture import draw

        block_q, block_kv = as_size("block_q", block_q), as_size("block_kv", block_kv)
        return draw(self, (q_len, kv_len), (block_q, block_kv), q_offset, batch, head)


def pairs_allowed(m: Mask, q: Span, kv: Span) -> jax.Array:
    """What a mask allows of a tile.

    Raises:
      TypeError: its ``allows`` returns anything but booleans that broadcast over the tile.
    """
    allowed = jnp.asarray(m.allows(q, kv))
    try:
        jnp.broadcast_shapes(allowed.shape, q.index.shape, kv.index.shape)
    except ValueError:
        tile = jnp.broadcast_shapes(q.index.shape, kv.index.shape)
        raise TypeError(
            f"{type(m).__name__}.allows must return booleans that broadcast over the tile {tile}, from q.index, "
            f"kv.index and what spans read; got shape {allowed.shape}"
        ) from None
    if allowed.dtype != jnp.bool_:
        raise TypeError(
            f"{type(m).__name__}.allows must return booleans (True = attend), got {allowed.dtype}; an additive mask "
            "goes in as bias="
        )
    return allowed


def tile_states(m: Mask, q: Tiles, kv: Tiles) -> jax.Array:
    """:meth:`Mask.tile_states` of full size: int8 [B or 1, N or 1, tiles of queries, tiles of keys].

    Raises:
      ValueError: a shape that does not broadcast to that.
    """
    states = jnp.asarray(m.tile_states(q, kv), jnp.int8)
    if states.ndim != 4 or any(n not in (1, side.count) for n, side in zip(states.shape[2:], (q, kv), strict=True)):
        raise ValueError(
            f"{type(m).__name__}.tile_states must return [batch or 1, heads or 1, {q.count} or 1, {kv.count} or 1]; "
            f"got shape {states.shape}"
        )
    return jnp.broadcast_to(states, (*states.shape[:2], q.count, kv.count))


def checked(m: Any, sizes: Sizes) -> Mask:
    """A mask whose arrays fit a call, with 1 or the batch as their first axis.

    Raises:
      ValueError: they don't, or it is no mask.
    """
    if not isinstance(m, Mask):
        raise ValueError(f"& and | combine masks; an array goes in as Dense(array), got {type(m).__name__}")
    if any(leaf is m for leaf in jax.tree.leaves(m)):
        raise ValueError(f"mask {type(m).__name__} is no pytree: decorate its class with @pallas_flash.mask")

    def leaf(path: Any, x: Any) -> jax.Array:
        x = jnp.asarray(x)
        x = x[None] if x.ndim == 0 else x
        if x.shape[0] not in (1, sizes.batch):
            raise ValueError(
                f"array {jax.tree_util.keystr(path)} of mask {type(m).__name__} has shape {x.shape}; the first axis of "
                f"a mask's arrays is the batch, 1 or {sizes.batch}"
            )
        return x

    m = jax.tree_util.tree_map_with_path(leaf, m.checked(sizes))
    for kind, shape in _reads(m):
        check_read(f"mask {type(m).__name__}", kind, shape, sizes)
    return m


def _reads(m: Mask) -> list[tuple[str, tuple[int, ...]]]:
    """How a user's mask reads its arrays, and their shapes, from a tile of one pair; our own check themselves."""
    found = []
    inside = {id(leaf) for part in vars(m).values() if isinstance(part, Mask) for leaf in jax.tree.leaves(part)}

    def record(side: str) -> Any:
        def watch(kind: str, array: Any, load: Any, entry: Any) -> jax.Array:
            if id(array) not in inside:
                found.append((side if kind == "token" else kind, np.shape(array)))
            return jnp.zeros((1, 1), jnp.asarray(array).dtype)

        return watch

    def run(place: jax.Array) -> Any:
        return m.allows(*(Span(place, place, place, place, watch=record(side)) for side in ("query", "key")))

    if not type(m).__module__.startswith(f"{__package__}."):
        with contextlib.suppress(Exception):  # whatever is wrong with it is told where it is used
            jax.eval_shape(run, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    return found


def by_itself(
    m: Mask, q_len: int, kv_len: int, q_offset: Any = 0, batch: int = 1, heads: int = 1
) -> tuple[Mask, Sizes]:
    """A mask that no call has checked, checked, and its sizes: at least ``batch`` and ``heads``, or those it has."""
    own_batch, own_heads = m.batch_and_heads()
    offset = int(q_offset) if isinstance(q_offset, int | np.integer) else None
    sizes = Sizes(larger(own_batch, batch), larger(own_heads, heads), q_len, kv_len, offset)
    return checked(m, sizes), sizes


def _a_mask(other: Any) -> Mask:
    if not isinstance(other, Mask):
        raise TypeError(
            f"a mask combines with a mask, not with {type(other).__name__}; an array goes in as Dense(array)"
        )
    return other


@mask
class _Two(Mask):
    """What a conjunction and a disjunction have in common."""

    a: Any
    b: Any

    def checked(self, sizes):
        return type(self)(checked(self.a, sizes), checked(self.b, sizes))  # type: ignore[call-arg]

    def batch_and_heads(self):
        return tuple(map(larger, self.a.batch_and_heads(), self.b.batch_and_heads()))

    @property
    def has_holes(self):
        return self.a.has_holes or self.b.has_holes

    @property
    def knows_tiles(self):
        return self.a.knows_tiles and self.b.knows_tiles


@mask
class And(_Two):
    """Pairs that both masks allow."""

    def allows(self, q, kv):
        return self.a.allows(q, kv) & self.b.allows(q, kv)

    def kv_range(self, q):
        return intersect(self.a.kv_range(q), self.b.kv_range(q))

    def q_range(self, kv):
        return intersect(self.a.q_range(kv), self.b.q_range(kv))

    def tile_states(self, q, kv):
        return jnp.minimum(self.a.tile_states(q, kv), self.b.tile_states(q, kv))


@mask
class Or(_Two):
    """Pairs that at least one mask allows."""

    def allows(self, q, kv):
        return self.a.allows(q, kv) | self.b.allows(q, kv)

    def kv_range(self, q):
        return unite(self.a.kv_range(q), self.b.kv_range(q))

    def q_range(self, kv):
        return unite(self.a.q_range(kv), self.b.q_range(kv))

    def tile_states(self, q, kv):
        return jnp.maximum(self.a.tile_states(q, kv), self.b.tile_states(q, kv))


@mask
class Full(Mask):
    """Every query sees every key."""

    def allows(self, q, kv):
        return jnp.full((1, 1), True)

    def kv_range(self, q):
        return EVERYTHING

    def q_range(self, kv):
        return EVERYTHING


def all_of(masks: list[Mask]) -> Mask:
    """The conjunction of any number of masks; :class:`Full` for none."""
    combined: Mask | None = None
    for m in masks:
        combined = m if combined is None else combined & m
    return Full() if combined is None else combined
