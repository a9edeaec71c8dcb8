"""What one call asks for: static facts (``Problem``), arrays (``Operands``), and all checks of the arguments."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import dropout
from .checks import Sizes, as_array, as_flag, as_int_array, as_number, bounded, one_of, pairwise, refuse_class
from .masks import Mask, all_of, checked
from .pair_masks import Dense
from .position_masks import Causal, Lengths, Window
from .scores import Alibi, Bias, Read, Score, SoftCap, chain, checked_reads, listed
from .token_masks import Segments


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static facts of one attention call; hashable, checked once by :func:`describe`.

    ``scale`` is None when it is an array among the operands; ``q_offset`` (position of query 0) likewise.
    ``precision`` is "highest" (true float32 products) or "default" (TF32 for float32 inputs on a GPU).
    """

    batch: int
    q_len: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    scale: float | None
    q_offset: int | None
    scores: str
    reads: tuple[Read, ...]
    sinks: bool
    dropout_rate: float
    mask: str
    precision: Literal["default", "highest"]
    backward: Literal["auto", "deterministic", "fast"]

    @property
    def narrow(self) -> bool:
        """Whether a window bounds the keys that a query sees, however many there are."""
        return "Window" in self.mask

    @property
    def packed(self) -> bool:
        """Whether documents bound the keys that a query sees, to lengths that only the data knows."""
        return "Segments" in self.mask or "KeyRanges" in self.mask

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def is_empty(self) -> bool:
        """No score exists."""
        return 0 in (self.batch, self.q_len, self.kv_len, self.num_q_heads)

    def __str__(self) -> str:
        heads = f"{self.num_q_heads}" + ("" if self.group == 1 else f"/{self.num_kv_heads}") + " heads"
        dims = f"D={self.head_dim}" + ("" if self.v_head_dim == self.head_dim else f", Dv={self.v_head_dim}")
        lengths = f"{self.q_len} queries x {self.kv_len} keys"
        extras = [self.mask]
        if self.scores:
            extras.append(self.scores)
        if self.sinks:
            extras.append("sinks")
        if self.dropout_rate:
            extras.append(f"dropout {self.dropout_rate:g}")
        return f"{self.dtype}, batch {self.batch}, {lengths}, {heads}, {dims}, " + ", ".join(extras)


class Operands(NamedTuple):
    """The arrays of one call, batch dimensions already merged into one."""

    q: jax.Array  # [B, T, N, D]
    k: jax.Array  # [B, S, K, D]
    v: jax.Array  # [B, S, K, Dv]
    score: Score | None
    mask: Mask
    q_offset: jax.Array | None  # int32 [B or 1]; None when static
    scale: jax.Array | None  # float32 [1]; None when static
    sinks: jax.Array | None  # float32 [N], of each head the log of the summed exponentials of its sinks
    dropout: jax.Array | None  # uint32 [B or 1, N or 1, 4], see dropout.counters


class Output(NamedTuple):
    """What attention gives, and what a backward pass needs of it.

    ``rest`` is what rounding took from a 16-bit o, in o's dtype: delta = sum(do * o) from the rounded o alone makes
    the gradient of q wrong by that error times whatever the keys have in common, which in real activations is a lot.
    """

    o: jax.Array  # [B, T, N, Dv]
    lse: jax.Array  # float32 natural log [B, N, T]
    rest: jax.Array | None = None  # [B, T, N, Dv]


class Gradients(NamedTuple):
    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    dscore: tuple[jax.Array | None, ...]  # for each array of the score; None for integers
    dscale: jax.Array | None
    dsinks: jax.Array | None


def offset_of(problem: Problem, x: Operands) -> Any:
    """Position of query 0: an int, or an int32 array [B or 1] (inside a kernel, its ref)."""
    return problem.q_offset if problem.q_offset is not None else x.q_offset


def scale_of(problem: Problem, x: Operands) -> Any:
    """What the products are multiplied by: a float, or a float32 array [1]."""
    return problem.scale if problem.scale is not None else x.scale


