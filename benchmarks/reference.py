"""What results are measured against: float32 attention and its gradients, written without any of the library's code."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .workloads import BLOCK, Workload

ROWS = 1024  # query rows at a time: 131072 tokens would not fit otherwise
STATEMENT = (
    "relative Frobenius difference to float32 attention (true float32 products) on the last batch entry and the last "
    "key head with all its query heads; the largest of dq, dk, dv for a backward row"
)


def part(w: Workload, name: str, array: jax.Array) -> jax.Array:
    """The part of an array of [B, S, N, D] that is checked; the last one, since overflows show there first."""
    group = w.heads // (w.kv_heads or w.heads)
    heads = group if name in ("out", "dq") else 1
    return jnp.asarray(array[-1, :, -heads:], jnp.float32)


def _dense(w: Workload, q: jax.Array, k: jax.Array, v: jax.Array, x: dict[str, Any]) -> jax.Array:
    """q: [T, G, D], k and v: [S, D], bias: [G, T, S]; each block of rows is recomputed in the backward pass."""
    ids, sinks, slopes = x["ids"], x["sinks"], x["slopes"]
    size = ROWS if q.shape[0] % ROWS == 0 else q.shape[0]
    keys = jnp.arange(w.length)

    def rows(block):
        q, index, bias, kept = block
        logits = jnp.einsum("qgd,kd->gqk", q, k, precision="highest") * w.dim**-0.5
        if w.soft_cap is not None:
            logits = w.soft_cap * jnp.tanh(logits / w.soft_cap)
        if bias is not None:
            logits += jnp.moveaxis(bias, 0, 1)
        distance = index[:, None] - keys
        if slopes is not None:
            logits -= slopes[:, None, None] * jnp.abs(distance)
        allowed = ids[index][:, None] == ids
        if x["blocks"] is not None:
            allowed &= x["blocks"][index // BLOCK][:, keys // BLOCK]
        if w.causal:
            allowed &= distance >= 0
        if w.window is not None:
            allowed &= (distance >= 0) & (distance <= w.window)
        logits = jnp.where(allowed, logits, -jnp.inf)
        if sinks is not None:
            logits = jnp.concatenate([logits, jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:2], 1))], -1)
        p = jax.nn.softmax(logits)[..., : w.length]
        if kept is not None:
            p = jnp.where(jnp.moveaxis(kept, 0, 1), p / (1 - w.dropout), 0.0)
        return jnp.einsum("gqk,kd->qgd", p, v, precision="highest")

    def blocks(x):
        return x.reshape(-1, size, *x.shape[1:])

    pairs = (None if x[name] is None else blocks(jnp.moveaxis(x[name], 0, 1)) for name in ("bias", "kept"))
    return jax.lax.map(jax.checkpoint(rows), (blocks(q), blocks(keys[: q.shape[0]]), *pairs)).reshape(*q.shape[:2], -1)


def results(w: Workload, q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, extras: dict[str, Any]):
    """The checked parts of out, dq, dk and dv."""
    q, do = part(w, "out", q), part(w, "out", do)
    k, v = part(w, "dk", k)[:, 0], part(w, "dv", v)[:, 0]
    group = q.shape[1]
    x = {
        "ids": extras["ids"][0] if w.documents else jnp.zeros(w.length, jnp.int32),
        "bias": extras["bias"][0, -group:].astype(jnp.float32) if w.bias else None,
        "sinks": extras["sinks"][-group:] if w.sinks else None,
        "slopes": extras["slopes"][-group:] if w.alibi else None,
        "kept": None,
        "blocks": extras["blocks"],
    }
    if w.dropout:
        shape = (w.batch, w.heads, w.q_length or w.length, w.length)
        x["kept"] = jax.jit(lambda key: jax.random.bernoulli(key, 1 - w.dropout, shape)[-1, -group:])(extras["key"])

    @jax.jit
    def compute(q, k, v, do, x):
        out, pullback = jax.vjp(lambda q, k, v: _dense(w, q, k, v, x), q, k, v)
        dq, dk, dv = pullback(do)
        return {"out": out, "dq": dq, "dk": dk[:, None], "dv": dv[:, None]}

    return compute(q, k, v, do, x)


def error(w: Workload, computed: dict[str, Any], wanted: dict[str, jax.Array]) -> float:
    """The largest relative Frobenius difference; NaN where a result holds one."""
    parts = {name: part(w, name, array) for name, array in computed.items()}
    return float(_largest(parts, {name: wanted[name] for name in parts}))


@jax.jit
def _largest(computed: dict[str, jax.Array], wanted: dict[str, jax.Array]) -> jax.Array:
    def norm(x):
        return jnp.sqrt(jnp.sum(x * x))

    errors = jax.tree.map(lambda got, want: norm(got - want) / norm(want), computed, wanted)
    return jnp.max(jnp.stack(jax.tree.leaves(errors)))  # jnp.max keeps NaN, Python's max may lose it
