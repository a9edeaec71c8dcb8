"""Our attention inside Flax's own layers: the same parameters, the same numbers, nothing dropped."""

import copy
import functools
import importlib
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import flax_layers
import pallas_flash as pf

adapter = importlib.import_module("flax_layers.attention_fn")  # the package's attribute of this name is the function
X = jax.random.normal(jax.random.key(0), (2, 7, 32))
Q, K, V = jax.random.normal(jax.random.key(1), (3, 2, 7, 4, 8))
KEY = jax.random.key(2)
PADDING = jnp.array([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]], jnp.float32)
MASKS = {
    "none": None,
    "float causal": linen.make_causal_mask(jnp.ones((2, 7))),
    "bool causal": linen.make_causal_mask(jnp.ones((2, 7)), dtype=bool),
    "float padding": linen.make_attention_mask(jnp.ones((2, 7)), PADDING),
}
CAUSAL = MASKS["bool causal"]
STOCK = {"linen": linen.dot_product_attention, "nnx": nnx.dot_product_attention}


@pytest.fixture(autouse=True)
def no_warning_yet(monkeypatch):
    monkeypatch.setattr(adapter, "_warned", set())


def nnx_layer(fn=nnx.dot_product_attention, heads=4, **kwargs):
    kwargs = {"decode": False, "rngs": nnx.Rngs(0), **kwargs}
    return nnx.MultiHeadAttention(heads, 32, attention_fn=fn, **kwargs)


def linen_layer(fn=linen.dot_product_attention, **kwargs):
    return linen.MultiHeadDotProductAttention(4, attention_fn=fn, **kwargs)


VARIABLES = linen_layer().init(jax.random.key(0), X)


def close(a, b, atol=1e-5):
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=atol)


def equal(a, b):
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def calls_of_flash_attention(monkeypatch):
    """A list that grows by the keywords of each call of the library while tracing."""
    seen, original = [], pf.flash_attention
    monkeypatch.setattr(pf, "flash_attention", lambda *a, **k: (seen.append(k), original(*a, **k))[1])
    return seen


@pytest.mark.parametrize("mask", MASKS)
def test_same_output_gradients_and_parameters_as_the_stock_layers(mask):
    """BR-132."""
    ours, stock = nnx_layer(flax_layers.attention_fn), nnx_layer()
    trees = [nnx.state(m, nnx.Param) for m in (ours, stock)]
    applies = [lambda p, x, m=m: nnx.merge(nnx.graphdef(m), p)(x, mask=MASKS[mask]) for m in (ours, stock)]
    linens = [linen_layer(flax_layers.attention_fn), linen_layer()]
    trees += [linens[0].init(jax.random.key(0), X), VARIABLES]
    applies += [lambda p, x, m=m: m.apply(p, x, mask=MASKS[mask]) for m in linens]

    def out_and_gradients(apply, params):
        def loss(params, x):
            out = apply(params, x)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, X)

    for i in (0, 2):
        assert jax.tree.structure(trees[i]) == jax.tree.structure(trees[i + 1])
        jax.tree.map(equal, trees[i], trees[i + 1])
        jax.tree.map(close, *(out_and_gradients(applies[j], trees[j]) for j in (i, i + 1)))


def test_a_structured_mask_goes_through():
    mask = pf.Causal() & pf.Window(2, None)
    dense = mask.dense(7, 7)
    close(nnx_layer(flax_layers.attention_fn)(X, mask=mask), nnx_layer()(X, mask=dense))
    ours = jax.jit(linen_layer(flax_layers.attention_fn).apply)(VARIABLES, X, mask=mask)
    close(ours, linen_layer().apply(VARIABLES, X, mask=dense))


def test_options_reach_the_kernel(monkeypatch):
    segments = jnp.array([[0, 0, 0, 1, 1, 1, 1]] * 2)
    fn = flax_layers.make_attention_fn(local_window_size=(1, 0), scale=0.3, logits_soft_cap=2.0, precision="highest")
    options = {"local_window_size": (1, 0), "scale": 0.3, "logits_soft_cap": 2.0}
    want = pf.flash_attention(Q, K, V, q_segment_ids=segments, **options)
    equal(fn(Q, K, V, q_segment_ids=segments, scale=None), want)
    seen = calls_of_flash_attention(monkeypatch)
    fn(Q, K, V)
    fn(Q, K, V, precision="default")
    assert [call["precision"] for call in seen] == ["highest", "default"]


