"""Packed sequences: against the same attention on each sequence by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf
from pallas_flash.varlen import key_ranges
from pallas_flash.visits import kv_tile_ranges, q_tile_ranges

from .accuracy import normal, oracle
from .test_masks import all_sound, compiled

Q_LENGTHS, K_LENGTHS = (9, 0, 20, 1, 7), (9, 5, 13, 4, 0)
HEADS, KV_HEADS, DIM, PADDING = 4, 2, 16, 3


def offsets(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def arrays(q_lengths, k_lengths):
    """q, k, v and the cotangents of the output and the lse."""
    tokens, keys = (sum(lengths) + PADDING for lengths in (q_lengths, k_lengths))
    shapes = (tokens, HEADS), (keys, KV_HEADS), (keys, KV_HEADS), (tokens, HEADS)
    return *(normal(i, *shape, DIM) for i, shape in enumerate(shapes)), normal(4, HEADS, tokens)


def one_by_one(q, k, v, do, dlse, cu_q, cu_k, **options):
    """What each sequence gives by itself, in float64; padding gives 0 and -inf."""
    want = {"out": q, "lse": dlse, "dq": q, "dk": k, "dv": v}
    want = {name: np.full(x.shape, -np.inf if name == "lse" else 0.0) for name, x in want.items()}
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        parts = oracle(*(x[None] for x in (q[a:b], k[c:d], v[c:d], do[a:b], dlse[:, a:b])), options)
        for name, part in parts.items():
            place = (
                (slice(None), slice(a, b)) if name == "lse" else slice(c, d) if name in ("dk", "dv") else slice(a, b)
            )
            want[name][place] = part[0]
    return want


OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"local_window_size": (4, 2), "causal_alignment": "bottom_right"},
    "causal window, cap": {"is_causal": True, "local_window_size": 5, "logits_soft_cap": 3.0},
}


CASES = [(name, "xla", k_lengths) for name in OPTIONS for k_lengths in (Q_LENGTHS, K_LENGTHS)]
ON_GPU = [("causal", "triton", Q_LENGTHS), ("bottom right", "triton", K_LENGTHS), ("window", "triton", K_LENGTHS)]
TOLERANCE = 2e-5 if jax.default_backend() == "cpu" else 5e-3  # TF32


@pytest.mark.parametrize(
    "name, tier, k_lengths", CASES + [pytest.param(*case, marks=pytest.mark.everywhere) for case in ON_GPU], ids=str
)
def test_packed_sequences_are_as_by_themselves(name, tier, k_lengths, kernels):
    cu_q, cu_k = offsets(Q_LENGTHS), offsets(k_lengths)
    q, k, v, do, dlse = arrays(Q_LENGTHS, k_lengths)

    @jax.jit
    def packed(cu_q, cu_k):
        f = functools.partial(pf.varlen_attention, implementation=tier, return_lse=True, **OPTIONS[name])
        (out, lse), vjp = jax.vjp(lambda q, k, v: f(q, k, v, cu_q, cu_k), q, k, v)
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *vjp((do, dlse)))))

    with kernels():
        got = packed(cu_q, cu_k)
    want = one_by_one(q, k, v, do, dlse, cu_q, cu_k, **OPTIONS[name])
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, atol=TOLERANCE, err_msg=name)


@pytest.mark.everywhere
def test_one_compilation_serves_every_packing(kernels):
    traces = []
    q, k, v, do, dlse = arrays(Q_LENGTHS, Q_LENGTHS)

    @jax.jit
    def f(cu):
        traces.append(cu)
        return pf.varlen_attention(q, k, v, cu, is_causal=True)

    for lengths in (Q_LENGTHS, Q_LENGTHS[::-1], (37, 0, 0, 0, 0)):
        cu = offsets(lengths)
        want = one_by_one(q, k, v, do, dlse, cu, cu, is_causal=True)["out"]
        with kernels():
            np.testing.assert_allclose(f(cu), want, atol=TOLERANCE)
    assert len(traces) == 1


@pytest.mark.parametrize("window", [(None, None), (None, 0), (3, 0), (2, 4)])
@pytest.mark.parametrize("bottom_right", [False, True])
def test_ranges_are_sound(window, bottom_right):
    cu_q, cu_k = (jnp.asarray(offsets(x)) for x in (Q_LENGTHS, K_LENGTHS))
    sizes = int(cu_q[-1]) + PADDING, int(cu_k[-1]) + PADDING
    mask = key_ranges(cu_q, cu_k, sizes[0], *window, bottom_right=bottom_right)
    all_sound(*compiled(mask, 0, sizes))


def test_work_follows_the_tokens():
    """Sequences of a quarter of the length take a quarter of the tiles, and little of them is tested."""
    length, block = 2048, 64
    cu = jnp.arange(5) * (length // 4)
    for causal in (False, True):
        whole = pf.Causal() if causal else pf.Full()
        parts = key_ranges(cu, cu, length, None, 0 if causal else None, bottom_right=False)
        for find in (kv_tile_ranges, q_tile_ranges):
            visited, tested = [], []
            for mask in (whole, parts):
                first, full, full_end, end = np.moveaxis(np.asarray(find(mask, length, length, block, block, 0)), -1, 0)
                visited.append((end - first).sum())
                tested.append((end - first - full_end + full).sum())
            assert visited[1] <= 0.3 * visited[0] and tested[1] <= tested[0]


def test_pack_and_unpack():
    lengths = jnp.array([3, 0, 5])
    x = jax.random.normal(jax.random.key(0), (3, 5, 2))
    packed, cu = jax.jit(pf.pack, static_argnums=2)(x, lengths, 10)
    assert packed.shape == (10, 2) and cu.tolist() == [0, 3, 3, 8] and (packed[8:] == 0).all()
    back = jax.jit(pf.unpack, static_argnums=2)(packed, cu, 5)
    inside = jnp.arange(5) < lengths[:, None]
    np.testing.assert_array_equal(back, jnp.where(inside[..., None], x, 0))
    gradient = jax.grad(lambda x: (pf.pack(x, lengths, 10)[0] ** 2).sum())(x)
    np.testing.assert_allclose(gradient, jnp.where(inside[..., None], 2 * x, 0))


def test_pack_at_its_edges():
    x = jnp.arange(1, 9).reshape(2, 4)
    cut = pf.unpack(*pf.pack(x, jnp.array([4, 4]), 6), 4)
    assert cut.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    for shape in ((0, 4, 2), (2, 0, 2)):
        packed, cu = pf.pack(jnp.ones(shape), jnp.zeros(shape[0], int), 3)
        assert packed.shape == (3, 2) and not packed.any() and pf.unpack(packed, cu, 4).shape == (shape[0], 4, 2)
    assert pf.unpack(jnp.ones((0, 2)), jnp.array([0, 0]), 3).tolist() == [[[0, 0]] * 3]


def test_rows_in_front_of_the_first_sequence_see_nothing():
    q = normal(0, 8, 1, 16)
    out, lse = pf.varlen_attention(q, q, q, jnp.array([3, 5, 8]), return_lse=True, is_causal=True)
    alone = pf.varlen_attention(q[3:], q[3:], q[3:], jnp.array([0, 2, 5]), is_causal=True)
    assert not out[:3].any() and np.isneginf(lse[:, :3]).all()
    np.testing.assert_allclose(out[3:], alone, atol=1e-6)


@pytest.mark.parametrize(
    "function, arguments, text",
    [
        (pf.pack, (jnp.ones((2, 4)), jnp.ones(2), 3), "lengths must be an integer array"),
        (pf.pack, (jnp.ones((2, 4)), jnp.ones(3, int), 3), r"got shapes \(2, 4\) and \(3,\)"),
        (pf.pack, (jnp.ones((2, 4)), jnp.ones(2, int), 3.0), "total must be an int of at least 0; got 3.0"),
        (pf.unpack, (object(), jnp.array([0, 1]), 3), "packed must be an array; got object"),
        (pf.unpack, (jnp.ones(()), jnp.array([0, 1]), 3), "packed must be"),
        (pf.unpack, (jnp.ones(3), jnp.array([0, 1]), -1), "length must be an int of at least 0; got -1"),
    ],
)  # fmt: skip
def test_errors_of_pack(function, arguments, text):
    with pytest.raises(ValueError, match=text):
        function(*arguments)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"query": jnp.ones((1, 4, 2, 8))}, r"query must be packed.*; got shape \(1, 4, 2, 8\)"),
        ({"cu_seqlens_q": jnp.array([0.0, 4.0])}, r"cu_seqlens_q must be an integer array"),
        ({"cu_seqlens_k": jnp.array([0, 2, 4])}, r"same number of sequences; got shapes \(2,\) and \(3,\)"),
        ({"q_segment_ids": jnp.zeros(4, int)}, "q_segment_ids has no meaning for packed sequences"),
        ({"causal_alignment": "left"}, "causal_alignment must be one of 'top_left', 'bottom_right'; got 'left'"),
        ({"local_window_size": (-1, 0)}, "sizes must be >= 0"),
        ({"is_causal": "no"}, "is_causal must be True or False"),
        ({"mask": pf.Causal}, "mask is the class Causal"),
        ({"cu_seqlens_q": [0, 3, 1, 4]}, r"must never decrease, from 0 to at most the 4 rows.*; got \[0, 3, 1, 4\]"),
        ({"cu_seqlens_q": np.array([-1, 4])}, r"cu_seqlens_q must never decrease, from 0"),
        ({"cu_seqlens_k": jnp.array([0, 5])}, r"cu_seqlens_k must never decrease, from 0 to at most the 4 rows"),
        ({"cu_seqlens_q": np.array([0, 2**40])}, "cu_seqlens_q holds numbers beyond int32"),
    ],
)  # fmt: skip
def test_errors(arguments, text):
    x = jnp.ones((4, 2, 8))
    call = {"query": x, "key": x, "value": x, "cu_seqlens_q": jnp.array([0, 4]), **arguments}
    with pytest.raises(ValueError, match=text):
        pf.varlen_attention(**call)
    with pytest.raises(ValueError, match=r"first and last of mask KeyRanges must have shape \[batch or 1, 4\]"):
        pf.flash_attention(x, x, x, mask=pf.KeyRanges(jnp.zeros((1, 3), int), jnp.zeros((1, 3), int)))


@pytest.mark.everywhere
@pytest.mark.parametrize("tier", ["triton", "xla", "xla_chunked"])
def test_a_nan_stays_in_its_sequence(tier, kernels):
    cu = offsets(Q_LENGTHS)
    q, k, v, do, _ = arrays(Q_LENGTHS, Q_LENGTHS)
    start, end = cu[2:4]

    @jax.jit
    def gradients(q, k, v):
        f = functools.partial(pf.varlen_attention, cu_seqlens_q=cu, is_causal=True, implementation=tier)
        out, vjp = jax.vjp(f, q, k, v)
        return out, *vjp(do)

    with kernels():
        clean, poisoned = gradients(q, k, v), gradients(q, k.at[start].set(jnp.nan), v)
    outside = np.r_[0:start, end : q.shape[0]]
    for a, b in zip(clean, poisoned):
        np.testing.assert_array_equal(np.asarray(a)[outside], np.asarray(b)[outside])
    assert np.isnan(np.asarray(poisoned[0])[start:end]).all()
