"""A causal kernel written by hand, to see what the mask algebra costs ours: no options, no ranges, no NaN to keep out.

The same algorithm with the same tiles, products and order of programs, for lengths that are multiples of a tile, head
dims that are powers of two and as many key heads as query heads. Its row maximum settles as ours does, but nothing
mends rows for which that does not do: it is for random data.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_flash.kernels.triton.tile_math import exp2_fma

LOG2E = math.log2(math.e)
NEGATIVE = -1e30


def make(tiles: dict[str, Any], interpret: bool = False) -> Any:
    """``attention(q, k, v)`` in [B, T, N, D] with the tiles of "forward", "dq" and "dkv"."""

    @jax.custom_vjp
    def attention(q, k, v):
        return run_forward(q, k, v)[0]

    def run_forward(q, k, v):
        stats = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
        return call(_forward, "forward", (q, k, v), (like(q), stats))

    def forward(q, k, v):
        o, lse = run_forward(q, k, v)
        return o, (q, k, v, o, lse)

    def backward(saved, do):
        q, k, v, o, lse = saved
        dq, delta = call(_dq, "dq", (q, k, v, o, do, lse), (like(q), like(lse)))
        dk, dv = call(_dkv, "dkv", (q, k, v, do, lse, delta), (like(k), like(v)))
        return dq, dk, dv

    def call(kernel, name, operands, out_shape):
        batch, length, heads, _ = operands[0].shape
        tile = tiles[name]
        own = tile.block_kv if name == "dkv" else tile.block_q
        return pl.pallas_call(
            functools.partial(kernel, tile, interpret),
            out_shape=out_shape,
            grid=(batch * heads * (length // own),),
            compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.stages),
            interpret=interpret,
            name=f"plain_causal_{name}",
        )(*operands)

    attention.defvjp(forward, backward)
    return attention


def like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _place(shape: tuple[int, ...], block: int, heavy_last: bool) -> tuple[Any, Any, Any]:
    _, length, heads, _ = shape
    tiles = length // block
    row, tile = jax.lax.div(pl.program_id(0), jnp.int32(tiles)), jax.lax.rem(pl.program_id(0), jnp.int32(tiles))
    batch, head = jax.lax.div(row, jnp.int32(heads)), jax.lax.rem(row, jnp.int32(heads))
    return batch, head, (tiles - 1 - tile) if heavy_last else tile


def _held(x: jax.Array, tile: Any) -> jax.Array:
    if not tile.registers:
        return x
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (x.shape[1],) * 2, axis) for axis in (0, 1))
    return _dot(x, (rows == columns).astype(x.dtype)).astype(x.dtype)


def _dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    contract = (((1,), (1 if trans_b else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


def _causal(s: jax.Array, q_start: Any, kv_start: Any, q_axis: int) -> jax.Array:
    rows = jax.lax.broadcasted_iota(jnp.int32, s.shape, q_axis) + q_start
    columns = jax.lax.broadcasted_iota(jnp.int32, s.shape, 1 - q_axis) + kv_start
    return jnp.where(rows >= columns, s, -jnp.inf)


def _forward(tile: Any, interpret: bool, q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any, lse_ref: Any) -> None:
    batch, head, i = _place(q_ref.shape, tile.block_q, True)
    q_start, block = i * tile.block_q, tile.block_kv
    unit = jnp.full((1, 1), q_ref.shape[-1] ** -0.5 * LOG2E, jnp.float32)
    rows = pl.ds(q_start, tile.block_q)
    q = _held(plt.load(q_ref.at[batch, rows, head]), tile)

    def scores(j):
        return _dot(q, plt.load(k_ref.at[batch, pl.ds(j * block, block), head]), trans_b=True)

    def step(j, carry, masked):
        m, l, acc = carry
        s = scores(j)
        v = plt.load(v_ref.at[batch, pl.ds(j * block, block), head])
        if masked:
            s = _causal(s, q_start, j * block, 0)
            m_new = jnp.maximum(m, s.max(axis=1))
            alpha = jnp.exp2((m - m_new) * unit[0])
            m, l, acc = m_new, l * alpha, acc * alpha[:, None]
        p = exp2_fma(s, unit, -(m * unit[0])[:, None], interpret)
        return m, l + p.sum(axis=1), acc + _dot(p.astype(v.dtype), v)

    full = jax.lax.div(q_start + 1, jnp.int32(block))
    m = jnp.full((tile.block_q,), NEGATIVE, jnp.float32)
    m = jax.lax.fori_loop(jnp.int32(0), jnp.minimum(full, 1), lambda j, m: jnp.maximum(m, scores(j).max(axis=1)), m)
    carry = m, jnp.zeros((tile.block_q,), jnp.float32), jnp.zeros((tile.block_q, v_ref.shape[-1]), jnp.float32)
    carry = jax.lax.fori_loop(jnp.int32(0), full, functools.partial(step, masked=False), carry)
    end = pl.cdiv(q_start + tile.block_q, block)
    m, l, acc = jax.lax.fori_loop(full, end, functools.partial(step, masked=True), carry)
    plt.store(o_ref.at[batch, rows, head], (acc / l[:, None]).astype(o_ref.dtype))
    plt.store(lse_ref.at[batch, head, rows], m * unit[0] + jnp.log2(l))  # in base 2: nobody else reads it


def _dq(
    tile: Any, interpret: bool, q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any, do_ref: Any, lse_ref: Any,
    dq_ref: Any, delta_ref: Any,
) -> None:  # fmt: skip
    batch, head, i = _place(q_ref.shape, tile.block_q, True)
    q_start, block = i * tile.block_q, tile.block_kv
    scale = q_ref.shape[-1] ** -0.5
    unit = jnp.full((1, 1), scale * LOG2E, jnp.float32)
    rows = pl.ds(q_start, tile.block_q)
    q, do, o = (plt.load(ref.at[batch, rows, head]) for ref in (q_ref, do_ref, o_ref))
    delta = (o.astype(jnp.float32) * do.astype(jnp.float32)).sum(axis=1)
    plt.store(delta_ref.at[batch, head, rows], delta)
    q, do = _held(q, tile), _held(do, tile)
    lse = plt.load(lse_ref.at[batch, head, rows])

    def step(j, dq, masked):
        keys = pl.ds(j * block, block)
        k, v = (plt.load(ref.at[batch, keys, head]) for ref in (k_ref, v_ref))
        s = _dot(q, k, trans_b=True)
        s = _causal(s, q_start, j * block, 0) if masked else s
        p = exp2_fma(s, unit, -lse[:, None], interpret)
        ds = p * (_dot(do, v, trans_b=True) - delta[:, None])
        return dq + _dot(ds.astype(k.dtype), k)

    full = jax.lax.div(q_start + 1, jnp.int32(block))
    dq = jnp.zeros((tile.block_q, q_ref.shape[-1]), jnp.float32)
    dq = jax.lax.fori_loop(jnp.int32(0), full, functools.partial(step, masked=False), dq)
    end = pl.cdiv(q_start + tile.block_q, block)
    dq = jax.lax.fori_loop(full, end, functools.partial(step, masked=True), dq)
    plt.store(dq_ref.at[batch, rows, head], (dq * scale).astype(dq_ref.dtype))


def _dkv(
    tile: Any, interpret: bool, q_ref: Any, k_ref: Any, v_ref: Any, do_ref: Any, lse_ref: Any, delta_ref: Any,
    dk_ref: Any, dv_ref: Any,
) -> None:  # fmt: skip
    batch, head, i = _place(k_ref.shape, tile.block_kv, False)
    kv_start, block = i * tile.block_kv, tile.block_q
    scale = q_ref.shape[-1] ** -0.5
    unit = jnp.full((1, 1), scale * LOG2E, jnp.float32)
    keys = pl.ds(kv_start, tile.block_kv)
    k, v = (_held(plt.load(ref.at[batch, keys, head]), tile) for ref in (k_ref, v_ref))

    def step(j, carry, masked):
        dk, dv = carry
        rows = pl.ds(j * block, block)
        q, do = (plt.load(ref.at[batch, rows, head]) for ref in (q_ref, do_ref))
        lse, delta = (plt.load(ref.at[batch, head, rows])[None, :] for ref in (lse_ref, delta_ref))
        s = _dot(k, q, trans_b=True)
        s = _causal(s, j * block, kv_start, 1) if masked else s
        p = exp2_fma(s, unit, -lse, interpret)
        ds = p * (_dot(v, do, trans_b=True) - delta)
        return dk + _dot(ds.astype(q.dtype), q), dv + _dot(p.astype(do.dtype), do)

    first = jax.lax.div(kv_start, jnp.int32(block))
    full = pl.cdiv(kv_start + tile.block_kv - 1, block)
    end = jnp.int32(q_ref.shape[1] // block)
    carry = tuple(jnp.zeros((tile.block_kv, ref.shape[-1]), jnp.float32) for ref in (k_ref, v_ref))
    carry = jax.lax.fori_loop(full, end, functools.partial(step, masked=False), carry)
    dk, dv = jax.lax.fori_loop(first, jnp.minimum(full, end), functools.partial(step, masked=True), carry)
    plt.store(dk_ref.at[batch, keys, head], (dk * scale).astype(dk_ref.dtype))
    plt.store(dv_ref.at[batch, keys, head], dv.astype(dv_ref.dtype))
