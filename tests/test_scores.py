"""Scores: against attention written out in the test, differentiated by JAX."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf

from .accuracy import bucket_of

B, T, S, N, K, D = 2, 21, 37, 4, 2, 16
KEY = jax.random.key(5)


def normal(number, *shape):
    return jax.random.normal(jax.random.fold_in(KEY, number), shape)


Q, KEYS, V = normal(0, B, T, N, D), normal(1, B, S, K, D), normal(2, B, S, K, D)


@pf.score
class Everything(pf.Score):
    """Reads arrays in every way but from a table, some twice and not linearly."""

    gain: Any  # [N]
    pairs: Any  # [1, N, T, S]
    of_keys: Any  # [B, S]
    of_queries: Any  # [1, T]
    strength: Any  # scalar
    ids: Any  # int [1, S]

    def apply(self, s, q, kv):
        s = s * q.per_head(self.gain) + q.take_pairs(kv, self.pairs) * 0.5
        s = s * (1 + 0.1 * kv.take(self.of_keys)) + jnp.where(kv.take(self.ids) > 1, kv.take(self.of_keys), 0.0)
        return s * (1 - 0.1 * jnp.square(q.take(self.of_queries))) + q.per_batch(self.strength) * jnp.sin(s)

    def dense(self, s):
        s = s * self.gain[:, None, None] + self.pairs * 0.5
        keys = self.of_keys[:, None, None, :]
        s = s * (1 + 0.1 * keys) + jnp.where(self.ids > 1, keys, 0.0)
        return s * (1 - 0.1 * jnp.square(self.of_queries[0][:, None])) + self.strength * jnp.sin(s)


EVERYTHING = Everything(
    normal(3, N), normal(4, 1, N, T, S), normal(5, B, S), normal(6, 1, T), jnp.float32(0.7), jnp.arange(S)[None] // 7
)


def t5(table, bidirectional, max_distance, s):
    ahead = np.arange(S)[None, :] - np.arange(T)[:, None]
    return s + table[:, bucket_of(ahead, table.shape[1], bidirectional, max_distance)][None]


def far(s):
    return jnp.abs(jnp.arange(T)[:, None] - jnp.arange(S)[None, :]).astype(s.dtype)


def many(slopes, bias, s):
    return 2.0 * jnp.tanh(s / 2.0) + bias - slopes[:, :, None, None] * far(s)


@pf.score
class Distances(pf.Score):
    """A learnt bias for every distance, one table for all heads."""

    table: Any

    def apply(self, s, q, kv):
        return s + q.look_up(self.table, q.index - kv.index + S)

    def dense(self, s):
        return s + self.table[:, jnp.arange(T)[:, None] - jnp.arange(S)[None, :] + S][None]


# What the call is given, as a function of arrays, and the same on a dense array of logits.
CASES = {
    "everything": (EVERYTHING, lambda x: {"score": x}, lambda x, s: x.dense(s)),
    "t5": (
        normal(7, N, 12),
        lambda x: {"score": pf.RelativeBias(x, max_distance=20)},
        lambda x, s: t5(x, True, 20, s),
    ),
    "t5-causal-shared": (
        normal(8, 1, 8),
        lambda x: {"score": pf.RelativeBias(x, bidirectional=False, max_distance=16)},
        lambda x, s: t5(x, False, 16, s),
    ),
    "distances": (Distances(normal(9, 1, 300)), lambda x: {"score": x}, lambda x, s: x.dense(s)),
    "order": (
        (normal(10, B, N), normal(11, B, 1, 1, S)),
        lambda x: {"alibi_slopes": x[0], "bias": x[1], "logits_soft_cap": 2.0, "score": [EVERYTHING, pf.SoftCap(9.0)]},
        lambda x, s: 9.0 * jnp.tanh(EVERYTHING.dense(many(*x, s)) / 9.0),
    ),
}


def written_out(dense, q, k, v, captured):
    """Attention by definition, with lse, under a causal mask whose last query sees the last key of all but two."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    s = dense(captured, jnp.einsum("btnd,bsnd->bnts", q, k, precision="highest") / math.sqrt(D))
    s = jnp.where(jnp.arange(S)[None, :] <= jnp.arange(T)[:, None] + 9, s, -jnp.inf)
    o = jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(s), v, precision="highest")
    return o, jax.nn.logsumexp(s, axis=-1)


