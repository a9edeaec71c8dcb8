"""Bug reports against other libraries, as in test_bug_reports.py: dropout, sinks, decoding, debug flags, work done."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf
from pallas_flash.visits import kv_visits, q_visits

from .accuracy import error, normal, oracle
from .cases import Case
from .programs import equations, kernels_in
from .test_bug_reports import TIER, small_and_real
from .test_forward_backward import compare_arrays, run

everywhere, gpu = pytest.mark.everywhere, pytest.mark.gpu
IMPLEMENTATIONS = [TIER, "xla", "xla_chunked"]


@everywhere
@pytest.mark.parametrize("implementation, dtype", [(TIER, "float32"), ("xla", "float64"), ("xla_chunked", "float64")])
def test_br_11_debug_flags_in_x64_mode(implementation, dtype, kernels):
    """float64 keeps its precision; that kernels refuse it in words is in test_dispatch.py."""
    with jax.enable_x64(True):
        q, k, v, do, dlse = (x.astype(dtype) for x in Case("11", 1, 20, 20, 2, 1).arrays())
        with kernels(), jax.debug_nans(True), jax.debug_infs(True):
            got = run((q, k, v, do, dlse), {}, implementation, (("is_causal", True), ("precision", "highest")))
    want = oracle(q, k, v, do, dlse, {"is_causal": True})
    for name, array in want.items():
        assert got[name].dtype == dtype, name
        assert error(got[name], array) <= {"float32": 5e-6, "float64": 1e-13}[dtype], name


@pytest.mark.parametrize("implementation", [TIER, "xla"])
def test_br_11_debug_flags_outside_jit(implementation):
    """Operation by operation: no infinity is made where every query sees a key.

    The loop of xla_chunked keeps the constant -inf of an empty row's lse for its backward pass, and only jit drops it.
    """
    q, k, v, do, _ = Case("11", 1, 20, 20, 2, 1).arrays()

    def loss(q, k, v, sinks):
        out = pf.flash_attention(q, k, v, is_causal=True, sinks=sinks, implementation=implementation)
        return (out * do).sum()

    with pf.interpret(), jax.debug_nans(True), jax.debug_infs(True):
        got = jax.grad(loss, (0, 1, 2, 3))(q, k, v, jnp.ones(2))
    assert all(bool(jnp.isfinite(x).all()) for x in got)


def naive(q, k, v, logits):
    """Attention in 16 bits around a float32 softmax of ``logits`` of a given dtype."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("btnd,bsnd->bnts", q, k, preferred_element_type=logits) * jnp.asarray(q.shape[-1] ** -0.5, logits)
    p = jax.nn.softmax(s.astype(jnp.float32), -1).astype(q.dtype)
    return jnp.einsum("bnts,bsnd->btnd", p, v, preferred_element_type=jnp.float32).astype(q.dtype)


