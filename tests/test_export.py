"""BR-78, jax.export: forward and gradient, written here and run in a new process; a symbolic batch size."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import pallas_flash as pf

SHAPE = (16, 4, 16)
RUN = """
import sys, numpy as np, jax
from jax import export
program, arrays, results = sys.argv[1:]
call = export.deserialize(bytearray(open(program, "rb").read())).call
given = np.load(arrays)
np.savez(results, *jax.tree.leaves(call(*(given[name] for name in given.files))))
assert "pallas_flash" not in sys.modules
"""


def with_gradients(tier):
    def loss(q, k, v, slopes):
        o, lse = pf.flash_attention(
            q, k, v, is_causal=True, alibi_slopes=slopes, logits_soft_cap=3.0, sinks=slopes, return_lse=True,
            implementation=tier,
        )  # fmt: skip
        return jnp.sum(jnp.sin(o)) + jnp.sum(lse), o

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))


def arrays(batch):
    keys = jax.random.split(jax.random.key(0), 3)
    return *(jax.random.normal(key, (batch, *SHAPE)) for key in keys), jnp.ones(SHAPE[1])


def shapes(batch):
    whole = jax.ShapeDtypeStruct((batch, *SHAPE), jnp.float32)
    return whole, whole, whole, jax.ShapeDtypeStruct(SHAPE[1:2], jnp.float32)


@pytest.mark.parametrize("tier", ["xla", "triton"])
def test_round_trip_to_a_new_process(tier, tmp_path):
    with pf.interpret():
        function = with_gradients(tier)
        exported = export.export(function)(*shapes(2))
    given = arrays(2)
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "given.npz", *given)
    files = [str(tmp_path / name) for name in ("program", "given.npz", "results.npz")]
    subprocess.run([sys.executable, "-c", RUN, *files], check=True)
    results = np.load(tmp_path / "results.npz")
    want = jax.tree.leaves(with_gradients("xla")(*given))
    for name, array in zip(results.files, want, strict=True):
        np.testing.assert_allclose(results[name], array, atol=2e-5)


@pytest.mark.parametrize("tier", ["xla", "xla_chunked"])
def test_symbolic_batch_size(tier):
    (batch,) = export.symbolic_shape("b")
    exported = export.export(with_gradients(tier))(*shapes(batch))
    for size in (1, 3):
        got, want = exported.call(*arrays(size)), with_gradients("xla")(*arrays(size))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)


def on_h200():
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda")))


def test_kernels_refuse_a_symbolic_batch_size_in_words():
    (batch,) = export.symbolic_shape("b")
    with (
        on_h200(),
        pytest.raises(NotImplementedError, match="symbolic batch b leaves a kernel's grid open: export once"),
    ):
        export.export(with_gradients("triton"), platforms=("cuda",))(*shapes(batch))
    with on_h200():
        assert pf.explain(*shapes(batch)[:3]).forward == "xla"


def test_kernels_export_for_a_gpu():
    """Triton's custom call comes without JAX's promise of compatibility, so the exporter has to accept it by name."""
    accepted = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    with on_h200():
        exported = export.export(with_gradients("triton"), platforms=("cuda",), disabled_checks=accepted)(*shapes(2))
    again = export.deserialize(bytearray(exported.serialize()))
    assert again.platforms == ("cuda",) and again.mlir_module().count("__gpu$xla.gpu.triton") >= 3
