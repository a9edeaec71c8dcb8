"""Packed sequences: against the same attention on each sequence by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf
from pallas_flash.masks import kv_tile_ranges, q_tile_ranges
from pallas_flash.varlen import key_ranges

from .test_masks import sound

pytestmark = pytest.mark.everywhere

Q_LENGTHS, K_LENGTHS = (9, 0, 20, 1, 7), (9, 5, 13, 4, 0)
HEADS, KV_HEADS, DIM, PADDING = 4, 2, 16, 3


def offsets(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def arrays(q_lengths, k_lengths):
    keys = jax.random.split(jax.random.key(2), 3)
    q = jax.random.normal(keys[0], (sum(q_lengths) + PADDING, HEADS, DIM))
    return q, *(jax.random.normal(key, (sum(k_lengths) + PADDING, KV_HEADS, DIM)) for key in keys[1:])


def one_by_one(q, k, v, cu_q, cu_k, **options):
    """Output and lse from a call per sequence; padding gives 0 and -inf."""
    out, lse = jnp.zeros_like(q), jnp.full((HEADS, q.shape[0]), -jnp.inf)
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        o, part = pf.flash_attention(q[a:b], k[c:d], v[c:d], implementation="xla", return_lse=True, **options)
        out, lse = out.at[a:b].set(o), lse.at[:, a:b].set(part)
    return out, lse


OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"local_window_size": (4, 2), "causal_alignment": "bottom_right"},
    "causal window, cap": {"is_causal": True, "local_window_size": 5, "logits_soft_cap": 3.0},
}


CASES = [(name, "xla", k_lengths) for name in OPTIONS for k_lengths in (Q_LENGTHS, K_LENGTHS)]
CASES += [("causal", "triton", Q_LENGTHS), ("bottom right", "triton", K_LENGTHS), ("window", "triton", K_LENGTHS)]


@pytest.mark.parametrize("name, tier, k_lengths", CASES, ids=str)
def test_packed_sequences_are_as_by_themselves(name, tier, k_lengths, kernels):
    cu_q, cu_k = offsets(Q_LENGTHS), offsets(k_lengths)
    q, k, v = arrays(Q_LENGTHS, k_lengths)

    def packed(q, k, v, cu_q, cu_k):
        return pf.varlen_attention(q, k, v, cu_q, cu_k, implementation=tier, return_lse=True, **OPTIONS[name])

    def alone(q, k, v):
        return one_by_one(q, k, v, cu_q, cu_k, **OPTIONS[name])

    def both(f, *extra):
        (out, lse), vjp = jax.vjp(lambda *a: f(*a, *extra), q, k, v)
        return out, lse, *vjp((jnp.sin(out), jnp.where(jnp.isneginf(lse), 0.0, jnp.cos(lse))))

    with kernels():
        got = jax.jit(lambda *cu: both(packed, *cu))(cu_q, cu_k)
    tolerance = 5e-3 if jax.default_backend() == "gpu" else 2e-5  # TF32
    for a, b in zip(got, both(alone)):
        np.testing.assert_allclose(a, b, atol=tolerance)


def test_one_compilation_serves_every_packing(kernels):
    traces = []
    q, k, v = arrays(Q_LENGTHS, Q_LENGTHS)

    @jax.jit
    def f(cu):
        traces.append(cu)
        return pf.varlen_attention(q, k, v, cu, is_causal=True)

    for lengths in (Q_LENGTHS, Q_LENGTHS[::-1], (37, 0, 0, 0, 0)):
        cu = offsets(lengths)
        np.testing.assert_allclose(f(cu), one_by_one(q, k, v, cu, cu, is_causal=True)[0], atol=1e-5)
    assert len(traces) == 1


@pytest.mark.parametrize("window", [(None, None), (None, 0), (3, 0), (2, 4)])
@pytest.mark.parametrize("bottom_right", [False, True])
def test_ranges_are_sound(window, bottom_right):
    cu_q, cu_k = (jnp.asarray(offsets(x)) for x in (Q_LENGTHS, K_LENGTHS))
    sizes = int(cu_q[-1]) + PADDING, int(cu_k[-1]) + PADDING
    mask = key_ranges(cu_q, cu_k, sizes[0], *window, bottom_right=bottom_right)
    allowed = np.asarray(mask.dense(*sizes))
    sound(kv_tile_ranges(mask, *sizes, 8, 4, 0), allowed, 8, 4)
    sound(q_tile_ranges(mask, *sizes, 8, 4, 0), allowed.swapaxes(-1, -2), 4, 8)


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


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"query": jnp.ones((1, 4, 2, 8))}, r"query must be packed.*; got shape \(1, 4, 2, 8\)"),
        ({"cu_seqlens_q": jnp.array([0.0, 4.0])}, r"cu_seqlens_q must be an integer array \[sequences \+ 1\]"),
        ({"cu_seqlens_k": jnp.array([0, 2, 4])}, r"same number of sequences; got shapes \(2,\) and \(3,\)"),
        ({"q_segment_ids": jnp.zeros(4, int)}, "q_segment_ids has no meaning for packed sequences"),
        ({"causal_alignment": "left"}, "causal_alignment must be 'top_left' or 'bottom_right'; got 'left'"),
        ({"local_window_size": (-1, 0)}, "sizes must be >= 0"),
    ],
)  # fmt: skip
def test_errors(arguments, text):
    x = jnp.ones((4, 2, 8))
    call = {"query": x, "key": x, "value": x, "cu_seqlens_q": jnp.array([0, 4]), **arguments}
    with pytest.raises(ValueError, match=text):
        pf.varlen_attention(**call)
    with pytest.raises(ValueError, match=r"first and last of mask KeyRanges must have shape \[batch or 1, 4\]"):
        pf.flash_attention(x, x, x, mask=pf.KeyRanges(jnp.zeros((1, 3), int), jnp.zeros((1, 3), int)))
