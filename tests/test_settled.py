"""Row maxima that settle at the first whole tile, and the rows for which that does not do."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import shard_map
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pallas_flash as pf
import pallas_flash.kernels.triton
from pallas_flash.kernels.triton import tiles

from .accuracy import error, normal, oracle
from .cases import CASES
from .test_forward_backward import compare, run

forward = sys.modules["pallas_flash.kernels.triton.forward"]  # its function has the same name


@pytest.fixture
def settling(monkeypatch):
    """Small tiles, the first of which is enough: problems that an interpreter can run."""
    choose = tiles.choose
    small = tiles.Tile(16, 16, 4, 2)
    monkeypatch.setattr(tiles, "choose", lambda p, kernel, device: (
        small if kernel == "forward" else choose(p, kernel, device)))  # fmt: skip
    monkeypatch.setattr(forward, "MANY_STEPS", 1)
    monkeypatch.setattr(forward, "_CHECKED", 32)
    clear()
    yield
    clear()


def clear():
    run.clear_cache()
    attend.clear_cache()


@pytest.fixture
def unmended(settling, monkeypatch):
    """The second kernel does nothing: what the first has marked stays NaN."""
    monkeypatch.setattr(forward, "_again_kernel", lambda *args: None)


SETTLING = {
    *("full", "causal-odd-gqa", "mqa-bf16", "f16", "offsets", "window-left", "lengths", "segments", "dense-mask"),
    *("block-map", "sinks", "dropout", "scale", "traced-scale", "dim-96-v-40"),
}


@pytest.mark.everywhere
@pytest.mark.parametrize("case", [c for c in CASES if c.name in SETTLING], ids=str)
def test_case(case, kernels, settling):
    compare(case, "triton", kernels)


def rising(dtype, octaves, length=150):
    """Logits of the last keys are up to ``octaves`` above those of the first, in every third row."""
    q, k, v, do = (normal(i, 1, length, 2, 16, dtype="float32") for i in range(4))
    axis = jnp.full((16,), 0.25)  # of length 1
    steep = (jnp.arange(length) % 3 == 0)[None, :, None, None]
    q = jnp.where(steep, 40 * axis, q * 0.5)
    slope = jnp.linspace(0, 1, length) ** 4 * octaves * np.log(2) * 4 / 40
    k = k * 0.1 + slope[None, :, None, None] * axis
    return *(x.astype(dtype) for x in (q, k, v, do)), normal(5, 1, 2, length)


@functools.partial(jax.jit, static_argnames=("causal", "tier"))
def attend(q, k, v, causal, tier="triton"):
    return pf.flash_attention(q, k, v, is_causal=causal, return_lse=True, implementation=tier)


def compare_forward(arrays, causal, kernels):
    """The accuracy rule for out and lse: the backward pass knows nothing of how they came about."""
    q, k, v, *_ = arrays
    want = oracle(*arrays, {"is_causal": causal})
    with kernels():
        got, plain = (attend(q, k, v, causal, tier) for tier in ("triton", "xla"))
    for name, ours, theirs in zip(("out", "lse"), got, plain):
        assert error(ours, want[name]) <= 2 * error(theirs, want[name]) + 1e-4, name


ENOUGH = {"float32": 200, "bfloat16": 200, "float16": 40}  # octaves: beyond what the type holds


@pytest.mark.everywhere
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ENOUGH)
def test_logits_that_rise_beyond_the_range(dtype, causal, kernels, settling):
    compare_forward(rising(dtype, ENOUGH[dtype]), causal, kernels)


@pytest.mark.everywhere
@pytest.mark.parametrize("dtype", ENOUGH)
def test_such_rows_are_marked(dtype, kernels, unmended):
    """So that the test above is of the second kernel."""
    q, k, v, *_ = rising(dtype, ENOUGH[dtype])
    with kernels():
        _, lse = attend(q, k, v, False)
    rows = np.isnan(np.asarray(lse))[0, 0]
    assert rows[::3].all() and not rows[1::3].any() and not rows[2::3].any()


@pytest.mark.everywhere
@pytest.mark.parametrize("dtype, octaves", [("float32", 90), ("bfloat16", 90), ("float16", 12)])
def test_most_logits_settle(dtype, octaves, kernels, settling, unmended):
    """Rises that the number format holds need no second kernel."""
    compare_forward(rising(dtype, octaves), False, kernels)


def steps_up(dtype, whole, later=None, length=64):
    """Logits of 0, but for key 20 in the second whole tile and key 50, in a tested one of the last queries; in nats."""
    q, k = (jnp.zeros((1, length, 1, 16)) for _ in range(2))
    q, v = q.at[..., 0].set(4.0), normal(2, 1, length, 1, 16, dtype="float32") + 2
    k = k.at[:, 20, :, 0].set(whole)
    k = k if later is None else k.at[:, 50, :, 0].set(later)
    return *(x.astype(dtype) for x in (q, k, v, v)), normal(5, 1, 1, length)


@pytest.mark.everywhere
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("whole, later", [(87.5, None), (88.5, None), (86.5, 87.5), (68.5, 88.5), (88.0, 89.5)])
def test_the_last_octaves_before_an_overflow(dtype, whole, later, kernels, settling):
    """Sums whose reciprocal is no normal number, and rescaling by a factor that is none: both would lose all.

    88.7 nats are 2**128; the logits are exact in every dtype, in TF32 too.
    """
    compare_forward(steps_up(dtype, whole, later), later is not None, kernels)


@pytest.mark.everywhere
def test_a_sink_far_above_what_settled(kernels, settling):
    q, k, v, *_ = steps_up("float32", 86.5)
    f = functools.partial(pf.flash_attention, sinks=jnp.full((1,), 87.5, jnp.float32), return_lse=True)
    with kernels():
        ours, theirs = (jax.jit(functools.partial(f, implementation=tier))(q, k, v) for tier in ("triton", "xla"))
    np.testing.assert_allclose(ours[0], theirs[0], atol=5e-3)  # TF32 on a GPU
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)


@pytest.mark.everywhere
@pytest.mark.parametrize("octaves", [10, 13, 16.5, 18])
def test_a_key_that_takes_all_in_float16(octaves, kernels, settling):
    """The first token of many models, with a value of 0: what the others get are the small weights."""
    q, k, v, *rest = steps_up("float16", 0)
    k = k.at[:, 0, :, 0].set(jnp.float16(octaves * np.log(2)))
    compare_forward((q, k, v.at[:, 0].set(0), *rest), False, kernels)


def test_the_second_kernel_ends_with_the_rows(settling, monkeypatch):
    """Behind them lie the next head's, and behind the last of these anything, NaN at worst."""
    load = forward.load_stats

    def behind_is_nan(ref, batch, head, start, block, length, other):
        values = load(ref, batch, head, start, block, length, other)
        return jnp.where(start < length, values, jnp.nan)

    monkeypatch.setattr(forward, "load_stats", behind_is_nan)
    monkeypatch.setattr(forward, "_CHECKED", 1024)
    compare_forward(rising("float32", 200, length=144), True, pf.interpret)


