"""The portable tier: kernels written in Pallas, lowered through Triton; Ampere and newer NVIDIA GPUs."""

from __future__ import annotations

import jax

from ...devices import Device
from ...problem import Gradients, Operands, Output, Problem

_MISSING = None
try:
    # Before the functions below, which have the names of their files.
    from . import backward as _backward_kernels
    from . import forward as _forward_kernel
    from . import tiles
    from .tile_math import addressable, quiet_deprecation
except ImportError as error:  # the backend is deprecated upstream: the day it is gone, say so and use other tiers
    _MISSING = f"the installed JAX {jax.__version__} has no Triton backend of Pallas any more ({error})"

NAME = "triton"
_DTYPES = ("bfloat16", "float16", "float32")


def unsupported(problem: Problem, device: Device) -> list[str]:
    """Every reason, one sentence each, why this tier cannot serve the problem on the device."""
    if _MISSING:
        return [_MISSING]
    reasons = []
    if problem.dtype not in _DTYPES:
        reasons.append(f"dtype {problem.dtype} has no kernel: cast to one of {', '.join(_DTYPES)}")
    sizes = {"batch": problem.batch, "query length": problem.q_len, "key length": problem.kv_len}
    symbolic = [f"{name} {size}" for name, size in sizes.items() if not isinstance(size, int)]
    if symbolic:
        reasons.append(f"a symbolic {', '.join(symbolic)} leaves a kernel's grid open: export once for each size")
    if min(problem.head_dim, problem.v_head_dim) == 0:
        reasons.append("a head dim of 0 leaves a kernel nothing to load")
    if max(problem.head_dim, problem.v_head_dim) > 512:
        dims = f"head dims {problem.head_dim} (query, key) and {problem.v_head_dim} (value)"
        reasons.append(f"{dims} are beyond 512, the largest that a tile in registers can hold")
    if not device.interpret:
        if device.platform != "cuda":
            reasons.append(
                f"it needs an NVIDIA GPU and the platform is {device.platform!r}; on a CPU its kernels run only, "
                "slowly, inside `with pallas_flash.interpret():`"
            )
        elif device.capability < (8, 0):
            major, minor = device.capability
            reasons.append(f"it needs compute capability 8.0 (Ampere) or newer and {device.kind} has {major}.{minor}")
    if not reasons:
        for kernel in _kernels(problem):
            try:
                tiles.choose(problem, kernel, device)
            except ValueError as error:
                reasons.append(str(error))
    return reasons


def outrun(problem: Problem) -> list[str]:
    """Why plain XLA would be faster than this tier, from measurements on an H200; empty if it would not.

    A program walks all the keys of its tile of queries, so few programs on many keys leave the GPU idle. XLA splits
    the keys too, and its scores are few then. Elsewhere no size was found where it is ahead (docs/performance.md).
    """
    rows = problem.batch * problem.num_q_heads
    most_rows = min(problem.kv_len // 128, 64 if problem.q_len <= 16 else 16)
    if problem.q_len > 64 or problem.kv_len < 2048 or rows > most_rows or problem.narrow:
        return []
    return [
        f"{problem.q_len} queries in {rows} rows of batch x heads on {problem.kv_len} keys keep too few programs busy: "
        "plain XLA is faster there; name implementation='triton' to have the kernels all the same"
    ]


def describe(problem: Problem, device: Device) -> dict[str, str]:
    """Kernel by kernel, the tile that would run and where it is from."""
    chosen = {kernel: tiles.choose_with_origin(problem, kernel, device) for kernel in _kernels(problem)}
    return {kernel: f"{tile} ({origin})" for kernel, (tile, origin) in chosen.items()}


def _kernels(problem: Problem) -> tuple[str, ...]:
    # Of wide heads the sums of both dk and dv leave no registers for tensor-core products: two kernels, each of which
    # computes p, are faster by a fifth to a third at 256 channels and slower at 512 (docs/performance.md).
    keys = ("dk", "dv") if 128 < max(problem.head_dim, problem.v_head_dim) <= 256 else ("dkv",)
    scores = ("dscore",) if any(read.differentiable for read in problem.reads) else ()
    return ("forward", "dq", *keys, *scores)


def forward(problem: Problem, device: Device, x: Operands, *, keep_rest: bool) -> Output:
    """Output and natural-log lse; with ``keep_rest`` also what a 16-bit output lost to rounding."""
    tile = tiles.take(problem, "forward", device)
    keep_rest = keep_rest and problem.dtype != "float32"
    x = _readied(problem, device, x)
    with quiet_deprecation():
        return _forward_kernel.forward(problem, x, tile, device.interpret, keep_rest=keep_rest)


def backward(problem: Problem, device: Device, x: Operands, out: Output, do: jax.Array, dlse: jax.Array) -> Gradients:
    """Gradients from the cotangents of o and lse."""
    chosen = {kernel: tiles.take(problem, kernel, device) for kernel in _kernels(problem) if kernel != "forward"}
    (do,) = _factors(problem, device, do)
    x = _readied(problem, device, x)
    with quiet_deprecation():
        return _backward_kernels.backward(problem, x, out, do, dlse, chosen, device.interpret)


def _readied(problem: Problem, device: Device, x: Operands) -> Operands:
    """The operands as kernels take them."""
    q, k, v = _factors(problem, device, x.q, x.k, x.v)
    # float64, as of any array made in x64 mode, would make all that it meets in a kernel 64 bits wide.
    sinks = None if x.sinks is None else x.sinks.astype("float32")
    return addressable(x._replace(q=q, k=k, v=v, sinks=sinks))


def _factors(problem: Problem, device: Device, *arrays: jax.Array) -> list[jax.Array]:
    """The arrays as every product takes them: float32 that will be multiplied as TF32 has its ten bits already.

    Hardware takes the rest by rounding in one product and by cutting in another. Then do.v of one kernel and delta,
    from the output of another, would not cancel where they must, as in a row that sees one key.
    """
    if problem.dtype != "float32" or problem.precision == "highest" or device.interpret:
        return list(arrays)
    return [jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10) for x in arrays]