def test_every_name_of_flax_is_in_the_signature():
    """BR-132."""
    for fn in (flax_layers.attention_fn, flax_layers.make_attention_fn(scale=1.0)):
        for stock in STOCK.values():
            names = list(inspect.signature(stock).parameters)
            ours = list(inspect.signature(fn).parameters)
            assert names[:12] == ours[:12]
            assert set(names) <= set(ours)
    assert pickle.loads(pickle.dumps(flax_layers.attention_fn)) is flax_layers.attention_fn


@pytest.mark.parametrize("dims", [(), (2, 3)])
def test_batch_ranks(dims):
    q, k, v = jax.random.normal(KEY, (3, *dims, 5, 4, 8))
    mask = jnp.tril(jnp.ones((*dims[:1], *(1 for _ in dims[1:]), 1, 5, 5)))
    close(*(jax.jit(fn)(q, k, v, mask=mask) for fn in (flax_layers.attention_fn, linen.dot_product_attention)))


def test_dtypes_are_promoted_as_in_flax():
    half = linen_layer(flax_layers.attention_fn, dtype=jnp.bfloat16, force_fp32_for_softmax=True)
    out = jax.jit(half.apply)(VARIABLES, X)
    assert out.dtype == jnp.bfloat16
    close(out, jax.jit(linen_layer().apply)(VARIABLES, X), atol=2e-2)
    whole = jnp.arange(24).reshape(1, 3, 2, 4) % 3
    for inputs in ((Q.astype(jnp.bfloat16), K, V), (whole, whole, whole)):
        ours, stock = (jax.jit(fn)(*inputs) for fn in (flax_layers.attention_fn, linen.dot_product_attention))
        assert ours.dtype == stock.dtype == jnp.float32
        close(ours, stock)
    own = flax_layers.attention_fn(Q, K, V, promote_dtype=lambda xs, dtype: [x.astype(jnp.bfloat16) for x in xs])
    assert own.dtype == jnp.bfloat16


# Decode: Flax passes one query, the whole cache and a mask of its filled part, and no position.


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"is_causal": True, "local_window_size": (2, 0)}], ids=str
)
@pytest.mark.parametrize("shape", [(2, 7, 32), (1, 2, 7, 32)], ids=["one batch dim", "two"])
def test_decode_token_by_token_equals_the_causal_pass(options, shape):
    x, fn = X.reshape(shape), flax_layers.make_attention_fn(**options)
    caches = {}
    for name, layer in {"ours": linen_layer(fn, decode=True), "stock": linen_layer(decode=True)}.items():
        step = jax.jit(lambda c, t, m=layer: m.apply({**VARIABLES, "cache": c}, t, mutable=["cache"]))
        cache, rows = layer.init(jax.random.key(0), x)["cache"], []
        for t in range(7):
            y, updated = step(cache, x[..., t : t + 1, :])
            cache = updated["cache"]
            rows.append(y)
        caches[name] = cache, jnp.concatenate(rows, -2)
    jax.tree.map(close, caches["ours"][0], caches["stock"][0])
    mask = CAUSAL.reshape(*shape[:-2], 1, 7, 7)
    close(caches["ours"][1], linen_layer(fn).apply(VARIABLES, x, mask=mask))
    if "local_window_size" not in options:
        close(caches["ours"][1], caches["stock"][1])


def test_decode_nnx_with_is_causal():
    layer = nnx_layer(flax_layers.attention_fn, decode=True)
    layer.init_cache((2, 7, 32), dtype=jnp.float32)
    takes = inspect.signature(nnx.MultiHeadAttention.__call__).parameters
    causal = {"is_causal": True} if "is_causal" in takes else {}
    step = nnx.jit(lambda m, t: m(t, **causal))
    close(jnp.concatenate([step(layer, X[:, t : t + 1]) for t in range(7)], 1), nnx_layer()(X, mask=CAUSAL))


