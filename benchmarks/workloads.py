"""Named shapes, each with its source."""

from __future__ import annotations

import dataclasses
from typing import Any

BLOCK = 128  # tokens of a block of a sparse mask
TOKENS, HIDDEN = 16384, 2048  # FlashAttention-3 paper, section 4.1: 16k tokens in all, hidden size 2048


@dataclasses.dataclass(frozen=True)
class Workload:
    """One attention call; lengths in tokens, ``documents`` the lengths of packed documents."""

    name: str
    batch: int
    length: int
    heads: int
    dim: int
    kv_heads: int | None = None
    dtype: str = "bfloat16"
    causal: bool = False
    window: int | None = None  # keys to the left of the query, besides itself
    documents: tuple[int, ...] = ()
    bias: bool = False  # [1, heads, length, length] in the inputs' dtype
    bias_gradient: bool = False  # whether the backward pass computes that of the bias too
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    dropout: float = 0.0
    blocks: float | None = None  # share of random blocks of BLOCK x BLOCK that are allowed
    causal_array: bool = False  # the causal mask as a boolean array [1, 1, length, length]
    varlen: bool = False  # the documents through varlen_attention, where a peer has it
    q_length: int | None = None  # queries, where they are fewer than the keys
    v_dim: int | None = None  # channels of the values, where it is not dim
    precision: str | None = None  # of float32 products
    rising: bool = False  # logits that rise along the keys by more than a settled row maximum can hold
    repeats: int = 1  # calls in one program, each waiting for the one before: for work shorter than its launch

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward pass: 4 B H S S D (2 of each head dim), of a causal mask half.

        A window or packed documents count the pairs that are allowed.
        """
        s = self.length
        if self.documents:
            pairs = sum(d * d for d in self.documents) * (0.5 if self.causal else 1)
        elif self.window is not None:
            pairs = s * (self.window + 1)
        elif self.blocks is not None:
            pairs = s * s * self.blocks
        else:
            pairs = (self.q_length or s) * s * (0.5 if self.causal else 1)
        return 2.0 * self.batch * self.heads * pairs * (self.dim + (self.v_dim or self.dim))

    @property
    def only_ours(self) -> str:
        """Options that jax.nn and most peers lack."""
        named = {"soft cap": self.soft_cap, "ALiBi": self.alibi, "sinks": self.sinks, "dropout": self.dropout}
        named |= {"block sparsity": self.blocks, "dense causal mask": self.causal_array}
        named |= {"value head dim of its own": self.v_dim}
        return ", ".join(name for name, value in named.items() if value)

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"is_causal": True} if self.causal and not self.causal_array else {}
        if self.window is not None:
            options["local_window_size"] = (self.window, 0)
        return options


def cell(dim: int, length: int, causal: bool) -> Workload:
    name = f"d{dim}-{'causal' if causal else 'full'}-{label(length)}"
    return Workload(name, TOKENS // length, length, HIDDEN // dim, dim, causal=causal)


def label(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


DIMS = (64, 128, 256)
# The cells of the table of peers: D x (causal at 1k, 4k, 16k; full at 16k).
CELLS = [cell(d, s, True) for d in DIMS for s in (1024, 4096, 16384)] + [cell(d, 16384, False) for d in DIMS]
GRID = [cell(d, s, c) for d in DIMS for c in (True, False) for s in (512, 1024, 2048, 4096, 8192, 16384)]
SPECIAL = [
    Workload("gqa-32-8", 2, 8192, 32, 128, kv_heads=8, causal=True),
    Workload("mha-32", 2, 8192, 32, 128, causal=True),
    Workload("gqa-64-8", 1, 8192, 64, 128, kv_heads=8, causal=True),
    Workload("mha-64", 1, 8192, 64, 128, causal=True),
    Workload("documents", 1, 16384, 16, 128, causal=True, documents=(5000, 300, 2700, 1024, 4096, 100, 1900, 1264)),
    Workload("window-1024", 1, 16384, 16, 128, causal=True, window=1023),
    Workload("short", 256, 128, 16, 64),
    Workload("d96", 4, 4096, 16, 96, causal=True),
    Workload("d192", 4, 4096, 10, 192, causal=True),
    Workload("long-128k", 1, 131072, 4, 128, causal=True),
]
# Head dims between the powers of two, and multi-head latent attention's.
DIM_ROWS = [Workload(f"dim-{d}", 4, 4096, 16, d, causal=True) for d in (64, 72, 80, 96, 112, 128, 160, 192, 256)]
DIM_ROWS += [Workload("mla-192-128", 4, 4096, 16, 192, v_dim=128, causal=True)]
DTYPES = [
    Workload(f"{dtype}-{label(s)}", 8192 // s, s, 16, 128, dtype=dtype, causal=True, precision=precision)
    for dtype, precision in (("bfloat16", None), ("float16", None), ("float32", None))
    for s in (1024, 4096)
]
DTYPES += [dataclasses.replace(w, name=f"highest-{label(w.length)}", precision="highest") for w in DTYPES[-2:]]
# One option beside the plain call, or what its users run.
_PLAIN = Workload("plain", 4, 4096, 16, 128, causal=True)
OPTIONS = [
    _PLAIN,
    dataclasses.replace(_PLAIN, name="soft-cap", soft_cap=30.0),
    dataclasses.replace(_PLAIN, name="alibi", alibi=True),
    dataclasses.replace(_PLAIN, name="dropout", dropout=0.1),
    dataclasses.replace(_PLAIN, name="rising", rising=True),
    Workload("bias", 1, 4096, 16, 128, bias=True),
    Workload("bias-gradient", 1, 4096, 16, 128, bias=True, bias_gradient=True),
    Workload("gpt-oss", 1, 16384, 64, 64, kv_heads=8, causal=True, window=127, sinks=True),
    Workload("batch-8x4k", 8, 4096, 16, 128, causal=True),
    Workload("ragged-8x1k", 1, 8192, 16, 128, causal=True, documents=(2048, 512, 1536, 256, 1024, 100, 1948, 768),
             varlen=True),
]  # fmt: skip
_FULL = Workload("full-8k", 2, 8192, 16, 128)
SPARSE = [
    _FULL,
    dataclasses.replace(_FULL, name="blocks-10%", blocks=0.1),
    dataclasses.replace(_FULL, name="causal-8k", causal=True),
    dataclasses.replace(_FULL, name="causal-array-8k", causal=True, causal_array=True),
]
# Where plain XLA may be faster: batch x heads from 16 to 4096, 16 heads of 64 channels.
SMALL = [
    Workload(f"small-{batch * 16}x{length}", batch, length, 16, 64, causal=True, repeats=8)
    for batch in (1, 16, 256)
    for length in (16, 64, 256, 512)
]
# A few queries on many keys, the shape of a decoding step.
DECODE = [
    Workload(f"decode-{batch * 16}x{queries}x{label(length)}", batch, length, 16, 128, q_length=queries, repeats=8)
    for batch in (1, 4, 8)
    for queries in (1, 64)
    for length in (2048, 16384)
]
SMOKE = [
    Workload("smoke-causal", 1, 64, 2, 16, dtype="float32", causal=True),
    Workload("smoke-gqa", 1, 48, 4, 16, kv_heads=2, dtype="float32"),
]
GROUPS = {
    "cells": CELLS,
    "grid": GRID,
    "special": SPECIAL,
    "dims": DIM_ROWS,
    "dtypes": DTYPES,
    "options": OPTIONS,
    "sparse": SPARSE,
    "small": SMALL,
    "decode": DECODE,
    "smoke": SMOKE,
}
GROUPS |= {f"d{d}": [w for w in CELLS if w.dim == d] for d in DIMS}


def find(names: str) -> list[Workload]:
    """Workloads by comma-separated names of groups or of single workloads.

    Raises:
      SystemExit: an unknown name.
    """
    single = {w.name: w for group in GROUPS.values() for w in group}
    found: dict[str, Workload] = {}
    for name in names.split(","):
        chosen = GROUPS.get(name) or ([single[name]] if name in single else None)
        if chosen is None:
            raise SystemExit(f"unknown workload {name!r}: groups {', '.join(GROUPS)}; see `python -m benchmarks list`")
        found |= {w.name: w for w in chosen}
    return list(found.values())
