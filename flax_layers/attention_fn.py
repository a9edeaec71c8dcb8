"""``attention_fn`` for ``nnx.MultiHeadAttention`` and ``linen.MultiHeadDotProductAttention``."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.linen.dtypes import promote_dtype as flax_promote_dtype

import pallas_flash

_FROM_FLAX = ("dropout_rate", "dropout_rng", "broadcast_dropout")
_OTHER_RESULTS = ("return_residual", "return_lse")
# What a caller sets through make_attention_fn; the rest of flash_attention's arguments come from Flax, call by call.
OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(pallas_flash.flash_attention).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in (*_FROM_FLAX, *_OTHER_RESULTS)
)
_MASKING = (
    "is_causal",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "local_window_size",
    "causal_alignment",
    "q_offset",
    "q_segment_ids",
    "kv_segment_ids",
)
# A keyword of a newer Flax that stands at its default asks for nothing.
_FLAX_DEFAULTS = {
    name: parameter.default
    for stock in (linen.dot_product_attention, nnx.dot_product_attention)
    for name, parameter in inspect.signature(stock).parameters.items()
}
_NNX_GROUPS_HEADS = "num_kv_heads" in inspect.signature(nnx.MultiHeadAttention.__init__).parameters
_MARK = "_pallas_flash"
_warned: set[str] = set()


def make_attention_fn(**defaults: Any) -> Callable[..., jax.Array]:
    """An ``attention_fn`` with options of :func:`pallas_flash.flash_attention` set.

    Args:
      **defaults: any of ``OPTIONS``: ``local_window_size``, ``logits_soft_cap``, ``scale``, ``q_segment_ids``,
        ``implementation``, ``precision`` (where the layer states none), ...

    Returns:
      A function with the arguments of Flax's ``dot_product_attention``; see :func:`attention_fn`.

    Raises:
      TypeError: a name that flash_attention does not have, or that Flax passes itself; the text lists the valid ones.

    >>> from flax import nnx
    >>> fn = make_attention_fn(local_window_size=(128, 0))
    >>> layer = nnx.MultiHeadAttention(2, 16, attention_fn=fn, decode=False, rngs=nnx.Rngs(0))
    >>> layer(jax.numpy.ones((1, 4, 16))).shape
    (1, 4, 16)
    """
    _check_names(defaults)
    defaults = {name: x for name, x in defaults.items() if x is not None}

    def attention_fn(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        # linen hands over only the names that it finds here, so each is spelled out
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        *,
        promote_dtype: Any = None,
        is_causal: bool = False,
        input_positions: Any = None,
        **options: Any,
    ) -> jax.Array:
        """Flash attention with the arguments of Flax's ``dot_product_attention``.

        Statistics are always float32, so ``force_fp32_for_softmax`` changes nothing.  Dropout happens in the kernel
        and drops the weights that Flax drops for the same key.  Sowing of the weights and custom einsums take Flax's
        own unfused function, quadratic in memory, with one warning.  In a decode step (one query, several keys, a
        mask array) causal masking and windows count from the newest key that the mask allows, unless ``q_offset`` or
        ``causal_alignment`` says otherwise.

        Args:
          query: [*batch, T, N, D], any number of batch dimensions, none included.
          key, value: [*batch, S, K, D] and [*batch, S, K, Dv], N a multiple of K.
          bias: float, broadcastable to [*batch, N, T, S].
          mask: of any dtype (nonzero = attend), broadcastable to [*batch, N, T, S]; or a ``pallas_flash.Mask``.
          dropout_rate: in [0, 1); with ``deterministic`` False, a rate above 0 needs ``dropout_rng``.
          dtype, promote_dtype: as in Flax; query, key and value are promoted together.
          module: the layer that asks for the weights to be sown.
          **options: any of ``OPTIONS``, in place of the default given to make_attention_fn; None is no option.

        Returns:
          [*batch, T, N, Dv] in the promoted dtype.

        Raises:
          TypeError: an unknown keyword with a value, or ``input_positions``.
          ValueError: a malformed argument; the text names it.
          NotImplementedError: an option that the unfused function cannot honour.
        """
        _check_names({name: x for name, x in options.items() if x is not None and not _is_flax_default(name, x)})
        if input_positions is not None:
            raise TypeError(
                "attention_fn does not rotate: apply rotary positions before it (input_positions was given)"
            )
        merged = {**defaults, **{name: x for name, x in options.items() if name in OPTIONS and x is not None}}
        merged_precision = merged.pop("precision", None)
        precision = merged_precision if precision is None else precision
        if is_causal:
            merged["is_causal"] = True
        if promote_dtype is None:
            query, key, value = flax_promote_dtype(query, key, value, dtype=dtype)
        else:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        if mask is not None and not isinstance(mask, pallas_flash.Mask):
            mask = jnp.asarray(mask) != 0
            if query.shape[-3] == 1 < key.shape[-3]:
                _place_decode_step(merged, mask, query, key)
        dropping = _dropout_is_active(dropout_rate, dropout_rng, deterministic)
        einsums = {
            "einsum_dot_general": einsum_dot_general,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }
        reasons = {
            "sowing of the attention weights": module is not None,
            "a custom einsum": any(einsum is not None for einsum in einsums.values()),
        }
        if not any(reasons.values()):
            if dropping:
                merged |= {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
                merged["broadcast_dropout"] = broadcast_dropout
            return pallas_flash.flash_attention(query, key, value, bias, mask, precision=precision, **merged)
        stock: Callable[..., jax.Array] = nnx.dot_product_attention
        if isinstance(module, linen.Module) or force_fp32_for_softmax or reasons["a custom einsum"]:
            stock = functools.partial(
                linen.dot_product_attention, force_fp32_for_softmax=force_fp32_for_softmax, **einsums
            )
        if stock is not nnx.dot_product_attention or not _NNX_GROUPS_HEADS:
            key, value = _repeat_heads(query, key, value)
        flax_arguments = {
            "broadcast_dropout": broadcast_dropout,
            "dropout_rng": dropout_rng,
            "dropout_rate": dropout_rate,
            "deterministic": not dropping,
            "dtype": query.dtype,
            "precision": precision,
            "module": module,
        }
        reason = " and ".join(reason for reason, given in reasons.items() if given)
        return _unfused(reason, functools.partial(stock, **flax_arguments), query, key, value, bias, mask, merged)

    # The module's own attention_fn can then be pickled, as Flax's can.
    attention_fn.__qualname__ = attention_fn.__name__
    setattr(attention_fn, _MARK, True)
    return attention_fn


def is_ours(function: Any) -> bool:
    """Whether a function was made by :func:`make_attention_fn`."""
    return hasattr(function, _MARK)


def _place_decode_step(options: dict[str, Any], mask: jax.Array, query: jax.Array, key: jax.Array) -> None:
    """Says where the one query of a decode step stands: at the newest key of the cache that it may see.

    Flax passes the whole cache and a mask of its filled part, and no position.  Without this the query would stand
    at 0, and causal masking or a window would leave it the first key only.
    """
    if not options.get("is_causal") and options.get("local_window_size") is None:
        return
    if options.get("q_offset") is not None or options.get("causal_alignment") is not None:
        return
    batch_dims, heads, kv_len = query.shape[:-3], query.shape[-2], key.shape[-3]
    visible = jnp.broadcast_to(mask, (*batch_dims, heads, 1, kv_len)).any(axis=(-3, -2))
    options["q_offset"] = jnp.max(jnp.where(visible, jnp.arange(kv_len, dtype=jnp.int32), 0), axis=-1)


def _unfused(
    reason: str, stock: Any, query: jax.Array, key: jax.Array, value: jax.Array, bias: Any, mask: Any, options: Any
) -> jax.Array:
    """Flax's own attention, with what our options mean written into its arguments."""
    options = {name: x for name, x in options.items() if x is not None}
    cannot = [name for name in options if name not in (*_MASKING, "scale", "implementation", "backward")]
    named = options.get("implementation", "xla")
    if named != "xla" and "xla" not in tuple(named):
        cannot.append(f"implementation={named!r}")
    if cannot:
        raise NotImplementedError(
            f"{', '.join(cannot)} cannot be honoured by the unfused attention that sow_weights and custom "
            "einsums need; leave it out, or switch those off"
        )
    _warn_unfused(reason)
    masking = {name: x for name, x in options.items() if name in _MASKING}
    if mask is not None or masking:
        mask = pallas_flash.dense_mask(query, key, mask, **masking)
    if "scale" in options:
        query = query * jnp.asarray(options["scale"] * math.sqrt(query.shape[-1]), query.dtype)
    return stock(query, key, value, bias, mask)