@pytest.mark.parametrize("window", [None, (2, 0)])
def test_decode_with_a_mask_of_the_caller(window):
    """BR-99: rank 4, as long as the cache; the speed of a cache is no subject of tests."""
    fn = flax_layers.make_attention_fn(**({} if window is None else {"local_window_size": window}))
    mask = jnp.asarray(PADDING[:, ::-1] > 0)[:, None, None]  # the first tokens of row 0 are padding
    whole = mask & CAUSAL if window is None else mask & CAUSAL & pf.Window(*window).dense(7, 7)
    layer = linen_layer(fn, decode=True)
    step = jax.jit(lambda c, t: layer.apply({**VARIABLES, "cache": c}, t, mask=mask, mutable=["cache"]))
    cache, rows = layer.init(jax.random.key(0), X)["cache"], []
    for t in range(7):
        y, updated = step(cache, X[:, t : t + 1])
        cache = updated["cache"]
        rows.append(y)
    want = linen_layer().apply(VARIABLES, X, mask=whole)
    close(jnp.concatenate(rows, 1)[0, 2:], want[0, 2:])  # before that, row 0 sees nothing: 0 here, a mean there
    close(jnp.concatenate(rows, 1)[1], want[1])
    layer = nnx_layer(fn, decode=True)
    layer.init_cache((2, 7, 32), dtype=jnp.float32)
    step = nnx.jit(lambda m, t: m(t, mask=mask))
    out = jnp.concatenate([step(layer, X[:, t : t + 1]) for t in range(7)], 1)
    want = nnx_layer()(X, mask=whole)
    close(out[0, 2:], want[0, 2:])
    close(out[1], want[1])


def test_one_query_without_a_mask_is_not_a_decode_step():
    fns = flax_layers.attention_fn, nnx.dot_product_attention
    close(*(jax.jit(lambda q, fn=fn: fn(q, K, V, is_causal=True))(Q[:, :1]) for fn in fns))
    seen = jnp.arange(7) <= jnp.array([[[[3]]], [[[5]]]])
    options = {"local_window_size": (1, 0), "q_offset": 4}
    fns = flax_layers.make_attention_fn(**options), functools.partial(pf.flash_attention, **options)
    close(*(jax.jit(lambda q, fn=fn: fn(q, K, V, mask=seen))(Q[:, :1]) for fn in fns))


# Dropout drops what Flax drops; sowing and custom einsums take Flax's own function, bit for bit, with a warning.


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("stock", STOCK.values(), ids=STOCK)
def test_active_dropout_drops_what_flax_drops(stock, broadcast):
    dropout = {"dropout_rng": KEY, "dropout_rate": 0.3, "broadcast_dropout": broadcast}
    for mask in (None, MASKS["float causal"]):
        close(flax_layers.attention_fn(Q, K, V, mask=mask, **dropout), stock(Q, K, V, mask=mask, **dropout))
    close(flax_layers.attention_fn(Q, K, V, mask=pf.Causal(), **dropout), stock(Q, K, V, mask=CAUSAL, **dropout))
    kernels = flax_layers.make_attention_fn(implementation="triton")
    with pf.interpret():
        close(kernels(Q, K, V, mask=pf.Causal(), **dropout), stock(Q, K, V, mask=CAUSAL, **dropout))
    fn = flax_layers.make_attention_fn(local_window_size=(2, 0), scale=0.3, implementation=("triton", "xla"))
    want = stock(Q * 0.3 * 8**0.5, K, V, mask=pf.Window(2, 0).dense(7, 7), **dropout)
    close(fn(Q, K, V, **dropout), want)
    bias = jax.random.normal(KEY, (1, 4, 7, 7))
    gradients = (
        jax.grad(lambda q, f=f: jnp.sum(f(q, K, V, bias, **dropout) ** 2))(Q) for f in (adapter.attention_fn, stock)
    )
    close(*gradients)