@pytest.mark.parametrize("size", small_and_real([(64, 32), (1, 32)], [(1024, 128), (1, 128)]), ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_br_12_logits_are_not_rounded_to_16_bits(implementation, size, kernels):
    q_len, dim = size
    arrays = Case("12", 2, q_len, 1024 if dim == 128 else 64, 4, 2, dim, dtype="bfloat16").arrays()
    q, k, v, do, dlse = (30 * arrays[0].astype(jnp.float32)).astype(jnp.bfloat16), *arrays[1:]
    want = oracle(q, k, v, do, 0 * dlse, {})
    names = ("out", "dq", "dk", "dv") if q_len > 1 else ("out",)  # one query is decoding, without gradients

    def errors(attention):
        out, vjp = jax.vjp(attention, q, k, v) if q_len > 1 else (attention(q, k, v), lambda do: ())
        arrays = (out, *vjp(do))
        return {name: error(x.astype(jnp.float32), want[name]) for name, x in zip(names, arrays)}

    with kernels():
        ours = errors(jax.jit(lambda *a: pf.flash_attention(*a, implementation=implementation)))
    limits = {name: 2 * e + 1e-3 for name, e in errors(lambda *a: naive(*a, jnp.float32)).items()}
    rounded = errors(lambda *a: naive(*a, jnp.bfloat16))
    for name in names:
        assert ours[name] <= limits[name] < rounded[name], name


def test_br_19_gradients_of_a_merge():
    """Also of itself: 0 where both halves are empty, the weights elsewhere."""
    lse = jnp.array([[[-jnp.inf, -jnp.inf, 0.5, 0.5]], [[-jnp.inf, 0.3, -jnp.inf, 0.3]]])
    o = normal(0, 2, 1, 4, 1, 8)

    def joined(lse, o):
        out, total = pf.merge(o[0], lse[0][None], o[1], lse[1][None])
        return (out * jnp.cos(jnp.arange(32.0)).reshape(out.shape)).sum() + jnp.where(
            jnp.isfinite(total), total, 0
        ).sum()

    dlse, do = jax.grad(joined, (0, 1))(lse, o)
    assert bool(jnp.isfinite(dlse).all()) and (dlse[:, 0, 0] == 0).all() and (do[:, 0, 0] == 0).all()
    step = 1e-3
    moved = [joined(lse.at[1, 0, 3].add(h), o) for h in (step, -step)]
    np.testing.assert_allclose(dlse[1, 0, 3], (moved[0] - moved[1]) / (2 * step), rtol=1e-2)


@everywhere
@pytest.mark.parametrize("implementation", [TIER, "xla"])
def test_br_19_merge_of_two_empty_halves(implementation, kernels):
    """Query 2 sees no key of either half, query 3 only the first half's, query 4 only the second's."""
    q, k, v, do, dlse = Case("19", 1, 6, 16, 2, 2).arrays()
    mask = np.ones((6, 16), bool)
    mask[2], mask[3, 8:], mask[4, :8] = False, False, False
    options = {"mask": jnp.asarray(mask)}

    def halves(q, k, v):
        parts = [
            pf.flash_attention(
                q,
                k[:, s],
                v[:, s],
                mask=mask[:, s],
                implementation=implementation,
                return_lse=True,
                precision="highest",
            )
            for s in (slice(8), slice(8, None))
        ]
        return pf.merge(*parts[0], *parts[1])

    @jax.jit
    def with_gradients(q, k, v):
        out, vjp = jax.vjp(halves, q, k, v)
        return *out, *vjp((do, dlse))

    with kernels():
        got = dict(zip(("out", "lse", "dq", "dk", "dv"), with_gradients(q, k, v)))
    want = oracle(q, k, v, do, dlse, options)
    for name, array in want.items():
        assert error(got[name], array) <= 5e-6, name
    assert (got["out"][:, 2] == 0).all() and np.isneginf(got["lse"][:, :, 2]).all() and (got["dq"][:, 2] == 0).all()


@everywhere
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_br_24_dropout_with_an_empty_row(implementation, kernels):
    mask = np.random.default_rng(3).random((2, 1, 3, 4)) < 0.7
    mask[:, :, 0], mask[0, :, 1] = True, False
    options = {"mask": jnp.asarray(mask), "dropout_rate": 0.5, "dropout_rng": jax.random.key(2)}
    got = compare_arrays(Case("24", 2, 3, 4, 2, 2, 4).arrays(), options, implementation, kernels)
    for name in ("out", "dq"):
        assert (np.asarray(got[name])[0, 1] == 0).all() and (np.asarray(got[name])[:, 0] != 0).any(), name


@pytest.mark.parametrize(
    "size", small_and_real([(1, 40, 8, 1, 16, 5, "float32")], [(1, 300, 64, 8, 64, 127, "bfloat16")]), ids=str
)
def test_br_90_sinks_with_a_window_and_grouped_heads(size, kernels):
    batch, length, heads, kv_heads, dim, window, dtype = size
    arrays = Case("90", batch, length, length, heads, kv_heads, dim, dtype=dtype).arrays()
    options = {"is_causal": True, "local_window_size": (window, 0)}
    got = compare_arrays(arrays, {**options, "sinks": 2 * normal(8, heads)}, TIER, kernels)
    with kernels():
        with_none = run(arrays, {}, TIER, tuple(options.items()))
        with_closed = run(arrays, {"sinks": jnp.full(heads, -jnp.inf)}, TIER, tuple(options.items()))
    assert (np.asarray(with_closed.pop("dsinks")) == 0).all() and (np.asarray(got["dsinks"]) != 0).all()
    tolerance = {"float32": 1e-6, "bfloat16": 1e-2}[dtype]
    for name, array in with_none.items():
        pair = (np.asarray(x, np.float32) for x in (with_closed[name], array))
        np.testing.assert_allclose(*pair, rtol=tolerance, atol=tolerance)
        assert (np.asarray(got[name]) != np.asarray(array)).any(), name


@pytest.mark.parametrize("implementation", small_and_real(["xla"], [TIER]))
def test_br_95_dropout_by_its_statistics(implementation, kernels):
    """With values that are the identity, the output is the weights. That all tiers draw alike is in test_options.py."""
    batch, length, heads, rate, steps = 2, 8, 3, 0.3, 2000
    q, k = normal(0, batch, length, heads, 16), normal(1, batch, length, heads, 16)
    v = jnp.broadcast_to(jnp.eye(length)[:, None], (batch, length, heads, length))
    keys = jax.random.split(jax.random.key(95), steps)

    def attend(key, rate=rate, broadcast=False):
        options = {"dropout_rng": key, "dropout_rate": rate, "broadcast_dropout": broadcast}
        return pf.flash_attention(q, k, v, implementation=implementation, precision="highest", **options)

    with kernels():
        weights = np.asarray(jax.jit(jax.vmap(attend))(keys)).swapaxes(2, 3)  # [steps, B, N, T, S]
        shared = np.asarray(jax.jit(jax.vmap(lambda key: attend(key, broadcast=True)))(keys[:9])).swapaxes(2, 3) > 0
        again = np.asarray(jax.jit(attend)(keys[7])).swapaxes(1, 2)
        whole = np.asarray(jax.jit(lambda key: attend(key, rate=0.0))(keys[0])).swapaxes(1, 2)
    kept = weights > 0
    np.testing.assert_array_equal(again > 0, kept[7])

    def as_expected(events, probability):
        return abs(events.mean() - probability) < 4 * (probability * (1 - probability) / events.size) ** 0.5

    assert as_expected(kept, 1 - rate)
    alike = rate**2 + (1 - rate) ** 2  # how often two independent draws agree: of steps or layers, rows, heads
    for one, other in ((kept[::2], kept[1::2]), (kept[:, 0], kept[:, 1]), (kept[:, :, 0], kept[:, :, 1])):
        assert as_expected(one == other, alike)
    np.testing.assert_array_equal(shared, np.broadcast_to(shared[:, :1, :1], shared.shape))
    assert as_expected(shared[:-1, 0, 0] == shared[1:, 0, 0], alike)
    deviations = (weights.mean(0) - whole) / (weights.std(0) / steps**0.5)
    assert np.abs(deviations).max() < 5 and 0.8 < deviations.std() < 1.2


@everywhere
def test_br_98_chunks_of_a_prompt_into_a_cache(kernels):
    """5 tokens, 3 single ones, 4 more, at other places of the cache in each row; what is not written yet is NaN."""
    q, k, v, do, dlse = Case("98", 2, 16, 16, 4, 2).arrays()
    start = jnp.array([0, 3])
    rows = jnp.arange(2)[:, None]
    of = lambda x, place, count: x[rows, place[:, None] + jnp.arange(count)]

    def step(cache, place, q, k, v):
        at = place[:, None] + jnp.arange(q.shape[1])
        cache = [old.at[rows, at].set(new) for old, new in zip(cache, (k, v))]
        lengths = place + q.shape[1]
        options = {"q_offset": place, "key_value_seq_lengths": lengths, "precision": "highest"}
        return cache, pf.flash_attention(q, *cache, is_causal=True, implementation=TIER, **options)

    step = jax.jit(step)
    before = (jnp.arange(20) < start[:, None])[..., None, None]
    cache = [jnp.where(before, jnp.pad(x, ((0, 0), (0, 4), (0, 0), (0, 0))), jnp.nan) for x in (k, v)]
    place, outs = start, []
    for count in (5, 1, 1, 1, 4):
        with kernels():
            cache, out = step(cache, place, *(of(x, place, count) for x in (q, k, v)))
        outs.append(out)
        place = place + count
    want = oracle(q, k, v, do, dlse, {"is_causal": True})["out"]
    np.testing.assert_allclose(jnp.concatenate(outs, 1), of(want, start, 12), atol=1e-5)


@pytest.mark.parametrize("size", small_and_real([(40, (3, 9, 16, 40), 8)], [(1000, (5, 129, 256, 1000), 128)]), ids=str)
def test_br_106_window_while_decoding(size, kernels):
    length, filled, left = size
    q, k, v, *_ = Case("106", 4, length, length, 4, 2).arrays()
    filled = jnp.array(filled)
    newest = q[jnp.arange(4), filled - 1][:, None]
    options = {"is_causal": True, "local_window_size": (left, 0), "implementation": TIER, "precision": "highest"}
    attend = jax.jit(lambda *a, **given: pf.flash_attention(*a, **options, **given))

    place = jnp.arange(length)
    seen = ((place < filled[:, None]) & (place >= filled[:, None] - 1 - left))[..., None, None]
    with kernels():
        out = attend(newest, k, v, q_offset=filled - 1, key_value_seq_lengths=filled)
        hidden = (jnp.where(seen, x, jnp.nan) for x in (k, v))
        poisoned = attend(newest, *hidden, q_offset=filled - 1, key_value_seq_lengths=filled)
        bottom_right = jax.jit(
            lambda *a: pf.flash_attention(*a, causal_alignment="bottom_right", key_value_seq_lengths=filled, **options)
        )(newest, k, v)
        prefill = attend(q, k, v)
    np.testing.assert_array_equal(out, poisoned)
    np.testing.assert_allclose(out, bottom_right, atol=1e-6)
    np.testing.assert_allclose(out[:, 0], prefill[jnp.arange(4), filled - 1], atol=1e-5)
    scores = jnp.einsum("bnd,bsnd->bns", newest[:, 0], jnp.repeat(k, 2, 2), precision="highest") / 4
    weights = jax.nn.softmax(jnp.where(seen[..., 0].swapaxes(1, 2), scores, -jnp.inf), -1)
    want = jnp.einsum("bns,bsnd->bnd", weights, jnp.repeat(v, 2, 2), precision="highest")
    np.testing.assert_allclose(out[:, 0], want, atol=1e-5)  # min(length, left + 1) keys, and no other


def tiles_of(visits):
    """Tiles visited, and how many of them without a test of each pair."""
    first, full, full_end, end = np.moveaxis(np.asarray(visits.bounds), -1, 0)
    return int((end - first).sum()), int((full_end - full).sum())


@pytest.mark.parametrize("blocks", [(64, 64), (128, 32), (32, 128)], ids=str)
@pytest.mark.parametrize("visits", [kv_visits, q_visits])
def test_br_113_an_array_that_is_causal_costs_no_more_tiles(visits, blocks):
    length = 1000
    array = pf.Dense(np.tri(length, dtype=bool)[None, None])
    got, want, every = (tiles_of(visits(m, length, length, *blocks, 0)) for m in (array, pf.Causal(), pf.Full()))
    assert got == want and got[0] < 0.65 * every[0]
    long = 32768
    causal, window = (
        tiles_of(visits(m, long, long, *blocks, 0))[0] for m in (pf.Causal(), pf.Causal() & pf.Window(4095, 0))
    )
    assert window <= causal / 3


def kernel_calls(jaxpr):
    """(shape of the first result, whether a loop runs it) of each kernel in a program."""
    for equation, around in equations(jaxpr):
        if equation.primitive.name == "pallas_call":
            yield equation.outvars[0].aval.shape, bool({"scan", "while"} & set(around))


def test_br_118_vmap_of_a_gradient_is_no_loop():
    q = jnp.ones((32, 2, 16, 4, 16))

    def gradients(q, k, v):
        return jax.grad(lambda *a: pf.flash_attention(*a, implementation=TIER).sum(), (0, 1, 2))(q, k, v)

    with pf.interpret():
        single, batched = jax.make_jaxpr(gradients)(q[0], q[0], q[0]), jax.make_jaxpr(jax.vmap(gradients))(q, q, q)
        looped = jax.make_jaxpr(lambda q: jax.lax.map(lambda q: gradients(q, q, q), q))(q)
    assert kernels_in(batched) == kernels_in(single) == ["flash_dkv", "flash_dq", "flash_forward"]
    assert all(shape[0] == 32 and not in_loop for shape, in_loop in kernel_calls(batched))
    assert all(in_loop for _, in_loop in kernel_calls(looped))  # it would have been seen


NO_WARNING = """
import jax, jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
import pallas_flash
q = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.bfloat16)
gradient = jax.grad(lambda *a: pallas_flash.flash_attention(*a, is_causal=True).astype(jnp.float32).sum(), (0, 1, 2))
with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))):
    assert pallas_flash.explain(q, q, q).backward == "triton"
    assert "flash_dkv" in jax.jit(gradient).trace(q, q, q).lower(lowering_platforms=("cuda",)).as_text()
"""


def test_br_122_import_and_gradient_with_warnings_as_errors():
    """All but the announcement of JAX itself that its backend goes, which a caller's own jit raises while lowering."""
    announced = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
    subprocess.run([sys.executable, "-W", "error", "-W", announced, "-c", NO_WARNING], check=True)
