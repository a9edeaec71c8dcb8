"""The order of programs: every tile once, and nothing heavy left for the end."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf
from pallas_flash.kernels.triton import grid, tiles
from pallas_flash.problem import describe
from pallas_flash.visits import kv_tile_ranges, q_tile_ranges

TILE = tiles.Tile(64, 64, 4, 3)
SLOTS = 264  # two programs on each of 132 multiprocessors
NONE = ("query_seq_lengths", "key_value_seq_lengths", "local_window_size", "q_offset", "kv_segment_ids", "scale",
        "logits_soft_cap", "sinks", "alibi_slopes", "score", "dropout_rng", "precision")  # fmt: skip
DEFAULTS = {**dict.fromkeys(NONE), "causal_alignment": "top_left", "dropout_rate": 0.0, "broadcast_dropout": False,
            "backward": "auto", "is_causal": False, "q_segment_ids": None}  # fmt: skip


def problem(batch, length, heads, kv_heads, dim, **options):
    def described(q, k):
        found.append(describe(q, k, k, None, None, **{**DEFAULTS, **options})[0])

    found = []
    shapes = (jax.ShapeDtypeStruct((batch, length, n, dim), jnp.bfloat16) for n in (heads, kv_heads))
    jax.eval_shape(described, *shapes)
    return found[0]


def documents(batch, length):
    """Segment ids; heads take turns by their being there, whatever they hold."""
    return jnp.zeros((batch, length), jnp.int32)


def order(g, monkeypatch):
    """(batch, head, tile) of every program, as rows of an array."""
    monkeypatch.setattr(grid.pl, "program_id", lambda axis: jnp.arange(g.size, dtype=jnp.int32))
    return np.stack(jnp.broadcast_arrays(*g.place()), axis=1)


@pytest.mark.parametrize("make", [grid.q_grid, grid.kv_grid])
@pytest.mark.parametrize("sizes", [(3, 200, 6, 2), (1, 64, 1, 1), (5, 1000, 7, 7)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_every_tile_has_one_program(make, sizes, causal, packed, monkeypatch):
    p = problem(*sizes, 64, is_causal=causal, q_segment_ids=documents(*sizes[:2]) if packed else None)
    g = make(p, TILE)
    found = order(g, monkeypatch)
    heads = p.num_q_heads if make is grid.q_grid else p.num_kv_heads
    every = np.stack(np.meshgrid(*map(np.arange, (p.batch, heads, -(-p.q_len // 64))), indexing="ij"), -1).reshape(
        -1, 3
    )
    assert sorted(map(tuple, found)) == sorted(map(tuple, every))


def time_of(work, slots=SLOTS):
    """When the last program ends, if each starts as soon as one before it has, against work without gaps."""
    free = [0.0] * slots
    for w in work:
        heapq.heapreplace(free, free[0] + w)
    return max(free) / (sum(work) / slots)


DOCUMENTS = jnp.asarray(np.repeat(np.arange(8), (5000, 300, 2700, 1024, 4096, 100, 1900, 1264)))[None]


@pytest.mark.parametrize(
    "make, find", [(grid.q_grid, kv_tile_ranges), (grid.kv_grid, q_tile_ranges)], ids=["queries", "keys"]
)
@pytest.mark.parametrize("name", ["documents", "causal-4k", "causal-1k", "causal-16k"])
def test_heavy_tiles_are_not_left_for_the_end(name, make, find, monkeypatch):
    batch, length = {"documents": (1, 16384), "causal-4k": (4, 4096), "causal-1k": (16, 1024)}.get(name, (1, 16384))
    p = problem(batch, length, 16, 16, 128, is_causal=True, q_segment_ids=documents(batch, length))
    mask = pf.Causal() & pf.Segments(DOCUMENTS, DOCUMENTS) if name == "documents" else pf.Causal()
    first, _, _, end = np.moveaxis(np.asarray(find(mask, length, length, 64, 64, 0))[0, 0], -1, 0)
    g = make(p, TILE)
    taken = [time_of((end - first + 1)[order(by, monkeypatch)[:, 2]].tolist()) for by in (g, g._replace(together=1))]
    assert taken[0] < 1.04 and taken[0] <= taken[1] + 0.003, taken


def test_how_many_heads_take_turns():
    """Bounded by what L2 keeps, a divisor of the rows; head after head without documents."""
    for (batch, length, heads), together in {(1, 16384, 16): 16, (1, 131072, 16): 4, (3, 16384, 7): 7}.items():
        p = problem(batch, length, heads, heads, 128, is_causal=True, q_segment_ids=documents(batch, length))
        assert grid.q_grid(p, TILE).together == together
        assert grid.q_grid(problem(batch, length, heads, heads, 128, is_causal=True), TILE).together == 1
    assert grid.q_grid(problem(1, 16384, 16, 16, 128), TILE).together == 1
