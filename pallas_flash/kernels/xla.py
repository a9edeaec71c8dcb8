"""Plain attention: the definition, the oracle of the tests, and what runs where no kernel can.

``attend`` is the definition in one screen, differentiated by JAX itself, so forward mode and second derivatives
work.  ``attend_chunked`` runs it over slices of the queries and recomputes each slice in the backward pass: the same
numbers in memory linear in the length.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .. import dropout
from ..masks import Mask, pairs_allowed
from ..problem import Operands, Output, Problem, offset_of, scale_of
from ..scores import applied
from ..softmax import LOWEST
from ..spans import Span


@dataclasses.dataclass(frozen=True)
class DenseSpan(Span):
    """Rows of one side of the whole [B, N, T, S] array of scores; ``axis`` is -2 for queries and -1 for keys."""

    axis: int

    def _rows(self) -> jax.Array:
        return self.row.reshape(-1)

    def _take(self, per_token: Any) -> jax.Array:
        values = jnp.asarray(per_token)[:, self._rows()]
        return values[:, None, :, None] if self.axis == -2 else values[:, None, None, :]

    def _per_batch(self, values: Any) -> jax.Array:
        return jnp.asarray(values).reshape(-1, 1, 1, 1)

    def _per_head(self, values: Any) -> jax.Array:
        return jnp.atleast_2d(jnp.asarray(values))[..., None, None]

    def _take_pairs(self, kv: DenseSpan, pairs: Any) -> jax.Array:
        pairs = jnp.asarray(pairs)
        pairs = pairs.reshape((1,) * (4 - pairs.ndim) + pairs.shape)
        pairs = pairs if pairs.shape[-2] == 1 else pairs[:, :, self._rows(), :]
        # All keys in their order are the array itself.
        return pairs if pairs.shape[-1] in (1, kv.row.size) else pairs[..., kv._rows()]

    def _look_up(self, table: Any, entry: jax.Array) -> jax.Array:
        return jnp.asarray(table)[self.head if table.shape[0] > 1 else 0, entry]


def spans(batch: int, heads: int, rows: jax.Array, kv_len: int, q_offset: Any) -> tuple[DenseSpan, DenseSpan]:
    """The spans of query ``rows`` and of all keys."""
    every_batch = jnp.arange(batch, dtype=jnp.int32).reshape(-1, 1, 1, 1)
    every_head = jnp.arange(heads, dtype=jnp.int32).reshape(1, -1, 1, 1)
    q_rows = rows.astype(jnp.int32)[:, None]
    q_index = q_rows + jnp.asarray(q_offset, jnp.int32).reshape(-1, 1, 1, 1)
    keys = jnp.arange(kv_len, dtype=jnp.int32)[None, :]
    q = DenseSpan(q_rows, q_index, every_batch, every_head, -2)
    return q, DenseSpan(keys, keys, every_batch, every_head, -1)


def dense_mask(mask: Mask, batch: int, heads: int, rows: jax.Array, kv_len: int, q_offset: Any) -> jax.Array:
    """What a mask allows the query ``rows`` [R], a boolean array [B or 1, N or 1, R, kv_len]."""
    allowed = pairs_allowed(mask, *spans(batch, heads, rows, kv_len, q_offset))
    allowed = allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)
    return jnp.broadcast_to(allowed, (*allowed.shape[:2], rows.size, kv_len))


def attend(problem: Problem, x: Operands, rows: jax.Array | None = None) -> Output:
    """Softmax attention by its definition, over all queries or the given ``rows`` (``x.q`` holds just those).

    Statistics in float32 (float64 for float64 inputs).  A row with no allowed key gives output 0 and lse -inf.
    What is NaN or infinite in a key, value or query reaches only the pairs that the mask allows.
    """
    p = problem
    wide = jnp.promote_types(p.dtype, jnp.float32)
    rows = jnp.arange(p.q_len, dtype=jnp.int32) if rows is None else rows
    q_span, kv_span = spans(p.batch, p.num_q_heads, rows, p.kv_len, offset_of(p, x))
    (q, bad_q), (k, bad_k), (v, bad_v) = (_finite(a) for a in (x.q, x.k, x.v))
    precision = jax.lax.Precision.HIGHEST if p.precision == "highest" else None

    grouped = q.reshape(p.batch, q.shape[1], p.num_kv_heads, p.group, p.head_dim)
    logits = jnp.einsum("btkgd,bskd->bkgts", grouped, k, precision=precision, preferred_element_type=wide)
    logits = logits.reshape(p.batch, p.num_q_heads, q.shape[1], p.kv_len)
    logits = logits * scale_of(p, x)
    bad = bad_q[..., None] | jnp.repeat(bad_k | bad_v, p.group, axis=1)[:, :, None, :]
    allowed = jnp.broadcast_to(pairs_allowed(x.mask, q_span, kv_span), logits.shape)
    if x.score is not None:
        # What a score makes of a forbidden pair, or reads there, may be NaN: no gradient passes through it.
        watch = _only(allowed)
        logits = jnp.where(allowed, logits, 0.0)
        logits = applied(x.score, logits, *(dataclasses.replace(s, watch=watch) for s in (q_span, kv_span)))
    allowed &= ~(logits < LOWEST)  # a bias of finfo.min forbids, here as in the kernels
    # Finite, for callers with jax_debug_infs; -inf is nowhere but in the lse of an empty row.
    logits = jnp.where(allowed, jnp.where(bad, jnp.nan, logits), jnp.finfo(wide).min)

    m = logits.max(-1, keepdims=True)
    sinks = None if x.sinks is None else x.sinks[None, :, None, None].astype(wide)
    m = jax.lax.stop_gradient(m if sinks is None else jnp.maximum(m, sinks))
    unnormalised = jnp.where(allowed, jnp.exp(logits - m), 0.0)
    total = unnormalised.sum(-1, keepdims=True)
    keyless = total == 0
    total = total if sinks is None else total + jnp.exp(sinks - m)
    empty = total == 0
    # Selected once more, because 0 / NaN is NaN: a row that sees a NaN would reach dv of keys that it does not see.
    probs = jnp.where(allowed, unnormalised / jnp.where(empty, 1.0, total), 0.0)
    lse = jnp.where(empty, -jnp.inf, jnp.log(jnp.where(empty, 1.0, total)) + m)[..., 0]
    if x.dropout is not None:
        counter = tuple(x.dropout[..., word, None, None] for word in range(4))
        kept = dropout.kept(counter, p.dropout_rate, q_span.row, kv_span.row, p.kv_len)
        probs = jnp.where(kept, probs / (1.0 - p.dropout_rate), 0.0)
    probs = probs.astype(p.dtype).reshape(p.batch, p.num_kv_heads, p.group, q.shape[1], p.kv_len)
    o = jnp.einsum("bkgts,bskd->btkgd", probs, v, precision=precision, preferred_element_type=wide)
    o = o.reshape(p.batch, q.shape[1], p.num_q_heads, p.v_head_dim)
    # The select keeps the cotangents of rows without keys, and of rows that are NaN, away from keys they do not see.
    by_row = jax.lax.stop_gradient(total)[..., 0].swapaxes(1, 2)[..., None] * 0.0
    o = jnp.where(keyless[..., 0].swapaxes(1, 2)[..., None] | jnp.isnan(by_row), by_row, o)
    return Output(o.astype(p.dtype), lse.astype(wide))


def _only(allowed: jax.Array) -> Any:
    """A span's ``watch`` that gives 0 for what is read at forbidden pairs."""

    def watch(kind: str, array: Any, load: Any, entry: Any) -> jax.Array:
        values = load()
        return jnp.where(allowed, values, jnp.zeros((), values.dtype))

    return watch


