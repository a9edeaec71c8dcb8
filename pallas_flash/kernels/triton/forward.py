"""Forward kernel: FlashAttention-2, algorithm 1 (arXiv:2307.08691), one program per tile of queries.

Where a program takes many tiles of keys whole, the row maximum *settles*: it is that of the first of them, and what
follows is summed relative to it. The softmax is the same whatever is subtracted from the logits, as long as nothing
overflows or vanishes. Nothing vanishes that would not otherwise, since the first tile has a weight of 1. Logits that
rise by 100 octaves (69 nats; in float16 by 16 octaves, 11 nats) behind the first tile end as infinity, NaN, or a sum or
a rise beyond 2**100: such rows are marked by lse NaN, and a second kernel, which has nothing to do else, computes them
again with a running maximum. This saves the maximum of every tile and the rescaling of the output.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ...problem import Operands, Output, Problem, offset_of
from ...softmax import LN2, LOG2E, LOWEST
from ...visits import Visits, kv_visits
from .grid import q_grid, split
from .loops import Loops, as_arrays, first_full, walk
from .tile_math import (
    Chunks,
    ScoreMaker,
    any_of,
    chunks_of,
    dot,
    dot_chunks,
    exp2,
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

# Average number of whole tiles from which the row maximum settles: fewer do not pay for the scores of the first tile
# twice and for the second kernel. Half of it for heads up to 64, whose softmax is a larger part of the work.
MANY_STEPS = 12
_CHECKED = 1024  # rows that a program of the second kernel looks at
_FAR = 100.0  # octaves; a factor of 2**-127 would be 0, and so would 1 / l be of a sum of 2**127


def forward(problem: Problem, x: Operands, tile: Tile, interpret: bool, *, keep_rest: bool) -> Output:
    """Output [B, T, N, Dv] in the inputs' dtype, natural-log lse [B, N, T] in float32, and the rest if it is kept."""
    p = problem
    visits = kv_visits(x.mask, p.q_len, p.kv_len, tile.block_q, tile.block_kv, offset_of(p, x))
    loops = Loops.of(visits)
    settled = _settles(p, x, tile, loops)
    o = result(x, (p.batch, p.q_len, p.num_q_heads, p.v_head_dim), x.q.dtype)
    lse = result(x, (p.batch, p.num_q_heads, p.q_len), jnp.float32)
    out_shape = (o, lse, o) if keep_rest else (o, lse)
    options = {
        "compiler_params": plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.stages),
        "interpret": interpret,
    }
    operands = (x, as_arrays(visits))
    results = pl.pallas_call(
        functools.partial(_kernel, p, tile, loops, settled, interpret),
        out_shape=out_shape,
        grid=(q_grid(p, tile).size,),
        name="flash_forward",
        **options,
    )(*operands)
    if settled:
        before = len(jax.tree.leaves(operands))
        results = pl.pallas_call(
            functools.partial(_again_kernel, p, tile, loops, interpret),
            out_shape=out_shape,
            grid=(p.batch * p.num_q_heads * pl.cdiv(p.q_len, _CHECKED),),
            input_output_aliases={before + i: i for i in range(len(results))},
            name="flash_forward_again",
            **options,
        )(*operands, results)
    return Output(*results)


