"""Implementations to compare, with one face: ``attention(q, k, v, extras)`` for a workload, in [B, T, N, D].

``extras`` holds what else a workload needs (segment ids, a mask, a bias, sinks), as arguments: arrays that a jitted
function closes over become constants of the program, half a gigabyte of them for a bias.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_flash

from .workloads import BLOCK, Workload

Attention = Callable[[jax.Array, jax.Array, jax.Array, dict[str, Any]], jax.Array]
Maker = Callable[[Workload], Attention]


class Refusal(Exception):
    """A peer cannot run a workload; the text says why."""


def reason(error: Exception) -> str:
    """Why a cell was not measured, in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def extras(w: Workload) -> dict[str, Any]:
    made: dict[str, Any] = dict.fromkeys(("ids", "mask", "bias", "sinks", "slopes", "key", "starts", "blocks"))
    if w.documents:
        ids = jnp.asarray(np.repeat(np.arange(len(w.documents)), w.documents), jnp.int32)[None]
        # The dense mask of those who know no segment ids.
        made |= {"ids": ids, "mask": (ids[:, :, None] == ids[:, None, :])[:, None]}
        made["starts"] = jnp.asarray(np.cumsum((0, *w.documents)), jnp.int32)
    if w.blocks is not None:
        count = w.length // BLOCK
        # The diagonal besides, so that no query is without a key.
        made["blocks"] = (jax.random.uniform(jax.random.key(6), (count, count)) < w.blocks) | jnp.eye(count, dtype=bool)
    if w.causal_array:
        made["mask"] = jnp.tri(w.length, dtype=bool)[None, None]
    if w.bias:
        made["bias"] = jax.random.normal(jax.random.key(7, impl="rbg"), (1, w.heads, w.length, w.length)).astype(
            w.dtype
        )
    if w.sinks:
        made["sinks"] = jax.random.normal(jax.random.key(8), (w.heads,))
    if w.alibi:
        made["slopes"] = 2.0 ** (-8.0 * jnp.arange(1, w.heads + 1) / w.heads)
    if w.dropout:
        made["key"] = jax.random.key(9)
    return made


def ours(implementation: str) -> Maker:
    def make(w: Workload) -> Attention:
        options = {**w.options(), "implementation": implementation}
        options |= {"logits_soft_cap": w.soft_cap, "dropout_rate": w.dropout, "precision": w.precision}

        def attention(q, k, v, x):
            more = {"sinks": x["sinks"], "alibi_slopes": x["slopes"], "dropout_rng": x["key"], **options}
            if w.varlen:
                return pallas_flash.varlen_attention(q[0], k[0], v[0], x["starts"], **more)[None]
            mask = x["mask"] if w.causal_array else None
            if w.blocks is not None:
                mask = pallas_flash.Blocks(x["blocks"], BLOCK, BLOCK)
            return pallas_flash.flash_attention(q, k, v, x["bias"], mask, q_segment_ids=x["ids"], **more)

        return attention

    return make


def jax_nn(implementation: str) -> Maker:
    def make(w: Workload) -> Attention:
        _refuse_ours(w)
        if implementation == "xla" and w.batch * w.heads * (w.q_length or w.length) * w.length * 4 > 40e9:
            raise Refusal("float32 logits of more than 40 GB")
        options = {**w.options(), "implementation": implementation}

        def attention(q, k, v, x):
            with jax.default_matmul_precision(w.precision):
                return jax.nn.dot_product_attention(q, k, v, x["bias"], x["mask"], **options)

        return attention

    return make


def jax_triton_op(w: Workload) -> Attention:
    _refuse_ours(w)
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention")
    if w.window is not None or w.bias or w.kv_heads not in (None, w.heads):
        raise Refusal("no window, no bias, no grouped heads")
    return lambda q, k, v, x: module.mha(q, k, v, x["ids"], sm_scale=w.dim**-0.5, causal=w.causal)


def tokamax(implementation: str) -> Maker:
    def make(w: Workload) -> Attention:
        _refuse_ours(w)
        module = importlib.import_module("tokamax")
        options = {**w.options(), "implementation": implementation}
        return lambda q, k, v, x: module.dot_product_attention(q, k, v, x["bias"], x["mask"], **options)

    return make


