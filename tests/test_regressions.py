"""What testers found wrong, each as they reported it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_flash as pf
from pallas_flash import devices

TIERS = ["triton", "xla", "xla_chunked"]
Q, K, V = jax.random.normal(jax.random.key(0), (3, 2, 8, 2, 16))


@pytest.fixture(autouse=True)
def interpreted():
    with pf.interpret():
        yield


@pytest.mark.parametrize("tier", TIERS)
def test_soft_cap_keeps_forbidden_nan_out_of_gradients(tier):
    k, v = (x.at[:, 5:].set(jnp.nan) for x in (K, V))
    options = {"key_value_seq_lengths": jnp.array([5, 5]), "logits_soft_cap": 30.0, "implementation": tier}
    grads = jax.jit(jax.grad(lambda *a: pf.flash_attention(*a, **options).sum(), (0, 1, 2)))(Q, k, v)
    assert all(np.isfinite(np.asarray(g)).all() for g in grads)


@pytest.mark.parametrize("tier", TIERS)
def test_gradient_of_the_scale_does_not_read_padded_queries(tier):
    options = {"query_seq_lengths": jnp.array([5, 5]), "implementation": tier}
    gradient = jax.jit(jax.grad(lambda s, q: pf.flash_attention(q, K, V, scale=s, **options).sum()))
    np.testing.assert_allclose(gradient(0.3, Q), gradient(0.3, Q.at[:, 5:].set(jnp.nan)), rtol=1e-6)


@pf.mask
class FullOnOdd(pf.Mask):
    """A mask that asks for the head, or the batch row, without holding arrays of that size."""

    what: str = pf.static()

    def allows(self, q, kv):
        return (getattr(q, self.what) % 2 == 1) | (kv.index <= q.index)


@pytest.mark.parametrize("what, shape", [("head", (1, 2, 8, 8)), ("batch", (2, 1, 8, 8))])
def test_dense_mask_knows_heads_and_batch_rows(what, shape):
    mask = pf.dense_mask(Q, K, FullOnOdd(what))
    assert mask.shape == shape
    want, got = (pf.flash_attention(Q, K, V, mask=m, implementation="xla") for m in (FullOnOdd(what), mask))
    np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize("tier", ["triton", "xla"])
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x"), P(None, "x")], ids=str)
def test_explicit_mesh_axes(tier, spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))

    def f(q, k, v, tier=tier):
        out, vjp = jax.vjp(lambda *a: pf.flash_attention(*a, is_causal=True, implementation=tier), q, k, v)
        return out, *vjp(jnp.sin(out))

    want = jax.jit(functools.partial(f, tier="xla"))(Q, K, V)
    with jax.set_mesh(mesh):
        got = jax.jit(f)(*(jax.device_put(a, NamedSharding(mesh, spec)) for a in (Q, K, V)))
    assert tuple(jax.typeof(got[0]).sharding.spec)[: len(spec)] == tuple(spec)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def test_shard_map_that_checks_what_varies(monkeypatch):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    bias = jnp.zeros((1, 2, 8, 8))

    def gradients(q):
        def f(q, bias):
            return jnp.sum(pf.flash_attention(q, q, q, bias, scale=jnp.float32(0.2), implementation="triton"))

        return jax.grad(f, (0, 1))(q, bias)

    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=P("x"), out_specs=(P("x"), P()))
    with pytest.raises(NotImplementedError, match="interpreted kernels.*check_vma=False"):
        mapped(Q)
    monkeypatch.setattr(devices, "current", lambda: devices.Device("cuda", "NVIDIA H200", (9, 0)))
    assert "flash_dscore" in str(jax.make_jaxpr(mapped)(Q))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
def test_lengths_of_any_integer_dtype(dtype):
    q = jnp.ones((1, 200, 1, 4))
    mask = pf.dense_mask(q, q, key_value_seq_lengths=np.array([100], dtype))
    assert mask[0, 0, 0].sum() == 100


def test_large_segment_ids_stay_apart():
    ids = np.array([[7, 7, 9, 9]], np.uint32) + np.uint32(3_000_000_000)
    blocks = np.kron(np.eye(2), np.ones((2, 2))).astype(bool)
    np.testing.assert_array_equal(pf.dense_mask(Q[:1, :4], K[:1, :4], q_segment_ids=ids)[0, 0], blocks)
    wide = np.array([[-1, 0, 2**32, 2**32]])
    with pytest.raises(ValueError, match="q_segment_ids holds numbers beyond int32, which JAX keeps only in x64 mode"):
        pf.dense_mask(Q[:1, :4], K[:1, :4], q_segment_ids=wide)
    with jax.enable_x64(True):
        mask = pf.dense_mask(Q[:1, :4], K[:1, :4], pf.Segments(wide, wide))[0, 0]
    assert mask.tolist() == [[False] * 4, [False, True, False, False], *[[False, False, True, True]] * 2]


@pytest.mark.parametrize("side", [2**31 - 2, 2**31, 2**40])
def test_windows_larger_than_any_position(side):
    assert pf.dense_mask(Q, K, pf.Window(None, side)).all() and pf.dense_mask(Q, K, pf.Window(side)).all()
    with pytest.raises(ValueError, match="left of mask Window must be an int or None; got 1.5"):
        pf.Window(1.5)


def test_far_offsets_are_clipped():
    assert pf.dense_mask(Q, K, is_causal=True, q_offset=jnp.array([2**31 - 1, 0]))[0].all()


@pytest.mark.parametrize("tier", TIERS)
def test_a_row_of_the_lowest_bias_sees_nothing(tier):
    bias = jnp.full((8, 8), jnp.finfo(jnp.float32).min)
    out, lse = pf.flash_attention(Q, K, V, bias, implementation=tier, return_lse=True)
    assert (out == 0).all() and jnp.isneginf(lse).all()


def test_x64_mode_with_array_scale_and_shared_bias():
    with jax.enable_x64(True):
        q, k, v = (x.astype(jnp.float32) for x in (Q, K, V))

        def f(bias, tier):
            return pf.flash_attention(q, k, v, bias, scale=jnp.asarray(0.3), implementation=tier).sum()

        gradient = jax.jit(jax.grad(f), static_argnums=1)
        grads = [gradient(jnp.zeros((8, 8), jnp.float32), tier) for tier in ("triton", "xla")]
        np.testing.assert_allclose(*grads, atol=1e-5)


@pf.mask
class Additive(pf.Mask):
    def allows(self, q, kv):
        return jnp.where(kv.index <= q.index, 0.0, -1e9)


@pf.mask
class Closure(pf.Mask):
    def allows(self, q, kv):
        return kv.index <= q.index + OUTSIDE


OUTSIDE = jnp.arange(1)


class Undecorated(pf.Mask):
    def allows(self, q, kv):
        return kv.index <= q.index


@pytest.mark.parametrize(
    "mask, error, text",
    [
        (Additive(), TypeError, "Additive.allows must return booleans.*float32; an additive mask goes in as bias="),
        (Closure(), ValueError, r"\(Closure\) uses an array that is not among its fields.*make it a field"),
        (Undecorated(), ValueError, "mask Undecorated is no pytree: decorate its class with @pallas_flash.mask"),
        (pf.Causal, ValueError, r"mask is the class Causal; give an instance, Causal\(...\)"),
        ("causal", ValueError, "mask must be an array; got str 'causal'"),
        (pf.And(pf.Causal(), jnp.ones((8, 8), bool)), ValueError, r"& and \| combine masks; an array goes in as Dense"),
        (pf.Lengths(kv_len=jnp.array([2.5, 5])), ValueError, "kv_len of mask Lengths must be an integer array"),
        (
            pf.Lengths(kv_len=jnp.array([[3], [5]])),
            ValueError,
            r"kv_len of mask Lengths must have shape \[batch or 1\]",
        ),
        (pf.Prefix(None), ValueError, "length of mask Prefix must be an array; got NoneType"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_masks_that_are_none(mask, error, text):
    with pytest.raises(error, match=text):
        pf.flash_attention(Q, K, V, mask=mask, implementation="triton")


@pytest.mark.parametrize("tier", TIERS)
def test_masks_with_lists(tier):
    ids = [[0] * 4 + [1] * 4] * 2
    for mask, option in (
        (pf.Lengths(kv_len=[3, 5]), {"key_value_seq_lengths": jnp.array([3, 5])}),
        (pf.Segments(ids, ids), {"q_segment_ids": jnp.array(ids)}),
    ):
        calls = {"mask": mask}, option
        results = [jax.jit(lambda o=o: pf.flash_attention(Q, K, V, **o, implementation=tier))() for o in calls]
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("q_len, kv_len", [(0, 8), (8, 0)])
def test_segment_ids_of_no_tokens(q_len, kv_len):
    ids = {"q_segment_ids": jnp.zeros((2, q_len), int), "kv_segment_ids": jnp.zeros((2, kv_len), int)}
    out = pf.flash_attention(Q[:, :q_len], K[:, :kv_len], V[:, :kv_len], **ids)
    assert out.shape == (2, q_len, *Q.shape[2:]) and not out.any()


def test_head_dims_of_zero():
    lse = pf.flash_attention(Q, K, V[..., :0], return_lse=True)[1]
    np.testing.assert_allclose(lse, pf.flash_attention(Q, K, V, return_lse=True)[1], rtol=1e-6)
    np.testing.assert_allclose(pf.flash_attention(Q[..., :0], K[..., :0], V)[:, 0], V.mean(1), atol=1e-6)
    with pytest.raises(NotImplementedError, match="head dim of 0"):
        pf.flash_attention(Q[..., :0], K[..., :0], V, implementation="triton")


def test_a_preset_in_the_configuration_is_no_argument():
    with jax.default_matmul_precision("BF16_BF16_F32"):
        assert pf.flash_attention(Q, K, V).shape == Q.shape


@pytest.mark.parametrize("options", [{"local_window_size": jnp.int32(2)}, {"is_causal": jnp.array(True)}], ids=str)
def test_explain_takes_what_the_call_takes(options):
    pf.flash_attention(Q, K, V, **options)
    assert pf.explain(Q, K, V, **options).forward == "xla"


def test_explain_raises_what_the_call_raises():
    for options in ({"mask": "x"}, {"implementation": 5}, {"scale": "large"}):
        texts = []
        for call in (pf.flash_attention, pf.explain):
            with pytest.raises(ValueError) as error:
                call(Q, K, V, **options)
            texts.append(str(error.value))
        assert texts[0] == texts[1]
    assert pf.explain(Q[:, :0], K, V).forward == "xla"


def test_debug_nans_with_an_empty_row():
    options = {"key_value_seq_lengths": jnp.array([0, 4]), "implementation": "triton"}
    with jax.debug_nans(True):
        jax.jit(jax.grad(lambda q: pf.flash_attention(q, K, V, **options).sum()))(Q)


def test_dense_picture_of_small_arrays():
    array = np.tri(4, dtype=bool)
    np.testing.assert_array_equal(pf.Dense(array).dense(4, 4)[0, 0], array)


def test_merge_of_float64_parts():
    with jax.enable_x64(True):
        o, lse = jax.random.normal(jax.random.key(1), (2, 1, 3, 1, 4)), jnp.zeros((1, 1, 3))
        merged, _ = pf.merge(o[0], lse, o[1], lse)
        np.testing.assert_allclose(merged, (o[0] + o[1]) / 2, atol=1e-15)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("shape", [(2,), (2, 3)], ids=str)
def test_float64_sinks_beside_float32_queries(tier, shape):
    """What jnp.zeros makes in x64 mode."""
    wanted = jax.grad(lambda s: pf.flash_attention(Q, K, V, sinks=s, implementation="xla").sum())(jnp.ones(shape))
    with jax.enable_x64(True):
        sinks = jnp.ones(shape, jnp.float64)
        got = jax.grad(lambda s: pf.flash_attention(Q, K, V, sinks=s, implementation=tier).sum())(sinks)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("sinks", [None, -jnp.inf], ids=["no sinks", "sinks of -inf"])
def test_guarded_loss_of_the_lse_of_empty_rows(tier, sinks):
    """Its cotangent is NaN there, because where() cannot guard a gradient; the rows are empty by a bias or a mask."""
    bias = jnp.zeros((1, 1, 8, 1)).at[:, :, 6:].set(jnp.finfo(jnp.float32).min)

    def loss(q, k, v, bias, sinks, **options):
        _, lse = pf.flash_attention(q, k, v, bias, sinks=sinks, implementation=tier, return_lse=True, **options)
        return jnp.where(lse > -1e30, lse * jnp.exp(-lse), 0.0).sum()

    sinks = None if sinks is None else jnp.full(2, sinks)
    argnums = (0, 1, 2) if sinks is None else (0, 1, 2, 4)
    by_bias = jax.grad(loss, (*argnums, 3))(Q, K, V, bias, sinks)
    by_mask = jax.grad(loss, argnums)(Q, K, V, None, sinks, query_seq_lengths=jnp.array([6, 6]))
    assert all(np.isfinite(np.asarray(g)).all() for g in (*by_bias, *by_mask))
    for a, b in zip(by_bias, by_mask, strict=False):
        np.testing.assert_allclose(a, b, atol=1e-5)
