"""The oracle, attention in float64 numpy, and the one accuracy rule.

The oracle shares no code with the library: masks become a boolean array by their definition in the documentation,
gradients are written out by hand.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

LEARNT = ("bias", "sinks", "alibi_slopes", "score")  # options with gradients of their own


def lengths_of(batch, q_len, kv_len, o):
    """Lengths of the queries and of the keys [B], within the arrays."""
    q_lengths = np.asarray(o.get("query_seq_lengths", [q_len] * batch)).clip(0, q_len)
    return q_lengths, np.asarray(o.get("key_value_seq_lengths", [kv_len] * batch)).clip(0, kv_len)


def offset_of(batch, q_len, kv_len, o):
    """Position of query 0 [B]."""
    if o.get("causal_alignment") == "bottom_right":
        q_lengths, kv_lengths = lengths_of(batch, q_len, kv_len, o)
        return kv_lengths - q_lengths
    return np.broadcast_to(np.asarray(o.get("q_offset", 0)), batch)


def allowed_pairs(batch, heads, q_len, kv_len, o):
    """[B, N, T, S] of who may see whom, from the options of flash_attention."""
    i = np.arange(q_len)[None, :, None]
    j = np.arange(kv_len)[None, None, :]
    q_lengths, kv_lengths = lengths_of(batch, q_len, kv_len, o)
    position = i + offset_of(batch, q_len, kv_len, o)[:, None, None]
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


class Wanted(dict):
    """Arrays by name; ``sizes`` are what errors are relative to, if more: of sums, those without signs."""

    def __init__(self, **arrays):
        super().__init__(**arrays)
        self.sizes = {}


def oracle(q, k, v, do, dlse, options):
    """Everything in float64: dict of out, lse, dq, dk, dv and of the gradients of what ``LEARNT`` was given.

    ``score`` may be a :class:`pallas_flash.RelativeBias`.
    """
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
    ahead = (
        np.arange(kv_len) - np.arange(q_len)[:, None] - offset_of(batch, q_len, kv_len, options)[:, None, None, None]
    )
    slopes, score = options.get("alibi_slopes"), options.get("score")
    if slopes is not None:
        s = s - np.atleast_2d(np.asarray(slopes).astype(np.float64))[:, :, None, None] * abs(ahead)
    if score is not None:
        table = np.asarray(score.table).astype(np.float64)
        bucket = np.broadcast_to(bucket_of(ahead, table.shape[1], score.bidirectional, score.max_distance), s.shape)
        of_head = np.broadcast_to(np.arange(heads)[:, None, None] % table.shape[0], s.shape)
        s = s + table[of_head, bucket]
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
    result = Wanted(out=out, lse=lse, dq=dq, dk=dk, dv=dv)
    if options.get("sinks") is not None:
        p_sinks = np.divide(e_sinks, total, out=np.zeros_like(e_sinks), where=total > 0)
        of_rows = -p_sinks * delta[..., None]
        result["dsinks"] = of_rows.sum((0, 2)).reshape(np.shape(options["sinks"]))
        result.sizes["dsinks"] = float(np.linalg.norm(abs(of_rows).sum((0, 2))))
    result.sizes["lse"] = float(np.sqrt(np.isfinite(lse).sum()))  # a logarithm: its absolute error counts

    def sums(ds):
        if bias is not None:
            shape = np.shape(bias)
            shared = tuple(axis for axis, size in enumerate((1,) * (4 - len(shape)) + shape) if size == 1)
            yield "dbias", ds.sum(shared, keepdims=True).reshape(shape)
        if slopes is not None:
            dslopes = -(ds * abs(ahead)).sum((2, 3))
            yield "dalibi_slopes", dslopes.sum(0) if np.ndim(slopes) == 1 else dslopes
        if score is not None:
            dtable = np.zeros_like(table)
            np.add.at(dtable, (of_head, bucket), ds)
            yield "dscore", dtable

    result.update(sums(ds))
    result.sizes.update((name, float(np.linalg.norm(x))) for name, x in sums(abs(ds)))
    return result


def bucket_of(ahead, buckets, bidirectional, max_distance):
    """T5's bucket of a relative position, by its formula (arXiv:1910.10683 and its reference code)."""
    start = np.zeros_like(ahead)
    if bidirectional:
        buckets //= 2
        start = (ahead > 0) * buckets
        distance = np.abs(ahead)
    else:
        distance = np.maximum(-ahead, 0)
    exact = buckets // 2
    with np.errstate(divide="ignore"):
        wide = np.log(distance.astype(np.float32) / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = np.minimum(exact + np.maximum(wide, 0).astype(np.int64), buckets - 1)
    return start + np.where(distance < exact, distance, far)


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


def error(got, want, size=0.0):
    """Relative Frobenius error; places where the oracle is -inf must agree exactly and are left out.

    ``size`` is what it is relative to where that is more: of a sum that cancels, the sum without signs.
    """
    got, want = np.asarray(got).astype(np.float64), np.asarray(want)
    empty = np.isneginf(want)
    assert (np.isneginf(got) == empty).all(), "empty rows differ"
    got, want = np.where(empty, 0, got), np.where(empty, 0, want)
    assert np.isfinite(got).all(), "NaN or infinity"
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), size, 1e-3))


def check(got, plain, want, floor, rounded=True):
    """The rule: for every array, error at most twice that of plain XLA in the same dtype, plus ``floor``.

    Where products are ``rounded``, to 16 bits or TF32, a sum of ds over pairs gets four times the floor: delta knows
    the rounded weights, by way of the output, where plain XLA subtracts the very sum that cancels. ``plain()`` is asked
    only where the floors alone do not decide: it is one more program to compile.
    """
    assert got.keys() == want.keys()
    sizes = {name: want.sizes.get(name, 0.0) for name in want}
    floors = {name: 4 * floor if rounded and name[1:] in LEARNT else floor for name in want}
    ours = {name: error(got[name], want[name], sizes[name]) for name in want}
    if all(ours[name] <= floors[name] for name in want):
        return
    for name, array in plain().items():
        theirs = error(array, want[name], sizes[name])
        assert ours[name] <= 2 * theirs + floors[name], f"{name}: error {ours[name]:.2e}, plain XLA {theirs:.2e}"
