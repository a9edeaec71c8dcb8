"""Attention over sequences packed end to end, with their offsets as run-time data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .attention import flash_attention
from .checks import as_array, as_flag, as_int_array, as_size, bounded, one_of
from .pair_masks import as_mask
from .problem import window_of
from .promotion import usual_promotion
from .spans import places
from .token_masks import KeyRanges


@usual_promotion
def varlen_attention(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    local_window_size: Any = None,
    **options: Any,
) -> Any:
    """Attention within each of many sequences that are packed end to end.

    Args:
      query: [total_q, N, D].  Rows behind the last offset are padding: their output is 0, their lse -inf.
      key: [total_k, K, D].
      value: [total_k, K, Dv].
      cu_seqlens_q: int [sequences + 1], non-decreasing, from 0: sequence i is rows ``cu[i]`` to ``cu[i + 1]``.  Traced
        or not, so one compilation serves every packing.
      cu_seqlens_k: the same for keys; default: as the queries.
      is_causal, local_window_size: as in :func:`flash_attention`, by the position within the sequence.
      causal_alignment: ``"top_left"``: query 0 of a sequence stands at its key 0; ``"bottom_right"``: its last query
        stands at its last key.
      **options: of :func:`flash_attention`, for a batch of one row; a ``score`` sees packed rows as positions.

    Returns:
      What ``flash_attention`` returns for 3-D input: out [total_q, N, Dv], lse [N, total_q].

    Raises:
      ValueError: a malformed argument.

    Work follows the tokens: tiles that hold no pair of one sequence are skipped (FlashAttention's varlen interface,
    arXiv:2205.14135, with offsets as data).

    >>> import jax, jax.numpy as jnp
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 7, 2, 16))
    >>> varlen_attention(q, k, v, jnp.array([0, 3, 3, 7]), is_causal=True).shape
    (7, 2, 16)
    """
    if jnp.ndim(query) != 3:
        raise ValueError(f"query must be packed, [total, heads, head_dim]; got shape {jnp.shape(query)}")
    for name in ("q_segment_ids", "kv_segment_ids", "query_seq_lengths", "key_value_seq_lengths", "q_offset"):
        if options.get(name) is not None:
            raise ValueError(f"{name} has no meaning for packed sequences: cu_seqlens_q and cu_seqlens_k bound them")
    one_of("causal_alignment", causal_alignment, ("top_left", "bottom_right"))
    if cu_seqlens_k is not None and options.get("alibi_slopes") is not None:
        raise ValueError(
            "alibi_slopes needs keys packed as the queries are (cu_seqlens_k=None): it counts distances in packed "
            "rows; a score that reads the positions from fields of its own can count others"
        )
    cu_q = _offsets("cu_seqlens_q", cu_seqlens_q, tokens=jnp.shape(query)[0])
    cu_k = (
        cu_q if cu_seqlens_k is None else _offsets("cu_seqlens_k", cu_seqlens_k, tokens=next(iter(jnp.shape(key)), 0))
    )
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must bound the same number of sequences; got shapes {cu_q.shape} and "
            f"{cu_k.shape}"
        )
    window = window_of(local_window_size)
    left, right = window.left, 0 if as_flag("is_causal", is_causal) else window.right
    ranges = key_ranges(cu_q, cu_k, jnp.shape(query)[0], left, right, bottom_right=causal_alignment == "bottom_right")
    mask = options.pop("mask", None)
    whole = ranges if mask is None else ranges & as_mask("mask", mask)
    return flash_attention(query, key, value, options.pop("bias", None), whole, **options)


def key_ranges(
    cu_q: jax.Array, cu_k: jax.Array, rows: int, left: int | None, right: int | None, *, bottom_right: bool
) -> KeyRanges:
    """For each of ``rows`` packed queries the keys from ``left`` before to ``right`` behind its position."""
    row, sequence = _rows(cu_q, rows)
    start, end = cu_k[sequence], cu_k[sequence + 1]
    position = start + row - cu_q[sequence]
    if bottom_right:
        position = position + (end - start) - (cu_q[sequence + 1] - cu_q[sequence])
    first = start if left is None else jnp.clip(position - left, start, end)
    last = end if right is None else jnp.clip(position + right + 1, start, end)
    # Rows before the first sequence or behind the last see nothing, at an end that keeps both bounds in order.
    rest = jnp.where(row < cu_q[0], cu_k[0], cu_k[-1])
    inside = (row >= cu_q[0]) & (row < cu_q[-1])
    return KeyRanges(*(jnp.where(inside, x, rest)[None] for x in (first, last)))


@usual_promotion
def pack(x: Any, lengths: Any, total: int) -> tuple[jax.Array, jax.Array]:
    """The tokens of a padded batch, end to end.

    Args:
      x: [B, T, ...].
      lengths: int [B], at most T.
      total: rows of the result, at least the sum of the lengths (what is longer is cut off).

    Returns:
      ``(packed [total, ...], cu_seqlens int32 [B + 1])``; rows behind the last token are 0.

    >>> import jax.numpy as jnp
    >>> packed, cu = pack(jnp.array([[1, 2, 0], [3, 0, 0]]), jnp.array([2, 1]), 4)
    >>> packed.tolist(), cu.tolist()
    ([1, 2, 3, 0], [0, 2, 3])
    """
    x, lengths, total = as_array("x", x), as_int_array("lengths", lengths), as_size("total", total, 0)
    if x.ndim < 2 or lengths.shape != x.shape[:1]:
        raise ValueError(
            f"x must be [batch, length, ...] and lengths [batch]; got shapes {x.shape} and {lengths.shape}"
        )
    lengths = bounded(lengths, 0, x.shape[1])
    cu = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])
    if 0 in x.shape[:2]:
        return jnp.zeros((total, *x.shape[2:]), x.dtype), cu
    row, sequence = _rows(cu, total)
    packed = x[sequence, jnp.clip(row - cu[sequence], 0, x.shape[1] - 1)]
    inside = (row < cu[-1]).reshape(-1, *(1,) * (packed.ndim - 1))
    return jnp.where(inside, packed, jnp.zeros((), x.dtype)), cu


@usual_promotion
def unpack(packed: Any, cu_seqlens: Any, length: int) -> jax.Array:
    """The opposite of :func:`pack`: [total, ...] back to [B, length, ...], with 0 behind each sequence.

    >>> import jax.numpy as jnp
    >>> unpack(jnp.array([1, 2, 3, 0]), jnp.array([0, 2, 3]), 3).tolist()
    [[1, 2, 0], [3, 0, 0]]
    """
    packed, cu = as_array("packed", packed), _offsets("cu_seqlens", cu_seqlens, sequences=0)
    length = as_size("length", length, 0)
    if packed.ndim == 0:
        raise ValueError("packed must be [total, ...]; got a scalar")
    place = cu[:-1, None] + jnp.arange(length, dtype=jnp.int32)
    if packed.shape[0] == 0:
        return jnp.zeros((*place.shape, *packed.shape[1:]), packed.dtype)
    inside = (place < cu[1:, None]) & (place < packed.shape[0])  # rows that pack cut off are 0 too
    rows = packed[jnp.clip(place, 0, packed.shape[0] - 1)]
    return jnp.where(inside.reshape(*inside.shape, *(1,) * (rows.ndim - 2)), rows, jnp.zeros((), packed.dtype))


def _rows(cu: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Numbers of packed rows and the sequence of each; padding behind the last counts to it."""
    row = jnp.arange(count, dtype=jnp.int32)
    sequence = places(cu, row, "right") - 1
    return row, jnp.clip(sequence, 0, cu.size - 2)


def _offsets(name: str, x: Any, sequences: int = 1, tokens: int | None = None) -> jax.Array:
    """As int32; of offsets that are known now the values are checked too."""
    x = as_int_array(name, x)
    if x.ndim != 1 or x.size <= sequences:
        raise ValueError(f"{name} must have shape [sequences + 1]; got shape {x.shape}")
    if tokens is not None and not isinstance(x, Tracer) and x.is_fully_addressable:
        known = np.asarray(x)
        if known[0] < 0 or (np.diff(known) < 0).any() or known[-1] > tokens:
            raise ValueError(
                f"{name} must never decrease, from 0 to at most the {tokens} rows that there are; "
                f"got {known.tolist()!s:.80}"
            )
    return bounded(x, 0, 2**29)
