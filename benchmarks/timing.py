"""How time is taken.

Work on a GPU is asynchronous, so many calls are queued between two synchronisations: the gaps between launches and the
cost of Python disappear behind the device's work. Each sample is the mean of such a queue; the result is the median
of the samples, with their spread beside it. Forward is a compiled call that returns the output. Backward is the
vector-Jacobian product alone: ``jax.vjp`` inside a jitted function returns its pullback, which is a pytree of the
residuals, and a second jitted function applies it, so that the forward pass is outside the clock. (Timing both and
subtracting would add their noise and would count work that XLA shares between them.) A launch costs some 40
microseconds; a workload whose work is shorter repeats it inside one program.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.tuning import samples

from . import peers, reference, torch_sdpa
from .peers import PEERS, Refusal
from .workloads import Workload

SAMPLE_SECONDS, MOST_CALLS = 0.03, 2000


class Sample(NamedTuple):
    seconds: float  # median of a call
    spread: float  # (largest - smallest) / median of the samples


@dataclasses.dataclass(frozen=True)
class Case:
    """A workload with its arrays and the results that every peer is measured against."""

    workload: Workload
    arrays: tuple[jax.Array, ...]  # q, k, v and the cotangent of the output
    extras: dict[str, Any]
    wanted: dict[str, jax.Array]

    @classmethod
    def of(cls, w: Workload) -> Case:
        (q, k, v, do), extras = inputs(w), peers.extras(w)
        return cls(w, (q, k, v, do), extras, reference.results(w, q, k, v, do, extras))


@functools.partial(jax.jit, static_argnums=0)
def inputs(w: Workload) -> tuple[jax.Array, ...]:
    """q, k, v and the cotangent of the output; random, because zeros run faster than data."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)  # the default generator takes seconds to compile
    kv_heads, v_dim = w.kv_heads or w.heads, w.v_dim or w.dim
    queries, rows = (w.q_length or w.length, w.heads), (w.length, kv_heads)
    shapes = ((*queries, w.dim), (*rows, w.dim), (*rows, v_dim), (*queries, v_dim))
    q, k, v, do = (jax.random.normal(key, (w.batch, *shape)) for key, shape in zip(keys, shapes, strict=True))
    if w.rising:
        k = k + jnp.linspace(0, 200, w.length)[None, :, None, None]  # times the sum of a query's channels
    return tuple(x.astype(w.dtype) for x in (q, k, v, do))


def measure(call: Callable[[], Any], wait: Callable[[Any], Any]) -> Sample:
    taken = samples(call, wait, SAMPLE_SECONDS, MOST_CALLS)
    median = statistics.median(taken)
    return Sample(median, (max(taken) - min(taken)) / median)


def run(case: Case, peer: str, directions: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of results of one peer on one workload; a refusal is a row with its reason."""
    timed = _torch if peer == peers.TORCH else _jax
    rows: list[dict[str, Any]] = []
    for direction in directions:
        try:
            rows.append({**_base(case, peer, direction), **timed(case, peer, direction)})
        except Exception as error:  # whatever a peer raises must not end the run of the others
            rows.append({**_base(case, peer, direction), "refused": peers.reason(error)})
    return rows


def _base(case: Case, peer: str, direction: str) -> dict[str, Any]:
    return {"workload": case.workload.name, "peer": peer, "direction": direction}


def _jax(case: Case, peer: str, direction: str) -> dict[str, Any]:
    attention = PEERS[peer](case.workload)
    q, k, v, do = case.arrays
    if direction == "forward":
        arguments: tuple[Any, ...] = (q, k, v, case.extras)
        compiled = jax.jit(_repeated(attention, 0, case.workload.repeats)).lower(*arguments).compile()
    else:
        _, pullback = jax.jit(functools.partial(with_pullback, attention, case.workload))(q, k, v, case.extras)
        arguments = (pullback, do)
        apply = _repeated(lambda pullback, do: pullback(do), 1, case.workload.repeats)
        compiled = jax.jit(apply).lower(*arguments).compile()
    seconds, spread = measure(lambda: compiled(*arguments), jax.block_until_ready)
    sample = Sample(seconds / case.workload.repeats, spread)
    computed = compiled(*arguments)
    computed = (computed,) if direction == "forward" else computed[:3]
    return {**_numbers(case, direction, sample, computed), "temp_bytes": _temp_bytes(compiled)}


def with_pullback(attention: peers.Attention, w: Workload, q: jax.Array, k: jax.Array, v: jax.Array, x: dict) -> Any:
    """The output and what gives dq, dk, dv (and of the bias, where the workload asks) from its cotangent."""
    if w.bias_gradient:
        return jax.vjp(lambda q, k, v, bias: attention(q, k, v, {**x, "bias": bias}), q, k, v, x["bias"])
    return jax.vjp(lambda q, k, v: attention(q, k, v, x), q, k, v)


def _repeated(call: Callable[..., Any], place: int, times: int) -> Callable[..., Any]:
    """``times`` calls, the argument at ``place`` of each depending on the result before it, its values unchanged."""

    def run(*arguments):
        result = call(*arguments)
        for _ in range(times - 1):
            seen = jnp.ravel(jax.tree.leaves(result)[0])[0]
            waits = arguments[place] + jnp.where(jnp.isnan(seen), seen, 0).astype(arguments[place].dtype)
            result = call(*arguments[:place], waits, *arguments[place + 1 :])
        return result

    return run


def _torch(case: Case, peer: str, direction: str) -> dict[str, Any]:
    calls, wait = torch_sdpa.calls(case.workload, *case.arrays)
    if case.workload.repeats > 1:
        raise Refusal("repeated calls are measured in one program of JAX")
    sample = measure(calls[direction], wait)
    return _numbers(case, direction, sample, [torch_sdpa.to_numpy(x) for x in calls[direction]()])


def _numbers(case: Case, direction: str, sample: Sample, computed: Sequence[Any]) -> dict[str, Any]:
    names = ("out",) if direction == "forward" else ("dq", "dk", "dv")
    named: dict[str, Any] = dict(zip(names, computed, strict=True))
    flops = case.workload.flops * (1.0 if direction == "forward" else 2.5)
    return {
        "us": sample.seconds * 1e6,
        "tflops": flops / sample.seconds / 1e12,
        "spread": sample.spread,
        "error": reference.error(case.workload, named, case.wanted),
    }


def _temp_bytes(compiled: Any) -> int | None:
    analysis = compiled.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def memory(w: Workload, peer: str) -> dict[str, Any]:
    """Temporary bytes of ``value_and_grad`` as the compiler plans them; nothing is run, so any length can be asked.

    Raises:
      Refusal: this backend does not tell.
    """
    attention = PEERS[peer](w)
    arrays, extras = jax.eval_shape(lambda: (inputs(w)[:3], peers.extras(w)))

    def loss(q, k, v, x):
        return attention(q, k, v, x).astype(jnp.float32).sum()

    temp_bytes = _temp_bytes(jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arrays, extras).compile())
    if temp_bytes is None:
        raise Refusal("this backend does not analyse memory")
    return {"workload": w.name, "peer": peer, "length": w.length, "temp_bytes": temp_bytes}
