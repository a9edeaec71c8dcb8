"""Checks of arguments, each in one sentence that names the argument, its value and the rule."""

from __future__ import annotations

import math
import operator
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Sizes(NamedTuple):
    """The sizes of one call that a mask's arrays must fit."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    q_offset: int | None = 0  # None where it is an array


def as_array(name: str, x: Any, rule: str = "an array") -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be {rule}; got {type(x).__name__} {x!r:.80}") from None


def as_int_array(name: str, x: Any) -> jax.Array:
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu" and x.size:
        kept = jax.dtypes.canonicalize_dtype(x.dtype)
        # JAX without x64 mode would cut them off without a word.
        if x.dtype != kept and (x.min() < np.iinfo(kept).min or x.max() > np.iinfo(kept).max):
            raise ValueError(f"{name} holds numbers beyond {kept}, which JAX keeps only in x64 mode")
    x = as_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be an integer array, got {x.dtype}")
    return x


def as_number(name: str, x: Any, rule: str, low: float = -sys.float_info.max, high: float = math.inf) -> float:
    """A number with ``low <= x < high`` known at trace time: Python's or numpy's, but neither a bool nor an array."""
    known = isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)
    try:
        number = float(x) if known else math.nan
    except OverflowError:
        number = math.inf
    if not low <= number < high:
        raise ValueError(f"{name} must be {rule}; got {x!r:.80}")
    return number


def as_flag(name: str, x: Any) -> bool:
    """A truth value known at trace time: True, False, 1 or 0, of Python's, numpy's or in an array outside jit."""
    try:
        flag = operator.index(x.item() if isinstance(x, (np.generic, np.ndarray, jax.Array)) else x)
    except (TypeError, ValueError, NotImplementedError):
        flag = None
    if flag not in (0, 1):
        raise ValueError(f"{name} must be True or False, a Python or numpy bool known at trace time; got {x!r:.80}")
    return bool(flag)


def bounded(x: jax.Array, low: int, high: int) -> jax.Array:
    """Integers as int32 within bounds, clipped in a dtype that holds both them and the bounds."""
    x = x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
    return jnp.clip(x, max(low, jnp.iinfo(x.dtype).min), high).astype(jnp.int32)


def pairwise(name: str, x: Any, batch_dims: tuple[int, ...], heads: int, q_len: int, kv_len: int) -> jax.Array:
    """An array that broadcasts to [batch dims, N, T, S], as [B or 1, N or 1, T or 1, S or 1]."""
    x = as_array(name, x)
    target = (*batch_dims, heads, q_len, kv_len)
    rank = max(4, len(target))
    full = (1,) * (rank - len(target)) + target
    if x.ndim > rank or any(have not in (1, want) for have, want in zip(x.shape[::-1], full[::-1], strict=False)):
        raise ValueError(
            f"{name} of shape {x.shape} does not broadcast to [batch, heads, q_len, kv_len] = {list(target)}: "
            "each dimension must be 1 or the full size"
        )
    x = x.reshape((1,) * (rank - x.ndim) + x.shape)
    outer = x.shape[:-3]
    if math.prod(outer) == 1:
        return x.reshape(1, *x.shape[-3:])
    x = jnp.broadcast_to(x, (*full[:-3], *x.shape[-3:]))
    return x.reshape(math.prod(full[:-3]), *x.shape[-3:])


def refuse_class(name: str, x: Any, base: type) -> None:
    """Raises ValueError where a subclass of ``base`` stands for its instance."""
    if isinstance(x, type) and issubclass(x, base):
        raise ValueError(f"{name} is the class {x.__name__}; give an instance, {x.__name__}(...)")


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


_RULES = {
    "query": "[batch or 1, q_len]",
    "key": "[batch or 1, kv_len]",
    "batch": "[batch or 1]",
    "head": "[heads or 1] or [batch or 1, heads or 1]",
    "pairs": "[batch or 1, heads or 1, q_len or 1, kv_len or 1]",
    "table": "[heads or 1, entries]",
}


def pair_shape(kind: str, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """The shape [B or 1, N or 1, T or 1, S or 1] of an array that is read in any way but from a table."""
    if kind == "query":
        return shape[0], 1, shape[1], 1
    if kind == "key":
        return shape[0], 1, 1, shape[1]
    if kind == "batch":
        return shape[0], 1, 1, 1
    if kind == "head":
        return (1, *shape)[-2], shape[-1], 1, 1
    return shape  # type: ignore[return-value]


def check_read(owner: str, kind: str, shape: tuple[int, ...], sizes: Sizes) -> None:
    """That an array of a mask or a score has a shape that the way it is read allows.

    Raises:
      ValueError: it has not; ``owner`` is named.
    """
    fits = len(shape) in {"batch": (1,), "head": (1, 2), "pairs": (4,)}.get(kind, (2,))
    if fits:
        whole = (1, shape[0], 1, 1) if kind == "table" else pair_shape(kind, shape)
        fits = all(have in (1, want) for have, want in zip(whole, sizes[:4], strict=True))
        fits &= {"query": sizes.q_len, "key": sizes.kv_len}.get(kind, shape[-1]) == shape[-1]
    if not fits:
        raise ValueError(f"an array of {owner}, read per {kind}, must have shape {_RULES[kind]}; got {shape}")


def as_size(name: str, x: Any, least: int = 1) -> int:
    """A number of tokens, blocks or heads; nothing is longer than 2**30, and positions stay inside int32."""
    try:
        size = operator.index(x)
    except (TypeError, jax.errors.ConcretizationTypeError):
        size = least - 1
    if size < least or isinstance(x, bool):
        raise ValueError(f"{name} must be an int of at least {least}; got {x!r:.80}")
    return min(size, 2**30)


def larger(a: Any, b: Any) -> Any:
    """Of two sizes of one axis, either of which may be 1, or symbolic."""
    return b if a == 1 else a
