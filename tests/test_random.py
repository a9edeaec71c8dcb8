"""Random combinations of every option, by hypothesis: what no table thought of.

A *program* is what has to be compiled: the options that are given, shapes and dtypes. It is run on several draws of
everything that is data. On a CPU the shapes are drawn from a few, on a GPU there are more of both.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

import pallas_flash as pf
from pallas_flash.visits import kv_tile_ranges, q_tile_ranges

from .accuracy import offset_of
from .cases import Case, Strided
from .test_forward_backward import compare_arrays
from .test_masks import sound

SETTINGS = {"deadline": None, "database": None}
SETTINGS["suppress_health_check"] = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
ON_GPU = jax.default_backend() == "gpu"
# Processes share the parts, each with a seed of its own: 360 examples on a CPU, 3,000 on a GPU.
PARTS, PROGRAMS, DRAWS = (25, 6, 20) if ON_GPU else (10, 6, 6)
LENGTHS, DIMS = ([130, 1, 17, 64, 257], [64, 16, 40, 128]) if ON_GPU else ([40, 1, 19], [16])


@dataclasses.dataclass(frozen=True)
class Program:
    case: Case
    static: dict  # options that are part of the program
    data: Callable  # (rng) -> the options that are arrays, always the same ones

    def options(self, rng):
        return {**self.static, **self.data(rng)}


def _blocks(rng, case):
    array = rng.random((1, case.heads, -(-case.q_len // 16), -(-case.kv_len // 8))) < 0.6
    return pf.Blocks(jnp.asarray(array), 16, 8)


OWN_MASKS = {
    "blocks": _blocks,
    "map": lambda rng, c: pf.BlockMap.of(Strided(5) | pf.Window(4, 2), c.q_len, c.kv_len, block_q=16, block_kv=8),
    "chunks": lambda rng, c: pf.Chunked(24) | pf.Prefix(jnp.asarray(rng.integers(0, c.kv_len + 1, c.batch))),
    "dilated": lambda rng, c: pf.Dilated(3) & pf.Window(None, 30),
    "ranges": lambda rng, c: pf.KeyRanges(*jnp.asarray(np.sort(rng.integers(0, c.kv_len + 1, (2, 1, c.q_len))))),
}


@st.composite
def programs(draw, lengths=LENGTHS, dims=DIMS):
    """Every option is drawn on its own: a third of them are given."""
    q_len, kv_len = draw(st.sampled_from(lengths)), draw(st.sampled_from(lengths))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    heads, batch = kv_heads * group, 2
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    case = Case("random", batch, q_len, kv_len, heads, kv_heads, draw(st.sampled_from(dims)), dtype=dtype)
    static, data = {"is_causal": draw(st.booleans())}, {}

    def given():
        return draw(st.integers(0, 2)) == 0

    def normal(*shape):
        return lambda rng: jnp.asarray(rng.normal(size=shape), jnp.float32)

    def ints(low, high, *shape):
        return lambda rng: jnp.asarray(rng.integers(low, high, shape))

    side = st.one_of(st.none(), st.integers(0, 40))
    if given():
        static["local_window_size"] = (draw(side), draw(side))
    if given():
        # Not less: where a cap saturates, its derivative 1 - tanh² is a rounding error of plain XLA too.
        static["logits_soft_cap"] = draw(st.sampled_from([4.0, 20.0]))
    if given():
        static["scale"] = draw(st.sampled_from([-0.4, 0.0, 0.3]))
    elif given():
        data["scale"] = lambda rng: jnp.float32(rng.normal() * 0.3)
    if given():
        data["query_seq_lengths"] = ints(0, q_len + 1, batch)
    if given():
        data["key_value_seq_lengths"] = ints(0, kv_len + 1, batch)
    if given():
        data["q_segment_ids"], data["kv_segment_ids"] = ints(-1, 3, batch, q_len), ints(-1, 3, batch, kv_len)
    if given():
        data["bias"] = normal(draw(st.sampled_from([1, batch])), heads, q_len, draw(st.sampled_from([1, kv_len])))
    if given():
        data["sinks"] = normal(heads, draw(st.integers(1, 2)))
    if given():
        slopes = draw(st.sampled_from([(heads,), (batch, heads)]))
        data["alibi_slopes"] = lambda rng: jnp.asarray(rng.random(slopes) * 0.3, jnp.float32)
    if given():
        table, both = normal(draw(st.sampled_from([1, heads])), 12), draw(st.booleans())
        data["score"] = lambda rng: pf.RelativeBias(table(rng), both, 20)
    if given():
        static |= {"dropout_rate": 0.3, "broadcast_dropout": draw(st.booleans())}
        data["dropout_rng"] = lambda rng: jax.random.key(rng.integers(1000))
    if given():
        static["causal_alignment"] = "bottom_right"
    elif given():
        data["q_offset"] = ints(-20, 60, draw(st.sampled_from([1, batch])))
    elif given():
        static["q_offset"] = draw(st.integers(-20, 60))
    own = None
    at_0 = "causal_alignment" not in static and "q_offset" not in {**static, **data}
    kind = draw(st.sampled_from(["", "array", "own"]))
    if kind == "array":
        shape = (draw(st.sampled_from([1, batch])), 1, q_len, kv_len)
        data["mask"] = lambda rng: jnp.asarray(rng.random(shape) < 0.6)
    elif kind == "own":
        own = OWN_MASKS[draw(st.sampled_from([name for name in OWN_MASKS if at_0 or name != "map"]))]

    def drawn(rng):
        values = {name: make(rng) for name, make in data.items()}
        if own is not None:
            offset = 0 if at_0 else jnp.asarray(offset_of(batch, q_len, kv_len, {**static, **values}))
            values["mask"] = own(rng, case)
            values["mask_array"] = values["mask"].dense(q_len, kv_len, offset, batch=batch, heads=heads)
        return values

    return Program(case, static, drawn)


@pytest.mark.everywhere
@pytest.mark.parametrize("part", range(PARTS))
def test_random_problems(part, kernels, record_property):
    """Output, lse and all gradients of random calls against the float64 oracle."""
    done = []

    @seed(part)
    @settings(max_examples=PROGRAMS, phases=[Phase.generate], **SETTINGS)  # to shrink would mean minutes of compiling
    @given(program=programs())
    def examples(program):
        for number in range(DRAWS):
            options = program.options(np.random.default_rng((part, len(done), number)))
            note(f"draw {number} of {sorted(options)}")
            compare_arrays(program.case.arrays(number), options, "triton", kernels)
        done.append(program)

    examples()
    record_property("random_examples", len(done) * DRAWS)
    record_property("seed", part)
    assert len(done) == PROGRAMS


@st.composite
def masks(draw, q_len, kv_len, depth=2):
    """A mask of up to ``depth`` levels of & and |."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    if depth and draw(st.booleans()):
        a, b = draw(masks(q_len, kv_len, depth - 1)), draw(masks(q_len, kv_len, depth - 1))
        return a & b if draw(st.booleans()) else a | b
    side = st.one_of(st.none(), st.integers(0, 30))
    kind = draw(st.sampled_from(["full", "causal", "window", "prefix", "lengths", "segments", "dense"]))
    length = lambda n: jnp.asarray(rng.integers(0, n + 1, 2), jnp.int32)
    return {
        "full": pf.Full,
        "causal": pf.Causal,
        "window": lambda: pf.Window(draw(side), draw(side)),
        "prefix": lambda: pf.Prefix(length(kv_len)),
        "lengths": lambda: pf.Lengths(length(q_len), length(kv_len)),
        "segments": lambda: pf.Segments(
            jnp.asarray(np.sort(rng.integers(-1, 3, (2, q_len)))),
            jnp.asarray(np.sort(rng.integers(-1, 3, (2, kv_len)))),
        ),
        "dense": lambda: pf.Dense(jnp.asarray(rng.random((2, 1, q_len, kv_len)) < draw(st.sampled_from([0.1, 0.9])))),
    }[kind]()


