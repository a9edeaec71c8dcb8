"""Our own arithmetic promotes as JAX does by default, whatever the caller has configured for theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def usual_promotion(function: Callable[P, R]) -> Callable[P, R]:
    """Runs a function with JAX's default promotion of ranks and dtypes.

    Callers may set ``jax_numpy_rank_promotion="raise"`` or ``jax_numpy_dtype_promotion="strict"`` to find mistakes in
    their models; they could not repair one that this reported in here.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return run