def test_dropout_of_the_layers_equals_stock_and_follows_the_key():
    """BR-95: other weights in another layer, which takes the next key of a stream, or in another step."""

    def run_linen(fn, key):
        m = linen_layer(fn, dropout_rate=0.5, deterministic=False)
        return m.apply(VARIABLES, X, mask=MASKS["float causal"], rngs={"dropout": key})

    def run_nnx(fn, key):
        m = nnx_layer(fn, dropout_rate=0.5, deterministic=False)
        return m(X, mask=MASKS["float causal"], rngs=nnx.Rngs(dropout=key))

    for run, stock in ((run_linen, STOCK["linen"]), (run_nnx, STOCK["nnx"])):
        first = run(flax_layers.attention_fn, jax.random.key(1))
        close(first, run(stock, jax.random.key(1)))
        equal(first, run(flax_layers.attention_fn, jax.random.key(1)))
        assert float(jnp.abs(first - run(flax_layers.attention_fn, jax.random.key(2))).max()) > 1e-2
    layer, stream = nnx_layer(flax_layers.attention_fn, dropout_rate=0.5, deterministic=False), nnx.Rngs(dropout=0)
    assert float(jnp.abs(layer(X, rngs=stream) - layer(X, rngs=stream)).max()) > 1e-2


def test_dropout_keeps_its_rate_and_its_mean():
    keys = jax.random.split(KEY, 2000)
    dropout = {"dropout_rate": 0.25, "broadcast_dropout": False}
    v = jnp.abs(V) + 1
    outs = jax.jit(jax.vmap(lambda key: flax_layers.attention_fn(Q, K, v, dropout_rng=key, **dropout)))(keys)
    error = outs.mean(0) - pf.flash_attention(Q, K, v)
    assert float(jnp.abs(error / (outs.std(0) / 2000**0.5)).max()) < 5
    # One-hot values under equal scores show the mask itself.
    zeros, one_hot = jnp.zeros((9, 7, 4, 7)), jnp.tile(jnp.eye(7)[:, None], (9, 1, 4, 1))
    weights = flax_layers.attention_fn(zeros, zeros, one_hot, dropout_rng=KEY, **dropout)
    kept = np.asarray(weights > 0)
    assert abs(kept.mean() - 0.75) < 4 * (0.75 * 0.25 / kept.size) ** 0.5
    assert (kept[0] != kept[1]).any() and (kept[:, :, 0] != kept[:, :, 1]).any()


def test_a_deterministic_layer_needs_no_key():
    """BR-94: and without dropout a layer needs neither key nor flag."""
    for options in ({"dropout_rate": 0.5, "deterministic": True}, {"dropout_rate": 0.0}):
        equal(flax_layers.attention_fn(Q, K, V, **options), pf.flash_attention(Q, K, V))
        ours, stock = linen_layer(flax_layers.attention_fn, **options), linen_layer()
        close(ours.apply(VARIABLES, X), stock.apply(VARIABLES, X))
        close(nnx_layer(flax_layers.attention_fn, **options)(X), nnx_layer()(X))
    asked = linen_layer(flax_layers.attention_fn, dropout_rate=0.5).apply(VARIABLES, X, deterministic=True)
    close(asked, linen_layer().apply(VARIABLES, X))
    eval_mode = nnx_layer(flax_layers.attention_fn, dropout_rate=0.5)
    eval_mode.eval()
    close(eval_mode(X), nnx_layer()(X))


def test_sow_returns_the_weights():
    """BR-134."""
    with pytest.warns(UserWarning, match="sowing"):
        out, state = linen_layer(flax_layers.attention_fn).apply(
            VARIABLES, X, sow_weights=True, mutable="intermediates"
        )
    want, want_state = linen_layer().apply(VARIABLES, X, sow_weights=True, mutable="intermediates")
    equal(out, want)
    weights = state["intermediates"]["attention_weights"][0]
    assert weights.shape == (2, 4, 7, 7)
    equal(weights, want_state["intermediates"]["attention_weights"][0])
    ours, stock = nnx_layer(flax_layers.attention_fn), nnx_layer()
    equal(ours(X, mask=CAUSAL, sow_weights=True), stock(X, mask=CAUSAL, sow_weights=True))
    sown = [jax.tree.leaves(nnx.state(m, nnx.Intermediate))[0] for m in (ours, stock)]
    assert sown[0].shape == (2, 4, 7, 7)
    equal(*sown)


