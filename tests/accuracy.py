"""The oracle, attention in float64 numpy, and the one accuracy rule.

The oracle shares no code with the library: masks become a boolean array by their definition in the documentation,
gradients are written out by hand.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def allowed_pairs(batch, heads, q_len, kv_len, o):
    """[B, N, T, S] of who may see whom, from the options of flash_attention."""
    i = np.arange(q_len)[None, :, None]
    j = np.arange(kv_len)[None, None, :]
    q_lengths = np.asarray(o.get("query_seq_lengths", [q_len] * batch)).clip(0, q_len)
    kv_lengths = np.asarray(o.get("key_value_seq_lengths", [kv_len] * batch)).clip(0, kv_len)
    offset = np.broadcast_to(np.asarray(o.get("q_offset", 0)), batch)
    if o.get("causal_alignment") == "bottom_right":
        offset = kv_lengths - q_lengths
    position = i + offset[:, None, None]
    ok = (i < q_lengths[:, None, None]) & (j < kv_lengths[:, None, None])
    if o.get("is_causal"):
        ok = ok & (j <= position)
    if o.get("local_window_size") is not None:
        w = o["local_window_size"]
        left, right = (w, w) if isinstance(w, int) else w
        if left is not None:
            ok = ok & (j >= position - left)
        if right is not None:
            ok = ok & (j <= position + right)
    if o.get("q_segment_ids") is not None:
        q_ids = np.asarray(o["q_segment_ids"])
        kv_ids = np.asarray(o.get("kv_segment_ids", q_ids))
        ok = ok & (q_ids[:, :, None] == kv_ids[:, None, :]) & (q_ids[:, :, None] >= 0)
    ok = np.broadcast_to(ok[:, None], (batch, heads, q_len, kv_len))
    mask = o.get("mask_array", o.get("mask"))
    return ok if mask is None else ok & np.asarray(mask)


def oracle(q, k, v, do, dlse, options):
    """Everything in float64: dict of out, lse, dq, dk, dv and, where given, dbias and dsinks."""
    q, k, v, do, dlse = (np.asarray(a).astype(np.float64) for a in (q, k, v, do, dlse))
    batch, q_len, heads, dim = q.shape
    heads_first = lambda a: np.ascontiguousarray(a.swapaxes(1, 2))  # so that numpy multiplies with BLAS
    kv_len, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    ok = allowed_pairs(batch, heads, q_len, kv_len, options)
    scale = options.get("scale")
    scale = 1 / np.sqrt(dim) if scale is None else float(np.asarray(scale).reshape(()))
    q, k, v, do = heads_first(q), heads_first(k).repeat(group, 1), heads_first(v).repeat(group, 1), heads_first(do)
    s = q @ k.swapaxes(2, 3) * scale
    slope = np.ones_like(s)
    cap = options.get("logits_soft_cap")
    if cap is not None:
        t = np.tanh(s / cap)
        s, slope = cap * t, 1 - t * t
    bias = options.get("bias")
    if bias is not None:
        s = s + np.asarray(bias).astype(np.float64)
    s = np.where(ok, s, -np.inf)
    sinks = np.asarray(options.get("sinks", np.full(heads, -np.inf))).astype(np.float64)
    sinks = sinks.reshape(heads, -1)[None, :, None, :]
    m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sinks.max(-1, keepdims=True))
    m = np.where(np.isneginf(m), 0, m)
    e = np.exp(s - m)
    e_sinks = np.exp(sinks - m)
    total = e.sum(-1, keepdims=True) + e_sinks.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + m)[..., 0]
    p = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
    kept = kept_weights(s.shape, options)
    out = (p * kept) @ v
    dp = do @ v.swapaxes(2, 3)
    delta = (do * out).sum(-1) - dlse
    ds = p * (kept * dp - delta[..., None])
    raw = ds * slope * scale
    of_group = lambda a: a.reshape(batch, kv_heads, group, *a.shape[2:]).sum(2)
    dk, dv = (of_group(a.swapaxes(2, 3) @ b) for a, b in ((raw, q), (p * kept, do)))
    out, dq, dk, dv = (a.swapaxes(1, 2) for a in (out, raw @ k, dk, dv))
    result = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    if options.get("sinks") is not None:
        p_sinks = np.divide(e_sinks, total, out=np.zeros_like(e_sinks), where=total > 0)
        result["dsinks"] = -(p_sinks * delta[..., None]).sum((0, 2)).reshape(np.shape(options["sinks"]))
    if bias is not None:
        shape = np.shape(bias)
        shape = (1,) * (4 - len(shape)) + shape
        shared = tuple(axis for axis in range(4) if shape[axis] == 1)
        result["dbias"] = ds.sum(shared, keepdims=True).reshape(np.shape(bias))
    return result


def kept_weights(shape, options):
    """What dropout multiplies each weight with: the documented draw of jax.random."""
    rate = options.get("dropout_rate", 0.0)
    if not rate:
        return np.ones(shape)
    drawn = (1, 1, *shape[2:]) if options.get("broadcast_dropout") else shape
    return np.asarray(jax.random.bernoulli(options["dropout_rng"], 1 - rate, drawn)) / (1 - rate)


def normal(seed, *shape, dtype="float32"):
    """A sample from numpy, which compiles nothing."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def error(got, want):
    """Relative Frobenius error; places where the oracle is -inf must agree exactly and are left out."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want)
    empty = np.isneginf(want)
    assert (np.isneginf(got) == empty).all(), "empty rows differ"
    got, want = np.where(empty, 0, got), np.where(empty, 0, want)
    assert np.isfinite(got).all(), "NaN or infinity"
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-3))


def check(got, plain, want, floor):
    """The rule: for every array, error at most twice that of plain XLA in the same dtype, plus ``floor``.

    ``plain()`` is asked only where the floor alone does not decide: it is one more program to compile.
    """
    assert got.keys() == want.keys()
    ours = {name: error(got[name], want[name]) for name in want}
    if max(ours.values()) <= floor:
        return
    for name, array in plain().items():
        theirs = error(array, want[name])
        assert ours[name] <= 2 * theirs + floor, f"{name}: error {ours[name]:.2e}, plain XLA {theirs:.2e}"