def with_gradients(f, *arrays):
    out, vjp = jax.vjp(f, *arrays)
    return out, vjp(jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), out))


def close(got, want, scale=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=0, atol=scale * max(1.0, float(jnp.abs(b).max())))


@pytest.mark.everywhere
@pytest.mark.parametrize("tier", ["xla", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_score_and_its_gradients(name, tier, kernels):
    captured, options, dense = CASES[name]

    def attend(q, k, v, captured):
        mask = pf.Window(None, 9)  # lets queries see nine keys ahead
        return pf.flash_attention(
            q, k, v, mask=mask, implementation=tier, precision="highest", return_lse=True, **options(captured)
        )

    with kernels():
        got = jax.jit(functools.partial(with_gradients, attend))(Q, KEYS, V, captured)
    want = with_gradients(functools.partial(written_out, dense), Q, KEYS, V, captured)
    close(got, want, 2e-5)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (8, 16), (64, 500)])
def test_buckets_are_those_of_t5(bidirectional, buckets, max_distance):
    table = jnp.arange(buckets, dtype=jnp.float32)[None]
    ahead = np.arange(-700, 700)
    place = jnp.zeros((1, 1), jnp.int32)

    class Row(pf.Span):
        def _look_up(self, table, entry):
            return table[0, entry]

    q, kv = (Row(index, index, place, place) for index in (place, jnp.asarray(ahead)[None]))
    got = pf.RelativeBias(table, bidirectional, max_distance).apply(jnp.zeros(ahead.shape), q, kv)
    np.testing.assert_array_equal(got[0], bucket_of(ahead, buckets, bidirectional, max_distance))


@pytest.mark.everywhere
@pytest.mark.parametrize("tier", ["xla", "triton"])
def test_nan_that_a_score_reads_of_forbidden_keys(tier, kernels):
    """Also where the derivative by what was read would be NaN: 0 * NaN."""

    @pf.score
    class Warm(pf.Score):
        of_keys: Any
        heat: Any

        def apply(self, s, q, kv):
            return s * kv.take(self.of_keys) + q.per_head(self.heat) * jnp.log((q.index - kv.index + 1).astype(s.dtype))

    lengths = jnp.full((B,), 13)

    def attend(of_keys, k, heat):
        score = Warm(of_keys, heat)
        return pf.flash_attention(
            Q, k, V, score=score, is_causal=True, key_value_seq_lengths=lengths, implementation=tier
        )

    def run(value):
        of_keys, k = normal(12, B, S).at[:, 13:].set(value), KEYS.at[:, 13:].set(value)
        return jax.jit(functools.partial(with_gradients, attend))(of_keys, k, normal(13, N))

    with kernels():
        got, want = run(jnp.nan), run(0.0)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("tier", ["xla", "triton"])
def test_vmap_over_what_a_score_reads(tier, kernels):
    slopes = normal(14, 3, N)

    def loss(slopes):
        return jnp.sum(jnp.sin(pf.flash_attention(Q, KEYS, V, score=pf.Alibi(slopes), implementation=tier)))

    with kernels():
        got = jax.jit(jax.vmap(jax.value_and_grad(loss)))(slopes)
        want = [jax.jit(jax.value_and_grad(loss))(s) for s in slopes]
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *want))


def test_composition():
    slopes = jnp.ones(N)
    both = pf.SoftCap(3.0) >> pf.Alibi(slopes)
    want = pf.flash_attention(Q, KEYS, V, logits_soft_cap=3.0, alibi_slopes=slopes)
    for score in (both, [pf.SoftCap(3.0), pf.Alibi(slopes)]):
        np.testing.assert_array_equal(pf.flash_attention(Q, KEYS, V, score=score), want)
    assert "SoftCap(cap=3.0), Alibi(slopes=float32[4])" in str(pf.explain(Q, KEYS, V, score=both))
    with pytest.raises(TypeError, match="composed with a score, not with float"):
        both >> 3.0


