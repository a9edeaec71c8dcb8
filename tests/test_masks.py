"""Ranges of masks are sound by brute force, and the algebra means what it says."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf
from pallas_flash.picture import kinds
from pallas_flash.visits import kv_tile_ranges, kv_visits, q_tile_ranges, q_visits

RNG = np.random.default_rng(0)
Q, KV = 37, 53


def ids(length, *cuts):
    row = np.zeros((1, length), np.int32)
    for cut in cuts:
        row[:, cut:] += 1
    return jnp.asarray(row)


SHUFFLED = jnp.asarray(RNG.integers(-1, 3, (2, Q)), jnp.int32), jnp.asarray(RNG.integers(-1, 3, (2, KV)), jnp.int32)
MASKS = {
    "full": pf.Full(),
    "causal": pf.Causal(),
    "left": pf.Window(5, None),
    "right": pf.Window(None, 4),
    "window": pf.Window(3, 2),
    "window-0": pf.Window(0, 0),
    "prefix": pf.Prefix(jnp.array([9, 40], jnp.int32)),
    "lengths": pf.Lengths(jnp.array([20, 37], jnp.int32), jnp.array([0, 31], jnp.int32)),
    "kv-length": pf.Lengths(None, jnp.array([16, 53], jnp.int32)),
    "q-length": pf.Lengths(jnp.array([16, 0], jnp.int32), None),
    "documents": pf.Segments(ids(Q, 10, 16, 30), ids(KV, 5, 16, 48)),
    "padding": pf.Segments(ids(Q, 10, 16) - 1, ids(KV, 20, 32) - 1),
    "shuffled": pf.Segments(*SHUFFLED),
    "chunked": pf.Chunked(12),
    "dilated": pf.Dilated(3),
    "key-ranges": pf.KeyRanges(jnp.asarray(np.arange(Q) // 9 * 9)[None], jnp.asarray(np.arange(Q) + 3)[None]),
    "dense": pf.Dense(jnp.asarray(RNG.random((2, 1, Q, KV)) < 0.5)),
    "dense-band": pf.Dense(jnp.tril(jnp.ones((1, 1, Q, KV), bool), 9)),
    "dense-keys": pf.Dense(jnp.asarray(np.arange(KV) % 20 < 17)[None, None, None]),
    "dense-queries": pf.Dense(jnp.asarray(np.arange(Q) > 8)[None, None, :, None]),
}
PAIRS = [
    ("causal", "left"), ("causal", "documents"), ("window", "lengths"), ("prefix", "causal"),
    ("dense", "causal"), ("left", "right"), ("documents", "prefix"), ("chunked", "causal"), ("q-length", "dense-band"),
]  # fmt: skip


def combined():
    yield from MASKS.items()
    for a, b in PAIRS:
        yield f"{a}&{b}", MASKS[a] & MASKS[b]
        yield f"{a}|{b}", MASKS[a] | MASKS[b]
    yield "three", (MASKS["causal"] | MASKS["prefix"]) & MASKS["left"]


ALL = dict(combined())


def sound(ranges, allowed, own_block, other_block):
    """No allowed pair outside [first, end), no forbidden pair inside [full, full_end)."""
    ranges = np.asarray(ranges)
    batches, _, tiles, _ = ranges.shape
    allowed = np.broadcast_to(allowed, (max(batches, allowed.shape[0]), *allowed.shape[1:]))
    for b, tile in itertools.product(range(allowed.shape[0]), range(tiles)):
        first, full, full_end, end = ranges[b % batches, 0, tile]
        assert 0 <= first <= full <= full_end <= end
        rows = allowed[b, 0, tile * own_block : (tile + 1) * own_block]
        seen = rows.any(0)
        assert not seen[: first * other_block].any() and not seen[end * other_block :].any()
        assert full_end * other_block <= seen.size or full == full_end  # a short tile is never called full
        assert rows[:, full * other_block : full_end * other_block].all()


BLOCKS = ((16, 8), (8, 32))


def dense_and_ranges(mask, offset, sizes=(Q, KV)):
    finders = kv_tile_ranges, q_tile_ranges
    return mask.dense(*sizes, offset), [[find(mask, *sizes, *blocks, offset) for find in finders] for blocks in BLOCKS]


compiled = jax.jit(dense_and_ranges, static_argnums=2)  # operations one by one take ten times as long to compile


def all_sound(allowed, ranges):
    allowed = np.asarray(allowed)
    for (block_q, block_kv), (of_queries, of_keys) in zip(BLOCKS, ranges):
        sound(of_queries, allowed, block_q, block_kv)
        sound(of_keys, allowed.swapaxes(-1, -2), block_kv, block_q)


@pytest.mark.parametrize("name", ALL)
def test_ranges_are_sound(name):
    mask = ALL[name]
    known = not jax.tree.leaves(mask)  # then numpy finds them
    for offset in (0, 16, -7) if name in MASKS else (-7,):
        all_sound(*(dense_and_ranges if known else compiled)(mask, offset))
    all_sound(*compiled(mask, jnp.array([3, -20], jnp.int32)))


def work(name, block=16, size=256):
    """(tiles visited, tiles tested) of a square problem."""
    ranges = np.asarray(kv_tile_ranges(name, size, size, block, block, 0)).reshape(-1, 4)
    first, full, full_end, end = ranges.T
    return int((end - first).sum()), int((end - first - (full_end - full)).sum())


def test_structured_masks_skip_work():
    tiles = 256 // 16
    assert work(pf.Full()) == (tiles**2, 0)
    assert work(pf.Causal()) == (tiles * (tiles + 1) // 2, tiles)
    visited, tested = work(pf.Causal() & pf.Window(31, None))
    assert visited == 1 + 2 + 3 * (tiles - 2) and tested <= 2 * tiles
    documents = pf.Segments(ids(256, 64, 128), ids(256, 64, 128))
    assert work(documents) == (4 * 4 + 4 * 4 + 8 * 8, 0)
    assert work(pf.Dense(jnp.tril(jnp.ones((1, 1, 256, 256), bool)))) == work(pf.Causal())
    assert work(pf.Lengths(None, jnp.array([64], jnp.int32))) == (tiles * 4, 0)


def of_tiles(allowed, block_q, block_kv):
    """Whether some and whether all pairs of each tile are allowed."""
    edges = [np.arange(0, size, block) for size, block in zip(allowed.shape[-2:], (block_q, block_kv))]
    return [
        np.asarray(ufunc.reduceat(ufunc.reduceat(allowed, edges[0], -2), edges[1], -1))
        for ufunc in (np.logical_or, np.logical_and)
    ]


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("offset", [0, -7])
def test_masks_with_holes_list_exactly_the_tiles_that_they_allow(blocks, offset):
    """Tiles of all three kinds in any order, alone and combined: none is visited for what lies beside it."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 3, (2, 2, 5, 4)).repeat(8, 2).repeat(16, 3)[:, :, :Q, :KV]
    dense = pf.Dense(jnp.asarray(np.where(coarse == 1, rng.random(coarse.shape) < 0.5, coarse == 2)))
    for mask, exact in ((dense, True), (dense & pf.Causal(), False), (dense | pf.Window(3, 3), False)):
        assert mask.has_holes and not pf.Dense(dense.array[:, :, :1]).has_holes
        allowed = np.asarray(mask.dense(Q, KV, offset))
        for find, last, own, other in ((kv_visits, (Q, KV), *blocks), (q_visits, (KV, Q), *blocks[::-1])):
            visits = find(mask, Q, KV, *blocks, offset)
            pairs = allowed if find is kv_visits else allowed.swapaxes(-1, -2)
            some, every = of_tiles(pairs, own, other)
            if last[1] % other:
                every[..., -1] = False
            states = np.asarray(visits.states)
            assert (states >= some).all() and (states - 1 <= every).all()
            assert not exact or (states == some + 1 * every).all()
            in_order = np.take_along_axis(states, np.asarray(visits.order), -1)
            assert (np.diff(in_order, axis=-1) <= 0).all()
            np.testing.assert_array_equal(visits.bounds[..., 2], (states == 2).sum(-1))
            np.testing.assert_array_equal(visits.bounds[..., 3], (states > 0).sum(-1))


