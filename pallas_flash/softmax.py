"""Numbers of the base-2 online softmax, and the merge of partial results."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

# The running maximum starts here and not at -inf, so that exp2(m_old - m_new) needs no special case in a row that
# has seen no allowed key yet.  Logits below it count as forbidden, like a bias of finfo.min.
LOWEST = -1e30


def merge(o_a: jax.Array, lse_a: jax.Array, o_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Joins attention over two disjoint sets of keys.

    Args:
      o_a, o_b: outputs [B, T, N, Dv].
      lse_a, lse_b: float32 natural-log normalisers [B, N, T]; -inf where a row saw no key.

    Returns:
      ``(o, lse)`` of the attention over both sets; 0 and -inf where neither saw a key.
      (FlashAttention, arXiv:2205.14135, section 3.1: softmax of concatenated blocks.)

    >>> import jax.numpy as jnp
    >>> o, lse = jnp.ones((1, 1, 1, 1)), jnp.zeros((1, 1, 1))
    >>> merged, total = merge(o, lse, 3 * o, lse)
    >>> float(merged[0, 0, 0, 0])
    2.0
    """
    # Finite where there is nothing to join, so that gradients are 0 there and not NaN.
    empty = jnp.isneginf(lse_a) & jnp.isneginf(lse_b)
    lse_a, lse_b = jnp.where(empty, 0.0, lse_a), jnp.where(empty, 0.0, lse_b)
    total = jnp.logaddexp(lse_a, lse_b)

    def weighted(o, lse):
        weight = jnp.where(empty, 0.0, jnp.exp(lse - total))
        return weight.swapaxes(-1, -2)[..., None] * o.astype(total.dtype)

    o = weighted(o_a, lse_a) + weighted(o_b, lse_b)
    return o.astype(o_a.dtype), jnp.where(empty, -jnp.inf, total)
