"""Kernels under ``jit`` with sharded inputs: each device runs its own batch rows and heads, without a collective.

XLA cannot see into a kernel, and would gather all its operands on every device.  ``custom_partitioning`` tells it that
batch rows, and key heads with their groups of query heads, are independent; every other axis is gathered if it comes
sharded.  What an output sums over (the gradient of a bias that all rows share, say) is summed across devices.

Each array's axes are labelled by a string: ``b`` batch rows, ``n`` query heads, ``k`` key heads, ``.`` kept whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from . import masks, pair_masks, position_masks, scores, token_masks
from .problem import Gradients, Operands, Output, Problem
from .promotion import usual_promotion

_ROWS: Any = "b.n."  # labels stand where arrays do
_STATS: Any = "bn."


def operand_labels(x: Operands) -> Operands:
    """Labels of the operands; a mask's arrays are [B or 1], [B or 1, length] or [B or 1, N or 1, T or 1, S or 1]."""

    def label(leaf: Any) -> Any:
        heads = "n" if len(leaf.shape) == 4 and leaf.shape[1] > 1 else "."
        return (("b" if leaf.shape[0] > 1 else ".") + heads + "..")[: len(leaf.shape)]

    offset = None if x.q_offset is None else label(x.q_offset)
    scale: Any = None if x.scale is None else "."
    kv: Any = "b.k."
    sinks: Any = None if x.sinks is None else "n"
    dropout: Any = None
    if x.dropout is not None:
        dropout = "".join(axis if size > 1 else "." for axis, size in zip("bn", x.dropout.shape[:2], strict=True)) + "."
    return Operands(_ROWS, kv, kv, _score_labels(x.score), jax.tree.map(label, x.mask), offset, scale, sinks, dropout)


def _score_labels(score: Any) -> Any:
    """Labels of a score's arrays, by how they are read."""
    if score is None:
        return None
    leaves, structure = jax.tree.flatten(score)
    kinds = {"query": "b.", "key": "b.", "batch": "b", "pairs": "bn..", "table": "n."}
    labels = ["." * leaf.ndim for leaf in leaves]
    for read in scores.reads(score):
        shape = leaves[read.leaf].shape
        axes = "bn"[-len(shape) :] if read.kind == "head" else kinds[read.kind]
        labels[read.leaf] = "".join(axis if size > 1 else "." for axis, size in zip(axes, shape, strict=True))
    return jax.tree.unflatten(structure, labels)


def output_labels(out: Output) -> Output:
    """Labels of an output, or of its cotangents."""
    return Output(_ROWS, _STATS, None if out.rest is None else _ROWS)


def _result_labels(result: Any, x: Operands) -> Any:
    """Labels of what a tier returns, an output or gradients, from the labels of the operands."""
    if isinstance(result, Output):
        return output_labels(result)
    given = zip(result.dscore, jax.tree.leaves(x.score), strict=True)
    dscore = tuple(None if d is None else label for d, label in given)
    return Gradients(x.q, x.k, x.v, dscore, x.scale, x.sinks)


def by_batch_and_heads(run: Callable[..., Any], p: Problem, args: tuple, labels: tuple) -> Any:
    """``run(p, *args)``, divided along batch rows and key heads where the first array comes sharded so.

    Args:
      run: from a problem and arrays to an output or gradients; called once more with each device's own problem.
      p: the whole problem.
      args: operands first, then any other arrays.
      labels: pytrees of label strings like ``args``.
    """
    if jax.device_count() == 1 or not (_is_known(args[0].mask) and _is_known(args[0].score)):
        return run(p, *args)
    leaves, tree = jax.tree.flatten(args)
    trace = jax.make_jaxpr(lambda *arrays: run(p, *jax.tree.unflatten(tree, arrays)), return_shape=True)
    program, result = trace(*leaves)
    out_labels = _result_labels(result, labels[0])
    in_strings, out_strings = jax.tree.leaves(labels), jax.tree.leaves(out_labels)
    out_tree = jax.tree.structure(out_labels)

    # custom_partitioning takes no constants (static tile ranges are one): they go in as arguments in front.
    constants = len(program.consts)
    in_strings = ["." * jnp.ndim(c) for c in program.consts] + in_strings

    def plain(*arrays):
        return tuple(jax.core.eval_jaxpr(program.jaxpr, arrays[:constants], *arrays[constants:]))

    def partition(mesh, arg_shapes, result_shapes):
        axes = _axes(p, mesh, arg_shapes[constants].sharding.spec)
        sizes = {label: math.prod(mesh.shape[name] for name in names) for label, names in axes.items()}
        local = _local(p, sizes["b"], sizes["n"])

        def sharding(labels):
            return NamedSharding(mesh, PartitionSpec(*(axes.get(label) or None for label in labels)))

        @usual_promotion  # traced when XLA compiles, long after the call
        def on_each_device(*arrays):
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # each device is by itself
                parts = jax.tree.leaves(run(local, *jax.tree.unflatten(tree, arrays[constants:])))
            summed = (_sum(part, labels, axes) for part, labels in zip(parts, out_strings, strict=True))
            return tuple(summed)

        return mesh, on_each_device, tuple(map(sharding, out_strings)), tuple(map(sharding, in_strings))

    divided = custom_partitioning(plain)
    factors: dict[str, Any] = {} if p.group == 1 else {"g": p.group}  # the size that no axis of its own shows
    divided.def_partition(partition, sharding_rule=_rule(p, in_strings, out_strings), **factors)

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        return divided(*arrays)

    @call.def_vmap
    def batched(axis_size, is_batched, *arrays):
        # custom_partitioning cannot be batched: under vmap XLA is left to gather, which is right, if slow.
        out = jax.vmap(plain, [0 if b else None for b in is_batched], axis_size=axis_size)(*arrays)
        return out, tuple(True for _ in out)

    return jax.tree.unflatten(out_tree, call(*program.consts, *leaves))