def test_custom_einsums_are_used():
    calls = []

    def einsum(*args, **kwargs):
        calls.append(args[0])
        return jnp.einsum(*args, **kwargs)

    classes = {"qk_attn_weights_einsum_cls": lambda: einsum, "attn_weights_value_einsum_cls": lambda: einsum}
    with pytest.warns(UserWarning, match="a custom einsum"):
        ours = linen_layer(flax_layers.attention_fn, **classes).apply(VARIABLES, X, mask=CAUSAL)
    assert len(calls) == 2
    equal(ours, linen_layer(**classes).apply(VARIABLES, X, mask=CAUSAL))


def test_unknown_and_bad_arguments_are_named(monkeypatch):
    """BR-92, BR-132."""
    for make in (flax_layers.make_attention_fn, flax_layers.flash_layers(windw=3).__enter__):
        with pytest.raises(TypeError, match="unknown options windw; flash_attention has .*local_window_size"):
            make(**({"windw": 3} if make is flax_layers.make_attention_fn else {}))
    with pytest.raises(TypeError, match="dropout_rate: the layer passes it"):
        flax_layers.make_attention_fn(dropout_rate=0.1)
    with pytest.raises(TypeError, match="unknown options flavour"):
        flax_layers.attention_fn(Q, K, V, flavour=1)
    with pytest.raises(TypeError, match="input_positions"):
        flax_layers.attention_fn(Q, K, V, input_positions=jnp.arange(7))
    monkeypatch.setitem(adapter._FLAX_DEFAULTS, "newer", False)
    equal(flax_layers.attention_fn(Q, K, V, flavour=None, newer=False), pf.flash_attention(Q, K, V))
    with pytest.raises(TypeError, match="unknown options newer"):
        flax_layers.attention_fn(Q, K, V, newer=True)
    for rate in (-0.1, float("nan"), 1.0, 1.5):
        with pytest.raises(ValueError, match=rf"dropout_rate must be in \[0, 1\); got {rate}"):
            flax_layers.attention_fn(Q, K, V, dropout_rate=rate, dropout_rng=KEY)
    with pytest.raises(ValueError, match="needs dropout_rng"):
        flax_layers.attention_fn(Q, K, V, dropout_rate=0.1)
    for option, words in ({"logits_soft_cap": 3.0}, "logits_soft_cap"), ({"implementation": "triton"}, "'triton'"):
        with pytest.raises(NotImplementedError, match=f"{words} cannot be honoured"):
            flax_layers.make_attention_fn(**option)(Q, K, V, einsum_dot_general=jax.lax.dot_general)


def test_grouped_query_heads_in_nnx():
    """BR-133."""
    with pytest.raises(ValueError, match="multiple"):
        flax_layers.attention_fn(Q[:, :, :3], K[:, :, :2], V[:, :, :2])
    if not adapter._NNX_GROUPS_HEADS:
        pytest.skip("this Flax has no num_kv_heads in its layer")
    ours, stock = (nnx_layer(fn, num_kv_heads=2) for fn in (flax_layers.attention_fn, nnx.dot_product_attention))
    assert ours.key.kernel.shape == (32, 2, 8)
    close(ours(X), stock(X))
    dropout = {"dropout_rng": KEY, "dropout_rate": 0.3}
    shared = Q, K[:, :, :2], V[:, :, :2]
    close(flax_layers.attention_fn(*shared, **dropout), nnx.dot_product_attention(*shared, **dropout))
    with pytest.raises(ValueError, match="divisible"):
        nnx_layer(flax_layers.attention_fn, heads=5, qkv_features=40, num_kv_heads=2)


