"""The front door: ``flash_attention``, its one ``custom_vjp``, and ``explain``."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from . import dispatch, sharding
from .checks import as_flag
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
      sinks: float [N] or [N, n]: logits of keys without a value, which only take their share of each head's softmax
        (gpt-oss).  The lse includes them; a row that sees no key has theirs.  Differentiable.
      dropout_rate: of the weights; each that stays is divided by ``1 - dropout_rate``.  A number.
      dropout_rng: a random key; the weights kept are ``jax.random.bernoulli(key, 1 - rate, [*batch, N, T, S])`` on
        every implementation (for a threefry key), also when recomputed, sharded or batched by vmap.
      broadcast_dropout: drop the same weights in all batch rows and heads, as Flax does by default.
      alibi_slopes: float [N] or [B, N]; subtracts ``slope * |position - key position|``.  Differentiable.
      score: a :class:`pallas_flash.Score`, or a list of them, that changes the scaled logits; its float arrays are
        differentiable.  The order: scale, soft cap, bias, ALiBi, scores as given, then every mask.
      precision: of the products of float32 inputs: None, "default" or "high" (TF32 on a GPU, as XLA does) or "highest".
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
    return_residual, return_lse = as_flag("return_residual", return_residual), as_flag("return_lse", return_lse)
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
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        score=score,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        backward=backward,
    )
    plan = dispatch.select(problem, implementation)
    out = sharding.on_auto_axes(functools.partial(run, plan), x)
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
    for name in ("return_residual", "return_lse"):
        as_flag(name, options.get(name, False))
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **_problem_options(options)}
    shapes = {name: x for name, x in given.items() if any(map(_is_shape, jax.tree.leaves(x)))}
    plans = []

    def trace(shapes):
        problem, _, _ = describe(**{**given, **shapes})
        plans.append(dispatch.select(problem, implementation))

    jax.eval_shape(trace, shapes)
    return plans[0]


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


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
    problem, x, batch_dims = describe(query, key, key, None, mask, **_problem_options(options))
    sizes = {"batch": problem.batch, "heads": problem.num_q_heads}
    allowed = x.mask.dense(problem.q_len, problem.kv_len, offset_of(problem, x), **sizes)
    outer = (1,) * len(batch_dims) if allowed.shape[0] == 1 else batch_dims
    return allowed.reshape(*outer, *allowed.shape[1:])


def _problem_options(options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``flash_attention`` as those of ``describe``."""
    signature = inspect.signature(flash_attention).parameters
    if unknown := options.keys() - signature.keys():
        raise TypeError(f"unknown arguments: {', '.join(sorted(unknown))}")
    wanted = [name for name in inspect.signature(describe).parameters if name not in ("query", "key", "value", "bias")]
    return {name: options.get(name, signature[name].default) for name in wanted if name != "mask"}


def run(plan: Plan, x: Operands) -> Output:
    """Runs a plan; the xla implementations are differentiated by JAX, the tiers by their own backward kernels."""
    p = plan.problem
    if p.is_empty:
        wide = jnp.promote_types(p.dtype, jnp.float32)
        o = jnp.zeros((p.batch, p.q_len, p.num_q_heads, p.v_head_dim), p.dtype)
        lse = jnp.full((1, 1, 1), -jnp.inf) if x.sinks is None else x.sinks[None, :, None]
        return Output(o, jnp.broadcast_to(lse, (p.batch, p.num_q_heads, p.q_len)).astype(wide))
    if plan.forward == "xla":
        return xla.attend(p, x)
    if plan.forward == "xla_chunked":
        return xla.attend_chunked(p, x)
    x = sharding.equally_varying(x)
    if plan.device.interpret and jax.typeof(x.q).manual_axis_type.varying:
        raise NotImplementedError(
            "interpreted kernels cannot run under jax.shard_map(check_vma=True), because Pallas' interpreter cannot: "
            "give it check_vma=False (compiled ones can)"
        )
    try:
        return _kernels(plan, x)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise NotImplementedError(_NO_FORWARD_MODE) from error
    except ValueError as error:
        if "captures constants" not in str(error):
            raise
        raise ValueError(
            f"a mask or score of this call ({', '.join(filter(None, (p.mask, p.scores)))}) uses an array that is not "
            "among its fields, which a kernel cannot reach: make it a field"
        ) from error


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
    dsinks = None if x.sinks is None or g.dsinks is None else g.dsinks.astype(x.sinks.dtype)
    dscore = None if x.score is None else jax.tree.unflatten(jax.tree.structure(x.score), g.dscore)
    none: Any = None
    return (Operands(g.dq, g.dk, g.dv, dscore, none, none, dscale, dsinks, none),)


_kernels.defvjp(_forward, _backward)


def _once_differentiable(function: Any) -> Any:
    """Turns an attempt to differentiate a kernel call into a sentence."""
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(_NO_FORWARD_MODE)

    return guarded
