"""Sinks and dropout, beyond the table of cases: what must not depend on how a call is run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_flash as pf
from pallas_flash.kernels.triton import tiles

B, N, T = 2, 4, 24
RATE, KEY = 0.4, jax.random.key(11)
DROPOUT = {"dropout_rate": RATE, "dropout_rng": KEY}
Q, K, V = jax.random.normal(jax.random.key(1), (3, B, T, N, 16))
SINKS = jnp.array([0.3, -1.0, 2.0, 0.0])


@pytest.fixture(autouse=True)
def interpreted():
    with pf.interpret():
        yield


def attend(q, k, v, sinks=None, tier="triton", **options):
    return pf.flash_attention(q, k, v, sinks=sinks, implementation=tier, **options)


def kept(tier="triton", batch=B, **options):
    """The dropout mask [B, N, T, S], read off with equal weights on an identity for v."""
    zeros = jnp.zeros((batch, T, N, 16))
    identity = jnp.tile(jnp.eye(T)[:, None], (batch, 1, N, 1))
    weights = jax.jit(lambda *a: attend(*a, tier=tier, **{**DROPOUT, **options}))(zeros, zeros, identity)
    return np.asarray(weights.swapaxes(1, 2) > 0)


def small_tiles(monkeypatch):
    choose = tiles.choose
    monkeypatch.setattr(tiles, "choose", lambda *a: dataclasses.replace(choose(*a), block_q=16, block_kv=16))


def everything(**options):
    """Output and gradients of q, k, v and the sinks, as one function."""

    @jax.jit
    def f(q, k, v, sinks):
        out, vjp = jax.vjp(lambda *a: attend(*a, is_causal=True, **DROPOUT, **options), q, k, v, sinks)
        return out, *vjp(jnp.sin(out))

    return f


def close(a, b, atol=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


@pytest.mark.parametrize("tier", ["triton", "xla", "xla_chunked"])
def test_dropout_keeps_the_documented_draw(tier):
    np.testing.assert_array_equal(kept(tier), jax.random.bernoulli(KEY, 1 - RATE, (B, N, T, T)))
    shared = jax.random.bernoulli(KEY, 1 - RATE, (1, 1, T, T))
    np.testing.assert_array_equal(kept(tier, broadcast_dropout=True), np.broadcast_to(shared, (B, N, T, T)))


def test_results_do_not_depend_on_tiles(monkeypatch):
    want = everything()(Q, K, V, SINKS)
    small_tiles(monkeypatch)
    close(everything()(Q, K, V, SINKS), want)


def test_remat_draws_the_same_weights():
    close(jax.jit(jax.checkpoint(everything()))(Q, K, V, SINKS), everything(tier="xla")(Q, K, V, SINKS))


def test_vmap_over_arrays_keys_and_sinks():
    sinks, keys = jnp.stack([SINKS, -SINKS]), jax.random.split(KEY, 2)

    def f(tier):
        return lambda q, sinks, key: attend(q, K, V, sinks, tier, dropout_rate=RATE, dropout_rng=key)

    stacked = jnp.stack([Q, 2 * Q])
    for axes, arrays in ((0, (stacked, sinks, keys)), ((None, None, 0), (Q, SINKS, keys))):
        close(*(jax.jit(jax.vmap(f(tier), axes))(*arrays) for tier in ("triton", "xla")))


@pytest.mark.parametrize(
    "spec, broadcast", [(P("x"), False), (P(None, None, "y"), True), (P("x", None, "y"), False)], ids=str
)
def test_sharding_changes_nothing(spec, broadcast):
    """Each device draws its own rows and heads of the one mask; the gradient of a sink is summed over devices."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a in (Q, K, V)]
    f = everything(broadcast_dropout=broadcast)
    compiled = f.lower(*placed, SINKS).compile()
    assert "all-gather" not in compiled.as_text() and "all-to-all" not in compiled.as_text()
    close(compiled(*placed, SINKS), everything(broadcast_dropout=broadcast, tier="xla")(Q, K, V, SINKS))


@pytest.mark.parametrize("tier", ["triton", "xla"])
def test_sinks_do_not_read_the_cotangent_of_padding(tier):
    lengths = jnp.array([T, 9])
    do = jnp.ones_like(Q)

    @jax.jit
    def gradients(do):
        f = lambda sinks: attend(Q, K, V, sinks, tier, query_seq_lengths=lengths)
        return jax.vjp(f, SINKS)[1](do)[0]

    close(gradients(do.at[1, 9:].set(jnp.nan)), gradients(do))


@pytest.mark.parametrize("tier", ["triton", "xla", "xla_chunked"])
def test_a_sink_takes_its_share_and_fills_the_lse_of_an_empty_row(tier):
    options = {"tier": tier, "return_lse": True, "key_value_seq_lengths": jnp.array([0, T])}

    @jax.jit
    def attend_to(sinks):
        return attend(Q, K, V, sinks, **options)

    out, lse = attend_to(SINKS)
    plain, plain_lse = attend_to(None)
    np.testing.assert_allclose(lse, jnp.logaddexp(plain_lse, SINKS[None, :, None]), atol=1e-5)
    assert (out[0] == 0).all()
    share = jnp.exp(plain_lse - lse).swapaxes(1, 2)[..., None]
    np.testing.assert_allclose(out, plain * share, atol=1e-5)
    two = jnp.stack([SINKS, SINKS], 1) - jnp.log(2.0)  # two halves of a sink are one
    np.testing.assert_allclose(attend_to(two)[1], lse, atol=1e-5)
    close(attend_to(jnp.full(4, -jnp.inf)), (plain, plain_lse))
    no_keys = pf.flash_attention(Q, K[:, :0], V[:, :0], sinks=SINKS, return_lse=True)[1]
    np.testing.assert_allclose(no_keys, jnp.broadcast_to(SINKS[None, :, None], no_keys.shape))
