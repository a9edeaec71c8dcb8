"""One line that switches the attention of a model already written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from flax import linen, nnx

from .adapter import is_ours, make_attention_fn

_STOCK = (nnx.dot_product_attention, linen.dot_product_attention)


def use_flash(model: Any, **options: Any) -> Any:
    """Switches the attention of ``model`` to ours; parameters are untouched.

    Args:
      model: an nnx model, changed in place, or a linen module.
      **options: as for :func:`flax_layers.make_attention_fn`.

    Returns:
      For nnx, the list of changed ``nnx.MultiHeadAttention`` layers (those on Flax's own attention function, or
      switched before).  For linen, a module whose ``init`` and ``apply`` run with our attention.

    Raises:
      TypeError: not a Flax model, or an unknown option.

    >>> from flax import nnx
    >>> model = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    >>> len(use_flash(model))
    1
    """
    if isinstance(model, linen.Module):
        make_attention_fn(**options)  # refuses unknown options now rather than at the first call
        return FlashModule(model, options)
    if not isinstance(model, nnx.Module):
        raise TypeError(f"use_flash takes an nnx or a linen module; got {type(model).__name__}")
    return _set(model, make_attention_fn(**options), lambda old: old in _STOCK or is_ours(old))


def use_reference(model: nnx.Module) -> list[Any]:
    """Takes :func:`use_flash` back on an nnx model; returns the changed layers."""
    return _set(model, nnx.dot_product_attention, is_ours)


def _set(model: nnx.Module, function: Any, applies: Any) -> list[Any]:
    nodes = (node for _, node in nnx.iter_graph(model))
    layers = [n for n in nodes if isinstance(n, nnx.MultiHeadAttention) and applies(n.attention_fn)]
    for layer in layers:
        layer.attention_fn = function
    return layers


@contextlib.contextmanager
def flash_layers(**options: Any) -> Iterator[None]:
    """Inside it, every ``linen.MultiHeadDotProductAttention`` on Flax's own attention runs with ours.

    Enter it around tracing: around ``init``, ``apply`` or the first call of a jitted function.

    >>> import jax
    >>> from flax import linen
    >>> layer, x = linen.MultiHeadDotProductAttention(2), jax.numpy.ones((1, 4, 16))
    >>> with flash_layers():
    ...     layer.apply(layer.init(jax.random.key(0), x), x).shape
    (1, 4, 16)
    """
    function = make_attention_fn(**options)

    def intercept(call, args, kwargs, context):
        layer = context.module
        is_attention = isinstance(layer, linen.MultiHeadDotProductAttention) and context.method_name == "__call__"
        if not is_attention or layer.attention_fn is not linen.dot_product_attention:
            return call(*args, **kwargs)
        # A bound linen module refuses ordinary assignment; the field is put back before anyone else looks.
        object.__setattr__(layer, "attention_fn", function)
        try:
            return call(*args, **kwargs)
        finally:
            object.__setattr__(layer, "attention_fn", linen.dot_product_attention)

    with linen.intercept_methods(intercept):
        yield


class FlashModule:
    """A linen module whose ``init``, ``init_with_output`` and ``apply`` run inside :func:`flash_layers`."""

    def __init__(self, module: linen.Module, options: dict[str, Any]):
        self._module = module
        self._options = options

    def init(self, *args: Any, **kwargs: Any) -> Any:
        with flash_layers(**self._options):
            return self._module.init(*args, **kwargs)

    def init_with_output(self, *args: Any, **kwargs: Any) -> Any:
        with flash_layers(**self._options):
            return self._module.init_with_output(*args, **kwargs)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        with flash_layers(**self._options):
            return self._module.apply(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
