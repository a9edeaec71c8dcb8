"""JAX's transformations around the kernels, interpreted; the plain tier is the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import shard_map
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_flash as pf

from .programs import kernels_in

Q, K, V = (jax.random.normal(jax.random.key(i), (2, 20, n, 8)) for i, n in enumerate((4, 2, 2)))


def attend(q, k, v, bias=None, tier="triton", **options):
    return pf.flash_attention(q, k, v, bias, implementation=tier, is_causal=True, **options)


plain = jax.jit(functools.partial(attend, tier="xla"))


def close(a, b, atol=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


@pytest.fixture(autouse=True)
def interpreted():
    with pf.interpret():
        yield


def with_gradients(f):
    @jax.jit
    def both(*a):
        out, vjp = jax.vjp(f, *a)
        return out, *vjp(jnp.cos(out))

    return both


plain_with_gradients = with_gradients(plain)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 1)], ids=str)
def test_vmap_over_any_subset_also_of_the_gradient(axes):
    """BR-65."""
    args = [x if axis is None else jnp.stack([x, 2 * x, -x], axis) for x, axis in zip((Q, K, V), axes)]

    def both(f):
        return jax.jit(jax.vmap(with_gradients(f), axes))(*args)

    close(both(attend), both(plain))


def test_vmap_over_masks_lengths_and_offsets():
    mask = jax.random.bernoulli(jax.random.key(5), 0.6, (3, 1, 1, 20, 20))
    lengths = jnp.array([[3, 20], [7, 1], [20, 20]])
    offsets = jnp.array([0, 5, -2])

    def both(tier):
        def f(mask, lengths, offset):
            return attend(Q, K, V, tier=tier, mask=mask, key_value_seq_lengths=lengths, q_offset=offset)

        return jax.jit(jax.vmap(f))(mask, lengths, offsets)

    close(both("triton"), both("xla"))


def test_nested_vmap_and_unbatched_input():
    """BR-67."""
    q, k, v = (jnp.stack([jnp.stack([x, x + 1])] * 2) for x in (Q, K, V))
    nested = jax.jit(jax.vmap(jax.vmap(jax.vmap(attend))))(q, k, v)
    close(nested, plain(q, k, v))


def test_jacrev():
    """BR-63."""
    q, k, v = (x[:1, :4, :2, :8] for x in (Q, K, V))
    close(*(jax.jit(jax.jacrev(f, (0, 1, 2)))(q, k, v) for f in (attend, plain)))


def test_scan_while_and_cond():
    def scanned(f):
        return jax.lax.scan(lambda q, _: (f(q, K, V), None), Q, None, length=3)[0]

    close(jax.jit(lambda: scanned(attend))(), plain(plain(plain(Q, K, V), K, V), K, V))
    looped = jax.jit(lambda: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, attend(c[1], K, V)), (0, Q)))
    close(looped()[1], plain(plain(Q, K, V), K, V))
    chosen = jax.jit(lambda p: jax.lax.cond(p, lambda: attend(Q, K, V), lambda: Q))
    close(chosen(True), plain(Q, K, V))
    close(chosen(False), Q)


def test_remat_saves_the_named_results():
    """BR-70: with the names saved the forward kernel stands once in the gradient, with nothing saved twice."""
    keep = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    def loss(policy):
        return jax.grad(lambda q: jnp.sum(jax.checkpoint(lambda q: jnp.sin(attend(q, K, V)), policy=policy)(q)))

    saved, nothing = (kernels_in(jax.make_jaxpr(loss(policy))(Q)) for policy in (keep, None))
    assert saved.count("flash_forward") == 1 and nothing.count("flash_forward") == 2
    close(jax.jit(loss(keep))(Q), plain_with_gradients(Q, K, V)[1])


def test_no_bias_kernel_without_a_bias():
    kernels = kernels_in(jax.make_jaxpr(with_gradients(attend))(Q, K, V))
    assert kernels == ["flash_dkv", "flash_dq", "flash_forward"]


def test_x64_mode():
    with jax.enable_x64(True):
        got = with_gradients(attend)(Q, K, V)
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(got))
    close(got, plain_with_gradients(Q, K, V))


def test_eval_shape_and_donation():
    assert jax.eval_shape(attend, Q, K, V).shape == Q.shape
    donated = jax.jit(attend, donate_argnums=0)(Q + 0, K, V)
    close(donated, plain(Q, K, V))


def test_jaxpr_round_trip():
    """BR-79."""
    closed = jax.make_jaxpr(attend)(Q, K, V)
    close(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, Q, K, V)[0], plain(Q, K, V))


def test_forward_mode_and_second_order_name_the_way_out():
    """BR-68."""
    q = Q[:1, :6, :2]
    k, v = K[:1, :6, :1], V[:1, :6, :1]

    def jvp(f):
        return lambda q: jax.jvp(lambda q: f(q, k, v), (q,), (q,))[1]

    def second(f):
        return jax.grad(lambda q: jnp.sum(jax.grad(lambda q: jnp.sum(jnp.sin(f(q, k, v))))(q) ** 2))

    for derivative in (jvp, second, lambda f: jax.jit(second(f))):
        with pytest.raises(NotImplementedError, match="implementation='xla', where both work"):
            derivative(attend)(q)
    # Inside jit, JAX finds forward mode only after our function has returned, and says so itself.
    with pytest.raises(TypeError, match="can't apply forward-mode"):
        jax.jit(jvp(attend))(q)
    step = 1e-3
    finite = (plain(q * (1 + step), k, v) - plain(q * (1 - step), k, v)) / (2 * step)
    close(jax.jit(jvp(plain))(q), finite, atol=1e-3)
    assert np.isfinite(np.asarray(jax.jit(second(plain))(q))).all()


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_shard_map(spec):
    """BR-71: no collective inside attention, forward and backward."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    f = shard_map(with_gradients(attend), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(f).lower(Q, K, V).compile()
    assert not any(name in compiled.as_text() for name in COLLECTIVES)
    close(compiled(Q, K, V), plain_with_gradients(Q, K, V))


