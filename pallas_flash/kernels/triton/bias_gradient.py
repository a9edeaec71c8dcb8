"""Gradient of an additive bias of any broadcast shape, without atomics, in memory of the bias.

A bias with a value per pair gets one program per tile of pairs, which sums over the batch rows and heads that share
it.  A bias that repeats along queries or keys gets one program per tile of the other side, which sums its rows; what
remains, sums over batch rows and heads of [B, N, length], is left to XLA.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ...masks import kv_tile_ranges, q_tile_ranges
from ...problem import Operands, Problem, offset_of
from .forward import split
from .tile_math import Loops, ScoreMaker, dot_chunks, load_range, load_rows, load_stats, result, walk
from .tiles import Tile


def bias_gradient(p: Problem, x: Operands, saved: Any, tile: Tile, interpret: bool) -> jax.Array:
    """Gradient of ``x.bias``, in its shape and dtype, accumulated in float32."""
    assert p.bias_shape is not None and x.bias is not None
    per_pair = p.bias_shape[2] == p.q_len and p.bias_shape[3] == p.kv_len
    if per_pair:
        return _pairs(p, x, saved, tile, interpret).astype(x.bias.dtype)
    along_keys = p.bias_shape[2] == 1 and p.bias_shape[3] > 1
    sums = _sums(p, x, saved, tile, interpret, along_keys)  # [B, N, length]
    sums = sums[:, :, None, :] if along_keys else sums[..., None]
    shared = tuple(axis for axis in range(4) if p.bias_shape[axis] == 1)
    return sums.sum(shared, keepdims=True).astype(x.bias.dtype)


def _ds(p, x, saved, tile, interpret, q_axis, batch, head, q_tile, kv_tile, masked):
    """Gradient of the loss by one tile of biased logits."""
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
    score = ScoreMaker(p, x, q_axis=q_axis, interpret=interpret)
    spans = score.spans(batch, head, q_start, tile.block_q, kv_start, tile.block_kv)
    products = dot_chunks(q, k, p, interpret) if q_axis == 0 else dot_chunks(k, q, p, interpret)
    dp = dot_chunks(do, v, p, interpret) if q_axis == 0 else dot_chunks(v, do, p, interpret)
    scores = score(products, *spans, jnp.zeros((1, 1), jnp.float32) if masked else None)
    return score.d_products(scores, score.probabilities(scores.s, lse2), dp, delta)[0]


def _pairs(p: Problem, x: Operands, saved: Any, tile: Tile, interpret: bool) -> jax.Array:
    ranges = kv_tile_ranges(x.mask, p.q_len, p.kv_len, tile.block_q, tile.block_kv, offset_of(p, x))
    shape: Any = p.bias_shape
    batches, heads = shape[:2]
    q_tiles, kv_tiles = pl.cdiv(p.q_len, tile.block_q), pl.cdiv(p.kv_len, tile.block_kv)
    return pl.pallas_call(
        functools.partial(_pairs_kernel, p, tile, interpret),
        out_shape=result(x, shape, jnp.float32),
        grid=(batches * heads * q_tiles * kv_tiles,),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=1),
        interpret=interpret,
        name="flash_dbias",
    )(x, saved, jnp.asarray(ranges))


def _pairs_kernel(
    p: Problem, tile: Tile, interpret: bool, x: Operands, saved: Any, ranges_ref: Any, dbias_ref: Any
) -> None:
    batches, heads = dbias_ref.shape[:2]
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
        first, _, _, end = load_range(ranges_ref, batch, head, q_tile)
        visits = ((first <= kv_tile) & (kv_tile < end)).astype(jnp.int32)
        tile_ds = functools.partial(_ds, p, x, saved, tile, interpret, 0, batch, head, q_tile, kv_tile, True)
        # A loop of none or one turn: skips the products of a forbidden tile.
        return jax.lax.fori_loop(0, visits, lambda _, t: t + tile_ds(), total)

    shared = (p.batch // batches) * shared_heads
    total = jnp.zeros((tile.block_q, tile.block_kv), jnp.float32)
    total = add(jnp.int32(0), total) if shared == 1 else jax.lax.fori_loop(jnp.int32(0), jnp.int32(shared), add, total)
    q_start, kv_start = q_tile * tile.block_q, kv_tile * tile.block_kv
    rows = q_start + jax.lax.iota(jnp.int32, tile.block_q)
    columns = kv_start + jax.lax.iota(jnp.int32, tile.block_kv)
    inside = (rows < p.q_len)[:, None] & (columns < p.kv_len)[None, :]
    view = dbias_ref.at[own_batch, own_head, pl.ds(q_start, tile.block_q), pl.ds(kv_start, tile.block_kv)]
    plt.store(view, total, mask=inside)


def _sums(p: Problem, x: Operands, saved: Any, tile: Tile, interpret: bool, along_keys: bool) -> jax.Array:
    """Row sums of the gradient of the logits [B, N, T], or with ``along_keys`` column sums [B, N, S]."""
    find = q_tile_ranges if along_keys else kv_tile_ranges
    ranges = find(x.mask, p.q_len, p.kv_len, tile.block_q, tile.block_kv, offset_of(p, x))
    length, block = (p.kv_len, tile.block_kv) if along_keys else (p.q_len, tile.block_q)
    return pl.pallas_call(
        functools.partial(_sums_kernel, p, tile, Loops.of(ranges), interpret, along_keys),
        out_shape=result(x, (p.batch, p.num_q_heads, length), jnp.float32),
        grid=(p.batch * p.num_q_heads * pl.cdiv(length, block),),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=1),
        interpret=interpret,
        name="flash_dbias",
    )(x, saved, jnp.asarray(ranges))


def _sums_kernel(
    p: Problem,
    tile: Tile,
    loops: Loops,
    interpret: bool,
    along_keys: bool,
    x: Operands,
    saved: Any,
    ranges_ref: Any,
    sums_ref: Any,
) -> None:
    length, block = (p.kv_len, tile.block_kv) if along_keys else (p.q_len, tile.block_q)
    rest, own_tile = split(pl.program_id(0), pl.cdiv(length, block))
    batch, head = split(rest, p.num_q_heads)

    def step(j, total, masked):
        q_tile, kv_tile = (j, own_tile) if along_keys else (own_tile, j)
        ds = _ds(p, x, saved, tile, interpret, int(along_keys), batch, head, q_tile, kv_tile, masked)
        return total + ds.sum(axis=1)

    total = walk(loops, load_range(ranges_ref, batch, head, own_tile), step, jnp.zeros((block,), jnp.float32))
    rows = own_tile * block + jax.lax.iota(jnp.int32, block)
    plt.store(sums_ref.at[batch, head, pl.ds(own_tile * block, block)], total, mask=rows < length)
