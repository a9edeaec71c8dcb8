"""One line that switches the attention of a model already written."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from flax import linen, nnx

from .attention_fn import is_ours, make_attention_fn

_STOCK = (nnx.dot_product_attention, linen.dot_product_attention)
# The attention function of the innermost flash_layers context; the interceptors of outer ones stand aside.
_innermost: contextvars.ContextVar[Any] = contextvars.ContextVar("flash_layers", default=None)


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
    if isinstance(model, FlashModule):
        model = model._module
    if isinstance(model, linen.Module):
        make_attention_fn(**options)  # refuses unknown options now rather than at the first call
        return FlashModule(model, options)
    if not isinstance(model, nnx.Module):
        raise TypeError(f"use_flash takes an nnx or a linen module; got {type(model).__name__}")
    return _set(model, make_attention_fn(**options), lambda old: old in _STOCK or is_ours(old))


def use_reference(model: nnx.Module) -> list[Any]:
    """Takes :func:`use_flash` back on an nnx model; returns the changed layers.

    Raises:
      TypeError: not an nnx model; a linen module was never changed, so use the module that use_flash was given.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"use_reference takes an nnx module; got {type(model).__name__} (a linen module is itself unchanged: "
            "use the one that use_flash was given)"
        )
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

    Enter it around tracing: around ``init``, ``apply`` or the first call of a jitted function.  Of nested contexts
    the innermost one counts, with its options alone.

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
        ours_to_switch = is_attention and layer.attention_fn is linen.dot_product_attention
        if not ours_to_switch or _innermost.get() is not function:
            return call(*args, **kwargs)
        # A bound linen module refuses ordinary assignment; the field is put back before anyone else looks.
        object.__setattr__(layer, "attention_fn", function)
        try:
            return call(*args, **kwargs)
        finally:
            object.__setattr__(layer, "attention_fn", linen.dot_product_attention)

    before = _innermost.set(function)
    try:
        with linen.intercept_methods(intercept):
            yield
    finally:
        _innermost.reset(before)


class FlashModule:
    """A linen module whose ``init``, ``apply`` and kin run inside :func:`flash_layers`; other names are the module's.

    ``bind`` is refused: what a bound module calls later would run outside the context.
    """

    def __init__(self, module: linen.Module, options: dict[str, Any]):
        self._module = module
        self._options = options

    def init(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("init", args, kwargs)

    def init_with_output(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("init_with_output", args, kwargs)

    def lazy_init(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("lazy_init", args, kwargs)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("apply", args, kwargs)

    def tabulate(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("tabulate", args, kwargs)

    def clone(self, **kwargs: Any) -> FlashModule:
        return FlashModule(self._module.clone(**kwargs), self._options)

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a module from use_flash cannot be bound; bind the original one and call it inside "
            "`with flax_layers.flash_layers(...):`"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a module from use_flash has init and apply and is no part of another module; switch the outermost one, "
            "or call the original inside `with flax_layers.flash_layers(...):`"
        )

    def _run(self, method: str, args: Any, kwargs: Any) -> Any:
        with flash_layers(**self._options):
            return getattr(self._module, method)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("_module", "_options"):  # copy and pickle look before __init__ has run
            raise AttributeError(name)
        return getattr(self._module, name)
