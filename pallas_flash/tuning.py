"""Measures which tiles suit the shapes of one's own call."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .tile_table import KERNELS, Entry, Fields, Situation, TileTable, asking

SAMPLES, SAMPLE_SECONDS, MOST_CALLS = 5, 0.02, 500
GAIN = 0.01  # less is noise


def autotune(
    fn: Callable[..., Any],
    *args: Any,
    kernels: Sequence[str] = KERNELS,
    seconds: float = 600.0,
    progress: Callable[[str], None] | None = None,
) -> TileTable:
    """Tries tiles for every attention kernel that a function runs, and returns a table of the fastest.

    Kernel after kernel, the function is compiled and timed with each tile that fits the GPU, the other kernels keeping
    the best that is known so far; expect one to three seconds a tile, most of it compilation. A step that trains the
    model times forward and backward kernels in their real surroundings.

    Args:
      fn: what to time, jitted or not: a call of ``flash_attention``, its gradient, a training step. It is called many
        times and must not donate its arguments. What it computes and does not return is not run, so not tuned.
      *args: its arguments, arrays of the sizes that matter.
      kernels: which kernels to tune, of "forward", "dq", "dkv" ("dk" and "dv" for wide heads) and "dscore" (the
        gradients of biases).
      seconds: when this time is over no new tile is tried.
      progress: called with a line of text for each tile.

    Returns:
      A :class:`TileTable` with the kernels whose best tile beat the one they would have had. Keep it with ``save``, get
      it back with ``TileTable.load``, and use it with ``with table:``.

    Raises:
      ValueError: ``fn`` runs none of the kernels, as on a machine without a GPU (``explain`` tells why), or
        ``kernels`` names one that does not exist.
      Exception: what ``fn`` itself raised with every tile.

    >>> import jax, jax.numpy as jnp, pallas_flash
    >>> q = jnp.ones((1, 16, 1, 16))
    >>> attend = lambda q: pallas_flash.flash_attention(q, q, q, implementation="triton")
    >>> with pallas_flash.interpret():  # on a GPU without this line
    ...     table = pallas_flash.autotune(attend, q, seconds=0)
    >>> with table:
    ...     pass
    """
    if isinstance(kernels, str) or not set(kernels) <= set(KERNELS):
        raise ValueError(f"kernels must be some of {KERNELS}, got {kernels!r}")
    with asking() as asked:
        jax.eval_shape(_fresh(fn), *args)
    situations = {s: tiles for s, tiles in asked.candidates.items() if s.kernel in kernels}
    if not situations:
        wanted = ", ".join(kernels)
        raise ValueError(
            f"fn runs no kernel that has tiles (looked for: {wanted}); pallas_flash.explain(...) of its attention call "
            "tells which implementation runs and why the kernels do not"
        )
    placed = [leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array)] or [jnp.zeros(())]
    (kind,) = {device.device_kind for device in placed[0].devices()}
    origin = f"tuned on {kind} with JAX {jax.__version__}"
    best = TileTable([], origin)
    end = time.perf_counter() + seconds
    for situation, tiles in situations.items():
        best = _tune_one(fn, args, situation, tiles, best, end, progress or (lambda line: None))
    return best


def _tune_one(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    situation: Situation,
    tiles: tuple[Fields, ...],
    best: TileTable,
    end: float,
    progress: Callable[[str], None],
) -> TileTable:
    if time.perf_counter() >= end:
        return best
    least, failure = math.inf, None
    try:
        least = _seconds(fn, args, best)
        progress(f"{situation}: {least * 1e6:.0f} us with the tile that it has")
    except Exception as error:  # made for another GPU, say
        failure = error
        progress(f"{situation}: refused with the tile that it has: {_first_line(error)}")
    for tile in tiles:
        if time.perf_counter() >= end:
            break
        shown = ", ".join(f"{name} {value}" for name, value in tile)
        try:
            took = _seconds(fn, args, TileTable([Entry(situation, tile)], best.origin) | best)
        except Exception as error:  # too much shared memory or too many registers: each backend has its own error
            progress(f"{situation}: refused with {shown}: {_first_line(error)}")
            continue
        progress(f"{situation}: {took * 1e6:.0f} us with {shown}")
        if took < least * (1 - GAIN):
            least = took
            best = TileTable([Entry(situation, tile, took * 1e6)], best.origin) | best
    if failure is not None and least == math.inf:
        raise failure
    return best


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"


def _seconds(fn: Callable[..., Any], args: tuple[Any, ...], table: TileTable) -> float:
    """Median time of a call with a table's tiles."""
    with table:
        compiled = jax.jit(_fresh(fn)).lower(*args).compile()

    return statistics.median(samples(lambda: compiled(*args), jax.block_until_ready, SAMPLE_SECONDS, MOST_CALLS))


def samples(call: Callable[[], Any], wait: Callable[[Any], Any], seconds: float, most: int) -> list[float]:
    """Times of a call, each the mean of a queue of at most ``most`` that takes about ``seconds``.

    Calls queued one behind the other hide what starting one costs.
    """

    def queue(calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        return (time.perf_counter() - started) / calls

    queue(1)  # loads the program
    # One call would measure the synchronisation as much as the work, where the work is short.
    once = queue(5) if queue(1) < seconds else seconds
    calls = max(1, min(most, round(seconds / once)))
    return [queue(calls) for _ in range(SAMPLES)]


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a new identity: JAX finds nothing compiled for it."""
    return lambda *args: fn(*args)
