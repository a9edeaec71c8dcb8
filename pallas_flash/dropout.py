"""Which attention weights are dropped: a function of the key and of the weight's place, of nothing else.

The mask is that of ``jax.random.bernoulli(key, 1 - rate, [B, N, T, S])`` for a threefry key (with JAX's default
``jax_threefry_partitionable``), drawn element by element: 20 rounds of Threefry-2x32 (Salmon et al., SC 2011) on the
64-bit index of the weight in that array.  So it does not depend on tiles, tiers, sharding or recomputation, and is
bit for bit what Flax draws.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .checks import as_array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def as_key(rng: Any) -> jax.Array:
    """The argument ``dropout_rng``.

    Raises:
      ValueError: anything but one random key, typed or raw.
    """
    rule = "one random key, jax.random.key(...) or jax.random.PRNGKey(...)"
    rng = as_array("dropout_rng", rng, rule)
    typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if not (typed and rng.ndim == 0) and not (rng.dtype == jnp.uint32 and rng.ndim == 1 and rng.size >= 2):
        raise ValueError(f"dropout_rng must be {rule}; got {rng.dtype} of shape {rng.shape}")
    return rng


def counters(key: Any, batch: int, heads: int, q_len: int, kv_len: int, broadcast: bool) -> jax.Array:
    """What a tile needs to know of the random key: uint32 [B or 1, N or 1, 4].

    The two words of the key, then the high and low word of the index of the first weight of this batch row and head:
    an array, so that it is divided among devices like everything else.  With ``broadcast`` all rows and heads drop
    the same weights, as in Flax.
    """
    words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    if broadcast:
        batch = heads = 1
    first = np.arange(batch * heads, dtype=np.uint64).reshape(batch, heads, 1) * np.uint64(q_len * kv_len)
    place = np.concatenate([first >> np.uint64(32), first & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)
    words = jnp.broadcast_to(words.reshape(-1)[:2].astype(jnp.uint32), (batch, heads, 2))
    return jnp.concatenate([words, jnp.asarray(place)], axis=-1)


def kept(counter: tuple[Any, ...], rate: float, q_row: Any, kv_row: Any, kv_len: int) -> jax.Array:
    """True where a weight stays.

    Args:
      counter: the four words of :func:`counters` for this batch row and head, each broadcastable to the tile.
      rate: of weights that are dropped.
      q_row, kv_row: int32 rows in the arrays, broadcastable against each other.
    """
    key_0, key_1, high, low = counter
    row_high, row_low = _wide_product(q_row.astype(jnp.uint32), kv_len)
    high, low = _add(high, low, row_high, row_low)
    high, low = _add(high, low, jnp.uint32(0), kv_row.astype(jnp.uint32))
    x, y = _threefry(key_0, key_1, high, low)
    # jax.random.uniform keeps 23 bits of 32 and compares in float32.
    threshold = math.ceil(float(np.float32(1.0 - rate)) * 2**23)
    return ((x ^ y) >> jnp.uint32(9)).astype(jnp.int32) < threshold


def _wide_product(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """High and low word of a uint32 array times an int below 2**32, without 64-bit integers."""
    a_low, a_high = a & jnp.uint32(0xFFFF), a >> jnp.uint32(16)
    b_low, b_high = jnp.uint32(b & 0xFFFF), jnp.uint32(b >> 16)
    low = a_low * b_low
    middle = a_high * b_low + (low >> jnp.uint32(16))
    other = a_low * b_high + (middle & jnp.uint32(0xFFFF))
    high = a_high * b_high + (middle >> jnp.uint32(16)) + (other >> jnp.uint32(16))
    return high, a * jnp.uint32(b)


def _add(a_high: Any, a_low: Any, b_high: Any, b_low: Any) -> tuple[jax.Array, jax.Array]:
    low = a_low + b_low
    return a_high + b_high + (low < b_low).astype(jnp.uint32), low


def _threefry(key_0: Any, key_1: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    keys = (key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(0x1BD11BDA))
    x, y = x + keys[0], y + keys[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x = x + y
            y = ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))) ^ x
        x = x + keys[(block + 1) % 3]
        y = y + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y
