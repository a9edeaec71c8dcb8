"""Our attention inside Flax's own layers: the same parameters, the same numbers, nothing dropped."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import flax_layers
import pallas_flash as pf
from flax_layers import adapter

X = jax.random.normal(jax.random.key(0), (2, 7, 32))
PADDING = jnp.array([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]], jnp.float32)


def nnx_layer(fn=None, **kwargs):
    extra = {} if fn is None else {"attention_fn": fn}
    return nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0), **extra, **kwargs)


def linen_layer(fn=None, **kwargs):
    extra = {} if fn is None else {"attention_fn": fn}
    return linen.MultiHeadDotProductAttention(4, **extra, **kwargs)


def close(a, b, atol=1e-5):
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=atol)


MASKS = {
    "none": None,
    "float causal": linen.make_causal_mask(jnp.ones((2, 7))),
    "bool causal": linen.make_causal_mask(jnp.ones((2, 7)), dtype=bool),
    "float padding": linen.make_attention_mask(jnp.ones((2, 7)), PADDING),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layer", [nnx_layer, linen_layer])
def test_same_output_and_parameters_as_the_stock_layer(layer, mask):
    stock, ours = layer(), layer(flax_layers.attention_fn)
    if layer is nnx_layer:
        a, b = (lambda x: stock(x, mask=MASKS[mask])), (lambda x: ours(x, mask=MASKS[mask]))
        trees = [nnx.state(m, nnx.Param) for m in (stock, ours)]
    else:
        trees = [m.init(jax.random.key(0), X) for m in (stock, ours)]
        a, b = (lambda x, m=m, t=t: m.apply(t, x, mask=MASKS[mask]) for m, t in zip((stock, ours), trees))
    assert jax.tree.structure(trees[0]) == jax.tree.structure(trees[1])
    jax.tree.map(close, *trees)
    close(a(X), b(X))
    close(*(jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(X) for f in (a, b)))


@pytest.mark.parametrize("layer", [nnx_layer, linen_layer])
def test_a_structured_mask_goes_through(layer):
    mask = pf.Causal() & pf.Window(2, None)
    dense = mask.dense(7, 7)
    if layer is nnx_layer:
        close(layer(flax_layers.attention_fn)(X, mask=mask), layer()(X, mask=dense))
    else:
        variables = layer().init(jax.random.key(0), X)
        ours = jax.jit(layer(flax_layers.attention_fn).apply)(variables, X, mask=mask)
        close(ours, layer().apply(variables, X, mask=dense))


def test_options_reach_the_kernel():
    fn = flax_layers.make_attention_fn(local_window_size=(1, 0), scale=0.3)
    q = jax.random.normal(jax.random.key(1), (2, 7, 4, 8))
    close(fn(q, q, q), pf.flash_attention(q, q, q, local_window_size=(1, 0), scale=0.3), atol=0)
    segments = jnp.array([[0, 0, 0, 1, 1, 1, 1]] * 2)
    close(fn(q, q, q, q_segment_ids=segments), pf.flash_attention(
        q, q, q, local_window_size=(1, 0), scale=0.3, q_segment_ids=segments), atol=0)  # fmt: skip


@pytest.mark.parametrize("layer", [nnx_layer, linen_layer])
def test_active_dropout_is_flax_s_own_with_a_warning(layer):
    adapter._warned.clear()
    if layer is nnx_layer:

        def run(fn):
            m = nnx.MultiHeadAttention(
                4, 32, decode=False, dropout_rate=0.5, deterministic=False, rngs=nnx.Rngs(0, dropout=1),
                **({} if fn is None else {"attention_fn": fn}))  # fmt: skip
            try:
                return m(X, mask=MASKS["float causal"])
            except ValueError:  # Flax >= 0.12.11 wants the rngs in the call
                return m(X, mask=MASKS["float causal"], rngs=nnx.Rngs(dropout=1))
    else:

        def run(fn):
            m = layer(fn, dropout_rate=0.5, deterministic=False)
            variables = layer(dropout_rate=0.0).init(jax.random.key(0), X)
            return m.apply(variables, X, mask=MASKS["float causal"], rngs={"dropout": jax.random.key(1)})

    stock = run(None)
    with pytest.warns(UserWarning, match="unfused attention.*dropout"):
        ours = run(flax_layers.attention_fn)
    close(stock, ours, atol=1e-6)
    plain = layer()(X) if layer is nnx_layer else None
    assert plain is None or float(jnp.abs(ours - plain).max()) > 1e-2


def test_sow_returns_the_weights():
    adapter._warned.clear()
    ours, stock = linen_layer(flax_layers.attention_fn), linen_layer()
    variables = stock.init(jax.random.key(0), X)
    with pytest.warns(UserWarning, match="sowing"):
        out, state = ours.apply(variables, X, sow_weights=True, mutable=["intermediates"])
    want, want_state = stock.apply(variables, X, sow_weights=True, mutable=["intermediates"])
    close(out, want)
    weights = state["intermediates"]["attention_weights"][0]
    assert weights.shape == (2, 4, 7, 7)
    close(weights, want_state["intermediates"]["attention_weights"][0])


def test_decode_token_by_token_equals_the_causal_pass():
    layer = linen_layer(flax_layers.attention_fn, decode=True)
    variables = layer.init(jax.random.key(0), X)
    params, cache = variables["params"], variables["cache"]
    rows = []
    for t in range(X.shape[1]):
        y, updated = layer.apply({"params": params, "cache": cache}, X[:, t : t + 1], mutable=["cache"])
        cache = updated["cache"]
        rows.append(y)
    whole = linen_layer().apply({"params": params}, X, mask=MASKS["bool causal"])
    close(jnp.concatenate(rows, 1), whole)


def test_decode_nnx_with_is_causal():
    layer = nnx.MultiHeadAttention(4, 32, decode=True, attention_fn=flax_layers.attention_fn, rngs=nnx.Rngs(0))
    layer.init_cache((2, 7, 32), dtype=jnp.float32)
    takes = inspect.signature(nnx.MultiHeadAttention.__call__).parameters
    causal = {"is_causal": True} if "is_causal" in takes else {}
    rows = [layer(X[:, t : t + 1], **causal) for t in range(7)]
    whole = nnx_layer()(X, mask=MASKS["bool causal"])
    close(jnp.concatenate(rows, 1), whole)


@pytest.mark.parametrize("dims", [(), (2, 3)])
def test_batch_ranks(dims):
    q = jax.random.normal(jax.random.key(2), (*dims, 5, 4, 8))
    mask = jnp.tril(jnp.ones((*(1 for _ in dims), 1, 5, 5)))
    want = linen.dot_product_attention(q, q, q, mask=mask)
    close(flax_layers.attention_fn(q, q, q, mask=mask), want)


def test_bf16_and_dtype():
    q = jax.random.normal(jax.random.key(2), (2, 5, 4, 8))
    out = flax_layers.attention_fn(q, q, q, dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    close(out, linen.dot_product_attention(q, q, q), atol=2e-2)


def test_unknown_and_bad_arguments_are_named():
    q = jnp.ones((1, 2, 1, 8))
    with pytest.raises(TypeError, match="unknown options windw"):
        flax_layers.make_attention_fn(windw=3)
    with pytest.raises(TypeError, match="unknown options flavour"):
        flax_layers.attention_fn(q, q, q, flavour=1)
    assert flax_layers.attention_fn(q, q, q, flavour=None).shape == q.shape
    for rate in (-0.1, float("nan"), 1.0, 1.5):
        with pytest.raises(ValueError, match="dropout_rate must be in"):
            flax_layers.attention_fn(q, q, q, dropout_rate=rate, dropout_rng=jax.random.key(0))
    with pytest.raises(ValueError, match="dropout_rng"):
        flax_layers.attention_fn(q, q, q, dropout_rate=0.1)
    with pytest.raises(NotImplementedError, match="logits_soft_cap cannot be honoured"):
        flax_layers.make_attention_fn(logits_soft_cap=3.0)(q, q, q, dropout_rate=0.1, dropout_rng=jax.random.key(0))


def test_use_flash_on_nnx_and_back():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for layer in self.layers:
                x = x + layer(x, mask=MASKS["float causal"])
            return x

    model = Block(nnx.Rngs(0))
    want = model(X)
    changed = flax_layers.use_flash(model)
    assert changed == list(model.layers)
    assert count_kernel_calls(model, X) == 2
    close(model(X), want)
    close(nnx.jit(lambda m, x: m(x))(model, X), want)
    assert flax_layers.use_reference(model) == changed
    assert model.layers[0].attention_fn is nnx.dot_product_attention


def count_kernel_calls(f, x):
    """How often flash_attention is entered while tracing."""
    seen = []
    original = pf.flash_attention
    pf.flash_attention = lambda *a, **k: (seen.append(1), original(*a, **k))[1]
    try:
        f(x)
    finally:
        pf.flash_attention = original
    return len(seen)


def test_use_flash_and_context_on_linen():
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            layer = linen.remat(linen.MultiHeadDotProductAttention)
            return x + layer(4)(x, mask=None)

    stock = Block()
    variables = stock.init(jax.random.key(0), X)
    want = stock.apply(variables, X)
    ours = flax_layers.use_flash(stock)
    jax.tree.map(close, variables, ours.init(jax.random.key(0), X))
    close(jax.jit(ours.apply)(variables, X), want)
    assert count_kernel_calls(lambda x: ours.apply(variables, x), X) == 1

    def in_context(x):
        with flax_layers.flash_layers():
            return stock.apply(variables, x)

    assert count_kernel_calls(in_context, X) == 1
    assert count_kernel_calls(lambda x: stock.apply(variables, x), X) == 0
    close(in_context(X), want)
    with pytest.raises(TypeError, match="unknown options"):
        flax_layers.use_flash(stock, windw=1)
    with pytest.raises(TypeError, match="takes an nnx or a linen module"):
        flax_layers.use_flash(lambda x: x)


def test_grouped_query_heads_in_nnx():
    if "num_kv_heads" not in inspect.signature(nnx.MultiHeadAttention.__init__).parameters:
        pytest.skip("this Flax has no num_kv_heads in its layer")
    ours, stock = (
        nnx.MultiHeadAttention(4, 32, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0), attention_fn=fn)
        for fn in (flax_layers.attention_fn, nnx.dot_product_attention)
    )
    close(ours(X), stock(X))