class Plain(pf.Score):
    pass


@pf.score
class Direct(pf.Score):
    gain: Any

    def apply(self, s, q, kv):
        return s * self.gain


@pf.score
class Boolean(pf.Score):
    def apply(self, s, q, kv):
        return s > 0


@pytest.mark.parametrize(
    "options, kind, text",
    [
        ({"score": pf.Alibi}, ValueError, r"score is the class Alibi; give an instance, Alibi\(...\)"),
        ({"score": [pf.Bias]}, ValueError, r"score is the class Bias; give an instance, Bias\(...\)"),
        ({"score": 5}, ValueError, "score must be a pallas_flash.Score or a list of them; got int"),
        ({"score": pf.Bias("x")}, ValueError, "array of score Bias must be an array; got str 'x'"),
        ({"score": pf.SoftCap(2.0) >> pf.Alibi("x")}, ValueError, "b.slopes of score Chain must be an array; got str 'x'"),
        ({"score": pf.Bias(None)}, ValueError, r"what score Bias\(array=None\) reads per pairs must be one array, .*; got None"),
        ({"score": pf.Alibi([1.0, 2.0])}, ValueError, r"score Alibi\(slopes=\[float32\[1\], float32\[1\]\]\) reads per head must be one array, .*; got list"),
        ({"score": pf.RelativeBias(None)}, ValueError, r"table of score RelativeBias must be an array \[heads or 1, buckets\]; got None"),
        ({"score": pf.RelativeBias(jnp.ones(32))}, ValueError, r"table of score RelativeBias must be .*; got shape \(32,\)"),
        ({"score": 0.5}, ValueError, "score must be a pallas_flash.Score or a list of them; got float"),
        ({"score": Plain()}, ValueError, "score Plain is no pytree: decorate its class with @pallas_flash.score"),
        ({"score": Direct(jnp.ones(N))}, ValueError, r"Direct\(gain=float32\[4\]\) uses an array otherwise than through"),
        ({"score": Boolean()}, TypeError, "Boolean.apply must return the changed logits, a float array; got bool"),
        ({"score": pf.Alibi(jnp.ones(3))}, ValueError, r"read per head, must have shape \[heads or 1\] or .*; got \(3,\)"),
        ({"score": pf.RelativeBias(jnp.ones((N, 2)))}, ValueError, "half of a direction's buckets must lie between 1 and"),
        ({"alibi_slopes": jnp.ones(3)}, ValueError, r"alibi_slopes must be a float array \[heads\] or .*; got float32"),
    ],
)  # fmt: skip
def test_errors(options, kind, text):
    with pytest.raises(kind, match=text):
        pf.flash_attention(Q, KEYS, V, **options)
    with pytest.raises(ValueError, match="alibi_slopes needs keys packed as the queries are"):
        offsets = jnp.array([0, 4])
        pf.varlen_attention(Q[0], KEYS[0], V[0], offsets, offsets, alibi_slopes=jnp.ones(N))


@pytest.mark.everywhere
@pytest.mark.parametrize("lengths", [(1, 64, 20), (17, 70, 0)], ids=str)
def test_what_no_query_may_see_stays_out_of_a_table(lengths, kernels):
    """Rows behind the last query of a short tile may see keys that no query does; a table sums over rows."""
    q_len, kv_len, offset = lengths
    q, k = normal(30, 1, q_len, 1, 16), normal(31, 1, kv_len, 1, 16)

    def gradient(k, tier):
        def loss(table):
            score = pf.RelativeBias(table, max_distance=20)
            options = {"is_causal": True, "q_offset": offset, "precision": "highest", "implementation": tier}
            return pf.flash_attention(q, k, k, score=score, **options).sum()

        return jax.jit(jax.grad(loss))(jnp.zeros((1, 8)))

    with kernels():
        got = gradient(k.at[:, offset + q_len :].set(jnp.nan), "triton")
    np.testing.assert_allclose(got, gradient(k, "xla"), atol=1e-4)