def _finite(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An array with its NaN and infinities as 0, and which tokens [B, heads, length] had one."""
    finite = jnp.isfinite(a)
    return jnp.where(finite, a, 0), ~finite.all(-1).swapaxes(1, 2)


def attend_chunked(problem: Problem, x: Operands, chunk: int = 256) -> Output:
    """``attend``, ``chunk`` queries at a time, recomputed in the backward pass (Rabe & Staats, arXiv:2112.05682)."""
    p = problem
    count = -(-p.q_len // chunk)
    padding = count * chunk - p.q_len
    q = jnp.pad(x.q, ((0, 0), (0, padding), (0, 0), (0, 0)))
    q = q.reshape(p.batch, count, chunk, p.num_q_heads, p.head_dim).swapaxes(0, 1)
    rows = jnp.minimum(jnp.arange(count * chunk, dtype=jnp.int32), p.q_len - 1).reshape(count, chunk)

    @jax.checkpoint
    def one(args):
        q_chunk, row_chunk = args
        return attend(p, x._replace(q=q_chunk), row_chunk)

    o, lse, _ = jax.lax.map(one, (q, rows))
    o = o.swapaxes(0, 1).reshape(p.batch, count * chunk, p.num_q_heads, p.v_head_dim)
    lse = jnp.moveaxis(lse, 0, 2).reshape(p.batch, p.num_q_heads, count * chunk)
    return Output(o[:, : p.q_len], lse[..., : p.q_len])