def describe(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    *,
    scale: Any,
    is_causal: bool,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    local_window_size: Any,
    causal_alignment: str,
    q_offset: Any,
    q_segment_ids: Any,
    kv_segment_ids: Any,
    logits_soft_cap: Any,
    sinks: Any,
    alibi_slopes: Any,
    score: Any,
    dropout_rate: Any,
    dropout_rng: Any,
    broadcast_dropout: bool,
    precision: Any,
    backward: str,
) -> tuple[Problem, Operands, tuple[int, ...]]:
    """Checks every argument and splits the call into static facts and arrays.

    Returns the problem, its operands, and the batch dimensions of ``query`` (empty for 3-D input).

    Raises:
      ValueError: a malformed argument; the text names it, its value or shape, and the rule.
    """
    query, key, value = as_array("query", query), as_array("key", key), as_array("value", value)
    batch_dims = _check_arrays(query, key, value)
    nb = len(batch_dims)
    batch = math.prod(batch_dims)
    q_len, num_q_heads, head_dim = query.shape[nb:]
    kv_len, num_kv_heads, v_head_dim = value.shape[nb:]

    masks: list[Mask] = []
    if as_flag("is_causal", is_causal):
        masks.append(Causal())
    window = window_of(local_window_size)
    if window != Window():
        masks.append(window)
    q_lengths = _lengths("query_seq_lengths", query_seq_lengths, batch_dims)
    kv_lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, batch_dims)
    if q_lengths is not None or kv_lengths is not None:
        masks.append(Lengths(_clip(q_lengths, q_len), _clip(kv_lengths, kv_len)))
    static_offset, offset_array = _offset(q_offset, causal_alignment, batch_dims, q_len, kv_len, q_lengths, kv_lengths)
    sizes = Sizes(batch, num_q_heads, q_len, kv_len, static_offset)
    masks += [m.checked(sizes) for m in _segments(q_segment_ids, kv_segment_ids, batch_dims, q_len, kv_len)]
    target = (batch_dims, num_q_heads, q_len, kv_len)
    refuse_class("mask", mask, Mask)
    if isinstance(mask, Mask):
        masks.append(checked(mask, sizes))
    elif mask is not None:
        array = pairwise("mask", mask, *target)
        masks.append(Dense(array))
        if array.dtype != jnp.bool_:
            raise ValueError(
                f"mask must be boolean (True = attend) or a pallas_flash.Mask, got {array.dtype}; "
                "an additive float mask goes in as bias="
            )
    scores: list[Score] = []
    if logits_soft_cap is not None:
        scores.append(SoftCap(logits_soft_cap))
    if bias is not None:
        bias = pairwise("bias", bias, *target)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise ValueError(f"bias must be a float array, got {bias.dtype}; a boolean mask goes in as mask=")
        scores.append(Bias(bias))
    if alibi_slopes is not None:
        scores.append(Alibi(_slopes(alibi_slopes, batch, num_q_heads)))
    scores += listed(score)
    whole_score = chain(scores)
    score_reads = checked_reads(whole_score, sizes)

    static_scale, scale_array = _scale(scale, head_dim, query.dtype)
    combined = all_of(masks)
    log_sinks = _sinks(sinks, num_q_heads)
    dropout_rate = 0.0 if dropout_rate is False else dropout_rate  # of `training and 0.1`
    rate = as_number("dropout_rate", dropout_rate, "a number in [0, 1) known at trace time, no bool or array", 0.0, 1.0)
    if rate and dropout_rng is None:
        raise ValueError(f"dropout_rate={rate} needs dropout_rng, a random key; none was given")
    rng = None if dropout_rng is None else dropout.as_key(dropout_rng)
    shared = as_flag("broadcast_dropout", broadcast_dropout)
    counters = dropout.counters(rng, batch, num_q_heads, q_len, kv_len, shared) if rate else None
    problem = Problem(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=str(query.dtype),
        scale=static_scale,
        q_offset=static_offset,
        scores="" if whole_score is None else str(whole_score),
        reads=score_reads,
        sinks=log_sinks is not None,
        dropout_rate=rate,
        mask=" & ".join(_name(m) for m in masks) or "no mask",
        precision=_precision(precision),
        backward=one_of("backward", backward, ("auto", "deterministic", "fast")),
    )
    query, key, value = (x.reshape(batch, *x.shape[nb:]) for x in (query, key, value))
    x = Operands(query, key, value, whole_score, combined, offset_array, scale_array, log_sinks, counters)
    return problem, x, batch_dims