@settings(max_examples=40, derandomize=True, **SETTINGS)
@given(
    st.data(), st.sampled_from([(5, 5), (37, 53), (64, 16)]), st.integers(-40, 40), st.sampled_from([(16, 16), (8, 32)])
)
def test_ranges_of_random_masks_are_sound(data, sizes, offset, blocks):
    mask = data.draw(masks(*sizes))
    allowed = np.broadcast_to(np.asarray(mask.dense(*sizes, offset)), (2, 1, *sizes))
    sound(kv_tile_ranges(mask, *sizes, *blocks, offset), allowed, *blocks)
    sound(q_tile_ranges(mask, *sizes, *blocks, offset), allowed.swapaxes(-1, -2), *blocks[::-1])


def test_the_strategy_draws_every_option():
    """Were an option never drawn, the tests above would prove nothing about it."""
    seen = set()

    @settings(max_examples=150, derandomize=True, **SETTINGS)
    @given(programs(lengths=[5], dims=[16]))
    def collect(program):
        options = program.options(np.random.default_rng(0))
        seen.update(options, [type(options.get("mask")).__name__])

    collect()
    assert seen >= {
        "is_causal", "causal_alignment", "local_window_size", "query_seq_lengths", "key_value_seq_lengths", "bias",
        "logits_soft_cap", "scale", "mask", "q_segment_ids", "kv_segment_ids", "q_offset", "sinks", "dropout_rate",
        "alibi_slopes", "score", "Blocks", "BlockMap", "Or", "And", "KeyRanges",
    }  # fmt: skip
