"""What the Triton kernels share: loads, products, scores, masks and probabilities of one tile.

Everything that names the Triton backend of Pallas is in this folder, because that backend is deprecated upstream.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ... import dropout
from ...masks import pairs_allowed
from ...problem import Operands, Problem, offset_of, scale_of
from ...scores import applied
from ...softmax import LOG2E
from ...spans import Span

Chunks = tuple[jax.Array, ...]


class Chunk(NamedTuple):
    """A power-of-two run of channels: ``[start, start + size)`` of which ``valid`` exist in the array."""

    start: int
    size: int
    valid: int


def chunks_of(dim: int, dtype: Any) -> tuple[Chunk, ...]:
    """Splits a head dim into runs that Triton can hold: powers of two, at least 16 and at most 256.

    Two runs where that wastes nothing beyond the next multiple of 16 (80 = 64 + 16, 96 = 64 + 32, 192 = 128 + 64,
    72 = 64 + 16 of which 8 exist), otherwise one padded run per 256: narrow products cost more than padding. A float32
    dim below 128 is padded too: in two runs its dk/dv kernel spills up to 17 kB of registers (ptxas, D = 96).
    """
    splits = jnp.dtype(dtype).itemsize < 4 or dim > 128
    chunks = []
    start = 0
    while start < dim:
        left = dim - start
        padded = max(16, pl.next_power_of_2(min(left, 256)))
        half = padded // 2
        rest = -(-(min(left, 256) - half) // 16) * 16
        if splits and half >= 16 and 0 < rest < half and rest == pl.next_power_of_2(rest):
            padded = half
        chunks.append(Chunk(start, padded, min(padded, left)))
        start += padded
    return tuple(chunks)


def padded_dim(dim: int, dtype: Any) -> int:
    """Channels that a tile of this head dim holds."""
    return sum(c.size for c in chunks_of(dim, dtype))


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """2**x in one instruction (ex2.approx.ftz, error 2 ulp); jnp.exp2 costs five on the GPU, so only interpreted."""
    if interpret:
        return jnp.exp2(x)
    return _elementwise("ex2.approx.ftz.f32 $0, $1;", x)


def exp2_fma(x: jax.Array, factor: jax.Array, shift: jax.Array, interpret: bool) -> jax.Array:
    """2**(x * factor + shift) in two instructions; XLA and Triton never contract the product and the sum."""
    if interpret:
        return jnp.exp2(x * factor + shift)
    factor, shift = jnp.broadcast_to(factor, x.shape), jnp.broadcast_to(shift, x.shape)
    asm = "{.reg .f32 t; fma.rn.ftz.f32 t, $1, $2, $3; ex2.approx.ftz.f32 $0, t;}"
    return _elementwise(asm, x, factor, shift)


def _elementwise(asm: str, *args: jax.Array) -> jax.Array:
    assert all(x.dtype == jnp.float32 for x in args), args  # in x64 mode jnp.where of two Python floats has 64 bits
    (y,) = plt.elementwise_inline_asm(
        asm,
        args=args,
        constraints=",".join(["=f"] + ["f"] * len(args)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )
    return y


def dot(a: jax.Array, b: jax.Array, problem: Problem, interpret: bool, *, trans_b: bool = False) -> jax.Array:
    """``a @ b`` or ``a @ b.T``, accumulated in float32; float32 operands as the problem's precision says."""
    contract = (((1,), (1 if trans_b else 0,)), ((), ()))
    precision: Any = None
    if a.dtype == jnp.float32:
        if problem.precision == "highest":
            # Three TF32 products: float32 accuracy on the tensor cores. The interpreter multiplies in float32 anyway.
            x3 = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
            precision = jax.lax.Precision.HIGHEST if interpret else x3
        else:
            precision = jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def dot_chunks(a: Chunks, b: Chunks, problem: Problem, interpret: bool) -> jax.Array:
    """``a @ b.T`` with the contracted head dim held in chunks."""
    total = None
    for a_c, b_c in zip(a, b, strict=True):
        product = dot(a_c, b_c, problem, interpret, trans_b=True)
        total = product if total is None else total + product
    assert total is not None  # a head dim of 0 never reaches a kernel
    return total