def on_auto_axes(attend: Callable[[Operands], Output], x: Operands) -> Output:
    """``attend(x)`` where mesh axes of type Explicit count as Auto: the output comes sharded as the queries are."""
    spread = jax.typeof(x.q).sharding
    explicit = AxisType.Explicit in getattr(spread.mesh, "axis_types", ())
    if not explicit:
        return attend(x)
    batch, length, heads, _ = (*spread.spec, None, None, None, None)[:4]

    def place(*axes: Any) -> Any:
        return NamedSharding(spread.mesh, PartitionSpec(*axes))

    placed = Output(place(batch, length, heads, None), place(batch, heads, length))
    on_auto: Any = jax.sharding.auto_axes(attend, out_sharding=placed)
    return on_auto(x)


def equally_varying(x: Operands) -> Operands:
    """Under ``jax.shard_map``: operands that all vary over the mesh axes over which any of them does.

    A kernel takes no others. What a replicated operand's gradient then has to sum over is left to JAX.
    """
    axes = [jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(x)]
    every = frozenset().union(*axes)

    def vary(leaf: Any) -> Any:
        missing = tuple(every - jax.typeof(leaf).manual_axis_type.varying)
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, x) if every else x


def _is_known(part: Any) -> bool:
    """Only our own masks and scores: a user's may ask for ``head`` or ``batch``, which each device counts from 0."""
    if isinstance(part, masks.And | masks.Or | scores.Chain):
        return _is_known(part.a) and _is_known(part.b)
    if isinstance(part, pair_masks.BlockMap):
        return _is_known(part.mask)
    modules = (masks, position_masks, token_masks, pair_masks, scores)
    return part is None or type(part).__module__ in {module.__name__ for module in modules}


def _axes(p: Problem, mesh: Any, q_spec: PartitionSpec) -> dict[str, tuple[str, ...]]:
    """Mesh axes of each label, as q [B, T, N, D] has them; none where they do not divide what they would split."""

    def names(axis: int, count: int) -> tuple[str, ...]:
        spec = q_spec[axis] if axis < len(q_spec) else None
        found = () if spec is None else (spec,) if isinstance(spec, str) else tuple(spec)
        return found if count % math.prod(mesh.shape[name] for name in found) == 0 else ()

    batch, heads = names(0, p.batch), names(2, p.num_kv_heads)
    return {"b": batch, "n": heads, "k": heads}


def _local(p: Problem, batches: int, heads: int) -> Problem:
    """The problem of one device."""
    return dataclasses.replace(
        p,
        batch=p.batch // batches,
        num_q_heads=p.num_q_heads // heads,
        num_kv_heads=p.num_kv_heads // heads,
    )


def _sum(part: jax.Array, labels: str, axes: dict[str, tuple[str, ...]]) -> jax.Array:
    """Adds up what an output without batch rows or heads of its own collects on each device."""
    over = () if "b" in labels else axes["b"]
    over += () if "n" in labels or "k" in labels else axes["n"]
    return jax.lax.psum(part, over) if over else part


def _rule(p: Problem, inputs: list[str], outputs: list[str]) -> str:
    """Shardy's einsum-like rule; axes kept whole get a name of their own, so that no sharding spreads along them."""
    heads = {"b": "b", "k": "k", "n": "k" if p.group == 1 else "(k g)"}
    count = iter(range(10_000))

    def side(arrays):
        return ", ".join(" ".join(heads.get(label) or f"w{next(count)}" for label in labels) for labels in arrays)

    return f"{side(inputs)} -> {side(outputs)}"
