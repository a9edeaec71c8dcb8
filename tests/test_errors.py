"""BR-125: the text of every error of a malformed call: it names the argument, its value or shape, and the rule."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf

FLAGS = ("is_causal", "broadcast_dropout", "return_lse", "return_residual")
Q, K = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 7, 2, 8))


def call(query=Q, key=K, value=K, bias=None, mask=None, **options):
    return pf.flash_attention(query, key, value, bias, mask, **options)


VALUE_ERRORS = {
    "rank": ({"query": jnp.ones((5, 8))}, r"at least 3 dimensions, layout is \[batch, length, heads, head_dim\].*\(5, 8\)"),
    "ranks": ({"key": K[0]}, r"same number of dimensions.*\(2, 5, 4, 8\).*\(7, 2, 8\)"),
    "batch": ({"key": K[:1], "value": K[:1]}, r"equal batch dimensions"),
    "value": ({"value": K[:, :3]}, r"key and value must agree"),
    "dim": ({"key": jnp.ones((2, 7, 2, 9))}, r"same head dim"),
    "heads": ({"key": jnp.ones((2, 7, 3, 8)), "value": jnp.ones((2, 7, 3, 8))}, r"4 query heads must be a multiple of the 3"),
    "dtypes": ({"key": K.astype(jnp.bfloat16)}, r"one dtype; got float32, bfloat16 and float32"),
    "ints": ({"query": Q.astype(int), "key": K.astype(int), "value": K.astype(int)}, r"must be float arrays: float32, .*; got int32"),
    "float mask": ({"mask": jnp.ones((5, 7))}, r"mask must be boolean.*got float32.*bias="),
    "mask shape": ({"mask": jnp.ones((2, 1, 5, 6), bool)}, r"mask of shape \(2, 1, 5, 6\) does not broadcast.*\[2, 4, 5, 7\]"),
    "2-D padding mask": ({"mask": jnp.ones((2, 7), bool)}, r"mask of shape \(2, 7\) does not broadcast"),
    "bias shape": ({"bias": jnp.ones((3, 5, 7))}, r"bias of shape \(3, 5, 7\) does not broadcast"),
    "bool bias": ({"bias": jnp.ones((5, 7), bool)}, r"bias must be a float array, got bool.*mask="),
    "lengths": ({"query_seq_lengths": jnp.array([1, 2, 3])}, r"query_seq_lengths must have one length per batch row, shape \[2\]; got shape \(3,\)"),
    "float lengths": ({"key_value_seq_lengths": jnp.array([1.0, 2.0])}, r"key_value_seq_lengths must be an integer array"),
    "window": ({"local_window_size": -1}, r"local_window_size=-1: sizes must be >= 0; use None"),
    "window pair": ({"local_window_size": (3, -2)}, r"local_window_size=\(3, -2\)"),
    "window triple": ({"local_window_size": (1, 2, 3)}, r"must be an int or a pair \(left, right\) of ints or None, known at trace time; got \(1, 2, 3\)"),
    "window bool": ({"local_window_size": True}, r"local_window_size must be an int or a pair .*; got True"),
    "window float": ({"local_window_size": 2.5}, r"must be an int or a pair .*; got 2.5"),
    "alignment": ({"causal_alignment": "centre"}, r"causal_alignment must be one of 'top_left', 'bottom_right'; got 'centre'"),
    "offset twice": ({"causal_alignment": "bottom_right", "q_offset": 1}, r"give one of them"),
    "offset shape": ({"q_offset": jnp.array([1, 2, 3])}, r"q_offset must be an int or have shape \[2\]"),
    "offset float": ({"q_offset": jnp.array([1.0, 2.0])}, r"q_offset must be an integer array"),
    "offset range": ({"q_offset": 2**30}, r"q_offset=1073741824 is out of range"),
    "segments": ({"q_segment_ids": jnp.zeros((2, 5), int)}, r"q_segment_ids alone serves both sides only when.*5 queries and 7 keys"),
    "kv segments": ({"kv_segment_ids": jnp.zeros((2, 7), int)}, r"kv_segment_ids was given without q_segment_ids"),
    "segment shape": ({"q_segment_ids": jnp.zeros((2, 4), int), "kv_segment_ids": jnp.zeros((2, 7), int)}, r"q_segment_ids must have shape \[batch, length\] = \[2, 5\]"),
    "window string": ({"local_window_size": "12"}, r"local_window_size must be an int or a pair .*; got '12'"),
    "window float pair": ({"local_window_size": np.ones(2)}, r"local_window_size must be an int or a pair .*; got array\(\[1., 1.\]\)"),
    "window array": ({"local_window_size": np.arange(3)}, r"local_window_size must be an int or a pair .*; got array\(\[0, 1, 2\]\)"),
    **{f"cap {x!r}": ({"logits_soft_cap": x}, r"logits_soft_cap must be a positive number \(1e-30 to 1e30\) known .*; got " + re.escape(repr(x)))
       for x in (0.0, -1, math.nan, math.inf, 1e-300, 1e300, True, "x", 1j, np.complex64(2), np.array(2.0), jnp.float32(2))},
    "scale": ({"scale": jnp.ones(3)}, r"scale must be a finite real scalar, no bool; got float32 of shape \(3,\)"),
    **{f"scale {x!r}": ({"scale": x}, r"scale must be a finite real scalar, no bool; got " + re.escape(repr(x)))
       for x in (math.nan, -math.inf, np.float32("nan"), True, np.complex64(2))},
    "bool scale": ({"scale": jnp.array(True)}, r"scale must be a finite real scalar, no bool; got bool of shape \(\)"),
    "complex scale": ({"scale": 1j}, r"scale must be a finite real scalar, no bool; got complex64 of shape \(\)"),
    "string scale": ({"scale": "x"}, r"scale must be a finite real scalar, no bool; got str 'x'"),
    "key scale": ({"scale": jax.random.key(0)}, r"scale must be a finite real scalar, no bool; got key<fry> of shape \(\)"),
    **{f"{name} {x!r}": ({name: x}, name + r" must be True or False, a Python or numpy bool known at trace time; got " + re.escape(repr(x)))
       for name in FLAGS for x in ("no", None, 2, 1.0, jnp.float32(1), np.ones(2, bool), jax.random.key(0))},
    "precision": ({"precision": "best"}, r"precision must be None, 'default'.*got 'best'"),
    "backward": ({"backward": "slow"}, r"backward must be one of 'auto', 'deterministic', 'fast'"),
    # BR-92 is the rates and the missing key here.
    "dropout": ({"dropout_rate": 1.5}, r"dropout_rate must be a number in \[0, 1\) known at trace time, no bool or array; got 1.5"),
    **{f"dropout {x!r}": ({"dropout_rate": x}, r"dropout_rate must be a number in \[0, 1\) known .*; got " + re.escape(repr(x)))
       for x in (-0.1, 1.0, math.nan, True, "x", 1j, np.complex64(0.5), np.array(0.5), jnp.array(0.5))},
    "dropout without a key": ({"dropout_rate": 0.5}, r"dropout_rate=0.5 needs dropout_rng, a random key"),
    "dropout of many keys": ({"dropout_rate": 0.5, "dropout_rng": jax.random.split(jax.random.key(0), 3)}, r"dropout_rng must be one random key.*shape \(3,\)"),
    **{f"dropout {rate} with {x!r}": ({"dropout_rate": rate, "dropout_rng": x}, r"dropout_rng must be one random key, .*; got " + got)
       for rate in (0.0, 0.5) for x, got in (("x", "str 'x'"), (3.5, r"float32 of shape \(\)"), ((1, None), r"tuple \(1, None\)"))},
    "sinks": ({"sinks": jnp.zeros(3)}, r"sinks must be a float array \[heads\] or \[heads, number\], heads = 4; got float32 of shape \(3,\)"),
    **{f"sinks {x!r}": ({"sinks": x}, r"sinks must be a float array \[heads\] or \[heads, number\], heads = 4; got " + got)
       for x, got in (("x", "str 'x'"), ((1.0, None), r"tuple \(1.0, None\)"), (2**70, "int 118"), (np.arange(4), r"int32 of shape \(4,\)"))},
    "fp8": ({x: a.astype(jnp.float8_e4m3fn) for x, a in {"query": Q, "key": K, "value": K}.items()}, r"bfloat16, float16 or float64; got float8_e4m3fn"),
    "dense object": ({"mask": pf.Causal() & pf.Dense(jnp.ones((1, 1, 5, 6), bool))}, r"array of mask Dense of shape \(1, 1, 5, 6\) does not broadcast"),
    "float dense object": ({"mask": pf.Dense(jnp.ones((5, 7)))}, r"array of mask Dense must be boolean"),
    "segments object": ({"mask": pf.Segments(jnp.zeros((2, 4), int), jnp.zeros((2, 7), int))}, r"q_ids of mask Segments must have shape \[batch or 1, 5\]; got \(2, 4\)"),
    "own mask": ({"mask": pf.Prefix(jnp.array([1, 2, 3]))}, r"mask Prefix has shape \(3,\); the first axis .* 1 or 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_malformed_call(name):
    arguments, text = VALUE_ERRORS[name]
    with pytest.raises(ValueError, match=text):
        call(**arguments)
    with pytest.raises(ValueError, match=text):  # and under a transformation, not later
        jax.eval_shape(lambda: call(**arguments))


@pytest.mark.parametrize("name", [*FLAGS, "logits_soft_cap", "local_window_size", "dropout_rate"])
def test_what_cannot_be_traced(name):
    with pytest.raises(ValueError, match=f"{name} must be .* known at trace time"):
        jax.eval_shape(lambda x: call(**{name: x}), jnp.array(1))
    with pytest.raises(ValueError, match=f"{name} must be .* known at trace time"):
        pf.explain(Q, K, K, **{name: jax.ShapeDtypeStruct((), jnp.int32)})


@pytest.mark.parametrize("name", FLAGS)
def test_what_counts_as_true_and_false(name):
    def run(flag):
        value = jnp.arange(K.size, dtype=K.dtype).reshape(K.shape)
        return call(value=value, dropout_rate=0.5, dropout_rng=jax.random.key(0), implementation="xla", **{name: flag})

    on, off = run(True), run(False)
    assert jax.tree.structure(on) != jax.tree.structure(off) or (on != off).any()
    for flag in (np.True_, np.False_, 1, 0, np.int8(1), jnp.array(True)):
        jax.tree.map(np.testing.assert_array_equal, run(flag), on if flag else off)


@pytest.mark.parametrize(
    "window", [[1, 2], np.array([1, 2]), (np.int64(1), np.int8(2)), range(1, 3), jnp.array([1, 2])], ids=repr
)
def test_a_window_in_any_sequence(window):
    np.testing.assert_array_equal(
        pf.dense_mask(Q, K, local_window_size=window), pf.dense_mask(Q, K, local_window_size=(1, 2))
    )


def test_explain_refuses_unknown_arguments():
    with pytest.raises(TypeError, match="unknown arguments: causal"):
        pf.explain(Q, K, K, causal=True)


def test_masks_combine_with_masks_only():
    with pytest.raises(TypeError, match=r"not with .*; an array goes in as Dense\(array\)"):
        pf.Causal() & jnp.ones((5, 7), bool)
