"""NaN in every byte that must not be read, and the invariances that need no tolerance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf

from .accuracy import normal

pytestmark = pytest.mark.everywhere

T = 70


def arrays(dtype=jnp.float32):
    return tuple(normal(i, 2, T, 2, 16, dtype=dtype) for i in range(4))


@functools.partial(jax.jit, static_argnames=("tier", "static"))
def forward_and_gradients(q, k, v, do, options, tier, static=()):
    def f(q, k, v):
        return pf.flash_attention(q, k, v, implementation=tier, return_lse=True, **options, **dict(static))

    (out, lse), vjp = jax.vjp(f, q, k, v)
    return out, lse, *vjp((do, jnp.zeros_like(lse)))


def same(a, b):
    """But for the last bits: a tile of the kernels that meets NaN is computed again, in another order."""
    for x, y in zip(a, b):
        np.testing.assert_allclose(np.asarray(x, "float32"), np.asarray(y, "float32"), rtol=1e-5, atol=1e-6)


BEHIND = {"query_seq_lengths": jnp.array([41, T]), "key_value_seq_lengths": jnp.array([19, 66])}
TIERS = ["triton", "xla", "xla_chunked"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("tier", TIERS)
def test_padding_is_never_read(tier, bad, kernels):
    q, k, v, do = arrays()
    rows = jnp.arange(T)[None, :, None, None]
    beyond_q = rows >= BEHIND["query_seq_lengths"][:, None, None, None]
    beyond_kv = rows >= BEHIND["key_value_seq_lengths"][:, None, None, None]

    def fill(value):
        at_q, at_kv = jnp.where(beyond_q, value, q), (jnp.where(beyond_kv, value, x) for x in (k, v))
        return at_q, *at_kv, jnp.where(beyond_q, value, do)

    zeros, bads = fill(0.0), fill(bad)
    with kernels():
        clean = forward_and_gradients(*zeros, BEHIND, tier)
        poisoned = forward_and_gradients(*bads, BEHIND, tier)
    same(clean, poisoned)
    out, lse, dq, dk, dv = poisoned
    assert (np.asarray(out)[0, 41:] == 0).all() and np.isneginf(np.asarray(lse)[0, :, 41:]).all()
    assert (np.asarray(dq)[0, 41:] == 0).all()
    for grad in (dk, dv):
        assert (np.asarray(grad)[0, 19:] == 0).all() and (np.asarray(grad)[1, 66:] == 0).all()


@pytest.mark.parametrize("tier", TIERS)
def test_future_keys_do_not_reach_the_past(tier, kernels):
    q, k, v, do = arrays()
    do = do.at[:, 40:].set(0)
    static = (("is_causal", True),)
    k_bad, v_bad = (x.at[:, 40:].set(jnp.nan) for x in (k, v))
    with kernels():
        clean = forward_and_gradients(q, k, v, do, {}, tier, static)
        poisoned = forward_and_gradients(q, k_bad, v_bad, do, {}, tier, static)
    same([clean[0][:, :40], clean[1][..., :40], clean[2][:, :40]],
         [poisoned[0][:, :40], poisoned[1][..., :40], poisoned[2][:, :40]])  # fmt: skip
    assert np.isnan(np.asarray(poisoned[0])[:, 40:]).all()  # and where it is allowed, NaN is not hidden


@pytest.mark.parametrize("tier", TIERS)
def test_a_key_that_a_dense_mask_forbids_may_be_nan(tier, kernels):
    q, k, v, do = arrays()
    mask = jnp.ones((1, 1, T, T), bool).at[..., 5].set(False).at[..., :30, 50].set(False)
    k_bad, v_bad = (x.at[:, 5].set(jnp.nan) for x in (k, v))
    with kernels():
        clean = forward_and_gradients(q, k, v, do, {"mask": mask}, tier)
        poisoned = forward_and_gradients(q, k_bad, v_bad, do, {"mask": mask}, tier)
    same(clean, poisoned)


@pytest.mark.parametrize("tier", TIERS)
def test_segments_are_isolated(tier, kernels):
    """BR-33: what changes in one document leaves every other bit-identical, forward and backward."""
    q, k, v, do = arrays()
    ids = jnp.asarray((np.arange(T)[None] >= 37).astype(np.int32).repeat(2, 0))
    options, static = {"q_segment_ids": ids}, (("is_causal", True),)
    changed = [x.at[:, 37:].set(jnp.flip(x[:, 37:], 1) * 3) for x in (q, k, v, do)]
    with kernels():
        one = forward_and_gradients(q, k, v, do, options, tier, static)
        two = forward_and_gradients(*changed, options, tier, static)
    for a, b in zip(one, two):
        a, b = (np.asarray(x).swapaxes(1, 2) if x.ndim == 3 else np.asarray(x) for x in (a, b))
        np.testing.assert_array_equal(a[:, :37], b[:, :37])


@pytest.mark.parametrize("bad", ["q", "k", "v"])
@pytest.mark.parametrize("tier", TIERS)
def test_a_nan_stays_in_its_document(tier, bad, kernels):
    """The lse of a row that sees a NaN is NaN, and so are its probabilities, also those of pairs it may not see."""
    q, k, v, do = arrays()
    ids = jnp.asarray((np.arange(T)[None] >= 37).astype(np.int32).repeat(2, 0))
    options = {"q_segment_ids": ids}
    clean = {"q": q, "k": k, "v": v}
    poisoned = clean | {bad: clean[bad].at[:, 3].set(jnp.nan)}
    with kernels():
        one = forward_and_gradients(*clean.values(), do, options, tier)
        do = do + forward_and_gradients(*poisoned.values(), do, options, tier)[0] * 0  # NaN, as a loss makes it
        two = forward_and_gradients(*poisoned.values(), do, options, tier)
    for a, b in zip(one, two):
        a, b = (np.asarray(x).swapaxes(1, 2) if x.ndim == 3 else np.asarray(x) for x in (a, b))
        np.testing.assert_array_equal(a[:, 37:], b[:, 37:])
    assert np.isnan(np.asarray(two[0])[:, 3]).all()


def test_a_nan_cotangent_stays_in_its_document(kernels):
    q, k, v, do = arrays()
    ids = jnp.asarray((np.arange(T)[None] >= 37).astype(np.int32).repeat(2, 0))
    with kernels():
        one = forward_and_gradients(q, k, v, do, {"q_segment_ids": ids}, "triton")
        two = forward_and_gradients(q, k, v, do.at[:, 3].set(jnp.nan), {"q_segment_ids": ids}, "triton")
    same((a[:, 37:] for a in one[2:]), (a[:, 37:] for a in two[2:]))


STATIC = {"causal": {"is_causal": True}, "window": {"is_causal": True, "local_window_size": (20, 0)}}
SCORES = {"plain": {}, "bias": {"bias": normal(7, 1, 2, T, T)}, "dropped": {"dropout_rng": jax.random.key(3)}}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("pattern", STATIC)
@pytest.mark.parametrize("tier", TIERS)
def test_a_nan_query_reaches_only_the_keys_that_it_sees(tier, pattern, score, kernels):
    q, k, v, do = arrays()
    static = STATIC[pattern] | ({"dropout_rate": 0.25} if score == "dropped" else {})
    static = tuple(static.items())
    with kernels():
        one = forward_and_gradients(q, k, v, do, SCORES[score], tier, static)
        do = do.at[:, 33].set(jnp.nan)
        two = forward_and_gradients(q.at[:, 33].set(jnp.nan), k, v, do, SCORES[score], tier, static)
    others, unseen = np.arange(T) != 33, np.arange(T) > 33
    if pattern == "window":
        unseen |= np.arange(T) < 33 - 20
    for a, b, rows in zip(one, two, (others, None, others, unseen, unseen)):
        if rows is not None:
            np.testing.assert_array_equal(np.asarray(a)[:, rows], np.asarray(b)[:, rows])
    assert np.isnan(np.asarray(two[0])[:, 33]).all()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("causal", [False, True])
def test_zero_cotangent_gives_zero(tier, causal, kernels):
    """BR-07."""
    q, k, v, do = arrays(jnp.float16)
    do = do * 0
    with kernels():
        grads = forward_and_gradients(q, k, v, do, {}, tier, (("is_causal", causal),))[2:]
    assert all((np.asarray(g) == 0).all() for g in grads)


@pytest.mark.parametrize("tier", TIERS)
def test_one_batch_row_does_not_reach_another(tier, kernels):
    q, k, v, do = arrays()
    changed = [x.at[1].set(x[1] * 2 + 1) for x in (q, k, v, do)]
    with kernels():
        one = forward_and_gradients(q, k, v, do, {}, tier)
        two = forward_and_gradients(*changed, {}, tier)
    same((a[0] for a in one), (b[0] for b in two))