def in_registers(a: Chunks, problem: Problem, interpret: bool) -> Chunks:
    """The same tile, held as the register operand of later products instead of being read from shared memory.

    Triton keeps an operand in registers only where it comes from another product, so this is one: by the identity,
    exact but for infinities, which turn their row into NaN as the softmax would.  It spares the half of the
    shared-memory traffic of a 64-wide product, which bounds it on Hopper (docs/performance.md).
    """

    def through_identity(chunk):
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (chunk.shape[1],) * 2, axis) for axis in (0, 1))
        return dot(chunk, (rows == columns).astype(chunk.dtype), problem, interpret).astype(chunk.dtype)

    return tuple(through_identity(chunk) for chunk in a)


def load_rows(ref: Any, batch: Any, head: Any, start: Any, block: int, length: int, *, check: bool) -> Chunks:
    """Rows ``[start, start + block)`` of one head of a [B, length, heads, dim] array, in chunks of channels.

    With ``check``, rows behind ``length`` read as 0; without, the caller knows that there are none.
    """
    chunks = chunks_of(ref.shape[-1], ref.dtype)
    return tuple(_load_chunk(ref, batch, head, start, block, length, chunk, check) for chunk in chunks)


def _load_chunk(ref, batch, head, start, block, length, chunk, check):
    # Dynamic starts everywhere: a static slice past the edge of the array is refused, masked or not.
    channel = jnp.int32(chunk.start) + _zero(start)
    view = ref.at[batch, pl.ds(start, block), head, pl.ds(channel, chunk.size)]
    inside = None
    if check and (length % block or ref.shape[1] % block):
        inside = (start + _iota(block) < length)[:, None]
    if chunk.valid < chunk.size:
        columns = (_iota(chunk.size) < chunk.valid)[None, :]
        inside = columns if inside is None else inside & columns
    if inside is None:
        return plt.load(view)
    inside = jnp.broadcast_to(inside, (block, chunk.size))
    return plt.load(view, mask=inside, other=jnp.zeros((), ref.dtype))


def store_rows(
    ref: Any, batch: Any, head: Any, start: Any, values: Chunks, length: int, only: jax.Array | None = None
) -> None:
    """The opposite of :func:`load_rows`; rows behind ``length`` and channels that do not exist stay unwritten.

    So do rows that are not among ``only``, a boolean each, where it is given.
    """
    block = values[0].shape[0]
    for chunk, value in zip(chunks_of(ref.shape[-1], ref.dtype), values, strict=True):
        channel = jnp.int32(chunk.start) + _zero(start)
        view = ref.at[batch, pl.ds(start, block), head, pl.ds(channel, chunk.size)]
        inside = (start + _iota(block) < length)[:, None] & (_iota(chunk.size) < chunk.valid)[None, :]
        exact = length % block == 0 and chunk.valid == chunk.size and only is None
        inside = inside if only is None else inside & only[:, None]
        plt.store(view, value.astype(ref.dtype), mask=None if exact else inside)


def load_stats(ref: Any, batch: Any, head: Any, start: Any, block: int, length: int, other: float) -> jax.Array:
    """Per-row float32 values from a [B, N, length] array; ``other`` behind the length."""
    view = ref.at[batch, head, pl.ds(start, block)]
    if length % block == 0:
        return plt.load(view)
    return plt.load(view, mask=start + _iota(block) < length, other=jnp.float32(other))


def store_stats(
    ref: Any, batch: Any, head: Any, start: Any, values: jax.Array, length: int, only: jax.Array | None = None
) -> None:
    """The opposite of :func:`load_stats`; what is behind the length, or not among ``only``, stays unwritten."""
    block = values.shape[0]
    inside = None if length % block == 0 else start + _iota(block) < length
    if only is not None:
        inside = only if inside is None else inside & only
    plt.store(ref.at[batch, head, pl.ds(start, block)], values, mask=inside)


def _iota(size: int) -> jax.Array:
    return jax.lax.iota(jnp.int32, size)


def _zero(traced: Any) -> Any:
    """A zero that the tracer cannot fold, for slices that must look dynamic."""
    return traced - traced


