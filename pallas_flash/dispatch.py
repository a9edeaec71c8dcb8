"""Who runs a call: an ordered tuple of tiers, the first without an objection wins; ``explain`` shows it all."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Sequence

import jax

from . import devices
from .devices import Device
from .kernels import triton
from .problem import Problem

TIERS = {tier.NAME: tier for tier in (triton,)}
PLAIN = ("xla", "xla_chunked")
NAMES = (*TIERS, *PLAIN)

Implementation = str | Sequence[str] | None

_default = jax.make_user_context(None)  # an Implementation; JAX keeps it beside the shapes of what it compiled
_warned: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Plan:
    """What would run, forward and backward, and why the others would not.  ``print`` it."""

    problem: Problem
    device: Device
    forward: str
    backward: str
    refusals: tuple[tuple[str, tuple[str, ...]], ...]
    tiles: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.problem}", f"on {self.device}", f"forward:  {self.forward}", f"backward: {self.backward}"]
        lines += [f"  {kernel} tile (queries x keys): {tile}" for kernel, tile in self.tiles]
        for name, reasons in self.refusals:
            lines += [f"not {name}: {reason}" for reason in reasons]
        return "\n".join(lines)


def select(problem: Problem, implementation: Implementation) -> Plan:
    """Picks forward and backward together.

    Raises:
      NotImplementedError: the implementations that were named all refuse; the text holds every reason.
      ValueError: an unknown name.
    """
    device = devices.current()
    named = implementation if implementation is not None else _default.value
    order = _order(named)
    refusals = []
    for name in order:
        reasons = refuse(name, problem, device, chosen_freely=named is None)
        if not reasons:
            tile_rows = (
                tuple(TIERS[name].describe(problem, device).items()) if name in TIERS and not problem.is_empty else ()
            )
            plan = Plan(problem, device, name, name, tuple(refusals), tile_rows)
            if named is None:
                _warn_if_quadratic(plan)
            return plan
        refusals.append((name, tuple(reasons)))
    said = "\n".join(f"  {name}: {reason}" for name, reasons in refusals for reason in reasons)
    raise NotImplementedError(
        f"implementation={named!r} cannot run this call ({problem}):\n{said}\n"
        "Leave implementation=None to let the library choose, or name 'xla', which runs everything."
    )


def refuse(name: str, problem: Problem, device: Device, *, chosen_freely: bool = False) -> list[str]:
    """Why an implementation would not run a problem; empty if it would."""
    if name in TIERS and problem.is_empty and chosen_freely:
        return ["there is nothing to compute"]
    if name in TIERS and not problem.is_empty:
        reasons = TIERS[name].unsupported(problem, device)
        if reasons or not chosen_freely:
            return reasons
        return ["interpreted kernels run only when named"] if device.interpret else TIERS[name].outrun(problem)
    return []


def _order(named: Implementation) -> tuple[str, ...]:
    if named is None:
        return (*TIERS, "xla")
    if not isinstance(named, (str, Sequence)):
        raise ValueError(f"implementation must be None, a name or a sequence of names; got {named!r}")
    names = (named,) if isinstance(named, str) else tuple(named)
    for name in names:
        if name not in NAMES:
            raise ValueError(f"implementation must be None or among {', '.join(map(repr, NAMES))}; got {name!r}")
    if not names:
        raise ValueError("implementation is an empty sequence; name at least one, or give None")
    return names


@contextlib.contextmanager
def use_implementation(implementation: Implementation) -> Iterator[None]:
    """Sets the default ``implementation`` of calls inside, in the manner of PyTorch's ``sdpa_kernel``.

    A function that ``jax.jit`` compiled outside is compiled anew inside.

    >>> import jax.numpy as jnp, pallas_flash
    >>> q = jnp.ones((1, 4, 1, 16))
    >>> with pallas_flash.use_implementation("xla"):
    ...     print(pallas_flash.explain(q, q, q).forward)
    xla
    """
    _order(implementation)
    with _default(
        implementation if implementation is None or isinstance(implementation, str) else tuple(implementation)
    ):
        yield


def _warn_if_quadratic(plan: Plan) -> None:
    """Tells a GPU user, once per reason, that memory is going to grow with the square of the length."""
    p = plan.problem
    linear = p.is_empty or min(p.q_len, p.kv_len) <= 64
    if plan.forward != "xla" or plan.device.platform not in ("cuda", "rocm") or linear:
        return
    reasons = "; ".join(reason for _, reasons in plan.refusals for reason in reasons)
    if reasons in _warned:
        return
    _warned.add(reasons)
    warnings.warn(
        f"pallas_flash runs this attention on plain XLA, in memory quadratic in the length, because {reasons}. "
        "Name implementation='xla' (or 'xla_chunked', linear in memory) to accept that and silence this.",
        stacklevel=5,
    )
