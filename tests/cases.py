"""The table of cases that every tier is tested on: shapes x masks x dtypes x options."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_flash as pf

from .accuracy import normal


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    batch: int = 2
    q_len: int = 65
    kv_len: int = 65
    heads: int = 2
    kv_heads: int = 2
    dim: int = 16
    v_dim: int | None = None
    dtype: str = "float32"
    options: Any = dict  # () -> keyword arguments of flash_attention

    def __str__(self) -> str:
        return self.name

    def arrays(self, draw=0):
        """q, k, v and the cotangents of the output and the lse."""
        v_dim = self.v_dim or self.dim
        shapes = (
            (self.batch, self.q_len, self.heads, self.dim),
            (self.batch, self.kv_len, self.kv_heads, self.dim),
            (self.batch, self.kv_len, self.kv_heads, v_dim),
            (self.batch, self.q_len, self.heads, v_dim),
        )
        seed = len(self.name) + 1000 * draw
        q, k, v, do = (normal((seed, i), *shape, dtype=self.dtype) for i, shape in enumerate(shapes))
        return q, k, v, do, normal((seed, 4), self.batch, self.heads, self.q_len)


def _ids(batch, length, *cuts):
    row = np.zeros(length, np.int32)
    for cut in cuts:
        row[cut:] += 1
    return jnp.asarray(np.stack([np.roll(row, 3 * b) for b in range(batch)]))


def _random_mask(*shape):
    return jnp.asarray(np.random.default_rng(0).random(shape) < 0.6).at[..., :1, :].set(False)


def _bias(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), dtype)


def _sinks(*shape):
    return jnp.asarray(np.random.default_rng(2).normal(size=shape) * 2, jnp.float32)


@pf.mask
class Strided(pf.Mask):
    """A user's own mask, without ranges."""

    step: int = pf.static()

    def allows(self, q, kv):
        return (q.index - kv.index) % self.step == 0


def prefix_lm(batch):
    return (pf.Causal() | pf.Prefix(jnp.full((batch,), 20))) & pf.Window(30, None)


def _mask(m, q_len, kv_len):
    """A Mask object, and beside it the array that the oracle needs."""
    return {"mask": m, "mask_array": m.dense(q_len, kv_len)}