@pytest.mark.parametrize("pair", PAIRS)
def test_and_or_are_set_operations(pair):
    a, b = (np.asarray(MASKS[name].dense(Q, KV)) for name in pair)
    assert ((MASKS[pair[0]] & MASKS[pair[1]]).dense(Q, KV) == (a & b)).all()
    assert ((MASKS[pair[0]] | MASKS[pair[1]]).dense(Q, KV) == (a | b)).all()


def test_a_mask_without_allows_says_what_to_define():
    @pf.mask
    class Nothing(pf.Mask):
        pass

    with pytest.raises(NotImplementedError, match="Nothing must define allows"):
        Nothing().dense(2, 2)


def test_new_masks_mean_what_they_say():
    i, j = np.arange(9)[:, None], np.arange(9)[None]
    np.testing.assert_array_equal(pf.Chunked(4).dense(9, 9)[0, 0], i // 4 == j // 4)
    np.testing.assert_array_equal(pf.Chunked(4).dense(9, 9, -3)[0, 0], (i - 3) // 4 == j // 4)
    np.testing.assert_array_equal(pf.Dilated(3).dense(9, 9)[0, 0], (i - j) % 3 == 0)
    for make, text in ((pf.Chunked, "size of mask Chunked"), (pf.Dilated, "step of mask Dilated")):
        for size in (0, 1.5):
            with pytest.raises(ValueError, match=f"{text} must be an int of at least 1; got {size}"):
                make(size)


def test_a_picture_shows_what_is_visited():
    found = kinds(pf.Causal(), 32, 32, 8, 8, 0)[0, 0]
    allowed = np.tri(32, dtype=bool)
    tile_q, tile_kv = np.arange(32)[:, None] // 8, np.arange(32)[None] // 8
    np.testing.assert_array_equal(found == 0, tile_kv > tile_q)
    np.testing.assert_array_equal(found == 3, tile_kv < tile_q)
    np.testing.assert_array_equal(found == 2, allowed & (tile_kv == tile_q))
    figure = (pf.Causal() & pf.Chunked(20)).draw(64, 48, block_q=16, block_kv=8)
    assert figure.axes[0].images[0].get_array().shape == (64, 48)


@pf.mask
class Reads(pf.Mask):
    """A user's mask that reads one array."""

    array: jax.Array
    kind: str = pf.static()

    def allows(self, q, kv):
        read = {"take": q.take, "keys": kv.take, "per_head": q.per_head, "per_batch": q.per_batch}
        values = q.take_pairs(kv, self.array) if self.kind == "pairs" else read[self.kind](self.array)
        return (values + 0 * q.index + 0 * kv.index) > 0


@pytest.mark.parametrize(
    "kind, shape, rule",
    [
        ("take", (1, 5), r"\[batch or 1, q_len\]; got \(1, 5\)"),
        ("keys", (1, 200), r"\[batch or 1, kv_len\]"),
        ("per_head", (1, 8), r"\[heads or 1\] or"),
        ("per_head", (2,), "is the batch, 1 or 1|heads"),
        ("per_batch", (1, 1), r"\[batch or 1\]"),
        ("pairs", (1, 1, 5, 5), "q_len or 1"),
    ],
)
def test_arrays_of_a_users_mask_have_the_shape_that_their_read_allows(kind, shape, rule):
    x = jnp.ones((1, 9, 4, 16))
    with pytest.raises(ValueError, match=rule):
        pf.flash_attention(x, x, x, mask=pf.Causal() & Reads(jnp.ones(shape), kind))


@pf.mask
class Not(pf.Mask):
    inner: pf.Mask

    def allows(self, q, kv):
        return ~self.inner.allows(q, kv)


@pytest.mark.parametrize(
    "inner",
    [pf.Lengths([3], [5]), pf.Blocks(np.eye(3, dtype=bool), 3, 4), pf.Dense(np.tri(9, 10, dtype=bool))],
    ids=str,
)
def test_masks_inside_a_users_mask_are_checked_too(inner):
    q, k = jnp.ones((1, 9, 2, 16)), jnp.arange(320.0).reshape(1, 10, 2, 16) / 320
    allowed = ~np.asarray(inner.dense(9, 10))
    np.testing.assert_array_equal(Not(inner).dense(9, 10), allowed)
    got, want = (pf.flash_attention(q, k, k, mask=m) for m in (Not(inner), jnp.asarray(allowed)))
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_sizes_beyond_int32_are_as_good_as_endless():
    for m in (pf.Chunked(2**31), pf.Blocks(jnp.ones((1, 1), bool), 10**12, 2**40), pf.Causal() | pf.Chunked(2**40)):
        assert m.dense(5, 7).all()
    assert pf.Dilated(2**40).dense(3, 3)[0, 0].astype(int).tolist() == np.eye(3, dtype=int).tolist()


def test_an_array_combines_as_dense_only():
    for array in (np.ones((3, 3), bool), jnp.ones((3, 3), bool)):
        for combine in (lambda a, m: a & m, lambda a, m: m & a, lambda a, m: a | m, lambda a, m: m | a):
            with pytest.raises(TypeError, match=r"an array goes in as Dense\(array\)"):
                combine(array, pf.Causal())


def test_allows_of_another_shape_is_refused():
    @pf.mask
    class Odd(pf.Mask):
        def allows(self, q, kv):
            return jnp.ones((7, 9), bool)

    x = jnp.ones((1, 20, 2, 16))
    for tier in ("triton", "xla"):
        with pf.interpret(), pytest.raises(TypeError, match=r"Odd.allows must return .* got shape \(7, 9\)"):
            pf.flash_attention(x, x, x, mask=Odd(), implementation=tier)
