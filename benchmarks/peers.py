"""Implementations to compare, with one face: ``attention(q, k, v)`` for a workload, in [B, T, N, D]."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_flash

from .workloads import Workload

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Refusal(Exception):
    """A peer cannot run a workload; the text says why."""


def segment_ids(w: Workload) -> jax.Array:
    return jnp.asarray(np.repeat(np.arange(len(w.documents)), w.documents), jnp.int32)[None]


def bias_of(w: Workload) -> jax.Array | None:
    if not w.bias:
        return None
    return jax.random.normal(jax.random.key(7), (1, w.heads, w.length, w.length)).astype(w.dtype)


def ours(implementation: str) -> Callable[[Workload], Attention]:
    def make(w: Workload) -> Attention:
        options = w.options()
        if w.documents:
            options["q_segment_ids"] = segment_ids(w)
        bias = bias_of(w)
        return lambda q, k, v: pallas_flash.flash_attention(q, k, v, bias, implementation=implementation, **options)

    return make


def jax_nn(implementation: str) -> Callable[[Workload], Attention]:
    def make(w: Workload) -> Attention:
        mask = None
        if w.documents:
            ids = segment_ids(w)
            mask = (ids[:, :, None] == ids[:, None, :])[:, None]
        if implementation == "xla" and w.batch * w.heads * w.length**2 * 4 > 40e9:
            raise Refusal("float32 logits of more than 40 GB")
        bias = bias_of(w)
        options = {**w.options(), "implementation": implementation}
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, bias, mask, **options)

    return make


def jax_triton_op(w: Workload) -> Attention:
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention")
    if w.window is not None or w.bias or w.kv_heads not in (None, w.heads):
        raise Refusal("no window, no bias, no grouped heads")
    ids = segment_ids(w) if w.documents else None
    return lambda q, k, v: module.mha(q, k, v, ids, sm_scale=w.dim**-0.5, causal=w.causal)


def tokamax(w: Workload) -> Attention:
    module = importlib.import_module("tokamax")
    mask = None
    if w.documents:
        ids = segment_ids(w)
        mask = (ids[:, :, None] == ids[:, None, :])[:, None]
    bias = bias_of(w)
    return lambda q, k, v: module.dot_product_attention(q, k, v, bias, mask, **w.options())


def flash_attn3_jax(w: Workload) -> Attention:
    module = importlib.import_module("flash_attn3_jax")
    if w.documents or w.bias:
        raise Refusal("no packed documents in this call, no bias")
    window = (-1, -1) if w.window is None else (w.window, 0)
    return lambda q, k, v: module.flash_mha(q, k, v, is_causal=w.causal, window_size=window)


def jax_linear_attention(w: Workload) -> Attention:
    module = importlib.import_module("jax_linear_attention")
    if not w.causal or w.bias:
        raise Refusal("causal only, no bias")
    options: dict[str, Any] = {"segment_ids": segment_ids(w)} if w.documents else {}
    if w.window is not None:
        options["sliding_window"] = w.window + 1  # counts the query itself
    return lambda q, k, v: module.flash_attention(q, k, v, **options)


PEERS: dict[str, Callable[[Workload], Attention]] = {
    "triton": ours("triton"),
    "xla": ours("xla"),
    "xla_chunked": ours("xla_chunked"),
    "jax.nn cudnn": jax_nn("cudnn"),
    "jax.nn xla": jax_nn("xla"),
    "jax triton op": jax_triton_op,
    "tokamax": tokamax,
    "flash-attn3-jax": flash_attn3_jax,
    "jax-linear-attention": jax_linear_attention,
    "torch flash": lambda w: _torch_only(),
}
OURS = ("triton", "xla", "xla_chunked")


def _torch_only() -> Attention:
    raise Refusal("timed by timing.measure_torch, not as a JAX function")


def find(names: str) -> list[str]:
    """Peer names from a comma-separated list, or all.

    Raises:
      SystemExit: an unknown name.
    """
    if names == "all":
        return list(PEERS)
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in PEERS:
            raise SystemExit(f"unknown peer {name!r}: {', '.join(PEERS)}")
    return chosen
