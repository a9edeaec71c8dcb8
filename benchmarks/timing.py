"""How time is taken.

Work on a GPU is asynchronous, so many calls are queued between two synchronisations: the gaps between launches and the
cost of Python disappear behind the device's work. Each sample is the mean of such a queue; the result is the median
of the samples, with their spread beside it. Forward is a jitted call that returns the output. Backward is the
vector-Jacobian product alone: ``jax.vjp`` inside a jitted function returns its residuals as a pytree, and a second
jitted function applies it, so that the forward pass is outside the clock.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .peers import PEERS, Refusal
from .workloads import Workload

SAMPLES = 5
SAMPLE_SECONDS = 0.03


class Sample(NamedTuple):
    seconds: float  # median of a call
    spread: float  # (largest - smallest) / median of the samples


def inputs(w: Workload) -> tuple[jax.Array, ...]:
    """q, k, v and the cotangent of the output; random, because zeros run faster than data."""
    keys = jax.random.split(jax.random.key(0), 4)
    kv_heads = w.kv_heads or w.heads
    heads = (w.heads, kv_heads, kv_heads, w.heads)
    return tuple(
        jax.random.normal(key, (w.batch, w.length, n, w.dim)).astype(w.dtype)
        for key, n in zip(keys, heads, strict=True)
    )


def measure(function: Any, *arguments: Any) -> Sample:
    jax.block_until_ready(function(*arguments))
    started = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    once = max(time.perf_counter() - started, 1e-6)
    calls = max(1, min(1000, round(SAMPLE_SECONDS / once)))
    samples = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - started) / calls)
    median = statistics.median(samples)
    return Sample(median, (max(samples) - min(samples)) / median)


def run(w: Workload, peer: str, directions: tuple[str, ...], reference: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Rows of results of one peer on one workload; a refusal is a row with its reason.

    ``reference`` holds the first peer's results, which later peers' errors are measured against.
    """
    base = {"workload": w.name, "peer": peer}
    try:
        if peer == "torch flash":
            return _torch(w, directions)
        attention = PEERS[peer](w)
        q, k, v, do = inputs(w)
        rows = []
        forward = jax.jit(attention)
        if "forward" in directions:
            sample = measure(forward, q, k, v)
            rows.append(row(w, peer, "forward", sample, {"out": forward(q, k, v)}, reference))
        if "backward" in directions:
            # custom_vjp functions cannot be asked for residuals, jax.vjp's result can: it is a pytree of them.
            _, pullback = jax.jit(lambda q, k, v: jax.vjp(attention, q, k, v))(q, k, v)
            backward = jax.jit(lambda pullback, do: pullback(do))
            sample = measure(backward, pullback, do)
            grads = dict(zip(("dq", "dk", "dv"), backward(pullback, do), strict=True))
            rows.append(row(w, peer, "backward", sample, grads, reference))
        return rows
    except (Refusal, ImportError, NotImplementedError, ValueError, TypeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return [{**base, "direction": d, "refused": reason} for d in directions]


def row(
    w: Workload, peer: str, direction: str, sample: Sample, results: dict[Any, jax.Array], reference: dict[str, Any]
) -> dict[str, Any]:
    flops = w.flops * (1.0 if direction == "forward" else 2.5)
    errors = []
    for name, result in results.items():
        corner = np.asarray(result[:1, -256:, :2].astype(jnp.float32))
        kept = reference.setdefault(name, corner)
        errors.append(float(np.linalg.norm(corner - kept) / np.linalg.norm(kept)))
    return {
        "workload": w.name,
        "peer": peer,
        "direction": direction,
        "us": sample.seconds * 1e6,
        "tflops": flops / sample.seconds / 1e12,
        "spread": sample.spread,
        # Relative Frobenius difference to the first peer of the run, last 256 tokens of two heads.
        "error": max(errors),
    }


def _torch(w: Workload, directions: tuple[str, ...]) -> list[dict[str, Any]]:
    """FlashAttention-2's CUDA kernels, as PyTorch ships them."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Refusal("torch is not installed") from error
    if w.documents or w.window is not None or w.bias or w.kv_heads not in (None, w.heads):
        raise Refusal("plain and causal attention only through this call")
    q, k, v = (
        torch.randn(w.batch, w.heads, w.length, w.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    do = torch.randn_like(q)
    rows = []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=w.causal)

        def forward():
            with torch.no_grad():
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=w.causal)

        def backward():
            torch.autograd.grad(out, (q, k, v), do, retain_graph=True)

        for direction, function in (("forward", forward), ("backward", backward)):
            if direction not in directions:
                continue

            def synchronised(function=function):
                function()
                return _TorchResult(torch)

            sample = measure(synchronised)
            flops = w.flops * (1.0 if direction == "forward" else 2.5)
            rows.append({
                "workload": w.name, "peer": "torch flash", "direction": direction, "us": sample.seconds * 1e6,
                "tflops": flops / sample.seconds / 1e12, "spread": sample.spread, "error": None,
            })  # fmt: skip
    return rows


class _TorchResult:
    """Lets ``jax.block_until_ready`` wait for torch's stream."""

    def __init__(self, torch: Any):
        self.torch = torch

    def block_until_ready(self) -> None:
        self.torch.cuda.synchronize()


def memory(w: Workload, implementation: str) -> dict[str, Any]:
    """Temporary bytes of ``value_and_grad`` as the compiler plans them; nothing is run."""
    attention = PEERS[implementation](w)

    def loss(q, k, v):
        return attention(q, k, v).astype(jnp.float32).sum()

    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(lambda: inputs(w))[:3]]
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*specs).compile()
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise Refusal("this backend does not analyse memory")
    return {"workload": w.name, "peer": implementation, "temp_bytes": analysis.temp_size_in_bytes}
