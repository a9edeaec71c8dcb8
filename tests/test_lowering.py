"""Kernels lower for CUDA on a machine without a GPU: a kernel that breaks is seen before the GPU is asked."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import pallas_flash as pf

from .cases import BIG_CASES, CASES
from .programs import equations, kernels_in


def lower(function, *arguments, kind="NVIDIA H200"):
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, 132, "cuda"))
    with use_abstract_mesh(mesh):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def gradient(case):
    options = case.options()
    options.pop("mask_array", None)
    bias, sinks = options.pop("bias", None), options.pop("sinks", None)

    def function(q, k, v, bias, sinks, do, dlse):
        def f(q, k, v, bias, sinks):
            return pf.flash_attention(q, k, v, bias, sinks=sinks, implementation="triton", return_lse=True, **options)

        out, vjp = jax.vjp(f, q, k, v, bias, sinks)
        return out, vjp((do, dlse))

    q, k, v, do, dlse = case.arrays()
    return function, (q, k, v, bias, sinks, do, dlse)


@pytest.mark.parametrize("case", [*CASES, *BIG_CASES], ids=str)
def test_case_lowers(case):
    function, arguments = gradient(case)
    dscore = {"flash_dscore"} if arguments[3] is not None else set()
    wanted = {"flash_forward", "flash_dq", *of_keys(max(case.dim, case.v_dim or 0)), *dscore}
    assert named(lower(function, *arguments)) >= wanted


def of_keys(dim):
    """Kernels of the gradients of keys and values: two where one would hold too much (test_tiles)."""
    return {"flash_dk", "flash_dv"} if 128 < dim <= 256 else {"flash_dkv"}


def named(text):
    return set(re.findall(r"flash_[a-z]+", text))


def wide_values(jaxpr):
    """Primitives and types of the values of 64 bits inside kernels."""
    for equation, around in equations(jaxpr):
        if "pallas_call" in around:
            for v in equation.outvars:
                if getattr(getattr(v.aval, "dtype", None), "itemsize", 0) > 4:
                    yield f"{equation.primitive}: {v.aval}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_x64_mode_leaves_kernels_in_32_bits(case):
    """A number of 64 bits in a kernel is slow, and in inline assembly written for 32 it is garbage."""
    function, arguments = gradient(case)
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
    with jax.enable_x64(True), use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*arguments)
    assert len(kernels_in(traced.jaxpr)) >= 3
    found = sorted(set(wide_values(traced.jaxpr)))
    assert not found, "; ".join(found)


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA H100 80GB HBM3", "NVIDIA B200"])
def test_other_gpus(kind):
    case = next(c for c in BIG_CASES if c.name == "dim-128")
    function, arguments = gradient(case)
    assert "flash_dkv" in lower(function, *arguments, kind=kind)


def test_long_sequence_has_no_quadratic_value():
    """BR-61: nothing of size S x S in the program of a gradient at S = 131072."""
    spec = jax.ShapeDtypeStruct((1, 131072, 8, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, 131072), jnp.int32)

    def loss(q, k, v, ids):
        return pf.flash_attention(q, k, v, is_causal=True, q_segment_ids=ids).astype(jnp.float32).sum()

    text = lower(jax.grad(loss, (0, 1, 2)), spec, spec, spec, ids)
    assert "flash_dq" in text and "131072x131072" not in text


def gradient_text(length, dim, dtype, kind="NVIDIA H200", **options):
    spec = jax.ShapeDtypeStruct((1, length, 2, dim), dtype)

    def loss(q, k, v):
        return pf.flash_attention(q, k, v, implementation="triton", **options).astype(jnp.float32).sum()

    return lower(jax.grad(loss, (0, 1, 2)), spec, spec, spec, kind=kind)


def test_no_product_outside_the_kernels():
    """BR-10: no scores, so no quadratic float32 product, between the kernels of a bfloat16 gradient."""
    text = gradient_text(1003, 64, jnp.bfloat16, is_causal=True)
    assert "flash_dq" in text and "1003x1003" not in text
    with pf.use_implementation("xla"):  # and the pattern finds them where they are
        spec = jax.ShapeDtypeStruct((1, 1003, 2, 64), jnp.bfloat16)
        assert "1003x1003" in lower(lambda q: pf.flash_attention(q, q, q, is_causal=True), spec)


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4"])
@pytest.mark.parametrize("dim, dtype", [(256, "float32"), (320, "bfloat16"), (512, "bfloat16"), (128, "float32")])
def test_large_heads_lower_on_smaller_gpus(dim, dtype, kind):
    """BR-48: without tuning flags, also with a bias and segments."""
    extra = {} if dim != 128 else {
        "bias": jnp.zeros((1, 2, 300, 300)), "q_segment_ids": jnp.zeros((1, 300), jnp.int32)}  # fmt: skip
    assert named(gradient_text(300, dim, dtype, kind, **extra)) >= of_keys(dim)
