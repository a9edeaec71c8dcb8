"""What changes a logit before the softmax: small pytrees, composed with ``>>``.

A score answers ``apply(s, q, kv)``: it gets one tile of logits with the two spans of the tile
(:class:`pallas_flash.spans.Span`) and gives the tile back changed.  It reads arrays among its fields through the spans;
JAX differentiates it inside the kernels, and its float arrays get their gradient in memory of their own size.  This is
PyTorch's FlexAttention (Dong et al., arXiv:2412.05496, section 3) for JAX, with gradients for what it captures.

>>> import jax, jax.numpy as jnp, pallas_flash
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 16))
>>> capped = SoftCap(5.0) >> Alibi(jnp.array([0.5, 0.25]))
>>> pallas_flash.flash_attention(q, k, v, score=capped, is_causal=True).shape
(1, 6, 2, 16)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from .checks import Sizes, as_array, as_number, check_read, refuse_class
from .masks import mask, static
from .spans import Span

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def score(cls: type[_T]) -> type[_T]:
    """Class decorator: makes a :class:`Score` subclass a frozen dataclass and a pytree, as :func:`mask` does a mask.

    >>> @score
    ... class Recency(Score):
    ...     rate: Any  # float [N]
    ...     def apply(self, s, q, kv):
    ...         return s - q.per_head(self.rate) * jnp.log1p(jnp.abs(q.index - kv.index).astype(s.dtype))
    >>> import jax, pallas_flash
    >>> x = jax.random.normal(jax.random.key(0), (1, 4, 2, 16))
    >>> loss = lambda rate: pallas_flash.flash_attention(x, x, x, score=Recency(rate)).sum()
    >>> jax.grad(loss)(jnp.ones(2)).shape
    (2,)
    """
    return mask(cls)


class Score:
    """Base of all scores.  Subclass with :func:`score` and define :meth:`apply`."""

    def apply(self, s: jax.Array, q: Span, kv: Span) -> jax.Array:
        """The new logits of a tile.

        Args:
          s: scaled logits, float32 (float64 for float64 inputs on the xla tier), natural units; in either orientation.
          q, kv: where the tile's queries and keys stand: ``index`` positions, ``row`` rows, ``batch`` and ``head``; and
            the only way to the arrays among the fields: ``q.take`` / ``kv.take`` [B or 1, length], ``q.per_head``
            [N or 1], ``q.per_batch`` [B or 1] (a scalar too), ``q.take_pairs(kv, ...)`` [B or 1, N or 1, T or 1,
            S or 1] and ``q.look_up(table, entry)`` [N or 1, entries].

        What it gives for a pair that the mask forbids does not matter, be it NaN.
        """
        raise NotImplementedError(f"{type(self).__name__} must define apply(s, q, kv)")

    def __rshift__(self, other: Score) -> Score:
        if not isinstance(other, Score):
            raise TypeError(f"a score is composed with a score, not with {type(other).__name__}")
        return Chain(self, other)

    def __str__(self) -> str:
        def shown(value):
            if isinstance(value, (list, tuple)):
                return f"[{', '.join(map(shown, value))}]"
            return f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else f"{value}"

        fields = {f.name: shown(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in fields.items())})"


@score
class Chain(Score):
    """First ``a``, then ``b``."""

    a: Any
    b: Any

    def apply(self, s, q, kv):
        return self.b.apply(self.a.apply(s, q, kv), q, kv)

    def __str__(self):
        return f"{self.a}, {self.b}"


@score
class SoftCap(Score):
    """``cap * tanh(s / cap)``: logits within (-cap, cap) (Gemma 2, arXiv:2408.00118, section 2)."""

    cap: float = static()

    def __post_init__(self):
        # The bounds keep it and its reciprocal within float32.
        rule = (
            "a positive number (1e-30 to 1e30) known at trace time, or None: float(cap) makes one of an array outside "
            "jit, a traced cap can be a field of a score of your own"
        )
        object.__setattr__(self, "cap", as_number("logits_soft_cap", self.cap, rule, 1e-30, 1e30))

    def apply(self, s, q, kv):
        return self.cap * jnp.tanh(s * (1.0 / self.cap))


@score
class Bias(Score):
    """Adds a float array [B or 1, N or 1, T or 1, S or 1]."""

    array: Any

    def apply(self, s, q, kv):
        return s + q.take_pairs(kv, self.array).astype(s.dtype)


@score
class Alibi(Score):
    """Subtracts ``slope * |position of the query - position of the key|`` (Press et al., arXiv:2108.12409).

    ``slopes`` is float [N] or [B or 1, N].
    """

    slopes: Any

    def apply(self, s, q, kv):
        return s - q.per_head(self.slopes).astype(s.dtype) * jnp.abs(q.index - kv.index).astype(s.dtype)


@score
class RelativeBias(Score):
    """T5's bias by bucket of relative position (Raffel et al., arXiv:1910.10683, section 2.1).

    ``table`` is float [N or 1, buckets].  Distances below half of the buckets (of one direction) have one each; farther
    ones share logarithmically wider ones up to ``max_distance``.  ``bidirectional`` gives keys ahead of the query the
    second half of the table; without it they all count as distance 0.
    """

    table: Any
    bidirectional: bool = static(default=True)
    max_distance: int = static(default=128)

    def apply(self, s, q, kv):
        shape = getattr(self.table, "shape", None)
        if shape is None or len(shape) != 2:
            got = type(self.table).__name__ if shape is None else f"shape {shape}"
            raise ValueError(f"table of score RelativeBias must be an array [heads or 1, buckets]; got {got}")
        ahead = kv.index - q.index
        buckets = shape[1]
        bucket = jnp.int32(0)
        if self.bidirectional:
            buckets //= 2
            bucket = jnp.where(ahead > 0, buckets, 0)
            distance = jnp.abs(ahead)
        else:
            distance = jnp.maximum(-ahead, 0)
        exact = buckets // 2
        if not 0 < exact < self.max_distance:
            raise ValueError(
                f"score {self}: half of a direction's buckets must lie between 1 and max_distance - 1; got {exact}"
            )
        # Counted, not computed by a logarithm, whose last bit differs between a kernel and XLA.
        far = jnp.minimum(distance, exact)
        for start in self._starts(buckets, exact):
            far = far + (distance >= start).astype(jnp.int32)
        return s + q.look_up(self.table, bucket + far).astype(s.dtype)

    def _starts(self, buckets: int, exact: int) -> list[int]:
        """The distances at which buckets ``exact + 1`` and up begin."""
        distance = np.arange(exact, self.max_distance + 1, dtype=np.float32)
        wide = np.log(distance / np.float32(exact)) / np.float32(math.log(self.max_distance / exact))
        bucket = np.minimum(exact + (wide * np.float32(buckets - exact)).astype(np.int32), buckets - 1)
        return [exact + int(np.argmax(bucket >= b)) for b in range(exact + 1, buckets)]


def listed(score: Any) -> list[Score]:
    """The argument ``score`` as a list, with its arrays as arrays of at least one axis.

    Raises:
      ValueError: no score, none that JAX knows as a pytree, or a field that is no array.
    """
    found = [] if score is None else list(score) if isinstance(score, (list, tuple)) else [score]
    for s in found:
        refuse_class("score", s, Score)
        if not isinstance(s, Score):
            raise ValueError(f"score must be a pallas_flash.Score or a list of them; got {type(s).__name__}")
        if any(leaf is s for leaf in jax.tree.leaves(s)):
            raise ValueError(f"score {type(s).__name__} is no pytree: decorate its class with @pallas_flash.score")
    return [_with_arrays(s) for s in found]


def _with_arrays(s: Score) -> Score:
    def array(path, x):
        return jnp.atleast_1d(as_array(f"{jax.tree_util.keystr(path).lstrip('.')} of score {type(s).__name__}", x))

    return jax.tree_util.tree_map_with_path(array, s)


def chain(scores: Sequence[Score]) -> Score | None:
    """The composition of any number of scores; None for none."""
    combined: Score | None = None
    for s in scores:
        combined = s if combined is None else combined >> s
    return combined


def applied(s: Score, logits: jax.Array, q: Span, kv: Span) -> jax.Array:
    """A tile of logits after a score, in their shape and dtype.

    Raises:
      TypeError: its ``apply`` returns anything but floats.
    """
    changed = jnp.asarray(s.apply(logits, q, kv))
    if not jnp.issubdtype(changed.dtype, jnp.floating):
        raise TypeError(f"{type(s).__name__}.apply must return the changed logits, a float array; got {changed.dtype}")
    return jnp.broadcast_to(changed, logits.shape).astype(logits.dtype)


class Read(NamedTuple):
    """One array that a score reads, in the order of the reads.

    ``leaf`` counts the arrays of the score; ``kind`` is "query", "key", "batch", "head", "pairs" or "table".
    """

    leaf: int
    kind: str
    differentiable: bool


@dataclasses.dataclass(frozen=True)
class _Field:
    """Stands for an array of a score while its reads are recorded: nothing but a span can use it."""

    leaf: int
    shape: tuple[int, ...]
    dtype: Any


def reads(s: Score) -> tuple[Read, ...]:
    """Which arrays a score reads, and how: found by running it once on a tile of one pair.

    Raises:
      ValueError: it reads what is no array among its fields, or uses one otherwise than through a span.
    """
    leaves, structure = jax.tree.flatten(s)
    fields = [_Field(i, leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]
    found = []

    def record(side):
        def watch(kind, field, load, entry):
            if not isinstance(field, _Field):
                raise ValueError(
                    f"what score {s!s:.80} reads per {kind} must be one array, a field of its own; got "
                    f"{type(field).__name__}"
                )
            kind = side if kind == "token" else kind
            found.append(Read(field.leaf, kind, bool(jnp.issubdtype(field.dtype, jnp.floating))))
            return jnp.zeros((1, 1), field.dtype)

        return watch

    def run(logits, place):
        q, kv = (Span(place, place, place, place, watch=record(side)) for side in ("query", "key"))
        return applied(jax.tree.unflatten(structure, fields), logits, q, kv)

    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(run, one, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    except (TypeError, AttributeError) as error:
        if "must return" in str(error) or not fields:
            raise
        raise ValueError(
            f"score {s} uses an array otherwise than through a span ({error}): read it with q.take, kv.take, "
            "q.per_head, q.per_batch, q.take_pairs or q.look_up, and compute on what they give"
        ) from error
    return tuple(found)


def checked_reads(s: Score | None, sizes: Sizes) -> tuple[Read, ...]:
    """What a score reads, of a call with these sizes.

    Raises:
      ValueError: an array has a shape that the way it is read does not allow.
    """
    if s is None:
        return ()
    found = reads(s)
    leaves = jax.tree.leaves(s)
    for read in found:
        check_read(f"score {s}", read.kind, leaves[read.leaf].shape, sizes)
    return found
