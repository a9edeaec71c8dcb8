"""Who runs, who refuses and in which words; a named implementation never becomes another."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf
from pallas_flash import devices, dispatch
from pallas_flash.devices import Device

X = jax.ShapeDtypeStruct((2, 4096, 4, 64), jnp.bfloat16)
H200 = Device("cuda", "NVIDIA H200", (9, 0))
TURING = Device("cuda", "Tesla T4", (7, 5))


@pytest.fixture
def on(monkeypatch):
    """Pretends to be on a device."""
    return lambda device: monkeypatch.setattr(devices, "current", lambda: device)


def test_auto_takes_the_kernel_on_a_gpu(on):
    on(H200)
    plan = pf.explain(X, X, X, is_causal=True)
    assert (plan.forward, plan.backward) == ("triton", "triton") and plan.refusals == ()
    text = str(plan)
    for part in ("bfloat16", "4096 queries x 4096 keys", "Causal", "H200", "forward:  triton", "dkv tile"):
        assert part in text


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_ampere_and_newer_pass(on, capability):
    """BR-127."""
    on(Device("cuda", "a GPU", capability))
    assert pf.explain(X, X, X).forward == "triton"


def test_older_gpu_falls_back_with_one_warning(on):
    """BR-114, BR-123."""
    on(TURING)
    dispatch._warned.clear()
    with pytest.warns(UserWarning, match=r"plain XLA.*compute capability 8.0 .*Tesla T4 has 7.5"):
        plan = pf.explain(X, X, X)
    assert plan.forward == "xla" and "Tesla T4 has 7.5" in str(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pf.explain(X, X, X)
    with pytest.raises(NotImplementedError, match=r"'triton' cannot run.*\n.*compute capability 8.0"):
        pf.explain(X, X, X, implementation="triton")


def test_the_warning_points_at_the_caller(on):
    on(TURING)
    dispatch._warned.clear()
    q = jnp.ones((1, 100, 1, 16))
    with pytest.warns(UserWarning, match="plain XLA") as record:
        pf.flash_attention(q, q, q)
    assert record[0].filename == __file__


def test_cpu_is_named(on):
    """BR-124: the message names the platform and the way out."""
    q = jnp.ones((1, 4, 1, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # falling back on a CPU is no surprise
        assert pf.explain(q, q, q).forward == "xla"
    with pytest.raises(NotImplementedError, match=r"(?s)platform is 'cpu'.*pallas_flash.interpret.*'xla'"):
        pf.flash_attention(q, q, q, implementation="triton")
    with pf.interpret():
        assert pf.explain(q, q, q, implementation="triton").forward == "triton"
        assert pf.explain(q, q, q).forward == "xla"


def test_float64_is_refused_by_the_kernels(on):
    on(H200)
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((1, 8, 1, 16), jnp.float64)
        with pytest.raises(NotImplementedError, match="dtype float64 has no kernel: cast to one of"):
            pf.explain(x, x, x, implementation="triton")


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 6, 1, 8), jnp.float64)
        out = pf.flash_attention(q, k, v, is_causal=True)
        s = np.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(8)
        s = np.where(np.tril(np.ones((6, 6), bool)), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        want = np.einsum("bnts,bsnd->btnd", p / p.sum(-1, keepdims=True), v)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, want, atol=1e-14)


def test_head_dim_beyond_the_largest(on):
    on(H200)
    x = jax.ShapeDtypeStruct((1, 8, 1, 1024), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="head dims 1024 .* beyond 512"):
        pf.explain(x, x, x, implementation="triton")


REFUSED = {  # device, head dim, dtype, reason
    "float64": (H200, 16, "float64", "dtype float64 has no kernel: cast to one of bfloat16, float16, float32"),
    "head dim": (H200, 1024, "float16", "head dims 1024 .* are beyond 512"),
    "GPU": (TURING, 16, "float16", "compute capability 8.0 .* and Tesla T4 has 7.5"),
    "platform": (Device("rocm", "MI300", (9, 4)), 16, "float16", "an NVIDIA GPU and the platform is 'rocm'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_refusal_is_told(on, name):
    """BR-114, BR-125: by default one warning, by name an error, and explain() says which path a call would take."""
    device, dim, dtype, reason = REFUSED[name]
    on(device)
    dispatch._warned.clear()
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((1, 100, 1, dim), dtype)
        with pytest.warns(
            UserWarning, match=f"on plain XLA, in memory quadratic in the length, because .*{reason}"
        ) as w:
            for _ in range(2):
                plan = pf.explain(x, x, x)
        with pytest.raises(NotImplementedError, match=f"(?s)implementation='triton' cannot run this call.*{reason}"):
            pf.explain(x, x, x, implementation="triton")
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(lambda x: pf.flash_attention(x, x, x, implementation="triton"), x)
    assert len(w) == 1 and (plan.forward, plan.backward) == ("xla", "xla") and re.search(reason, str(plan))


@pytest.mark.parametrize(
    "queries, keys, batch, window, forward",
    [
        (1, 8192, 4, None, "xla"),
        (64, 2048, 1, None, "xla"),
        (1, 4096, 4, None, "triton"),
        (1, 16384, 8, None, "triton"),  # enough rows to fill the GPU
        (64, 2048, 4, None, "triton"),
        (65, 8192, 1, None, "triton"),
        (1, 1024, 1, None, "triton"),
        (1, 8192, 1, (512, 0), "triton"),
    ],
)
def test_few_queries_on_many_keys_go_to_xla(on, queries, keys, batch, window, forward):
    """The measured rule: benchmarks/results/decode.json."""
    on(H200)
    q = jax.ShapeDtypeStruct((batch, queries, 16, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((batch, keys, 4, 128), jnp.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # its memory is linear in the keys: nothing to warn of
        plan = pf.explain(q, k, k, local_window_size=window)
        named = pf.explain(q, k, k, local_window_size=window, implementation="triton")
    assert plan.forward == forward and named.forward == "triton"
    assert (forward == "xla") == ("keep too few programs busy" in str(plan))


def test_a_sequence_is_an_order_of_preference(on):
    on(TURING)
    plan = pf.explain(X, X, X, implementation=("triton", "xla_chunked"))
    assert plan.forward == "xla_chunked" and plan.refusals[0][0] == "triton"


def test_use_implementation_is_a_scoped_default(on):
    on(H200)
    with pf.use_implementation("xla"):
        assert pf.explain(X, X, X).forward == "xla"
        assert pf.explain(X, X, X, implementation="triton").forward == "triton"
        with pf.use_implementation(None):
            assert pf.explain(X, X, X).forward == "triton"
    assert pf.explain(X, X, X).forward == "triton"


def test_unknown_names():
    q = jnp.ones((1, 4, 1, 16))
    with pytest.raises(ValueError, match="implementation must be None or among 'triton'.*got 'flash'"):
        pf.flash_attention(q, q, q, implementation="flash")
    with pytest.raises(ValueError, match="empty sequence"):
        pf.flash_attention(q, q, q, implementation=())
    with pytest.raises(ValueError, match="got 'flash'"), pf.use_implementation("flash"):
        pass


def test_empty_problem_never_reaches_a_kernel(on):
    """BR-51: zero-sized axes, also under grad."""
    on(H200)
    for q_len, kv_len, batch in ((3, 0, 2), (0, 3, 2), (3, 3, 0)):
        q, k = jnp.ones((batch, q_len, 2, 8)), jnp.ones((batch, kv_len, 2, 8))
        out, lse = pf.flash_attention(q, k, k, return_lse=True)
        assert pf.flash_attention(q, k, k, implementation="triton").shape == q.shape
        assert out.shape == q.shape and (np.asarray(out) == 0).all() and np.isneginf(np.asarray(lse)).all()
        grads = jax.jit(jax.grad(lambda q, k, v: pf.flash_attention(q, k, v).sum(), (0, 1, 2)))(q, k, k)
        assert all(g.shape == x.shape and (np.asarray(g) == 0).all() for g, x in zip(grads, (q, k, k)))


def test_the_day_the_backend_is_gone(monkeypatch, on):
    on(H200)
    monkeypatch.setattr(dispatch.TIERS["triton"], "_MISSING", "the installed JAX 9.9 has no Triton backend")
    with pytest.raises(NotImplementedError, match="has no Triton backend"):
        pf.explain(X, X, X, implementation="triton")


def test_contexts_reach_what_is_compiled_already():
    """A compiled function called inside a context must not answer from before it."""
    q = jnp.ones((1, 4, 1, 16))
    traced = []

    @jax.jit
    def attend(q):
        traced.append(pf.explain(q, q, q).forward)
        return pf.flash_attention(q, q, q)

    attend(q)
    with pf.use_implementation("triton"), pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        attend(q)
    with pf.use_implementation(["triton"]), pf.interpret():
        attend(q)
    attend(q)
    assert traced[:2] == ["xla", "triton"] and set(traced[2:]) <= {"xla"}