def _check_arrays(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[int, ...]:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    layout = "layout is [batch, length, heads, head_dim] or [length, heads, head_dim]"
    if query.ndim < 3:
        raise ValueError(f"query must have at least 3 dimensions, {layout}; got {shapes}")
    if not query.ndim == key.ndim == value.ndim:
        raise ValueError(f"query, key and value must have the same number of dimensions; got {shapes}")
    batch_dims = query.shape[:-3]
    if not batch_dims == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"query, key and value must have equal batch dimensions; got {shapes}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and value must agree in all but the head dim; {layout}; got {shapes}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same head dim; {layout}; got {shapes}")
    num_q_heads, num_kv_heads = query.shape[-2], key.shape[-2]
    if (num_kv_heads == 0) != (num_q_heads == 0) or (num_kv_heads and num_q_heads % num_kv_heads):
        raise ValueError(
            f"the {num_q_heads} query heads must be a multiple of the {num_kv_heads} key/value heads; {layout}; "
            f"got {shapes}"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value must have one dtype; got {query.dtype}, {key.dtype} and {value.dtype}: "
            "cast them with .astype(...) first"
        )
    if query.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
        raise ValueError(
            f"query, key and value must be float arrays: float32, bfloat16, float16 or float64; got {query.dtype}"
        )
    return batch_dims


def _lengths(name: str, x: Any, batch_dims: tuple[int, ...]) -> jax.Array | None:
    if x is None:
        return None
    x = as_int_array(name, x)
    wanted = batch_dims or (1,)
    if x.shape not in (wanted, batch_dims):
        raise ValueError(f"{name} must have one length per batch row, shape {list(wanted)}; got shape {x.shape}")
    return x.reshape(-1)


def _clip(lengths: jax.Array | None, size: int) -> jax.Array | None:
    return None if lengths is None else bounded(lengths, 0, size)


def window_of(size: Any) -> Window:
    """``local_window_size`` as a mask; both sides None where it is open.

    Raises:
      ValueError: not an int or a pair of ints >= 0 or None.
    """
    if size is None:
        return Window()
    sides = tuple(size) if isinstance(size, Sequence) or getattr(size, "ndim", 0) else (size, size)
    try:
        left, right = (None if side is None else operator.index(side) for side in sides)
        if any(isinstance(side, bool) for side in sides):
            raise TypeError
    except (TypeError, ValueError):
        raise ValueError(
            "local_window_size must be an int or a pair (left, right) of ints or None, known at trace time; "
            f"got {size!r}"
        ) from None
    if min(left or 0, right or 0) < 0:
        raise ValueError(f"local_window_size={size!r}: sizes must be >= 0; use None for a side without a limit")
    return Window(left, right)


def _segments(q_ids: Any, kv_ids: Any, batch_dims: tuple[int, ...], q_len: int, kv_len: int) -> list[Mask]:
    if q_ids is None and kv_ids is None:
        return []
    if q_ids is None:
        raise ValueError("kv_segment_ids was given without q_segment_ids; give both, or q_segment_ids alone")
    if kv_ids is None:
        if q_len != kv_len:
            raise ValueError(
                f"q_segment_ids alone serves both sides only when their lengths agree (got {q_len} queries and "
                f"{kv_len} keys); give kv_segment_ids too"
            )
        kv_ids = q_ids

    def ids(name, x, length):
        x = as_int_array(name, x)
        wanted = (*batch_dims, length)
        if x.shape != wanted:
            raise ValueError(f"{name} must have shape [batch, length] = {list(wanted)}; got {x.shape}")
        return x.reshape(math.prod(batch_dims), length)

    return [Segments(ids("q_segment_ids", q_ids, q_len), ids("kv_segment_ids", kv_ids, kv_len))]


