"""Sizes that only a GPU can run: 32-bit offsets, long sequences, memory, determinism."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf

from .accuracy import error, oracle

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_the_gpu(kernels):
    """Also what the tests make: these arrays are too large to be copied there."""
    with kernels():
        yield


@functools.partial(jax.jit, static_argnames=("static",))
def gradient(q, k, v, do, options, static=()):
    def f(q, k, v):
        return pf.flash_attention(q, k, v, implementation="triton", **options, **dict(static))

    out, vjp = jax.vjp(f, q, k, v)
    return out, *vjp(do)


def random(seed, *shape, dtype=jnp.bfloat16):
    # One draw repeated along the batch would hide a wrong offset; a cheap function of the index does not.
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize("shape", [(4096, 1100, 8, 64), (1600, 729, 16, 72), (8300, 1, 16, 128)], ids=str)
def test_beyond_2_31_elements(shape):
    """BR-56: offsets past 2**31 elements; first and last batch row against the oracle."""
    batch, length = shape[:2]
    q, k, v, do = (random(i, *shape) for i in range(4))
    out, dq, dk, dv = gradient(q, k, v, do, {})
    for b in (0, batch - 1):
        rows = [np.asarray(x[b : b + 1, :, -2:].astype(jnp.float32)) for x in (q, k, v, do)]
        want = oracle(*rows, np.zeros((1, 2, length)), {})
        for name, got in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv)):
            assert error(got[b : b + 1, :, -2:].astype(jnp.float32), want[name]) < 2e-2, (name, b)


def test_dense_mask_beyond_2_31_elements():
    """BR-58: a per-head mask of more than 2**31 elements."""
    batch, heads, length, dim = 8, 28, 4096, 64
    q, k, v, do = (random(i, batch, length, heads, dim) for i in range(4))
    mask = jax.random.bernoulli(jax.random.key(9), 0.7, (batch, heads, length, length))
    out, dq, dk, dv = gradient(q, k, v, do, {"mask": mask})
    last = [np.asarray(x[-1:, :, -1:].astype(jnp.float32)) for x in (q, k, v, do)]
    want = oracle(*last, np.zeros((1, 1, length)), {"mask": np.asarray(mask[-1:, -1:])})
    for name, got in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv)):
        assert error(got[-1:, :, -1:].astype(jnp.float32), want[name]) < 2e-2, name


def test_row_does_not_depend_on_the_batch():
    """BR-60."""
    q = random(0, 4, 500, 2, 64)
    k, v = (random(i, 4, 350_000, 2, 64) for i in (1, 2))
    run = jax.jit(lambda q, k, v: pf.flash_attention(q, k, v, implementation="triton"))
    np.testing.assert_array_equal(
        np.asarray(run(q, k, v)[:1], np.float32), np.asarray(run(q[:1], k[:1], v[:1]), np.float32)
    )


def test_million_tokens_with_a_window():
    """BR-62; three rows against the oracle."""
    length = 1_048_576
    q, k, v = (random(i, 1, length, 1, 64) for i in range(3))
    ids = (jnp.arange(length) // 300_000)[None]
    run = jax.jit(lambda q, k, v, ids: pf.flash_attention(
        q, k, v, implementation="triton", local_window_size=(1024, 0), q_segment_ids=ids))  # fmt: skip
    out = run(q, k, v, ids)
    for row in (0, 300_500, length - 1):
        first = max(0, row - 1024, row // 300_000 * 300_000)
        keys = [np.asarray(x[:, first : row + 1].astype(jnp.float32)) for x in (k, v)]
        query = np.asarray(q[:, row : row + 1].astype(jnp.float32))
        want = oracle(query, *keys, query * 0, np.zeros((1, 1, 1)), {})["out"]
        assert error(out[:, row : row + 1].astype(jnp.float32), want) < 2e-2, row


def test_long_sequence_and_its_memory():
    """S = 131072 runs forward and backward, and temporary memory grows linearly."""

    def loss(q, k, v):
        return pf.flash_attention(q, k, v, is_causal=True, implementation="triton").astype(jnp.float32).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    sizes = []
    for length in (16384, 32768, 65536, 131072):
        spec = jax.ShapeDtypeStruct((1, length, 8, 128), jnp.bfloat16)
        sizes.append(step.lower(spec, spec, spec).compile().memory_analysis().temp_size_in_bytes)
    assert all(b <= 2.1 * a for a, b in itertools.pairwise(sizes)), sizes
    assert sizes[-1] < 8 * 3 * 131072 * 8 * 128 * 2
    value, grads = step(*(random(i, 1, 131072, 8, 128) for i in range(3)))
    assert np.isfinite(float(value))
    for g in grads:
        assert bool(jnp.isfinite(g.astype(jnp.float32)).all()) and float(jnp.abs(g[:, -1]).max()) > 0


def test_thirty_runs_are_bit_identical():
    """BR-110."""
    q, k, v, do = (random(i, 4, 1024, 8, 128) for i in range(4))
    bias = random(5, 1, 8, 1024, 1024)

    @jax.jit
    def run(q, k, v, bias, do):
        out, vjp = jax.vjp(lambda *a: pf.flash_attention(*a, is_causal=True, implementation="triton"), q, k, v, bias)
        return out, *vjp(do)

    first = run(q, k, v, bias, do)
    for _ in range(29):
        for a, b in zip(first, run(q, k, v, bias, do)):
            assert bool((a == b).all())


def test_huge_logits():
    """BR-05: logits near 1e11; equal keys must give the values exactly and finite gradients."""
    for length in (1, 2, 130):
        x = jnp.full((1, length, 1, 64), 133120.0, jnp.bfloat16)
        out, *grads = gradient(x, x, x, jnp.ones_like(x), {})
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(x, np.float32))
        assert all(bool(jnp.isfinite(g.astype(jnp.float32)).all()) for g in grads)


def test_auto_chooses_a_kernel_on_a_gpu():
    x = jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)
    plan = pf.explain(x, x, x, is_causal=True)
    assert plan.forward == plan.backward == "triton"
