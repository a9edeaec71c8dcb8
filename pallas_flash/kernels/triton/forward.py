"""Forward kernel: FlashAttention-2, algorithm 1 (arXiv:2307.08691), one program per tile of queries."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ...problem import Operands, Output, Problem, offset_of
from ...softmax import LN2, LOG2E, LOWEST
from ...visits import Visits, kv_visits
from .grid import q_grid, split
from .loops import Loops, as_arrays, walk
from .tile_math import (
    ScoreMaker,
    chunks_of,
    dot,
    dot_chunks,
    exp2,
    in_registers,
    load_rows,
    result,
    sanitise,
    store_rows,
    store_stats,
)
from .tiles import Tile


def forward(problem: Problem, x: Operands, tile: Tile, interpret: bool, *, keep_rest: bool) -> Output:
    """Output [B, T, N, Dv] in the inputs' dtype, natural-log lse [B, N, T] in float32, and the rest if it is kept."""
    p = problem
    visits = kv_visits(x.mask, p.q_len, p.kv_len, tile.block_q, tile.block_kv, offset_of(p, x))
    o = result(x, (p.batch, p.q_len, p.num_q_heads, p.v_head_dim), x.q.dtype)
    lse = result(x, (p.batch, p.num_q_heads, p.q_len), jnp.float32)
    results = pl.pallas_call(
        functools.partial(_kernel, p, tile, Loops.of(visits), interpret),
        out_shape=(o, lse, o) if keep_rest else (o, lse),
        grid=(q_grid(p, tile).size,),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.stages),
        interpret=interpret,
        name="flash_forward",
    )(x, as_arrays(visits))
    return Output(*results)


def _kernel(
    p: Problem,
    tile: Tile,
    loops: Loops,
    interpret: bool,
    x: Operands,
    visits: Visits,
    o_ref: Any,
    lse_ref: Any,
    rest_ref: Any = None,
) -> None:
    batch, head, q_tile = q_grid(p, tile).place()
    kv_head, _ = split(head, p.group)
    q_start = q_tile * tile.block_q
    q = load_rows(x.q, batch, head, q_start, tile.block_q, p.q_len, check=True)
    if tile.registers:
        q = in_registers(q, p, interpret)
    score = ScoreMaker(p, x, q_axis=0, interpret=interpret)

    def step(j, carry, masked):
        m, l, acc = carry
        kv_start = j * tile.block_kv
        k = load_rows(x.k, batch, kv_head, kv_start, tile.block_kv, p.kv_len, check=masked)
        v = load_rows(x.v, batch, kv_head, kv_start, tile.block_kv, p.kv_len, check=masked)
        v, penalty = sanitise(v) if masked else (v, None)
        spans = score.spans(batch, head, q_start, tile.block_q, kv_start, tile.block_kv)
        scores = score(dot_chunks(q, k, p, interpret), *spans, penalty)
        s = scores.s
        m_new = jnp.maximum(m, s.max(axis=1))
        alpha = exp2((m - m_new) * score.unit, interpret)
        probs = score.exp2_below(s, m_new)
        l = l * alpha + probs.sum(axis=1)
        probs = score.kept(scores, probs).astype(v[0].dtype)
        acc = tuple(a * alpha[:, None] + dot(probs, c, p, interpret) for a, c in zip(acc, v, strict=True))
        return m_new, l, acc

    m = jnp.full((tile.block_q,), LOWEST, jnp.float32)
    l = jnp.zeros((tile.block_q,), jnp.float32)
    acc = tuple(jnp.zeros((tile.block_q, c.size), jnp.float32) for c in chunks_of(p.v_head_dim, p.dtype))
    m, l, acc = walk(loops, visits, (batch, head, q_tile), step, (m, l, acc))

    if x.sinks is not None:
        # One more logit without a value, in the units of the scores.
        sink = x.sinks[head] * (LOG2E / score.unit)
        m_new = jnp.maximum(m, sink)
        alpha = exp2((m - m_new) * score.unit, interpret)
        l = l * alpha + exp2((sink - m_new) * score.unit, interpret)
        m, acc = m_new, tuple(a * alpha[:, None] for a in acc)
    empty = l == 0.0
    norm = score.scale_of_kept / jnp.where(empty, 1.0, l)
    o = tuple(a * norm[:, None] for a in acc)
    store_rows(o_ref, batch, head, q_start, o, p.q_len)
    if rest_ref is not None:
        rest = tuple(c - c.astype(o_ref.dtype).astype(jnp.float32) for c in o)
        store_rows(rest_ref, batch, head, q_start, rest, p.q_len)
    lse = jnp.where(empty, -jnp.inf, m * (score.unit * LN2) + jnp.log(jnp.where(empty, 1.0, l)))
    store_stats(lse_ref, batch, head, q_start, lse, p.q_len)
