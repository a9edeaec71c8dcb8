"""Backward kernels: FlashAttention-2, algorithm 2 (arXiv:2307.08691), as separate sweeps.

``dq`` walks the keys of a tile of queries, ``dk, dv`` the queries of a tile of keys (and the query heads of its
group); a program owns what it writes, so there are no atomics and runs are bit-identical.  Scores are recomputed from
q, k and lse; nothing of size q_len x kv_len is written, but for the gradient of a bias of that shape.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ...problem import Gradients, Operands, Output, Problem, offset_of
from ...softmax import LOG2E
from ...visits import Visits, kv_visits, q_visits
from .grid import kv_grid, q_grid, split
from .loops import Loops, as_arrays, walk
from .score_gradients import score_gradients
from .tile_math import (
    Chunks,
    ScoreMaker,
    chunks_of,
    dot,
    dot_chunks,
    in_registers,
    load_rows,
    load_stats,
    result,
    sanitise,
    store_rows,
    store_stats,
)
from .tiles import Tile


def backward(
    problem: Problem, x: Operands, out: Output, do: jax.Array, dlse: jax.Array, tiles: dict[str, Tile], interpret: bool
) -> Gradients:
    """All gradients, from the cotangents of o [B, T, N, Dv] and of lse [B, N, T]."""
    p = problem
    do = do.astype(x.q.dtype)
    # +inf makes every probability of an empty row exactly 0. Where float32 no longer resolves a logit, lse is moved up
    # by more than its rounding, so that no probability overflows.
    empty = jnp.isneginf(out.lse)
    dlse = jnp.where(empty, 0.0, dlse)  # no logit moves the lse of such a row, whatever a guarded loss says of it
    lse2 = jnp.where(empty, 0.0, out.lse) * LOG2E
    lse2 = jnp.where(jnp.abs(lse2) < 2.0**24, lse2, lse2 + jnp.abs(lse2) * 2.0**-22)
    lse2 = jnp.where(empty, jnp.inf, lse2)
    dq, delta = _dq(p, x, (do, lse2, dlse, out.o, out.rest), tiles["dq"], interpret)
    saved = (do, lse2, delta)
    dk, dv = _dkv(p, x, saved, tiles["dkv"], interpret)
    dscale = None
    if x.scale is not None:
        # The kernels leave the scale out where it is an array, so that its own gradient exists at scale 0 too.
        # A query that sees nothing may hold NaN.
        dscale = jnp.sum(jnp.where(dq == 0, 0.0, dq.astype(jnp.float32) * x.q.astype(jnp.float32))).reshape(1)
        dq, dk = ((g * x.scale[0]).astype(g.dtype) for g in (dq, dk))
    dscore = score_gradients(p, x, saved, tiles.get("dscore"), interpret)
    return Gradients(dq, dk, dv, dscore, dscale, None if x.sinks is None else _dsinks(x.sinks, out, do, dlse))


def _dsinks(sinks: jax.Array, out: Output, do: jax.Array, dlse: jax.Array) -> jax.Array:
    """A sink is a logit whose value is 0, so its gradient is -p * delta, summed over the rows of its head [N]."""
    p = jnp.where(jnp.isneginf(out.lse), 0.0, jnp.exp(sinks[:, None] - out.lse))
    o = out.o.astype(jnp.float32) + (0.0 if out.rest is None else out.rest.astype(jnp.float32))
    # What is exactly 0 came from no key: whatever its cotangent is, it must not matter.
    delta = jnp.where(o == 0.0, 0.0, o * do.astype(jnp.float32)).sum(-1).swapaxes(1, 2) - dlse
    return -jnp.sum(p * delta, (0, 2))


def _dq(p: Problem, x: Operands, saved: Any, tile: Tile, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """dq, and delta [B, N, T] for the kernels that follow: do is here already, one of its own would read it again."""
    visits = kv_visits(x.mask, p.q_len, p.kv_len, tile.block_q, tile.block_kv, offset_of(p, x))
    return pl.pallas_call(
        functools.partial(_dq_kernel, p, tile, Loops.of(visits), interpret),
        out_shape=(result(x, x.q.shape, x.q.dtype), result(x, (p.batch, p.num_q_heads, p.q_len), jnp.float32)),
        grid=(q_grid(p, tile).size,),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.stages),
        interpret=interpret,
        name="flash_dq",
    )(x, saved, as_arrays(visits))


def _dq_kernel(
    p: Problem,
    tile: Tile,
    loops: Loops,
    interpret: bool,
    x: Operands,
    saved: Any,
    visits: Visits,
    dq_ref: Any,
    delta_ref: Any,
) -> None:
    do_ref, lse2_ref, dlse_ref, o_ref, rest_ref = saved
    batch, head, q_tile = q_grid(p, tile).place()
    kv_head, _ = split(head, p.group)
    q_start = q_tile * tile.block_q
    q = load_rows(x.q, batch, head, q_start, tile.block_q, p.q_len, check=True)
    do = load_rows(do_ref, batch, head, q_start, tile.block_q, p.q_len, check=True)
    # The cotangent of lse enters each score's gradient as p * dlse, so it joins delta (FlashAttention-4 does the same).
    delta = -load_stats(dlse_ref, batch, head, q_start, tile.block_q, p.q_len, 0.0)
    for part in (o_ref, rest_ref):
        if part is not None:
            delta += _row_sums(load_rows(part, batch, head, q_start, tile.block_q, p.q_len, check=True), do)
    store_stats(delta_ref, batch, head, q_start, delta, p.q_len)
    if tile.registers:
        q, do = in_registers(q, p, interpret), in_registers(do, p, interpret)
    lse2 = load_stats(lse2_ref, batch, head, q_start, tile.block_q, p.q_len, jnp.inf)
    score = ScoreMaker(p, x, q_axis=0, interpret=interpret)

    def step(j, dq, masked):
        kv_start = j * tile.block_kv
        k = load_rows(x.k, batch, kv_head, kv_start, tile.block_kv, p.kv_len, check=masked)
        v = load_rows(x.v, batch, kv_head, kv_start, tile.block_kv, p.kv_len, check=masked)
        k, penalty = sanitise(k) if masked else (k, None)
        spans = score.spans(batch, head, q_start, tile.block_q, kv_start, tile.block_kv)
        scores = score(dot_chunks(q, k, p, interpret), *spans, penalty)
        probs = score.probabilities(scores, lse2)
        dp = dot_chunks(do, v, p, interpret)
        _, ds = score.d_products(scores, probs, dp, delta[:, None])
        ds = ds.astype(k[0].dtype)
        return tuple(g + dot(ds, c, p, interpret) for g, c in zip(dq, k, strict=True))

    dq = tuple(jnp.zeros((tile.block_q, c.size), jnp.float32) for c in chunks_of(p.head_dim, p.dtype))
    dq = walk(loops, visits, (batch, head, q_tile), step, dq)
    scale = 1.0 if p.scale is None else p.scale
    store_rows(dq_ref, batch, head, q_start, tuple(g * scale for g in dq), p.q_len)


def _row_sums(a: Chunks, b: Chunks) -> jax.Array:
    """Of the products, row by row, in float32."""
    sums = [(c.astype(jnp.float32) * d.astype(jnp.float32)).sum(axis=1) for c, d in zip(a, b, strict=True)]
    return functools.reduce(jnp.add, sums)


def _dkv(p: Problem, x: Operands, saved: Any, tile: Tile, interpret: bool) -> tuple[jax.Array, jax.Array]:
    visits = q_visits(x.mask, p.q_len, p.kv_len, tile.block_q, tile.block_kv, offset_of(p, x))
    return pl.pallas_call(
        functools.partial(_dkv_kernel, p, tile, Loops.of(visits), interpret),
        out_shape=(result(x, x.k.shape, x.k.dtype), result(x, x.v.shape, x.v.dtype)),
        grid=(kv_grid(p, tile).size,),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.stages),
        interpret=interpret,
        name="flash_dkv",
    )(x, saved, as_arrays(visits))


def _dkv_kernel(
    p: Problem,
    tile: Tile,
    loops: Loops,
    interpret: bool,
    x: Operands,
    saved: Any,
    visits: Visits,
    dk_ref: Any,
    dv_ref: Any,
) -> None:
    do_ref, lse2_ref, delta_ref = saved
    batch, kv_head, kv_tile = kv_grid(p, tile).place()
    kv_start = kv_tile * tile.block_kv
    k = load_rows(x.k, batch, kv_head, kv_start, tile.block_kv, p.kv_len, check=True)
    v = load_rows(x.v, batch, kv_head, kv_start, tile.block_kv, p.kv_len, check=True)
    if tile.registers:
        k, v = in_registers(k, p, interpret), in_registers(v, p, interpret)
    # Tiles are held transposed, keys by queries, so that p and ds feed their products without a transposition.
    score = ScoreMaker(p, x, q_axis=1, interpret=interpret)

    def one_head(i, carry):
        head = kv_head * p.group + i

        def step(j, carry, masked):
            dk, dv = carry
            q_start = j * tile.block_q
            q = load_rows(x.q, batch, head, q_start, tile.block_q, p.q_len, check=masked)
            do = load_rows(do_ref, batch, head, q_start, tile.block_q, p.q_len, check=masked)
            lse2 = load_stats(lse2_ref, batch, head, q_start, tile.block_q, p.q_len, jnp.inf)
            delta = load_stats(delta_ref, batch, head, q_start, tile.block_q, p.q_len, 0.0)
            penalty = None
            if masked:
                q, bad_q = sanitise(q)
                do, bad_do = sanitise(do)
                penalty = bad_q + bad_do
            spans = score.spans(batch, head, q_start, tile.block_q, kv_start, tile.block_kv)
            scores = score(dot_chunks(k, q, p, interpret), *spans, penalty)
            probs_t = score.probabilities(scores, lse2)
            dp_t = dot_chunks(v, do, p, interpret)
            _, ds_t = score.d_products(scores, probs_t, dp_t, delta[None, :])
            probs_t, ds_t = score.kept(scores, probs_t).astype(do[0].dtype), ds_t.astype(q[0].dtype)
            dv = tuple(g + dot(probs_t, c, p, interpret) for g, c in zip(dv, do, strict=True))
            dk = tuple(g + dot(ds_t, c, p, interpret) for g, c in zip(dk, q, strict=True))
            return dk, dv

        return walk(loops, visits, (batch, head, kv_tile), step, carry)

    dk = tuple(jnp.zeros((tile.block_kv, c.size), jnp.float32) for c in chunks_of(p.head_dim, p.dtype))
    dv = tuple(jnp.zeros((tile.block_kv, c.size), jnp.float32) for c in chunks_of(p.v_head_dim, p.dtype))
    dk, dv = (
        one_head(0, (dk, dv))
        if p.group == 1
        else jax.lax.fori_loop(jnp.int32(0), jnp.int32(p.group), one_head, (dk, dv))
    )
    scale = 1.0 if p.scale is None else p.scale
    store_rows(dk_ref, batch, kv_head, kv_start, tuple(g * scale for g in dk), p.kv_len)
    store_rows(dv_ref, batch, kv_head, kv_start, tuple(g * score.scale_of_kept for g in dv), p.kv_len)
