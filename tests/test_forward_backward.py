"""Every case on every tier: out, lse and all gradients against the float64 oracle, by the accuracy rule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf
from pallas_flash import dispatch
from pallas_flash.kernels.triton import tiles

from .accuracy import LEARNT, check, oracle
from .cases import BIG_CASES, CASES


@functools.partial(jax.jit, static_argnames=("implementation", "static"))
def run(arrays, options, implementation, static):
    """Out, lse and the gradients of an implementation, in one compiled function."""
    q, k, v, do, dlse = arrays
    options = {**options, **dict(static)}
    learnt = {name: options.pop(name) for name in LEARNT if name in options}

    def attention(q, k, v, learnt):
        return pf.flash_attention(q, k, v, implementation=implementation, return_lse=True, **learnt, **options)

    (out, lse), vjp = jax.vjp(attention, q, k, v, learnt)
    # A row without keys has lse -inf; its cotangent has nothing to flow to.
    dq, dk, dv, dlearnt = vjp((do, dlse.astype(lse.dtype)))
    arrays_of = {f"d{name}": jax.tree.leaves(gradient)[0] for name, gradient in dlearnt.items()}
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, **arrays_of}


def split(options):
    """Arrays, masks and scores are traced; ints, strings and tuples are constants of the compiled function."""
    traced = {n: x for n, x in options.items() if isinstance(x, (jax.Array, pf.Mask, pf.Score))}
    return traced, tuple((n, x) for n, x in options.items() if n not in traced)


def compare(case, tier, kernels):
    compare_arrays(case.arrays(), case.options(), tier, kernels)


def compare_arrays(arrays, options, tier, kernels):
    """The accuracy rule on given (q, k, v, do, dlse); returns what the tier gave."""
    want = oracle(*arrays, options)
    options = dict(options)
    options.pop("mask_array", None)
    traced, static = split(options)
    with kernels():
        got = run(arrays, traced, tier, static)
    assert got["out"].dtype == arrays[0].dtype and got["lse"].dtype == jnp.float32
    for name, array in zip(("dq", "dk", "dv"), arrays):
        assert got[name].dtype == array.dtype
    # Rounding differs between a blocked and a plain sum. On a GPU float32 is multiplied as TF32, with the precision of
    # float16, by the kernels always and by XLA only where it calls a matrix product (not for one key, say).
    floor = {"float32": 5e-6, "float16": 1e-4, "bfloat16": 1e-3}[str(arrays[0].dtype)]
    tf32 = jax.default_backend() == "gpu" and arrays[0].dtype == jnp.float32 and options.get("precision") != "highest"
    floor = 1e-3 if tf32 else floor
    rounded = tf32 or arrays[0].dtype != jnp.float32
    if rounded and (arrays[1].shape[1] == 1 or np.isfinite(want["lse"]).sum() < 32):
        floor *= 5  # one key or a few rows: nothing averages, and XLA, without a matrix product, multiplies exactly

    def plain():
        with kernels():  # where it multiplies as the kernels do
            return run(arrays, traced, "xla", static)

    check(got, plain, want, floor, rounded)
    return got


@pytest.mark.everywhere
@pytest.mark.parametrize("tier", dispatch.TIERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, tier, kernels):
    compare(case, tier, kernels)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("mqa-bf16", "f16", "dim-72", "everything")], ids=str)
def test_tiles_held_in_registers(case, kernels, monkeypatch):
    """What long problems do on a GPU: the side that stays goes through a product with the identity first."""
    choose = tiles.choose
    monkeypatch.setattr(tiles, "choose", lambda *args: dataclasses.replace(choose(*args), registers=True))
    run.clear_cache()
    compare(case, "triton", kernels)
    run.clear_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("tier", dispatch.TIERS)
@pytest.mark.parametrize("case", BIG_CASES, ids=str)
def test_big_case(case, tier, kernels):
    compare(case, tier, kernels)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("everything", "lengths", "bias")], ids=str)
def test_chunked(case):
    options = case.options()
    arrays = case.arrays()
    want = oracle(*arrays, options)
    traced, static = split(options)
    got = run(arrays, traced, "xla_chunked", static)
    check(got, lambda: run(arrays, traced, "xla", static), want, floor=5e-6, rounded=False)
