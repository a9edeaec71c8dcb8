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
    any_of,
    chunks_of,
    dot,
    dot_chunks,
    in_registers,
    load_rows,
    load_stats,
    nan_rows,
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
    dk, dv = _dkv(p, x, saved, tiles, interpret)
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
        scores = score(dot_chunks(q, k, p, interpret), *spans, masked, penalty)
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


def _dkv(p: Problem, x: Operands, saved: Any, tiles: dict[str, Tile], interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Together, or dk and dv apart where both sums leave too few registers for the products (wide heads)."""
    if "dkv" in tiles:
        dk, dv = _over_queries(p, x, saved, tiles["dkv"], interpret, ("dk", "dv"))
    else:
        (dk,), (dv,) = (_over_queries(p, x, saved, tiles[part], interpret, (part,)) for part in ("dk", "dv"))
    return dk, dv


def _over_queries(
    p: Problem, x: Operands, saved: Any, tile: Tile, interpret: bool, parts: tuple[str, ...]
) -> list[jax.Array]:
    visits = q_visits(x.mask, p.q_len, p.kv_len, tile.block_q, tile.block_kv, offset_of(p, x))
    shapes = {"dk": result(x, x.k.shape, x.k.dtype), "dv": result(x, x.v.shape, x.v.dtype)}
    return pl.pallas_call(
        functools.partial(_dkv_kernel, p, tile, Loops.of(visits), interpret, parts),
        out_shape=[shapes[part] for part in parts],
        grid=(kv_grid(p, tile).size,),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.stages),
        interpret=interpret,
        name="flash_" + ("dkv" if len(parts) == 2 else parts[0]),
    )(x, saved, as_arrays(visits))


def _dkv_kernel(
    p: Problem,
    tile: Tile,
    loops: Loops,
    interpret: bool,
    parts: tuple[str, ...],
    x: Operands,
    saved: Any,
    visits: Visits,
    *refs: Any,
) -> None:
    do_ref, lse2_ref, delta_ref = saved
    batch, kv_head, kv_tile = kv_grid(p, tile).place()
    kv_start = kv_tile * tile.block_kv
    k = load_rows(x.k, batch, kv_head, kv_start, tile.block_kv, p.kv_len, check=True)
    k = in_registers(k, p, interpret) if tile.registers else k
    v: Any = ()
    if "dk" in parts:
        v = load_rows(x.v, batch, kv_head, kv_start, tile.block_kv, p.kv_len, check=True)
        v = in_registers(v, p, interpret) if tile.registers else v
    # Tiles are held transposed, keys by queries, so that p and ds feed their products without a transposition.
    score = ScoreMaker(p, x, q_axis=1, interpret=interpret)

    def swept(loops, careful):
        def one_head(i, sums):
            head = kv_head * p.group + i

            def step(j, sums, masked):
                q_start = j * tile.block_q
                q = load_rows(x.q, batch, head, q_start, tile.block_q, p.q_len, check=masked)
                do = load_rows(do_ref, batch, head, q_start, tile.block_q, p.q_len, check=masked)
                lse2 = load_stats(lse2_ref, batch, head, q_start, tile.block_q, p.q_len, jnp.inf)
                penalty = None
                if masked and careful:
                    q, bad_q = sanitise(q)
                    do, bad_do = sanitise(do)
                    penalty = bad_q + bad_do
                spans = score.spans(batch, head, q_start, tile.block_q, kv_start, tile.block_kv)
                scores = score(dot_chunks(k, q, p, interpret), *spans, masked, penalty)
                probs_t = score.probabilities(scores, lse2)
                factors = {}
                if "dk" in parts:
                    delta = load_stats(delta_ref, batch, head, q_start, tile.block_q, p.q_len, 0.0)
                    _, ds_t = score.d_products(scores, probs_t, dot_chunks(v, do, p, interpret), delta[None, :])
                    factors["dk"] = ds_t.astype(q[0].dtype), q
                if "dv" in parts:
                    factors["dv"] = score.kept(scores, probs_t).astype(do[0].dtype), do
                return {
                    part: tuple(g + dot(a, c, p, interpret) for g, c in zip(sums[part], b, strict=True))
                    for part, (a, b) in factors.items()
                }

            return walk(loops, visits, (batch, head, kv_tile), step, sums)

        dims = {"dk": p.head_dim, "dv": p.v_head_dim}
        sums = {
            part: tuple(jnp.zeros((tile.block_kv, c.size), jnp.float32) for c in chunks_of(dims[part], p.dtype))
            for part in parts
        }
        return (
            one_head(0, sums) if p.group == 1 else jax.lax.fori_loop(jnp.int32(0), jnp.int32(p.group), one_head, sums)
        )

    def store(sums, only=None):
        scales = {"dk": 1.0 if p.scale is None else p.scale, "dv": score.scale_of_kept}
        for part, ref in zip(parts, refs, strict=True):
            store_rows(ref, batch, kv_head, kv_start, tuple(g * scales[part] for g in sums[part]), p.kv_len, only)

    sums = swept(loops, careful=False)
    store(sums)
    if loops.partial:
        # NaN of a query has leaked to a key that is forbidden to it, or was due.
        leaked = functools.reduce(jnp.logical_or, (nan_rows(chunks) for chunks in sums.values()))

        @pl.when(any_of(leaked))
        def _():
            store(swept(None, careful=True), leaked)
