"""The front door: ``flash_attention``, its one ``custom_vjp``, and ``explain``."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from . import dispatch, sharding
from .dispatch import Implementation, Plan
from .kernels import xla
from .problem import Operands, Output, describe, offset_of
from .promotion import usual_promotion


@usual_promotion
def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    implementation: Implementation = None,
    return_residual: bool = False,
    causal_alignment: str = "top_left",
    q_offset: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    score: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Any = None,
    broadcast_dropout: bool = False,
    precision: Any = None,
    backward: str = "auto",
    return_lse: bool = False,
) -> Any:
    """Exact attention, ``softmax(scale * q k^T + bias, masked) v``, in memory linear in the length.

    The arguments up to ``return_residual`` are those of :func:`jax.nn.dot_product_attention`, with its order, defaults
    and results.  Everything that restricts who sees whom is combined: a pair must pass every one of them.

    Args:
      query: [B, T, N, D], float32, bfloat16 or float16 (float64 on the xla tier).  Any number of batch dimensions,
        none included; all of query, key and value have one dtype.
      key: [B, S, K, D]; N is a multiple of K and query head n uses key head ``n // (N / K)``.
      value: [B, S, K, Dv].
      bias: float, broadcastable to [B, N, T, S]; added to the scaled logits.  Differentiable.
      mask: bool, broadcastable to [B, N, T, S], True = attend; or a :class:`pallas_flash.Mask`.
      scale: of the logits; default ``1 / sqrt(D)``.  A number or a (traced) scalar of any sign.
      is_causal: query at position p sees keys at positions <= p.
      query_seq_lengths, key_value_seq_lengths: int [B]; rows from there on are padding.
      local_window_size: ``(left, right)`` keys on each side of the position, inclusive; None leaves a side open, an
        int w means (w, w).
      implementation: None (the library chooses), ``"triton"``, ``"xla"``, ``"xla_chunked"``, or a sequence in order
        of preference.  A named implementation runs or raises; it never becomes another.
      return_residual: also return the lse as jax.nn does, [B, T, N] in key's dtype, without gradient.
      causal_alignment: where query i stands: ``"top_left"``, position i; ``"bottom_right"``, i + S - T, by each row's
        own lengths where they are given.
      q_offset: int or int [B]: position of query 0, instead of an alignment.
      q_segment_ids, kv_segment_ids: int [B, T] and [B, S]; equal ids see each other, a negative id is padding.
        ``q_segment_ids`` alone serves both sides when T == S.
      logits_soft_cap: ``cap * tanh(logits / cap)``, before the bias.
      sinks, alibi_slopes, score, dropout_rate, dropout_rng, broadcast_dropout: not there yet.
      precision: of the products of float32 inputs: None or "default" (TF32 on a GPU, as XLA does) or "highest".
      backward: ``"auto"``, ``"deterministic"`` or ``"fast"``; the triton tier's is always deterministic.
      return_lse: also return the natural-log normaliser of each row, float32 [B, N, T], differentiable.

    Returns:
      ``out`` [B, T, N, Dv] in query's dtype, or a tuple ``(out, residual, lse)`` of what was asked for.  A row that
      sees no key gives out 0, lse -inf and zero gradients.

    Raises:
      ValueError: a malformed argument.
      NotImplementedError: a valid call that the named implementation has no kernel for.

    Algorithm: FlashAttention-2 (Dao, arXiv:2307.08691, algorithms 1 and 2).

    >>> import jax, jax.numpy as jnp
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 16))
    >>> flash_attention(q, k, v, is_causal=True).shape
    (2, 5, 4, 16)
    >>> bool(jnp.allclose(flash_attention(q, k, v), jax.nn.dot_product_attention(q, k, v), atol=1e-5))
    True
    """
    _refuse_future(sinks, alibi_slopes, score, dropout_rate)
    problem, x, batch_dims = describe(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        causal_alignment=causal_alignment,
        q_offset=q_offset,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        logits_soft_cap=logits_soft_cap,
        precision=precision,
        backward=backward,
    )
    out = run(dispatch.select(problem, implementation), x)
    o, lse = (a.reshape(*batch_dims, *a.shape[1:]) for a in (out.o, out.lse))
    results = [o]
    if return_residual:
        results.append(jax.lax.stop_gradient(lse).swapaxes(-1, -2).astype(x.k.dtype))
    if return_lse:
        results.append(lse)
    return results[0] if len(results) == 1 else tuple(results)


@usual_promotion
def explain(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Any) -> Plan:
    """The plan of ``flash_attention`` with the same arguments, without running anything.

    Arrays may be given as :class:`jax.ShapeDtypeStruct`.  Raises what the call would raise.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
    >>> print(explain(x, x, x, implementation="xla", is_causal=True).backward)
    xla
    """
    implementation = options.pop("implementation", None)
    static, arrays = _problem_options(options)
    plans = []

    def trace(query, key, value, bias, mask, arrays):
        problem, _, _ = describe(query, key, value, bias, mask, **static, **arrays)
        plans.append(dispatch.select(problem, implementation))

    jax.eval_shape(trace, query, key, value, bias, mask, arrays)
    return plans[0]


@usual_promotion
def dense_mask(query: Any, key: Any, mask: Any = None, **options: Any) -> jax.Array:
    """Who may see whom under the same options of ``flash_attention``, as a boolean array.

    Returns:
      [*batch or 1, N or 1, T, S]; quadratic in the length, for pictures, tests and unfused attention.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 2, 1, 16))
    >>> dense_mask(x, x, is_causal=True)[0, 0].tolist()
    [[True, False], [True, True]]
    """
    static, arrays = _problem_options(options)
    problem, x, batch_dims = describe(query, key, key, None, mask, **static, **arrays)
    allowed = x.mask.dense(problem.q_len, problem.kv_len, offset_of(problem, x))
    outer = (1,) * len(batch_dims) if allowed.shape[0] == 1 else batch_dims
    return allowed.reshape(*outer, *allowed.shape[1:])


def _problem_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments of ``flash_attention`` as those of ``describe``: constants, and arrays to trace."""
    signature = inspect.signature(flash_attention).parameters
    if unknown := options.keys() - signature.keys():
        raise TypeError(f"unknown arguments: {', '.join(sorted(unknown))}")
    future = (options.get(name) for name in ("sinks", "alibi_slopes", "score", "dropout_rate"))
    _refuse_future(*future)
    wanted = [name for name in inspect.signature(describe).parameters if name not in ("query", "key", "value", "bias")]
    given = {name: options.get(name, signature[name].default) for name in wanted if name != "mask"}
    arrays = {n: x for n, x in given.items() if isinstance(x, (jax.Array, jax.ShapeDtypeStruct))}
    return {n: x for n, x in given.items() if n not in arrays}, arrays


