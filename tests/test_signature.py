"""flash_attention is jax.nn.dot_product_attention, and more."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf

Q, K, V = (jax.random.normal(jax.random.key(i), (2, 9, n, 8)) for i, n in enumerate((4, 2, 2)))


def test_every_parameter_of_jax_nn_with_its_kind_and_default():
    ours = inspect.signature(pf.flash_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    for name, parameter in theirs.items():
        assert name in ours, name
        assert ours[name].kind == parameter.kind and ours[name].default == parameter.default, name
    positional = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional


OPTIONS = [
    {"bias": jnp.linspace(-1, 1, 81).reshape(9, 9)},
    {"mask": jnp.arange(9)[None, None, None, :] != 4},
    {"scale": 0.2},
    {"is_causal": True},
    {"query_seq_lengths": jnp.array([9, 4]), "key_value_seq_lengths": jnp.array([7, 9])},
    {"local_window_size": (3, 2)},
]


@pytest.mark.parametrize("chosen", list(itertools.combinations(range(len(OPTIONS)), 2)), ids=str)
def test_same_results_as_jax_nn(chosen):
    options = {name: x for i in chosen for name, x in OPTIONS[i].items()}
    want, residual = jax.nn.dot_product_attention(Q, K, V, **options, return_residual=True)
    got, ours = pf.flash_attention(Q, K, V, **options, return_residual=True)
    # Rows of padding are defined here (out 0, lse -inf) and arbitrary there.
    rows = np.arange(9)[None] < np.asarray(options.get("query_seq_lengths", [9, 9]))[:, None]
    np.testing.assert_allclose(np.asarray(got)[rows], np.asarray(want)[rows], atol=2e-6)
    np.testing.assert_allclose(np.asarray(ours)[rows], np.asarray(residual)[rows], atol=2e-6)
    assert got.dtype == want.dtype and ours.dtype == residual.dtype and ours.shape == residual.shape


def test_difference_empty_row_is_zero():
    """BR-16, BR-17: a row without keys gives 0 and no gradient; jax.nn gives the mean of all values."""
    mask = jnp.ones((2, 1, 9, 9), bool).at[0, :, 1].set(False)
    weights = jax.random.normal(jax.random.key(9), (8, 8))

    def loss(w, f, select):
        out = f(Q @ w, K, V, mask=mask)
        return jnp.sum(jnp.where(select, jnp.sin(out), 0))

    row = (jnp.arange(9) == 1)[None, :, None, None] & (jnp.arange(2) == 0)[:, None, None, None]
    out, lse = pf.flash_attention(Q, K, V, mask=mask, return_lse=True)
    assert (np.asarray(out)[0, 1] == 0).all() and np.isneginf(np.asarray(lse)[0, :, 1]).all()
    ours = jax.grad(loss)(weights, pf.flash_attention, True)
    want = jax.grad(loss)(weights, jax.nn.dot_product_attention, ~row)
    np.testing.assert_allclose(ours, want, atol=1e-5)


def test_difference_value_head_dim_and_batch_dims():
    v = jax.random.normal(jax.random.key(5), (2, 9, 2, 5))
    assert pf.flash_attention(Q, K, v).shape == (2, 9, 4, 5)
    outer = [x.reshape(2, 1, *x.shape[1:]) for x in (Q, K, V)]
    np.testing.assert_array_equal(pf.flash_attention(*outer)[:, 0], pf.flash_attention(Q, K, V))
    np.testing.assert_allclose(pf.flash_attention(Q[0], K[0], V[0]), pf.flash_attention(Q, K, V)[0], atol=1e-6)


def test_residual_has_no_gradient_and_lse_has_one():
    def total(q, **which):
        return pf.flash_attention(q, K, V, **which)[1].sum()

    assert (np.asarray(jax.grad(total)(Q, return_residual=True)) == 0).all()
    assert np.abs(jax.grad(total)(Q, return_lse=True)).max() > 0.01
    out, residual, lse = pf.flash_attention(Q, K, V, return_residual=True, return_lse=True)
    np.testing.assert_array_equal(residual, lse.swapaxes(1, 2))
