"""Block sparsity: what lists of blocks say of tiles of any size, without an array of q_len x kv_len."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf
from pallas_flash.visits import kv_visits, q_visits

from .accuracy import normal
from .cases import Strided
from .programs import equations
from .test_masks import ALL, KV, Q, of_tiles

SIZES = 150, 131


def blocks(*shape, keep=0.4):
    return jnp.asarray(np.random.default_rng(3).random(shape) < keep)


@pytest.mark.parametrize("tile", [(32, 16), (16, 32), (64, 64), (48, 24), (256, 256)], ids=str)
@pytest.mark.parametrize("block", [(32, 16), (16, 64), (7, 50)], ids=str)
def test_tiles_of_any_size_hear_of_the_blocks_that_they_touch(tile, block):
    array = blocks(2, 3, *(-(-size // b) for size, b in zip(SIZES, block)))
    mask = pf.Blocks(array, *block)
    allowed = np.asarray(mask.dense(*SIZES))
    i, j = np.arange(SIZES[0])[:, None] // block[0], np.arange(SIZES[1])[None] // block[1]
    np.testing.assert_array_equal(allowed, np.asarray(array)[:, :, i, j])
    some, every = of_tiles(allowed, *tile)
    for m in (mask, pf.BlockMap.of(mask, *SIZES, block_q=block[0], block_kv=block[1])):
        for find in (kv_visits, q_visits):
            states = np.asarray(jax.jit(find, static_argnums=(1, 2, 3, 4, 5))(m, *SIZES, *tile, 0).states)
            states = states if find is kv_visits else states.swapaxes(-1, -2)
            tail = (slice(None),) * (3 if find is kv_visits else 2) + (-1,)
            whole = every.copy()
            whole[tail] &= SIZES[find is kv_visits] % tile[find is kv_visits] == 0  # a short tile is never called full
            np.testing.assert_array_equal(states, some + 1 * whole)


@pytest.mark.parametrize("name", ALL)
def test_a_map_of_any_mask_is_sound(name):
    mask, block = ALL[name], (16, 8)
    for offset in (0, -7):
        allowed = np.asarray(mask.dense(Q, KV, offset))
        block_map = pf.BlockMap.of(mask, Q, KV, block_q=block[0], block_kv=block[1], q_offset=offset)
        some, every = of_tiles(allowed, *block)
        states = np.asarray(block_map.states)
        assert (states >= some).all() and (states - 1 <= every).all()
        if not mask.knows_tiles or isinstance(mask, pf.Dense):
            np.testing.assert_array_equal(states, some + 1 * every)
        np.testing.assert_array_equal(block_map.dense(Q, KV, offset), allowed)


def largest(f, *args):
    """Elements of the largest array that a function makes, in whatever loop."""
    made = (v.aval for e, _ in equations(jax.make_jaxpr(f)(*args)) for v in e.outvars)
    return max(aval.size for aval in made if hasattr(aval, "size"))


def test_memory_of_a_map():
    """Structured masks cost their blocks, others one row of blocks at a time."""
    length, block = 4096, 64
    ids = jnp.repeat(jnp.arange(4), length // 4)[None]

    def build(mask):
        return pf.BlockMap.of(mask, length, length, block_q=block, block_kv=block).states

    structured = largest(build, pf.Causal() & pf.Window(left=100) & pf.Segments(ids, ids))
    assert structured <= (length // block) ** 2 + 2 * length
    assert largest(build, Strided(100)) <= 2 * length * block


def test_interleaved_documents_leave_holes_that_a_map_knows():
    ids = jnp.asarray(np.arange(256) // 16 % 4)[None]
    states = pf.BlockMap.of(pf.Segments(ids, ids), 256, 256, block_q=16, block_kv=16).states[0, 0]
    i, j = np.arange(16)[:, None], np.arange(16)[None]
    np.testing.assert_array_equal(states, np.where(i % 4 == j % 4, 2, 0))


def test_one_map_for_all_layers():
    """Made once outside, it rides through jit, scan, remat and vmap as an argument, with the gradients of its mask."""
    mask = Strided(40) & pf.Window(left=90)
    q, k, v = (normal(i, 2, 130, 2, 16) for i in range(3))
    block_map = jax.jit(lambda: pf.BlockMap.of(mask, 130, 130, block_q=32, block_kv=32))()

    def loss(q, mask, tier):
        def layer(x, _):
            return x + pf.flash_attention(x, k, v, mask=mask, implementation=tier), None

        return (jax.lax.scan(jax.checkpoint(layer), q, length=2)[0] ** 2).sum()

    with pf.interpret():
        got = jax.jit(jax.grad(loss), static_argnums=2)(q, block_map, "triton")
    want = jax.jit(jax.grad(loss), static_argnums=2)(q, mask, "xla")
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * float(jnp.abs(want).max()))


def test_vmap_over_blocks():
    arrays = blocks(3, 1, 2, 3, 5)
    x = normal(0, 1, 96, 2, 16)

    def attend(array, tier):
        return pf.flash_attention(x, x, x, mask=pf.Blocks(array, 32, 20), implementation=tier)

    with pf.interpret():
        got = jax.vmap(lambda a: attend(a, "triton"))(arrays)
    np.testing.assert_allclose(got, jnp.stack([attend(a, "xla") for a in arrays]), atol=2e-5)


@pf.mask
class OwnKeys(pf.Mask):
    """Every head, or batch row, has keys of its own."""

    axis: str = pf.static()

    def allows(self, q, kv):
        return kv.index // 16 == getattr(q, self.axis)


@pytest.mark.parametrize("axis", ["head", "batch"])
def test_a_mask_that_asks_for_the_head_or_the_batch_needs_their_number(axis):
    name = {"head": "heads", "batch": "batch"}[axis]
    x = normal(0, 4, 64, 4, 16)
    with pytest.raises(ValueError, match=f"OwnKeys asks which of the {name} .*: give BlockMap.of {name}="):
        pf.BlockMap.of(OwnKeys(axis), 64, 64)
    block_map = pf.BlockMap.of(OwnKeys(axis), 64, 64, block_q=16, block_kv=16, **{name: 4})
    with pf.interpret():
        got = pf.flash_attention(x, x, x, mask=block_map, implementation="triton")
    np.testing.assert_allclose(got, pf.flash_attention(x, x, x, mask=OwnKeys(axis)), atol=1e-5)
    wrong = pf.BlockMap.of(OwnKeys(axis), 64, 64, **{name: 2})
    with pytest.raises(ValueError, match="made for 2 heads and the call has 4|is the batch, 1 or 4"):
        pf.flash_attention(x, x, x, mask=wrong)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0), (1, 1)], ids=str)
def test_maps_of_few_tokens(sizes):
    array = jnp.ones([-(-n // 3) for n in sizes], bool)
    block_map = pf.BlockMap.of(pf.Blocks(array, 3, 3), *sizes, block_q=2, block_kv=2)
    assert block_map.dense(*sizes).shape[2:] == sizes and block_map.dense(*sizes).all()
    q, k = jnp.ones((1, sizes[0], 1, 16)), jnp.ones((1, sizes[1], 1, 16))
    assert pf.flash_attention(q, k, k, mask=block_map).shape == q.shape


def test_a_map_with_a_symbolic_batch():
    def f(q, ids):
        mask = pf.BlockMap.of(pf.Segments(ids, ids) | pf.Dilated(2), 64, 64)
        return pf.flash_attention(q, q, q, mask=mask, implementation="xla")

    (b,) = jax.export.symbolic_shape("b")
    q, ids = jax.ShapeDtypeStruct((b, 64, 2, 8), jnp.float32), jax.ShapeDtypeStruct((b, 64), jnp.int32)
    exported = jax.export.export(jax.jit(f))(q, ids)
    arrays = normal(0, 3, 64, 2, 8), jnp.arange(192).reshape(3, 64) // 50
    np.testing.assert_allclose(exported.call(*arrays), f(*arrays), atol=1e-6)


CALL = dict.fromkeys(("query", "key", "value"), jnp.ones((2, 64, 2, 8)))
MAP = pf.BlockMap.of(pf.Causal(), 64, 64)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: pf.Blocks(blocks(2, 2), 0, 16), "block_q of mask Blocks must be an int of at least 1; got 0"),
        (lambda: pf.Blocks(blocks(2, 2), 32, 16), r"2, 4\]: 64 queries in blocks of 32.*got shape \(2, 2\)"),
        (lambda: pf.Blocks(jnp.ones((2, 4)), 32, 16), "array of mask Blocks must be boolean"),
        (lambda: pf.BlockMap.of(pf.Causal(), 64, 32), "made for kv_len=32 and the call has kv_len=64"),
        (lambda: pf.BlockMap.of(pf.Causal(), 64, 64, q_offset=3), "made for q_offset=3 and the call has q_offset=0"),
        (lambda: pf.BlockMap.of(pf.Causal(), 64, 64, q_offset=jnp.array([3])), "q_offset of a BlockMap must be an int"),
        (lambda: pf.BlockMap.of(pf.Causal(), 64, 64, block_kv=1.5), "block_kv must be an int of at least 1; got 1.5"),
        (lambda: pf.BlockMap.of(pf.Dense(jnp.ones((64, 64))), 64, 64), "must be boolean"),
        (lambda: pf.BlockMap.of(jnp.ones((64, 60), bool), 64, 64), r"\(64, 60\) does not broadcast"),
        (lambda: pf.BlockMap.of(pf.Lengths(jnp.array([1, 2, 3])), 64, 64), r"has shape \(3,\); the first axis"),
        (lambda: pf.Blocks(blocks(3, 1, 2, 4), 32, 16), r"\(3, 1, 2, 4\) does not broadcast"),
        (lambda: pf.BlockMap.of(blocks(3, 64, 64), 64, 64), "made for 3 heads and the call has 2"),
        (lambda: pf.BlockMap(pf.Causal(), jnp.ones((1, 1, 2, 2), jnp.int8), 16, 16, 64, 64, 0), r"end in \(4, 4\)"),
        (lambda: pf.BlockMap.of(pf.Causal(), 64.0, 64), "q_len must be an int of at least 0; got 64.0"),
        (lambda: pf.BlockMap.of(pf.Causal(), 64, -1), "kv_len must be an int of at least 0; got -1"),
        (lambda: pf.BlockMap.of(pf.Causal(), 64, 64, heads=None), "heads must be an int of at least 1; got None"),
        (lambda: pf.BlockMap.of(pf.Causal(), 64, 64, q_offset=2**31), "within"),
        (lambda: pf.BlockMap.of(None, 64, 64), "mask of a BlockMap must be a Mask or an array; got NoneType"),
        (lambda: pf.Blocks([[True], [True, False]], 32, 32), "array of mask Blocks must be an array; got list"),
        (lambda: MAP & pf.Blocks(blocks(1, 4), 32, 16), "array of mask Blocks must be"),
    ],
)
def test_errors(make, text):
    with pytest.raises(ValueError, match=text):
        pf.flash_attention(**CALL, mask=make())


def test_a_map_refuses_offsets_that_are_arrays():
    with pytest.raises(ValueError, match="the call has q_offset=an array"):
        pf.flash_attention(**CALL, mask=MAP, q_offset=jnp.array([0, 0]))