def run(plan: Plan, x: Operands) -> Output:
    """Runs a plan; the xla implementations are differentiated by JAX, the tiers by their own backward kernels."""
    p = plan.problem
    if p.is_empty:
        wide = jnp.promote_types(p.dtype, jnp.float32)
        o = jnp.zeros((p.batch, p.q_len, p.num_q_heads, p.v_head_dim), p.dtype)
        return Output(o, jnp.full((p.batch, p.num_q_heads, p.q_len), -jnp.inf, wide))
    if plan.forward == "xla":
        return xla.attend(p, x)
    if plan.forward == "xla_chunked":
        return xla.attend_chunked(p, x)
    try:
        return _kernels(plan, x)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise NotImplementedError(_NO_FORWARD_MODE) from error


_NO_FORWARD_MODE = (
    "the attention kernels have no forward-mode (jvp) and no second derivative; call flash_attention with "
    "implementation='xla', where both work"
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernels(plan: Plan, x: Operands) -> Output:
    return _run_forward(plan, x, keep_rest=False)


def _run_forward(plan: Plan, x: Operands, *, keep_rest: bool) -> Output:
    tier = dispatch.TIERS[plan.forward]

    def on_device(problem, x):
        return tier.forward(problem, plan.device, x, keep_rest=keep_rest)

    def everywhere(x):
        return sharding.by_batch_and_heads(on_device, plan.problem, (x,), (sharding.operand_labels(x),))

    out = _once_differentiable(everywhere)(x)
    # The names stand inside the rule: outside it, jax.checkpoint would run the forward kernel again to get them.
    rest = None if out.rest is None else checkpoint_name(out.rest, "attention_out")
    return Output(checkpoint_name(out.o, "attention_out"), checkpoint_name(out.lse, "attention_lse"), rest)


@usual_promotion
def _forward(plan: Plan, x: Operands) -> tuple[Output, tuple[Operands, Output]]:
    out = _run_forward(plan, x, keep_rest=True)
    return out._replace(rest=None), (x, out)


@usual_promotion
def _backward(plan: Plan, saved: tuple[Operands, Output], cotangents: Output) -> tuple[Operands]:
    x, out = saved
    tier = dispatch.TIERS[plan.backward]

    def on_device(problem, x, out, cotangents):
        return tier.backward(problem, plan.device, x, out, cotangents.o, cotangents.lse)

    def everywhere(*args):
        labels = (sharding.operand_labels(x), sharding.output_labels(out), sharding.output_labels(cotangents))
        return sharding.by_batch_and_heads(on_device, plan.problem, args, labels)

    g = _once_differentiable(everywhere)(x, out, cotangents)
    dscale = None if x.scale is None or g.dscale is None else g.dscale.astype(x.scale.dtype)
    return (Operands(g.dq, g.dk, g.dv, g.dbias, mask=None, q_offset=None, scale=dscale),)  # type: ignore[arg-type]


_kernels.defvjp(_forward, _backward)


def _once_differentiable(function: Any) -> Any:
    """Turns an attempt to differentiate a kernel call into a sentence."""
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(_NO_FORWARD_MODE)

    return guarded


def _refuse_future(sinks: Any, alibi_slopes: Any, score: Any, dropout_rate: Any) -> None:
    dropout_rate = 0.0 if dropout_rate is None else dropout_rate
    given = {"sinks": sinks, "alibi_slopes": alibi_slopes, "score": score}
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name}= is not implemented yet; leave it None")
    if isinstance(dropout_rate, (int, float)) and not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate must be in [0, 1); got {dropout_rate}")
    if not isinstance(dropout_rate, (int, float)) or dropout_rate > 0.0:
        raise NotImplementedError(f"dropout_rate={dropout_rate}: dropout is not implemented yet; leave it 0.0")
