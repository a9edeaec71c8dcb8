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

import pallas_flash

_LIBRARY = inspect.signature(pallas_flash.flash_attention).parameters
# What a caller sets through make_attention_fn; the rest of flash_attention's arguments come from Flax, call by call.
OPTIONS = tuple(
    name
    for name, parameter in _LIBRARY.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    and name not in ("return_residual", "return_lse", "dropout_rate", "dropout_rng", "broadcast_dropout", "precision")
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
_MARK = "_pallas_flash"
_warned: set[str] = set()


def make_attention_fn(**defaults: Any) -> Callable[..., jax.Array]:
    """An ``attention_fn`` with options of :func:`pallas_flash.flash_attention` set.

    Args:
      **defaults: any of ``OPTIONS``: ``local_window_size``, ``logits_soft_cap``, ``scale``, ``q_segment_ids``,
        ``implementation``, ...

    Returns:
      A function with the arguments of Flax's ``dot_product_attention``.

    Raises:
      TypeError: a name that flash_attention does not have.

    >>> from flax import nnx
    >>> fn = make_attention_fn(local_window_size=(128, 0))
    >>> layer = nnx.MultiHeadAttention(2, 16, attention_fn=fn, decode=False, rngs=nnx.Rngs(0))
    >>> layer(jax.numpy.ones((1, 4, 16))).shape
    (1, 4, 16)
    """
    _check_names(defaults)

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
        """Attention of [*batch, length, heads, head_dim] arrays, as Flax's ``dot_product_attention``.

        A mask of any dtype (nonzero = attend) or a ``pallas_flash.Mask``; statistics are always float32, so
        ``force_fp32_for_softmax`` changes nothing.  Active dropout, sowing of the weights and custom einsums take
        Flax's own unfused function, with one warning.
        """
        unknown = {name: x for name, x in options.items() if name not in OPTIONS and x is not None}
        _check_names(unknown)
        if input_positions is not None:
            raise TypeError(
                "attention_fn does not rotate: apply rotary positions before it (input_positions was given)"
            )
        merged = {**defaults, **{name: x for name, x in options.items() if name in OPTIONS}}
        if is_causal:
            merged["is_causal"] = True
            if query.shape[-3] == 1 < key.shape[-3] and "q_offset" not in merged:
                # A decode step of Flax 0.12.8 to 0.12.10: the one query is the newest token, not the first.
                merged.setdefault("causal_alignment", "bottom_right")
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
        if mask is not None and not isinstance(mask, pallas_flash.Mask):
            mask = jnp.asarray(mask) != 0
        dropping = _dropout_is_active(dropout_rate, dropout_rng, deterministic)
        reasons = {
            "dropout": dropping,
            "sowing of the attention weights": module is not None,
            "a custom einsum": any((einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)),
        }
        if not any(reasons.values()):
            return pallas_flash.flash_attention(query, key, value, bias, mask, precision=precision, **merged)
        reason = " and ".join(reason for reason, given in reasons.items() if given)
        flax_arguments = {
            "broadcast_dropout": broadcast_dropout,
            "dropout_rng": dropout_rng,
            "dropout_rate": dropout_rate,
            "deterministic": not dropping,
            "dtype": dtype,
            "precision": precision,
            "module": module,
        }
        if module is None or isinstance(module, linen.Module):
            stock = functools.partial(
                linen.dot_product_attention,
                force_fp32_for_softmax=force_fp32_for_softmax,
                einsum_dot_general=einsum_dot_general,
                qk_attn_weights_einsum=qk_attn_weights_einsum,
                attn_weights_value_einsum=attn_weights_value_einsum,
            )
        else:
            stock = nnx.dot_product_attention
        return _unfused(reason, stock, query, key, value, bias, mask, merged, flax_arguments)

    setattr(attention_fn, _MARK, True)
    return attention_fn


def is_ours(function: Any) -> bool:
    """Whether a function was made by :func:`make_attention_fn`."""
    return hasattr(function, _MARK)


def _unfused(reason, stock, query, key, value, bias, mask, options, flax_arguments):
    """Flax's own attention, with what our options mean written into its arguments."""
    cannot = [name for name in options if name not in (*_MASKING, "scale", "implementation", "backward")]
    cannot = [name for name in cannot if options[name] is not None]
    if cannot or options.get("implementation") not in (None, "xla"):
        what = cannot or [f"implementation={options['implementation']!r}"]
        raise NotImplementedError(
            f"{', '.join(what)} cannot be honoured by the unfused attention that dropout, sow_weights and custom "
            "einsums need; leave it out, or switch those off"
        )
    _warn_unfused(reason)
    masking = {name: x for name, x in options.items() if name in _MASKING}
    if mask is not None or masking:
        mask = pallas_flash.dense_mask(query, key, mask, **masking)
    if options.get("scale") is not None:
        query = query * jnp.asarray(options["scale"] * math.sqrt(query.shape[-1]), query.dtype)
    group = query.shape[-2] // key.shape[-2]
    if group > 1:
        key, value = (jnp.repeat(x, group, axis=-2) for x in (key, value))
    return stock(query, key, value, bias, mask, **flax_arguments)


def _dropout_is_active(rate: Any, rng: Any, deterministic: bool) -> bool:
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must be in [0, 1); got {rate}")
    if deterministic or rate == 0.0:
        return False
    if rng is None:
        raise ValueError(f"dropout_rate={rate} needs dropout_rng, a random key; none was given")
    return True


def _check_names(options: dict[str, Any]) -> None:
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