def test_grouped_query_heads_decode():
    """BR-133: a cache of the key heads only."""
    if not adapter._NNX_GROUPS_HEADS:
        pytest.skip("this Flax has no num_kv_heads in its layer")
    sizes = {"heads": 32, "num_kv_heads": 8, "qkv_features": 64}
    layer = nnx_layer(flax_layers.attention_fn, decode=True, **sizes)
    layer.init_cache((2, 7, 32), dtype=jnp.float32)
    assert layer.key.kernel.shape == layer.value.kernel.shape == (32, 8, 2)
    assert layer.cached_key[...].shape == layer.cached_value[...].shape == (2, 7, 8, 2)
    step = nnx.jit(lambda m, t: m(t))
    out = jnp.concatenate([step(layer, X[:, t : t + 1]) for t in range(7)], 1)
    assert (layer.cached_key[...] != 0).all()
    close(out, nnx_layer(**sizes)(X, mask=CAUSAL))


# Switches of models already written.


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx_layer(rngs=rngs) for _ in range(2)])
        self.own = nnx_layer(lambda q, k, v, **_: q, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x + nnx.remat(lambda m, x: m(x, mask=MASKS["float causal"]))(layer, x)
        return self.own(x)


def test_use_flash_on_nnx_and_back(monkeypatch):
    model = NnxBlock(nnx.Rngs(0))
    run = nnx.jit(nnx.value_and_grad(lambda m, x: (jnp.sum(m(x) ** 2), m(x)), has_aux=True))
    want = run(model, X)
    changed = flax_layers.use_flash(model)
    assert changed == list(model.layers)
    seen = calls_of_flash_attention(monkeypatch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), run(model, X), want)
    assert len(seen) >= 2
    assert flax_layers.use_flash(model, scale=0.5) == changed
    assert flax_layers.use_reference(model) == changed
    assert model.layers[0].attention_fn is nnx.dot_product_attention
    calls = len(seen)
    equal(run(model, X)[0][1], want[0][1])
    assert len(seen) == calls


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, _=None):
        return x + linen.remat(linen.MultiHeadDotProductAttention)(4)(x, mask=MASKS["float causal"]), None


class LinenStack(linen.Module):
    @linen.compact
    def __call__(self, x):
        scan = linen.scan(LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return scan()(x, None)[0]


def test_use_flash_on_linen_through_scan_and_remat(monkeypatch):
    stock, ours = LinenStack(), flax_layers.use_flash(LinenStack())
    variables = stock.init(jax.random.key(0), X)
    jax.tree.map(equal, variables, ours.init(jax.random.key(0), X))
    grads = [jax.jit(jax.value_and_grad(lambda p, m=m: jnp.sum(m.apply(p, X) ** 2)))(variables) for m in (stock, ours)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *grads)
    seen = calls_of_flash_attention(monkeypatch)
    ours.clone().apply(variables, X)
    assert len(seen) > 0
    for spoiled in (copy.copy(ours), copy.deepcopy(ours)):
        close(spoiled.apply(variables, X), stock.apply(variables, X))
    with pytest.raises(TypeError, match="cannot be bound"):
        ours.bind(variables)
    with pytest.raises(TypeError, match="is no part of another module"):
        ours(X)


def test_contexts_switch_only_inside_and_the_innermost_counts(monkeypatch):
    seen = calls_of_flash_attention(monkeypatch)
    with flax_layers.flash_layers(scale=0.1):
        with flax_layers.flash_layers(scale=0.2):
            linen_layer().apply(VARIABLES, X)
        linen_layer().apply(VARIABLES, X)
        linen_layer(flax_layers.make_attention_fn(scale=0.3)).apply(VARIABLES, X)
    linen_layer().apply(VARIABLES, X)
    assert [call["scale"] for call in seen] == [0.2, 0.1, 0.3]


def test_switches_refuse_what_they_cannot_switch():
    with pytest.raises(TypeError, match="unknown options"):
        flax_layers.use_flash(LinenStack(), windw=1)
    with pytest.raises(TypeError, match="takes an nnx or a linen module"):
        flax_layers.use_flash(lambda x: x)
    with pytest.raises(TypeError, match="takes an nnx module.*unchanged"):
        flax_layers.use_reference(flax_layers.use_flash(LinenStack()))