def _repeat_heads(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Key and value with one head for each query head, for a stock function that does not group heads."""
    group = query.shape[-2] // key.shape[-2]
    return jnp.repeat(key, group, axis=-2), jnp.repeat(value, group, axis=-2)


def _dropout_is_active(rate: Any, rng: Any, deterministic: bool) -> bool:
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must be in [0, 1); got {rate}")
    if deterministic or rate == 0.0:
        return False
    if rng is None:
        raise ValueError(f"dropout_rate={rate} needs dropout_rng, a random key; none was given")
    return True


def _is_flax_default(name: str, x: Any) -> bool:
    return name in _FLAX_DEFAULTS and x is _FLAX_DEFAULTS[name]


def _check_names(options: dict[str, Any]) -> None:
    if theirs := sorted(options.keys() & set(_FROM_FLAX)):
        raise TypeError(f"{', '.join(theirs)}: the layer passes it, call by call; set it there")
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise TypeError(f"unknown options {', '.join(unknown)}; flash_attention has {', '.join(OPTIONS)}")


def _warn_unfused(reason: str) -> None:
    if reason in _warned:
        return
    _warned.add(reason)
    warnings.warn(
        f"flax_layers runs this layer on Flax's unfused attention, quadratic in memory, because of {reason}",
        stacklevel=3,
    )


attention_fn = make_attention_fn()
