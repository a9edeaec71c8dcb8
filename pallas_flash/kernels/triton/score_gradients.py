"""Gradients of the arrays that scores read, without atomics, in memory of their own size.

An array with a value per pair gets one program per tile of pairs, which sums over the batch rows and heads that share
it.  One that repeats along queries or keys gets one program per tile of the other side, which sums its rows; what
remains, sums over batch rows and heads of [B, N, length], is left to XLA.  A table gets one program per run of entries
and per part of the queries, which adds up the pairs that took each entry.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ...checks import pair_shape
from ...problem import Operands, Problem, offset_of
from ...visits import Visits, kv_visits, q_visits
from .grid import split
from .loops import Loops, as_arrays, visited, walk
from .tile_math import ScoreMaker, dot_chunks, load_rows, load_stats, result
from .tiles import Tile

_ENTRIES = 4096  # of a table, that all the programs of one head may write together beyond one table


def score_gradients(p: Problem, x: Operands, saved: Any, tile: Any, interpret: bool) -> tuple[jax.Array | None, ...]:
    """For each array of the score its gradient, accumulated in float32; None for integers."""
    leaves = jax.tree.leaves(x.score)
    totals: list[Any] = [None] * len(leaves)
    for number, read in enumerate(p.reads):
        if not read.differentiable:
            continue
        leaf = leaves[read.leaf]
        if read.kind == "table":
            d = _table(p, x, saved, tile, interpret, number, leaf.shape)
        else:
            # Of the one read of an array, a kernel's sums are rounded where they are written: half the traffic.
            once = [r.leaf for r in p.reads].count(read.leaf) == 1
            shape, dtype = pair_shape(read.kind, leaf.shape), leaf.dtype if once else jnp.float32
            d = _broadcast(p, x, saved, tile, interpret, number, shape, dtype).reshape(leaf.shape)
        totals[read.leaf] = d if totals[read.leaf] is None else totals[read.leaf] + d
    return tuple(None if d is None else d.astype(leaf.dtype) for d, leaf in zip(totals, leaves, strict=True))


def _broadcast(
    p: Problem, x: Operands, saved: Any, tile: Tile, interpret: bool, number: int, shape: Any, dtype: Any
) -> jax.Array:
    """Gradient of a read array [B or 1, N or 1, T or 1, S or 1]; ``dtype`` is what one with a value per pair gets."""
    if shape[2] == p.q_len and shape[3] == p.kv_len:
        return _pairs(p, x, saved, tile, interpret, number, shape, dtype)
    along_keys = shape[2] == 1 and shape[3] > 1
    sums = _sums(p, x, saved, tile, interpret, number, along_keys)  # [B, N, length]
    sums = sums[:, :, None, :] if along_keys else sums[..., None]
    shared = tuple(axis for axis in range(4) if shape[axis] == 1)
    return sums.sum(shared, keepdims=True)


def _spans(p, x, tile, interpret, q_axis, batch, head, q_tile, kv_tile):
    score = ScoreMaker(p, x, q_axis=q_axis, interpret=interpret)
    q_start, kv_start = q_tile * tile.block_q, kv_tile * tile.block_kv
    return score, score.spans(batch, head, q_start, tile.block_q, kv_start, tile.block_kv)


def _d_read(p, x, saved, tile, interpret, number, q_axis, batch, head, q_tile, kv_tile, masked):
    """Gradient of the loss by what one read gives for each pair of a tile."""
    do_ref, lse2_ref, delta_ref = saved
    q_start, kv_start = q_tile * tile.block_q, kv_tile * tile.block_kv
    kv_head, _ = split(head, p.group)
    q = load_rows(x.q, batch, head, q_start, tile.block_q, p.q_len, check=True)
    do = load_rows(do_ref, batch, head, q_start, tile.block_q, p.q_len, check=True)
    k = load_rows(x.k, batch, kv_head, kv_start, tile.block_kv, p.kv_len, check=True)
    v = load_rows(x.v, batch, kv_head, kv_start, tile.block_kv, p.kv_len, check=True)
    lse2 = load_stats(lse2_ref, batch, head, q_start, tile.block_q, p.q_len, jnp.inf)
    delta = load_stats(delta_ref, batch, head, q_start, tile.block_q, p.q_len, 0.0)
    delta = delta[:, None] if q_axis == 0 else delta[None, :]
    score, spans = _spans(p, x, tile, interpret, q_axis, batch, head, q_tile, kv_tile)
    products = dot_chunks(q, k, p, interpret) if q_axis == 0 else dot_chunks(k, q, p, interpret)
    dp = dot_chunks(do, v, p, interpret) if q_axis == 0 else dot_chunks(v, do, p, interpret)
    scores = score(products, *spans, masked)
    ds, _ = score.d_products(scores, score.probabilities(scores, lse2), dp, delta)
    d = score.d_read(number, scores, ds, *spans)
    # Rows behind the last query have p = 0, but what they may see of a forbidden NaN would be summed.
    return jnp.where(spans[0].row < p.q_len, d, 0.0) if p.q_len % tile.block_q else d


def _pairs(
    p: Problem, x: Operands, saved: Any, tile: Tile, interpret: bool, number: int, shape: Any, dtype: Any
) -> jax.Array:
    visits = kv_visits(x.mask, p.q_len, p.kv_len, tile.block_q, tile.block_kv, offset_of(p, x))
    batches, heads = shape[:2]
    q_tiles, kv_tiles = pl.cdiv(p.q_len, tile.block_q), pl.cdiv(p.kv_len, tile.block_kv)
    return pl.pallas_call(
        functools.partial(_pairs_kernel, p, tile, interpret, number),
        out_shape=result(x, shape, dtype),
        grid=(batches * heads * q_tiles * kv_tiles,),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=1),
        interpret=interpret,
        name="flash_dscore",
    )(x, saved, as_arrays(visits))


def _pairs_kernel(
    p: Problem, tile: Tile, interpret: bool, number: int, x: Operands, saved: Any, visits: Visits, d_ref: Any
) -> None:
    batches, heads = d_ref.shape[:2]
    kv_tiles = pl.cdiv(p.kv_len, tile.block_kv)
    q_tiles = pl.cdiv(p.q_len, tile.block_q)
    rest, kv_tile = split(pl.program_id(0), kv_tiles)
    rest, q_tile = split(rest, q_tiles)
    own_batch, own_head = split(rest, heads)
    shared_heads = p.num_q_heads // heads

    def add(i, total):
        shared_batch, shared_head = split(i, shared_heads)
        batch = own_batch if batches > 1 else shared_batch
        head = own_head if heads > 1 else shared_head
        turns = visited(visits, (batch, head, q_tile), kv_tile).astype(jnp.int32)
        here = functools.partial(_d_read, p, x, saved, tile, interpret, number, 0, batch, head, q_tile, kv_tile, True)
        # A loop of none or one turn: skips the products of a forbidden tile.
        return jax.lax.fori_loop(0, turns, lambda _, t: t + here(), total)

    shared = (p.batch // batches) * shared_heads
    total = jnp.zeros((tile.block_q, tile.block_kv), jnp.float32)
    total = add(jnp.int32(0), total) if shared == 1 else jax.lax.fori_loop(jnp.int32(0), jnp.int32(shared), add, total)
    q_start, kv_start = q_tile * tile.block_q, kv_tile * tile.block_kv
    rows = q_start + jax.lax.iota(jnp.int32, tile.block_q)
    columns = kv_start + jax.lax.iota(jnp.int32, tile.block_kv)
    inside = (rows < p.q_len)[:, None] & (columns < p.kv_len)[None, :]
    view = d_ref.at[own_batch, own_head, pl.ds(q_start, tile.block_q), pl.ds(kv_start, tile.block_kv)]
    plt.store(view, total.astype(d_ref.dtype), mask=inside)


def _sums(p: Problem, x: Operands, saved: Any, tile: Tile, interpret: bool, number: int, along_keys: bool) -> jax.Array:
    """Row sums of the gradient of a read [B, N, T], or with ``along_keys`` column sums [B, N, S]."""
    find = q_visits if along_keys else kv_visits
    visits = find(x.mask, p.q_len, p.kv_len, tile.block_q, tile.block_kv, offset_of(p, x))
    length, block = (p.kv_len, tile.block_kv) if along_keys else (p.q_len, tile.block_q)
    return pl.pallas_call(
        functools.partial(_sums_kernel, p, tile, Loops.of(visits), interpret, number, along_keys),
        out_shape=result(x, (p.batch, p.num_q_heads, length), jnp.float32),
        grid=(p.batch * p.num_q_heads * pl.cdiv(length, block),),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=1),
        interpret=interpret,
        name="flash_dscore",
    )(x, saved, as_arrays(visits))


def _sums_kernel(
    p: Problem,
    tile: Tile,
    loops: Loops,
    interpret: bool,
    number: int,
    along_keys: bool,
    x: Operands,
    saved: Any,
    visits: Visits,
    sums_ref: Any,
) -> None:
    length, block = (p.kv_len, tile.block_kv) if along_keys else (p.q_len, tile.block_q)
    rest, own_tile = split(pl.program_id(0), pl.cdiv(length, block))
    batch, head = split(rest, p.num_q_heads)

    def step(j, total, masked):
        q_tile, kv_tile = (j, own_tile) if along_keys else (own_tile, j)
        d = _d_read(p, x, saved, tile, interpret, number, int(along_keys), batch, head, q_tile, kv_tile, masked)
        return total + d.sum(axis=1)

    total = walk(loops, visits, (batch, head, own_tile), step, jnp.zeros((block,), jnp.float32))
    rows = own_tile * block + jax.lax.iota(jnp.int32, block)
    plt.store(sums_ref.at[batch, head, pl.ds(own_tile * block, block)], total, mask=rows < length)


def _table(p: Problem, x: Operands, saved: Any, tile: Tile, interpret: bool, number: int, shape: Any) -> jax.Array:
    """Gradient of a table [N or 1, entries]."""
    visits = kv_visits(x.mask, p.q_len, p.kv_len, tile.block_q, tile.block_kv, offset_of(p, x))
    entries = shape[1]
    parts = min(pl.cdiv(p.q_len, tile.block_q), max(1, _ENTRIES // entries))
    block = min(128, max(16, pl.next_power_of_2(entries)))
    sums = pl.pallas_call(
        functools.partial(_table_kernel, p, tile, Loops.of(visits), interpret, number, block),
        out_shape=result(x, (p.batch, p.num_q_heads, parts, entries), jnp.float32),
        grid=(p.batch * p.num_q_heads * parts * pl.cdiv(entries, block),),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=1),
        interpret=interpret,
        name="flash_dscore",
    )(x, saved, as_arrays(visits))
    return sums.sum((0, 2)) if shape[0] > 1 else sums.sum((0, 1, 2))[None]


def _table_kernel(
    p: Problem,
    tile: Tile,
    loops: Loops,
    interpret: bool,
    number: int,
    block: int,
    x: Operands,
    saved: Any,
    visits: Visits,
    sums_ref: Any,
) -> None:
    parts, entries = sums_ref.shape[2:]
    rest, run = split(pl.program_id(0), pl.cdiv(entries, block))
    rest, part = split(rest, parts)
    batch, head = split(rest, p.num_q_heads)
    begin = run * block
    own = begin + jax.lax.iota(jnp.int32, block)
    q_tiles = pl.cdiv(p.q_len, tile.block_q)
    per_part = pl.cdiv(q_tiles, parts)

    def add_row(i, total):
        q_tile = part * per_part + i

        def step(j, total, masked):
            score, spans = _spans(p, x, tile, interpret, 0, batch, head, q_tile, j)
            taken = jnp.broadcast_to(score.loaded(*spans)[number].entry, (tile.block_q, tile.block_kv))
            first, end = jnp.maximum(taken.min(), begin), jnp.minimum(taken.max() + 1, begin + block)

            def add_tile(_, total):
                d = _d_read(p, x, saved, tile, interpret, number, 0, batch, head, q_tile, j, masked)

                def add_entry(entry, total):
                    return total + jnp.where(own == entry, jnp.sum(jnp.where(taken == entry, d, 0.0)), 0.0)

                return jax.lax.fori_loop(first, end, add_entry, total)

            # A loop of none or one turn: skips the products of a tile that takes none of these entries.
            return jax.lax.fori_loop(0, (first < end).astype(jnp.int32), add_tile, total)

        return walk(loops, visits, (batch, head, q_tile), step, total)

    rows = jnp.clip(q_tiles - part * per_part, 0, per_part)
    total = jax.lax.fori_loop(0, rows, add_row, jnp.zeros((block,), jnp.float32))
    plt.store(sums_ref.at[batch, head, part, pl.ds(begin, block)], total, mask=own < entries)
