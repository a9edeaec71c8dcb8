"""``python -m benchmarks train``: tokens per second of a GPT's training step, with one attention or another.

The model is the example's (``examples/gpt.py``) in the shapes of GPT-2, of bytes; forward, backward and AdamW in one
compiled step on 16k tokens. No layer is computed twice: what an attention keeps for its backward pass, it keeps.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.corpus import VOCABULARY
from examples.gpt import GPT, Size

from . import peers, timing, workloads
from .workloads import TOKENS, Workload

LENGTHS = (1024, 4096, 16384)


def size(name: str, length: int, tokens: int = TOKENS) -> Size:
    """Radford et al., Language Models are Unsupervised Multitask Learners (2019), table 2."""
    layers, width, heads = {"gpt2-small": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "smoke": (1, 32, 2)}[name]
    return Size(layers, width, heads, heads, length, tokens // length, steps=0, learning_rate=1e-4)


def row(name: str, shape: Size, peer: str, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Time of a step and tokens per second of a peer.

    Raises:
      Refusal: the peer cannot run the shape.
    """
    w = Workload(name, shape.batch, shape.length, shape.heads, shape.head_dim, dtype=jnp.dtype(dtype).name, causal=True)
    attention, extras = peers.PEERS[peer](w), peers.extras(w)
    model = GPT(shape, dtype, lambda q, k, v, segments: attention(q, k, v, extras), nnx.Rngs(0), remat=False)
    graph, params = nnx.split(model)
    optimizer = optax.adamw(shape.learning_rate)
    state = optimizer.init(params)
    tokens = jax.random.randint(jax.random.key(0), (shape.batch, shape.length), 0, VOCABULARY)
    positions = jnp.broadcast_to(jnp.arange(shape.length), tokens.shape)

    def loss(params, tokens):
        logits = nnx.merge(graph, params)(tokens, jnp.zeros_like(tokens), positions)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    compiled = jax.jit(step).lower(params, state, tokens).compile()
    sample = timing.measure(lambda: compiled(params, state, tokens), jax.block_until_ready)
    value = float(compiled(params, state, tokens)[2])
    label = f"{name}-{workloads.label(shape.length)}"
    return {
        "workload": label, "peer": peer, "direction": "training step", "us": sample.seconds * 1e6,
        "spread": sample.spread, "tokens_per_second": shape.batch * shape.length / sample.seconds, "loss": value,
    }  # fmt: skip