@dataclasses.dataclass(frozen=True)
class TritonSpan(Span):
    """A run of tokens along axis 0 or 1 of a tile in registers."""

    flat: jax.Array
    length: int
    axis: int

    @classmethod
    def of(cls, start: Any, block: int, length: int, offset: Any, batch: Any, head: Any, axis: int) -> TritonSpan:
        flat = start + _iota(block)
        row = flat[:, None] if axis == 0 else flat[None, :]
        return cls(row, row + offset, batch, head, flat, length, axis)

    def _take(self, per_token: Any) -> jax.Array:
        batch = self.batch if per_token.shape[0] > 1 else 0
        values = plt.load(per_token.at[batch, self.flat], mask=self.flat < self.length, other=_nothing(per_token))
        return values[:, None] if self.axis == 0 else values[None, :]

    def _per_batch(self, values: Any) -> jax.Array:
        return values[self.batch if values.shape[0] > 1 else 0]

    def _per_head(self, values: Any) -> jax.Array:
        head = self.head if values.shape[-1] > 1 else 0
        if len(values.shape) == 1:
            return values[head]
        return values[self.batch if values.shape[0] > 1 else 0, head]

    def _take_pairs(self, kv: TritonSpan, pairs: Any) -> jax.Array:
        batches, heads, q_len, kv_len = pairs.shape
        batch = self.batch if batches > 1 else jnp.int32(0)
        head = self.head if heads > 1 else jnp.int32(0)
        q_row = self.row if q_len > 1 else jnp.zeros((1, 1), jnp.int32)
        kv_row = kv.row if kv_len > 1 else jnp.zeros((1, 1), jnp.int32)
        shape = jnp.broadcast_shapes(q_row.shape, kv_row.shape)
        q_row, kv_row = jnp.broadcast_to(q_row, shape), jnp.broadcast_to(kv_row, shape)
        inside = (q_row < q_len) & (kv_row < kv_len)
        values = plt.load(pairs.at[batch, head, q_row, kv_row], mask=inside, other=_nothing(pairs))
        return values != 0 if values.dtype == _WIDE_BOOL else values

    def _look_up(self, table: Any, entry: jax.Array) -> jax.Array:
        return plt.load(table.at[self.head if table.shape[0] > 1 else jnp.int32(0), entry])


_WIDE_BOOL = jnp.int16


def addressable(x: Operands) -> Operands:
    """Operands whose every element the kernels can reach.

    Pallas counts elements in 32 bits up to 2**32 *bytes*, one too few for one-byte elements behind 2**31: such masks
    travel as int16, where it counts in 64.
    """

    def widen(leaf):
        return leaf.astype(_WIDE_BOOL) if leaf.dtype == jnp.bool_ and leaf.size >= 2**31 else leaf

    return x._replace(mask=jax.tree.map(widen, x.mask))


def _nothing(ref: Any) -> jax.Array:
    return jnp.zeros((), ref.dtype)


class Scores(NamedTuple):
    """One tile of logits in units of ``ScoreMaker.unit`` base-2 logits, and what its derivative needs."""

    s: jax.Array  # float32, -inf where forbidden
    allowed: jax.Array | None  # None where the whole tile is
    scaled: jax.Array  # before the scores and the mask
    pull: Any  # from gradients of the logits to those of the scaled products; None where they are the same
    kept: jax.Array | None  # by dropout