def _offset(
    q_offset: Any,
    alignment: str,
    batch_dims: tuple[int, ...],
    q_len: int,
    kv_len: int,
    q_lengths: jax.Array | None,
    kv_lengths: jax.Array | None,
) -> tuple[int | None, jax.Array | None]:
    one_of("causal_alignment", alignment, ("top_left", "bottom_right"))
    if alignment == "bottom_right":
        if q_offset is not None:
            raise ValueError(
                "q_offset and causal_alignment='bottom_right' both state the position of query 0; give one of them"
            )
        if q_lengths is None and kv_lengths is None:
            return kv_len - q_len, None
        last_q, last_kv = _clip(q_lengths, q_len), _clip(kv_lengths, kv_len)
        last_q = jnp.full((1,), q_len, jnp.int32) if last_q is None else last_q
        return None, (kv_len if last_kv is None else last_kv) - last_q
    if q_offset is None:
        return 0, None
    if isinstance(q_offset, (int, np.integer)) and not isinstance(q_offset, bool):
        if abs(int(q_offset)) >= 2**29:
            raise ValueError(f"q_offset={q_offset} is out of range: positions must stay within +-2**29")
        return int(q_offset), None
    q_offset = as_int_array("q_offset", q_offset)
    if q_offset.ndim and q_offset.shape not in (batch_dims, (1,)):
        raise ValueError(f"q_offset must be an int or have shape {list(batch_dims)}; got shape {q_offset.shape}")
    # No token is farther away; keeps position arithmetic inside int32.
    return None, bounded(q_offset, -(2**29), 2**29).reshape(-1)


def _scale(scale: Any, head_dim: int, dtype: Any) -> tuple[float | None, jax.Array | None]:
    if scale is None:
        return (1.0 / math.sqrt(head_dim) if head_dim else 1.0), None
    rule = "a finite real scalar, no bool"
    if isinstance(scale, (int, float, np.number)):
        return as_number("scale", scale, rule), None
    scale = as_array("scale", scale, rule)
    real = jnp.issubdtype(scale.dtype, jnp.integer) or jnp.issubdtype(scale.dtype, jnp.floating)
    if scale.size != 1 or not real:
        raise ValueError(f"scale must be {rule}; got {scale.dtype} of shape {scale.shape}")
    return None, scale.astype(jnp.promote_types(dtype, jnp.float32)).reshape(1)


def _slopes(slopes: Any, batch: int, heads: int) -> jax.Array:
    slopes = as_array("alibi_slopes", slopes)
    fits = slopes.shape == (heads,) or (slopes.ndim == 2 and slopes.shape[0] in (1, batch) and slopes.shape[1] == heads)
    if not fits or not jnp.issubdtype(slopes.dtype, jnp.floating):
        raise ValueError(
            f"alibi_slopes must be a float array [heads] or [batch or 1, heads], heads = {heads}; got {slopes.dtype} "
            f"of shape {slopes.shape}"
        )
    return slopes


def _sinks(sinks: Any, heads: int) -> jax.Array | None:
    if sinks is None:
        return None
    rule = f"a float array [heads] or [heads, number], heads = {heads}"
    sinks = as_array("sinks", sinks, rule)
    if not jnp.issubdtype(sinks.dtype, jnp.floating) or sinks.ndim not in (1, 2) or sinks.shape[0] != heads:
        raise ValueError(f"sinks must be {rule}; got {sinks.dtype} of shape {sinks.shape}")
    wide = sinks.astype(jnp.promote_types(sinks.dtype, jnp.float32))
    # The denominator sees their sum only.
    return wide if sinks.ndim == 1 else jax.nn.logsumexp(wide, axis=-1)


def _precision(precision: Any) -> Literal["default", "highest"]:
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        if isinstance(precision, str) and "_" in precision:
            precision = None  # a preset of an algorithm, meant for other products
    if isinstance(precision, tuple):
        precision = precision[0] if len(set(precision)) == 1 else precision
    names = {None: "default", "float32": "highest", "fastest": "default", "tensorfloat32": "default"}
    plain = {"default": "default", "high": "default", "highest": "highest", "bfloat16": "default"}
    name = precision.name.lower() if isinstance(precision, jax.lax.Precision) else precision
    try:
        return {**names, **plain}[name]  # type: ignore[index,return-value]
    except (KeyError, TypeError):
        raise ValueError(
            f"precision must be None, 'default', 'high', 'highest' or a jax.lax.Precision; got {precision!r}"
        ) from None


def _name(m: Mask) -> str:
    return type(m).__name__