def _settles(p: Problem, x: Operands, tile: Tile, loops: Loops) -> bool:
    """Scores may rise from tile to tile by anything, every time; wider heads than 256 spill more (ptxas)."""
    dim = max(p.head_dim, p.v_head_dim)
    enough = MANY_STEPS if dim > 64 else MANY_STEPS // 2
    plain = x.score is None and dim <= 256
    return plain and loops.full and min(loops.steps, p.kv_len // tile.block_kv) >= enough


def _kernel(
    p: Problem, tile: Tile, loops: Loops, settled: bool, interpret: bool, x: Operands, visits: Visits, *refs: Any
) -> None:
    place = q_grid(p, tile).place()
    o, lse = _attend(p, tile, loops, settled, False, interpret, x, visits, place)
    _store(p, tile, place, refs, o, lse)
    if loops.partial and not settled:
        rows = jnp.isnan(lse)

        @pl.when(any_of(rows))
        def _():
            o, lse = _attend(p, tile, None, False, True, interpret, x, visits, place)
            _store(p, tile, place, refs, o, lse, only=rows)


def _again_kernel(
    p: Problem, tile: Tile, loops: Loops, interpret: bool, x: Operands, visits: Visits, found: Any, *refs: Any
) -> None:
    """The rows whose lse is NaN once more, with a running maximum; NaN that is due comes again."""
    del found  # is refs
    row, run = split(pl.program_id(0), pl.cdiv(p.q_len, _CHECKED))
    batch, head = split(row, p.num_q_heads)

    def marked(start, block):
        return jnp.isnan(load_stats(refs[1], batch, head, start, block, p.q_len, 0.0))

    def again(i, _):
        q_tile = run * (_CHECKED // tile.block_q) + i
        rows = marked(q_tile * tile.block_q, tile.block_q)

        @pl.when(any_of(rows))
        def _():
            place = (batch, head, q_tile)
            o, lse = _attend(p, tile, loops, False, True, interpret, x, visits, place)
            _store(p, tile, place, refs, o, lse, only=rows)

    @pl.when(any_of(marked(run * _CHECKED, _CHECKED)))
    def _():
        here = jnp.minimum(_CHECKED, p.q_len - run * _CHECKED)
        jax.lax.fori_loop(jnp.int32(0), pl.cdiv(here, tile.block_q), again, None)


def _store(p: Problem, tile: Tile, place: Any, refs: Any, o: Chunks, lse: jax.Array, only: Any = None) -> None:
    batch, head, q_tile = place
    o_ref, lse_ref, *rest_ref = refs
    start = q_tile * tile.block_q
    store_rows(o_ref, batch, head, start, o, p.q_len, only)
    if rest_ref:
        rest = tuple(c - c.astype(o_ref.dtype).astype(jnp.float32) for c in o)
        store_rows(rest_ref[0], batch, head, start, rest, p.q_len, only)
    store_stats(lse_ref, batch, head, start, lse, p.q_len, only)


def _attend(
    p: Problem,
    tile: Tile,
    loops: Loops | None,
    settled: bool,
    careful: bool,
    interpret: bool,
    x: Operands,
    visits: Visits,
    place: Any,
) -> tuple[Chunks, jax.Array]:
    """Output and lse of one tile of queries; unless ``careful``, lse is NaN where this has to be done again."""
    batch, head, q_tile = place
    kv_head, _ = split(head, p.group)
    q_start = q_tile * tile.block_q
    q = load_rows(x.q, batch, head, q_start, tile.block_q, p.q_len, check=True)
    if tile.registers:
        q = in_registers(q, p, interpret)
    score = ScoreMaker(p, x, q_axis=0, interpret=interpret)

    def load(array, j, masked):
        return load_rows(array, batch, kv_head, j * tile.block_kv, tile.block_kv, p.kv_len, check=masked)

    def scores_of(k, j, masked, penalty=None):
        spans = score.spans(batch, head, q_start, tile.block_q, j * tile.block_kv, tile.block_kv)
        return score(dot_chunks(q, k, p, interpret), *spans, masked, penalty)

    def settle(j, m):
        return jnp.maximum(m, scores_of(load(x.k, j, False), j, False).s.max(axis=1))

    def step(j, carry, masked):
        m, l, acc = carry
        k, v = load(x.k, j, masked), load(x.v, j, masked)
        v, penalty = sanitise(v) if masked and careful else (v, None)
        scores = scores_of(k, j, masked, penalty)
        if masked or not settled:
            m_new = jnp.maximum(m, scores.s.max(axis=1))
            alpha = exp2((m - m_new) * score.unit, interpret)
            m, l, acc = m_new, l * alpha, tuple(a * alpha[:, None] for a in acc)
        probs = score.exp2_below(scores.s, m)
        l = l + probs.sum(axis=1)
        probs = score.kept(scores, probs).astype(v[0].dtype)
        acc = tuple(a + dot(probs, c, p, interpret) for a, c in zip(acc, v, strict=True))
        return m, l, acc

    m = jnp.full((tile.block_q,), LOWEST, jnp.float32)
    if settled and loops is not None:
        m = first_full(loops, visits, place, settle, m)
    first_m = m
    l = jnp.zeros((tile.block_q,), jnp.float32)
    acc = tuple(jnp.zeros((tile.block_q, c.size), jnp.float32) for c in chunks_of(p.v_head_dim, p.dtype))
    m, l, acc = walk(loops, visits, place, step, (m, l, acc))

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
    lse = jnp.where(empty, -jnp.inf, m * (score.unit * LN2) + jnp.log(jnp.where(empty, 1.0, l)))
    if not careful:
        bad = nan_rows(acc)
        if settled:
            # A tested tile or a sink may have risen so far that rescaling made 0 of all before; inf - inf is NaN.
            lost = (first_m > LOWEST) & ((m - first_m) * score.unit > _FAR)
            bad |= lost | ~(l < 2.0**_FAR) | nan_rows(tuple(a - a for a in acc))
        lse = jnp.where(bad, jnp.nan, lse)
    return o, lse
