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
    if not known or not low <= float(x) < high:
        raise ValueError(f"{name} must be {rule}; got {x!r:.80}")
    return float(x)


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


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value