def _refuse_ours(w: Workload) -> None:
    if w.only_ours:
        raise Refusal(f"no {w.only_ours}")


def _flash_mha(module: Any, w: Workload) -> Callable[..., jax.Array]:
    _refuse_ours(w)
    if w.bias:
        raise Refusal("no bias")
    # FlashAttention counts the keys beside the query, as jax.nn does; -1 leaves a side open.
    window = (-1, -1) if w.window is None else (w.window, 0)
    return functools.partial(module.flash_mha, is_causal=w.causal, window_size=window)


def dew(w: Workload) -> Attention:
    """FlashAttention-3 on Hopper, -2 elsewhere."""
    module = importlib.import_module("dew_flash_attn")
    if w.documents and w.batch == 1:
        starts = np.cumsum((0, *w.documents), dtype=np.int32)
        varlen = functools.partial(
            module.flash_mha_varlen, cu_seqlens=starts, max_seqlen=max(w.documents), is_causal=w.causal
        )
        return lambda q, k, v, x: varlen(q[0], k[0], v[0])[None]
    attention = _flash_mha(module, w)
    return lambda q, k, v, x: attention(q, k, v)


def flash_attn3_jax(w: Workload) -> Attention:
    module = importlib.import_module("flash_attn3_jax")
    if w.documents:
        raise Refusal("no packed documents in this call")
    attention = _flash_mha(module, w)
    return lambda q, k, v, x: attention(q, k, v)


def jax_linear_attention(w: Workload) -> Attention:
    _refuse_ours(w)
    module = importlib.import_module("jla.ops.mosaic_gpu.attention")
    if not w.causal or w.bias:
        raise Refusal("causal only, no bias")
    window = None if w.window is None else w.window + 1  # counts the query itself
    return lambda q, k, v, x: module.flash_attention(q, k, v, segment_ids=x["ids"], sliding_window=window)


def plain_causal(w: Workload) -> Attention:
    """What the mask algebra costs ours: the same tiles, the causal mask written into the kernels."""
    from pallas_flash.kernels.triton import tiles

    module = importlib.import_module("benchmarks.plain_causal")
    plain = Workload(w.name, w.batch, w.length, w.heads, w.dim, dtype=w.dtype, causal=True)
    if w != plain or w.dtype == "float32" or w.dim > 128:
        raise Refusal("plain causal attention in 16 bits only, of at most 128 channels")

    def attention(q, k, v, x):
        plan = pallas_flash.explain(q, k, v, is_causal=True, implementation="triton")
        chosen = {name: tiles.choose(plan.problem, name, plan.device) for name in ("forward", "dq", "dkv")}
        return module.make(chosen, plan.device.interpret)(q, k, v)

    return attention


TORCH = "torch flash"
PEERS: dict[str, Maker] = {
    "triton": ours("triton"),
    "xla": ours("xla"),
    "xla_chunked": ours("xla_chunked"),
    "jax.nn cudnn": jax_nn("cudnn"),
    "jax.nn xla": jax_nn("xla"),
    "jax triton op": jax_triton_op,
    "plain causal kernel": plain_causal,
    "tokamax mosaic": tokamax("mosaic"),
    "tokamax triton": tokamax("triton"),
    "dew-flash-attn": dew,
    "flash-attn3-jax": flash_attn3_jax,
    "jax-linear-attention": jax_linear_attention,
}
NAMES = (*PEERS, TORCH)  # torch is no JAX function: torch_sdpa.py
SHORT = {"cudnn": "jax.nn cudnn", "torch": TORCH}


def find(names: str) -> list[str]:
    """Peer names from a comma-separated list, or all.

    Raises:
      SystemExit: an unknown name.
    """
    if names == "all":
        return list(NAMES)
    chosen = [SHORT.get(name.strip(), name.strip()) for name in names.split(",")]
    for name in chosen:
        if name not in NAMES:
            raise SystemExit(f"unknown peer {name!r}: {', '.join(NAMES)}")
    return chosen
