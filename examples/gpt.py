"""A byte-level GPT in Flax nnx: rotary positions, grouped query heads, packed documents, our attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_flash

from .corpus import VOCABULARY


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of the model and of a training step."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    length: int
    batch: int
    steps: int
    learning_rate: float

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


SIZES = {
    "cpu": Size(layers=3, width=128, heads=4, kv_heads=2, length=128, batch=16, steps=300, learning_rate=3e-3),
    "gpu-small": Size(layers=8, width=512, heads=8, kv_heads=4, length=2048, batch=16, steps=500, learning_rate=1e-3),
    "gpu": Size(layers=24, width=1024, heads=16, kv_heads=8, length=4096, batch=8, steps=1000, learning_rate=4e-4),
}


Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]  # of q, k, v and the documents' ids


def flash(implementation: str | None) -> Attend:
    """Our attention: causal, within documents."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return pallas_flash.flash_attention(
            q, k, v, is_causal=True, q_segment_ids=segments, implementation=implementation
        )

    return attend


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding (Su et al., arXiv:2104.09864) of [batch, length, heads, head_dim]."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = (positions[..., None] * frequency)[:, :, None, :]
    a, b = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Attention(nnx.Module):
    def __init__(self, size: Size, dtype: Any, attend: Attend, rngs: nnx.Rngs):
        self.size, self.attend = size, attend
        heads = (size.heads + 2 * size.kv_heads, size.head_dim)
        self.qkv = nnx.LinearGeneral(size.width, heads, use_bias=False, dtype=dtype, rngs=rngs)
        self.out = nnx.LinearGeneral((size.heads, size.head_dim), size.width, axis=(-2, -1), use_bias=False,
                                     dtype=dtype, rngs=rngs)  # fmt: skip

    def __call__(self, x: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        n, k = self.size.heads, self.size.kv_heads
        q, k, v = jnp.split(self.qkv(x), [n, n + k], axis=2)
        q, k = rotate(q, positions), rotate(k, positions)
        return self.out(self.attend(q, k, v, segments))


class Block(nnx.Module):
    def __init__(self, size: Size, dtype: Any, attend: Attend, rngs: nnx.Rngs):
        self.attention = Attention(size, dtype, attend, rngs)
        self.norm1, self.norm2 = (nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.up = nnx.Linear(size.width, 4 * size.width, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * size.width, size.width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), segments, positions)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """With ``remat``, of each block only the attention's results are kept for the backward pass."""

    def __init__(self, size: Size, dtype: Any, attend: Attend, rngs: nnx.Rngs, *, remat: bool = True):
        self.remat = remat
        self.embed = nnx.Embed(VOCABULARY, size.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(size, dtype, attend, rngs) for _ in range(size.layers)])
        self.norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(size.width, VOCABULARY, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        """Logits float32 [batch, length, 256]."""
        keep = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

        def run(block, *args):
            return block(*args)

        run = nnx.remat(run, policy=keep) if self.remat else run
        x = self.embed(tokens)
        for block in self.blocks:
            x = run(block, x, segments, positions)
        return self.head(self.norm(x)).astype(jnp.float32)