@pytest.mark.everywhere
def test_infinities_that_cancel_in_one_channel(kernels, settling):
    """Terms of both signs that overflow end as NaN beside numbers: a maximum over channels would not see it."""
    q, k, v, *rest = rising("float32", 110)
    signs = jnp.where(jnp.arange(150) % 2, 1e6, -1e6)[None, :, None]
    v = jnp.zeros_like(v).at[..., 3].set(signs + v[..., 3])
    compare_forward((q, k, v, *rest), False, kernels)


@pytest.mark.everywhere
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_is_mended_alone(causal, kernels, settling):
    """What one row makes its tile do leaves the others as they were, bit for bit."""
    q, k, v = (normal(i, 1, 150, 2, 16) for i in range(3))
    k = k.at[:, 100].set(5 * q[:, 120] * jnp.ones((1, 2, 1)))
    q_bad = q.at[:, 120].multiply(200.0)
    v_bad = v.at[0, 140, 1, 3].set(jnp.nan)
    with kernels():
        clean = attend(q, k, v, causal)
        steep = attend(q_bad, k, v, causal)
        poisoned = attend(q, k, v_bad, causal)
    others = np.arange(150) != 120
    np.testing.assert_array_equal(np.asarray(clean[0])[:, others], np.asarray(steep[0])[:, others])
    np.testing.assert_array_equal(np.asarray(clean[1])[..., others], np.asarray(steep[1])[..., others])
    assert np.isfinite(np.asarray(steep[0])).all()
    seen = np.arange(150) >= (140 if causal else 0)
    assert np.isnan(np.asarray(poisoned[0])[:, seen, 1]).any(-1).all()
    # Rows in the tile of the poisoned key are done again too, with a running maximum.
    np.testing.assert_allclose(np.asarray(clean[0])[:, ~seen], np.asarray(poisoned[0])[:, ~seen], atol=1e-6)


def test_transforms(settling):
    """vmap over one operand, and shard_map with its check of what varies: the second kernel writes in place."""
    q, k, v, *_ = (jnp.concatenate([x] * 2) for x in rising("float32", 200))

    def f(q, k, v, tier="triton"):
        return pf.flash_attention(q, k, v, is_causal=True, implementation=tier)

    want = f(q, k, v, "xla")
    with pf.interpret():
        mapped = jax.jit(jax.vmap(f, in_axes=(0, None, 0)))(q[:, None], k[:1], v[:, None])[:, 0]
        mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
        sharded = jax.jit(shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))(q, k, v)
    np.testing.assert_allclose(mapped, want, atol=1e-4)
    np.testing.assert_allclose(sharded, want, atol=1e-4)


def test_scores_do_not_settle(settling, monkeypatch):
    """A bias or a slope may rise by anything from tile to tile, every time."""
    monkeypatch.setattr(forward, "_again_kernel", None)
    q = normal(0, 1, 100, 2, 16)
    with pf.interpret():
        jax.eval_shape(lambda q: pf.flash_attention(q, q, q, jnp.zeros((1, 2, 1, 100)), implementation="triton"), q)
        with pytest.raises(TypeError):
            jax.eval_shape(lambda q: pf.flash_attention(q, q, q, implementation="triton"), q)