CASES = [
    Case("full"),
    Case("causal-odd-gqa", q_len=131, kv_len=131, heads=6, options=lambda: {"is_causal": True}),
    Case("mqa-bf16", heads=3, kv_heads=1, dim=32, dtype="bfloat16", options=lambda: {"is_causal": True}),
    Case("f16", dtype="float16", dim=32),
    Case("highest", q_len=33, options=lambda: {"precision": "highest"}),
    Case("short-queries", q_len=3, kv_len=129, options=lambda: {"is_causal": True, "causal_alignment": "bottom_right"}),
    Case("more-queries", q_len=70, kv_len=17, options=lambda: {"is_causal": True, "causal_alignment": "bottom_right"}),
    Case("one", q_len=1, kv_len=1, options=lambda: {"bias": _bias(2, 1, 1, 1)}),
    Case("one-key", q_len=37, kv_len=1),
    Case("offset", q_len=20, kv_len=90, options=lambda: {"is_causal": True, "q_offset": 37}),
    Case("offsets", q_len=20, kv_len=90, options=lambda: {"is_causal": True, "q_offset": jnp.array([5, 60])}),
    Case("window", options=lambda: {"local_window_size": (7, 3)}),
    Case("window-left", q_len=200, kv_len=200, batch=1, options=lambda: {"local_window_size": (40, None)}),
    Case("window-0", options=lambda: {"local_window_size": 0}),
    Case(
        "lengths",
        options=lambda: {"query_seq_lengths": jnp.array([65, 9]), "key_value_seq_lengths": jnp.array([0, 33])},
    ),
    Case("kv-lengths", options=lambda: {"key_value_seq_lengths": jnp.array([11, 64]), "is_causal": True}),
    Case(
        "bottom-right-lengths",
        q_len=40,
        options=lambda: {
            "query_seq_lengths": jnp.array([40, 9]),
            "key_value_seq_lengths": jnp.array([30, 63]),
            "is_causal": True,
            "causal_alignment": "bottom_right",
        },
    ),
    Case("segments", q_len=130, kv_len=130, options=lambda: {"q_segment_ids": _ids(2, 130, 37, 64), "is_causal": True}),
    Case(
        "segments-cross",
        q_len=40,
        options=lambda: {"q_segment_ids": _ids(2, 40, 9, 21) - 1, "kv_segment_ids": _ids(2, 65, 30) - 1},
    ),
    Case("dense-mask", options=lambda: {"mask": _random_mask(2, 2, 65, 65)}),
    Case("key-mask", options=lambda: {"mask": _random_mask(2, 1, 2, 65)[:, :, 1:]}),
    Case("query-mask", options=lambda: {"mask": _random_mask(1, 2, 65, 1)}),
    Case("prefix-lm", q_len=80, kv_len=80, options=lambda: _mask(prefix_lm(2), 80, 80)),
    Case("own-mask", options=lambda: _mask(Strided(3) & pf.Causal(), 65, 65)),
    Case(
        "blocks",
        heads=4,
        options=lambda: _mask(pf.Blocks(_random_mask(2, 4, 3, 5), 32, 14), 65, 65),
    ),
    Case(
        "block-map",
        q_len=100,
        kv_len=80,
        options=lambda: {
            **_mask(pf.BlockMap.of(Strided(41) & pf.Window(60, None), 100, 80, block_q=32, block_kv=16), 100, 80),
            "key_value_seq_lengths": jnp.array([80, 33]),
            "logits_soft_cap": 4.0,
        },
    ),
    Case("soft-cap", options=lambda: {"logits_soft_cap": 2.0, "is_causal": True}),
    Case("scale", options=lambda: {"scale": -0.7}),
    Case("traced-scale", options=lambda: {"scale": jnp.float32(0.3)}),
    Case("bias", options=lambda: {"bias": _bias(1, 2, 65, 65), "is_causal": True}),
    Case("bias-keys", options=lambda: {"bias": _bias(2, 1, 1, 65)}),
    Case("bias-queries", options=lambda: {"bias": _bias(1, 2, 65, 1)}),
    Case("bias-scalar", options=lambda: {"bias": _bias(1, 1, 1, 1)}),
    Case("bias-f32-with-bf16", dtype="bfloat16", dim=32, options=lambda: {"bias": _bias(65, 65)}),
    Case("sinks", heads=4, options=lambda: {"sinks": _sinks(4), "local_window_size": (9, 0)}),
    Case(
        "sinks-of-rows-without-keys",
        options=lambda: {"sinks": _sinks(2, 3), "key_value_seq_lengths": jnp.array([0, 33])},
    ),
    Case("dropout", options=lambda: {"dropout_rate": 0.3, "dropout_rng": jax.random.key(5), "is_causal": True}),
    Case(
        "dropout-bf16-gqa-bias",
        heads=6,
        dtype="bfloat16",
        dim=32,
        options=lambda: {
            "dropout_rate": 0.1,
            "dropout_rng": jax.random.PRNGKey(6),
            "broadcast_dropout": True,
            "bias": _bias(1, 6, 1, 65),
        },
    ),
    Case("dim-72", dim=72, q_len=33, kv_len=40, options=lambda: {"is_causal": True}),
    Case("dim-96-v-40", dim=96, v_dim=40, q_len=33, kv_len=40),
    Case("dim-1", dim=1, v_dim=3, q_len=20),
    Case(
        "everything",
        q_len=70,
        kv_len=90,
        heads=4,
        options=lambda: {
            "is_causal": True,
            "causal_alignment": "bottom_right",
            "local_window_size": (50, None),
            "query_seq_lengths": jnp.array([70, 41]),
            "key_value_seq_lengths": jnp.array([90, 77]),
            "q_segment_ids": _ids(2, 70, 33),
            "kv_segment_ids": _ids(2, 90, 50),
            "mask": _random_mask(2, 1, 70, 90),
            "bias": _bias(1, 4, 70, 90),
            "logits_soft_cap": 5.0,
            "scale": 0.5,
            "sinks": _sinks(4),
            "dropout_rate": 0.2,
            "dropout_rng": jax.random.key(7),
        },
    ),
]

# Compiled only: sizes and dims that an interpreter would take minutes for.
BIG_CASES = [
    *(Case(f"dim-{d}", q_len=300, kv_len=200, heads=4, dim=d, dtype="bfloat16", options=lambda: {"is_causal": True})
      for d in (16, 32, 40, 48, 56, 64, 80, 88, 96, 112, 128, 160, 192, 256, 320, 512)),
    *(Case(f"f32-dim-{d}", q_len=300, kv_len=200, dim=d, options=lambda: {"is_causal": True}) for d in (64, 128, 256)),
    *(Case(f"highest-dim-{d}", q_len=256, kv_len=256, dim=d, options=lambda: {"precision": "highest"}) for d in (64, 128, 256)),
    Case("mla", q_len=500, kv_len=500, heads=4, kv_heads=4, dim=192, v_dim=128, dtype="bfloat16", options=lambda: {"is_causal": True}),
    Case("long-causal", q_len=1000, kv_len=1000, heads=8, dim=128, dtype="bfloat16", options=lambda: {"is_causal": True}),
    # Beyond 2048 the side that stays is held in registers.
    *(Case(f"longer-{d}", q_len=2300, kv_len=2200, dim=d, dtype="bfloat16", options=lambda: {"is_causal": True}) for d in (64, 96, 128)),
    Case("longer-full", q_len=2300, kv_len=2300, kv_heads=2, dim=128, dtype="float16"),
    Case("long-full-f16", q_len=1024, kv_len=1024, heads=4, kv_heads=4, dim=64, dtype="float16"),
    Case("long-window", q_len=1500, kv_len=1500, batch=1, dim=64, dtype="bfloat16", options=lambda: {"local_window_size": (200, 0)}),
    Case("long-bias", q_len=700, kv_len=700, heads=4, dim=64, dtype="bfloat16", options=lambda: {"bias": _bias(1, 4, 700, 700, dtype="bfloat16")}),
    Case("long-segments", q_len=1000, kv_len=1000, dim=128, dtype="bfloat16", options=lambda: {"q_segment_ids": _ids(2, 1000, 111, 500, 777), "is_causal": True}),
]  # fmt: skip
