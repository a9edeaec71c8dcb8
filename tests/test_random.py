"""Random combinations of every option, by hypothesis: what no table thought of.

On a CPU the shapes are drawn from a few, so that each example costs seconds; on a GPU there are more of both.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import pallas_flash as pf
from pallas_flash.visits import kv_tile_ranges, q_tile_ranges

from .cases import Case
from .test_forward_backward import compare_arrays
from .test_masks import sound

SETTINGS = {"deadline": None, "derandomize": True, "database": None}
SETTINGS["suppress_health_check"] = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@st.composite
def problems(draw, lengths, dims):
    """A case with every option drawn on its own: a third of them are given."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    q_len, kv_len = draw(st.sampled_from(lengths)), draw(st.sampled_from(lengths))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    heads, batch = kv_heads * group, 2

    def sometimes(value):
        return value if draw(st.integers(0, 2)) == 0 else None

    side = st.one_of(st.none(), st.integers(0, 40))
    options = {
        "is_causal": draw(st.booleans()),
        "causal_alignment": sometimes("bottom_right"),
        "local_window_size": sometimes((draw(side), draw(side))),
        "query_seq_lengths": sometimes(jnp.asarray(rng.integers(0, q_len + 1, batch))),
        "key_value_seq_lengths": sometimes(jnp.asarray(rng.integers(0, kv_len + 1, batch))),
        # Not less: where a cap saturates, its derivative 1 - tanh² is a rounding error of plain XLA too.
        "logits_soft_cap": sometimes(draw(st.sampled_from([4.0, 20.0]))),
        "scale": sometimes(draw(st.sampled_from([-0.4, 0.0, 0.3]))),
        "mask": sometimes(jnp.asarray(rng.random((draw(st.sampled_from([1, batch])), 1, q_len, kv_len)) < 0.6)),
        "bias": sometimes(
            jnp.asarray(rng.normal(size=(1, heads, q_len, draw(st.sampled_from([1, kv_len])))), jnp.float32)
        ),
    }
    options["sinks"] = sometimes(jnp.asarray(rng.normal(size=(heads, draw(st.integers(1, 2)))), jnp.float32))
    if draw(st.integers(0, 2)) == 0:
        options["dropout_rate"], options["dropout_rng"] = 0.3, jax.random.key(draw(st.integers(0, 99)))
        options["broadcast_dropout"] = draw(st.booleans())
    if draw(st.integers(0, 2)) == 0:
        options["q_segment_ids"] = jnp.asarray(rng.integers(-1, 3, (batch, q_len)))
        options["kv_segment_ids"] = jnp.asarray(rng.integers(-1, 3, (batch, kv_len)))
    if options["causal_alignment"] is None:
        options["q_offset"] = sometimes(draw(st.integers(-20, 60)))
    options = {name: x for name, x in options.items() if x is not None}
    dim, dtype = draw(st.sampled_from(dims)), draw(st.sampled_from(["float32", "bfloat16"]))
    return Case("random", batch, q_len, kv_len, heads, kv_heads, dim, dtype=dtype, options=lambda: options)


@settings(max_examples=4, **SETTINGS)
@given(problems(lengths=[1, 19, 40], dims=[16]))
def test_random_problem(case):
    compare_arrays(case.arrays(), case.options(), "triton", pf.interpret)


@pytest.mark.gpu
@pytest.mark.parametrize("start", range(16))
def test_random_problem_compiled(start, kernels):
    """In sixteen parts, each with its own seed: most of the time is compilation, which workers share."""

    @seed(start)
    @settings(max_examples=2, **{**SETTINGS, "derandomize": False})
    @given(case=problems(lengths=[1, 17, 64, 130, 257], dims=[16, 40, 64, 128]))
    def examples(case):
        compare_arrays(case.arrays(), case.options(), "triton", kernels)

    examples()


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


@settings(max_examples=40, **SETTINGS)
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

    @settings(max_examples=60, **SETTINGS)
    @given(problems(lengths=[5], dims=[16]))
    def collect(case):
        seen.update(case.options())

    collect()
    assert seen >= {
        "is_causal", "causal_alignment", "local_window_size", "query_seq_lengths", "key_value_seq_lengths", "bias",
        "logits_soft_cap", "scale", "mask", "q_segment_ids", "kv_segment_ids", "q_offset", "sinks", "dropout_rate",
    }  # fmt: skip