SPECS = {"batch": P("x"), "heads": P(None, None, "y"), "both": P("x", None, "y"), "x and y": P(("x", "y"))}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("extra", ["none", "bias and segments"])
def test_sharded_inputs_under_jit(name, extra):
    """BR-72, BR-135: batch and head sharding under plain jit, on virtual devices, without a collective."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    q, k, v = (jnp.concatenate([a, a[::-1]]) for a in (Q, K, V))
    bias = jax.random.normal(jax.random.key(8), (1, 1, 20, 20)) if extra != "none" else None
    ids = jnp.asarray(np.arange(20)[None].repeat(4, 0) // 7) if extra != "none" else None

    def f(q, k, v, bias, ids, tier="triton"):
        def attention(*a):
            return attend(*a, tier=tier, q_segment_ids=ids)

        out, vjp = jax.vjp(attention, q, k, v, bias)
        return out, *vjp(jnp.sin(out))

    place = NamedSharding(mesh, SPECS[name])
    placed = [jax.device_put(a, place) for a in (q, k, v)]
    compiled = jax.jit(f).lower(*placed, bias, ids).compile()
    text = compiled.as_text()
    if bias is None:
        assert not any(word in text for word in COLLECTIVES)
    else:  # the gradient of a bias that all rows and heads share is summed over devices; nothing is gathered
        assert "all-gather" not in text and "all-to-all" not in text
    got = compiled(*placed, bias, ids)
    assert got[0].sharding.is_equivalent_to(place, 4)
    close(got, jax.jit(functools.partial(f, tier="xla"))(q, k, v, bias, ids))


def test_sharded_sequence_is_right():
    """An axis that kernels keep whole is gathered, not refused and not wrong."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    placed = [jax.device_put(a, NamedSharding(mesh, P(None, "x"))) for a in (Q, K, V)]
    close(with_gradients(attend)(*placed), plain_with_gradients(Q, K, V))


@pytest.mark.parametrize("tier", ["triton", "xla", "xla_chunked"])
def test_callers_may_forbid_promotion(tier):
    """jax_numpy_rank_promotion="raise" and jax_numpy_dtype_promotion="strict" are for finding mistakes in a model."""
    q, k, v = (a.astype(jnp.bfloat16) for a in (Q, K, V))
    bias = jnp.ones((1, 1, 20, 20))
    options = {
        "mask": pf.Causal() | pf.Prefix(jnp.array([3, 4])),
        "key_value_seq_lengths": jnp.array([20, 7]),
        "q_segment_ids": jnp.zeros((2, 20), jnp.int32),
        "scale": jnp.float32(0.3),
        "logits_soft_cap": 3.0,
    }
    place = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x"))

    def both(*a):
        f = functools.partial(attend, bias=bias, tier=tier, **options)
        return [x.astype(jnp.float32) for x in with_gradients(f)(*a)]

    want = both(q, k, v)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        options["mask"].dense(20, 20)
        got = both(*(jax.device_put(a, place) for a in (q, k, v)))
    close(got, want, atol=0.02)


def test_fused_projection_slices():
    """BR-77."""
    fused = jnp.stack([Q, Q + 1, Q - 1], axis=2)

    def f(fused, tier):
        q, k, v = (fused[:, :, i] for i in range(3))
        return attend(q, k, v, tier=tier)

    close(*(jax.jit(functools.partial(f, tier=tier))(fused) for tier in ("triton", "xla")))
    moved = jnp.moveaxis(Q, 2, 1)
    close(jax.jit(lambda m: attend(*(jnp.moveaxis(m, 1, 2),) * 3))(moved), plain(Q, Q, Q))