@dataclasses.dataclass(frozen=True)
class ScoreMaker:
    """Turns products q.k of a tile into masked logits: scale, scores, then every mask.

    The one place where a logit gets its meaning in this tier; forward, dq and dk/dv kernels all call it, the last
    with the tile transposed (``q_axis`` 1).
    """

    problem: Problem
    x: Operands  # of refs
    q_axis: int
    interpret: bool

    @property
    def scales_late(self) -> bool:
        """Whether the scale can wait for the fused multiply-add of exp2."""
        scale = self.problem.scale
        return self.x.score is None and scale is not None and 1e-6 < scale < 1e6

    @property
    def unit(self) -> float:
        """Base-2 logits per unit of a score."""
        return self.problem.scale * LOG2E if self.scales_late and self.problem.scale else LOG2E

    def offset(self, batch: Any) -> Any:
        offset = offset_of(self.problem, self.x)
        return offset if isinstance(offset, int) else offset[batch if offset.shape[0] > 1 else 0]

    def spans(self, batch, head, q_start, block_q, kv_start, block_kv) -> tuple[TritonSpan, TritonSpan]:
        p = self.problem
        q = TritonSpan.of(q_start, block_q, p.q_len, self.offset(batch), batch, head, self.q_axis)
        return q, TritonSpan.of(kv_start, block_kv, p.kv_len, 0, batch, head, 1 - self.q_axis)

    def __call__(
        self, products: jax.Array, q: TritonSpan, kv: TritonSpan, masked: bool, penalty: jax.Array | None = None
    ) -> Scores:
        """Scores of a tile, ``masked`` unless the mask allows it entirely; ``penalty`` is :func:`sanitise`'s."""
        p = self.problem
        scaled = products if penalty is None else products + penalty
        if not self.scales_late:
            scale = scale_of(p, self.x)
            scaled = scaled * (scale if isinstance(scale, float) else scale[0])
        s, pull = scaled, None
        if self.x.score is not None:
            loaded = self.loaded(q, kv)
            s, pull = jax.vjp(lambda s: self._apply(s, q, kv, [load.values for load in loaded]), scaled)
        kept = self._kept(q, kv)
        if not masked:
            return Scores(s, None, scaled, pull, kept)
        allowed = pairs_allowed(self.x.mask, q, kv)
        if p.kv_len % kv.flat.shape[0]:
            allowed = allowed & (kv.row < p.kv_len)
        if self.q_axis == 1 and p.q_len % q.flat.shape[0]:
            # Queries behind the end have p = 0, but a NaN in v would make their ds NaN.
            allowed = allowed & (q.row < p.q_len)
        allowed = jnp.broadcast_to(allowed, s.shape)
        return Scores(jnp.where(allowed, s, -jnp.inf), allowed, scaled, pull, kept)

    def _kept(self, q: TritonSpan, kv: TritonSpan) -> jax.Array | None:
        counters = self.x.dropout
        if counters is None:
            return None
        batch, head = (
            place if size > 1 else 0 for place, size in zip((q.batch, q.head), counters.shape[:2], strict=True)
        )
        counter = tuple(counters[batch, head, word] for word in range(4))
        return dropout.kept(counter, self.problem.dropout_rate, q.row, kv.row, self.problem.kv_len)

    @property
    def scale_of_kept(self) -> float:
        """What the weights that dropout keeps are multiplied by: late, on float32 sums, where it costs no rounding."""
        return 1.0 / (1.0 - self.problem.dropout_rate)

    def kept(self, scores: Scores, values: jax.Array) -> jax.Array:
        """Values of a tile, 0 where dropout drops the weight."""
        return values if scores.kept is None else jnp.where(scores.kept, values, 0.0)

    def exp2_below(self, s: jax.Array, m: jax.Array) -> jax.Array:
        """2**(base-2 logits less their row maximum), from scores and a row maximum [rows] in the same unit."""
        # A fused multiply-add rounds once, so s * unit and m * unit agree only to the rounding of the latter. That
        # cancels in the softmax until it overflows exp2. Logits so large differ by 0 or by more than exp2 can show:
        # for them the nearest power of two as unit, with which all products are exact, gives the same 0 or 1.
        exact = 2.0 ** math.ceil(math.log2(self.unit))
        unit = jnp.where(jnp.abs(m) < 2.0**30 / self.unit, jnp.float32(self.unit), jnp.float32(exact))
        return exp2_fma(s, unit[:, None], -(m * unit)[:, None], self.interpret)

    def probabilities(self, scores: Scores, lse2: jax.Array) -> jax.Array:
        """2**(base-2 logits - lse2), with lse2 [rows] along the query axis of the tile.

        Forbidden pairs get 0 also in a row whose lse is NaN, because a key that it does see is.
        """
        lse2 = lse2[:, None] if self.q_axis == 0 else lse2[None, :]
        p = exp2_fma(scores.s, jnp.full((1, 1), self.unit, jnp.float32), -lse2, self.interpret)
        return p if scores.allowed is None else jnp.where(scores.allowed, p, 0.0)

    def d_products(self, scores: Scores, p: jax.Array, dp: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gradients of the loss by the logits (for what scores read) and by ``scale * q.k`` (for q and k).

        ``dp`` is do.v, ``delta`` the row sums of do * o less the cotangent of lse
        (FlashAttention-2, arXiv:2307.08691, algorithm 2).  Forbidden pairs get 0 even where dp is NaN.
        """
        dp = dp if scores.kept is None else self.kept(scores, dp) * self.scale_of_kept
        ds = p * (dp - delta)
        d_scaled = ds if scores.pull is None else scores.pull(ds)[0]
        if scores.allowed is None:
            return ds, d_scaled
        # Last, because a forbidden NaN makes its slope NaN too.
        return jnp.where(scores.allowed, ds, 0.0), jnp.where(scores.allowed, d_scaled, 0.0)

    def d_read(self, number: int, scores: Scores, ds: jax.Array, q: TritonSpan, kv: TritonSpan) -> jax.Array:
        """Gradient by what the score's read of this number gives, pair by pair, from that of the logits."""

        values = [load.values for load in self.loaded(q, kv)]

        def shifted(probe):
            seen = values[number].astype(jnp.float32) + probe
            return self._apply(scores.scaled, q, kv, [*values[:number], seen, *values[number + 1 :]])

        _, pull = jax.vjp(shifted, jnp.zeros_like(ds))
        (d,) = pull(ds)
        return d if scores.allowed is None else jnp.where(scores.allowed, d, 0.0)

    def loaded(self, q: TritonSpan, kv: TritonSpan) -> list[Loaded]:
        """All that the score reads for a tile, in order: loads cannot be differentiated, so they come first."""
        found = []

        def watch(kind, array, load, entry):
            found.append(Loaded(load(), entry))
            return found[-1].values

        self._watched(jnp.zeros(jnp.broadcast_shapes(q.row.shape, kv.row.shape), jnp.float32), q, kv, watch)
        return found

    def _apply(self, s: jax.Array, q: TritonSpan, kv: TritonSpan, values: list[jax.Array]) -> jax.Array:
        """The score of a tile, from what its reads gave."""
        in_order = iter(values)
        return self._watched(s, q, kv, lambda kind, array, load, entry: next(in_order))

    def _watched(self, s: jax.Array, q: TritonSpan, kv: TritonSpan, watch: Any) -> jax.Array:
        assert self.x.score is not None
        return applied(self.x.score, s, *(dataclasses.replace(span, watch=watch) for span in (q, kv)))


class Loaded(NamedTuple):
    """What one read of a score gave; of a table also which entry was taken."""

    values: jax.Array
    entry: Any


def sanitise(values: Chunks) -> tuple[Chunks, jax.Array]:
    """Readies the rows of a partly forbidden tile for a product with p or ds, where 0 * NaN would leak.

    Returns the tile with NaN and infinities as 0, and what to add to the q.k products so that pairs which *are*
    allowed to see such a row still turn into NaN: 0 or NaN for each row, along axis 1 of the scores. It doubles what a
    step costs, so kernels try without: a leak ends as NaN in the sums, and only then they start again, with it.
    """
    bad = None
    for v in values:
        here = (~_is_finite(v)).astype(jnp.float32).max(axis=1)
        bad = here if bad is None else jnp.maximum(bad, here)
    assert bad is not None
    penalty = jnp.where(bad > 0, jnp.float32(jnp.nan), jnp.float32(0.0))
    cleaned = tuple(jnp.where(_is_finite(v), v, jnp.zeros((), v.dtype)) for v in values)
    return cleaned, penalty[None, :]


def nan_rows(values: Chunks) -> jax.Array:
    """Which rows hold NaN, boolean [rows]; by integers, because a maximum drops NaN on GPUs."""
    counts = [jnp.isnan(c).astype(jnp.int32).max(axis=1) for c in values]
    return functools.reduce(jnp.maximum, counts) > 0


def any_of(rows: jax.Array) -> jax.Array:
    """Pallas has no reduction of booleans for Triton."""
    return rows.astype(jnp.int32).max() > 0


def _is_finite(v: jax.Array) -> jax.Array:
    return jnp.abs(v.astype(jnp.float32)) < jnp.inf


def result(x: Operands, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """What a kernel writes: under ``shard_map`` it varies over the mesh axes that the queries vary over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x.q).manual_axis_type)


@contextlib.contextmanager
def quiet_deprecation() -> Iterator[None]:
    """Lowering through Triton warns since JAX 0.11, and our users can do nothing about it.

    What a caller's own jit lowers later is out of reach: README.md has a filter for those who make warnings errors.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
        yield
