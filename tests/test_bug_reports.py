"""Bug reports against other libraries, by their number in the notes: each input that broke one of them.

Small on a CPU, the reported sizes with ``-m gpu``.  Recipes that belong to another file's subject stand there under
the same numbers; the last test checks that none is missing.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf

from .accuracy import error, normal, oracle
from .cases import BIG_CASES, CASES, Case
from .test_forward_backward import compare, compare_arrays, run, split

everywhere, gpu = pytest.mark.everywhere, pytest.mark.gpu
TIER = "triton"


def small_and_real(small, real):
    """Parameters: the small ones run everywhere, the reported ones only where they are compiled."""
    return [pytest.param(x, marks=everywhere) for x in small] + [pytest.param(x, marks=gpu) for x in real]


def seen(kernels, q_len, kv_len, **options):
    """[T, S] of the weights: with q = k = 0 and one-hot values, each output row is its allowed set."""
    q, k = jnp.zeros((1, q_len, 1, 16)), jnp.zeros((1, kv_len, 1, 16))
    v = jnp.eye(kv_len)[None, :, None]
    with kernels():
        out = jax.jit(lambda *a: pf.flash_attention(*a, implementation=TIER, **options))(q, k, v)
    return np.asarray(out)[0, :, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", small_and_real([(2, 20, 2, 16)], [(8, 128, 4, 32)]), ids=str)
def test_br_01_gradient_of_a_bias_of_another_dtype(size, dtype, kernels):
    batch, length, heads, dim = size
    bias = normal(9, 1, heads, length, length, dtype=dtype)
    arrays = Case("01", batch, length, length, heads, heads, dim, dtype="bfloat16").arrays()
    got = compare_arrays(arrays, {"bias": bias}, TIER, kernels)
    assert got["dbias"].dtype == bias.dtype and got["dbias"].shape == bias.shape


LOWEST = {name: float(jnp.finfo(name).min) for name in ("float16", "bfloat16", "float32")}


@everywhere
@pytest.mark.parametrize("value", [*LOWEST.values(), -1e9, -np.inf], ids=[*LOWEST, "-1e9", "-inf"])
def test_br_06_additive_mask_values(value, kernels):
    forbidden = (
        jax.random.bernoulli(jax.random.key(1), 0.5, (1, 1, 40, 40)).at[:, :, 0].set(True).at[:, :, 1:, 0].set(False)
    )
    q, k, v, do, dlse = Case("06", q_len=40, kv_len=40).arrays()
    do, dlse = do.at[:, 0].set(0), dlse.at[:, :, 0].set(0)  # what the row without a real key holds is not compared
    options = {"bias": jnp.where(forbidden, value, 0.0)}
    want = oracle(q, k, v, do, dlse, options)
    with kernels():
        got = run((q, k, v, do, dlse), options, TIER, ())
    atol = 2e-2 if jax.default_backend() == "gpu" else 2e-5
    np.testing.assert_allclose(got["out"][:, 1:], want["out"][:, 1:], atol=atol)
    np.testing.assert_allclose(got["lse"][:, :, 1:], want["lse"][:, :, 1:], atol=atol)
    for name in ("dq", "dk", "dv", "dbias"):
        np.testing.assert_allclose(got[name], want[name], atol=atol, err_msg=name)


@everywhere
@pytest.mark.parametrize("ambient", [False, True])
def test_br_09_br_128_float32_is_float32_when_asked(ambient, kernels):
    arrays = Case("09", 1, 128, 128, 1, 1, 32).arrays()
    want = oracle(*arrays, {"is_causal": True})
    asked = () if ambient else (("precision", "highest"),)
    with kernels(), jax.default_matmul_precision("highest" if ambient else "default"):
        got = run(arrays, {}, TIER, (("is_causal", True), *asked))
    for name, bound in {"out": 1e-5, "lse": 1e-5, "dq": 5e-5, "dk": 5e-5, "dv": 5e-5}.items():
        assert np.abs(got[name] - want[name]).max() <= bound * np.abs(want[name]).max(), name


@pytest.mark.parametrize("length", small_and_real([1, 3, 9, 17, 33], [2, 7, 12, 16, 31, 32]))
def test_br_14_short_sequences(length, kernels):
    dtype, dim = ("bfloat16", 64) if length % 2 else ("float32", 128)
    compare(Case("14", 2, length, length, dim=dim, dtype=dtype), TIER, kernels)


@pytest.mark.parametrize("size", small_and_real([(2, 40, 4, 2, 32)], [(3, 300, 16, 2, 256)]), ids=str)
def test_br_15_activations_that_are_not_gaussian(size, kernels):
    batch, length, heads, kv_heads, dim = size
    arrays = Case("15", batch, length, length, heads, kv_heads, dim, dtype="bfloat16").arrays()
    outlier = jnp.where(jnp.arange(dim) % 13 == 5, 50.0, 3.0)

    def heavy(x):
        x = x.astype(jnp.float32)
        return (x * jnp.abs(x) + outlier).astype(jnp.bfloat16)

    q, k, v = (heavy(x) for x in arrays[:3])

    def naive(q, k, v):
        """16-bit attention with a float32 softmax: what tensor cores can do, they take p and ds in 16 bits."""
        k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
        s = jnp.einsum("btnd,bsnd->bnts", q, k).astype(jnp.float32) * 0.01
        s = jnp.where(jnp.tril(jnp.ones((length, length), bool)), s, -jnp.inf)
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(s, -1).astype(jnp.bfloat16), v)

    options = {"is_causal": True, "scale": 0.01}
    for b in range(batch):  # each row against its own oracle: a large row must not hide a wrong one
        row = tuple(x[b : b + 1] for x in (q, k, v, *arrays[3:]))
        want = oracle(*row, options)
        with kernels():
            got = run(row, {}, TIER, tuple(options.items()))
        # Plain XLA keeps ds in float32, which no kernel can: dq = ds k carries ds's rounding times the offset of k.
        # 0.6 of naive attention's error takes delta from an unrounded output (Output.rest): without it, this fails.
        out, vjp = jax.vjp(naive, *row[:3])  # not compiled as a whole, which would keep more bits
        without_lse = oracle(*row[:4], row[4] * 0, options)
        for name, theirs in zip(("out", "dq", "dk", "dv"), (out, *vjp(row[3]))):
            limit = (0.6 if name == "dq" else 1.0) * error(theirs.astype(jnp.float32), without_lse[name]) + 1e-3
            assert error(got[name].astype(jnp.float32), want[name]) <= limit, name


@pytest.mark.parametrize("size", small_and_real([(48, 64)], [(96, 256)]), ids=str)
@pytest.mark.parametrize("side", ["right", "left"])
def test_br_21_window_that_padding_empties(size, side, kernels):
    length, dim = size
    lengths = jnp.array([5, length])
    options = {"is_causal": True, "local_window_size": (8, 0)}
    if side == "right":
        options["key_value_seq_lengths"] = lengths
    else:
        options["mask"] = (jnp.arange(length) >= length - lengths[:, None])[:, None, None, :]
    compare(Case("21", q_len=length, kv_len=length, dim=dim, dtype="bfloat16", options=lambda: options), TIER, kernels)


@pytest.mark.parametrize("size", small_and_real([(70, 41)], [(200, 130)]), ids=str)
def test_br_23_gradient_rows_that_no_tile_writes(size, kernels):
    length, first = size
    lengths = np.array([first, 7])
    ids = jnp.asarray(np.where(np.arange(length) < lengths[:, None], 0, -1))
    got = compare_arrays(Case("23", q_len=length, kv_len=length).arrays(), {"q_segment_ids": ids}, TIER, kernels)
    for b in range(2):
        for name in ("out", "dq", "dk", "dv"):
            assert (np.asarray(got[name])[b, lengths[b] :] == 0).all(), name


@everywhere
@pytest.mark.parametrize("sizes", [(2, 5), (3, 40), (5, 2), (40, 20)], ids=str)
def test_br_25_br_26_which_corner(sizes, kernels):
    q_len, kv_len = sizes
    rows, keys = np.arange(q_len)[:, None], np.arange(kv_len)[None]
    for alignment, offset in (("top_left", 0), ("bottom_right", kv_len - q_len)):
        got = seen(kernels, q_len, kv_len, is_causal=True, causal_alignment=alignment)
        np.testing.assert_array_equal(got > 0, keys <= rows + offset)


@pytest.mark.parametrize(
    "size",
    small_and_real(
        [(1, 1, 70), (1, 70, 13), (2, 16, 64)], [(8, 512, 2048), (1, 1, 2048), (1, 2048, 77), (1, 2048, 1024)]
    ),
    ids=str,
)
def test_br_26_br_27_br_89_different_lengths(size, kernels):
    """With and without the causal flag in one process: compiled kernels must not be shared between them."""
    batch, q_len, kv_len = size
    for causal in (False, True):
        options = {"is_causal": causal, "causal_alignment": "bottom_right"}
        arrays = Case("27", batch, q_len, kv_len, dim=64, dtype="float16").arrays()
        compare_arrays(arrays, options, TIER, kernels)


@everywhere
def test_br_28_br_31_br_32_windows_count_what_they_say(kernels):
    size = 40
    rows, keys = np.arange(size)[:, None], np.arange(size)[None]
    seen_by = {}
    for window in ((0, 0), (0, 31), (5, 2), (size - 1, 0), (size, 0), (None, 0), (3, None), 4):
        seen_by[window] = seen(kernels, size, size, local_window_size=window)
        got = seen_by[window] > 0
        left, right = (window, window) if isinstance(window, int) else window
        low = -size if left is None else rows - left
        high = size if right is None else rows + right
        np.testing.assert_array_equal(got, (keys >= low) & (keys <= high), err_msg=f"{window}")
    np.testing.assert_array_equal(seen_by[4], seen(kernels, size, size, local_window_size=(4, 4)))
    np.testing.assert_array_equal(seen_by[size - 1, 0], seen(kernels, size, size, is_causal=True))


@everywhere
def test_br_35_padding_ids_and_ids_that_return(kernels):
    """0 is an ordinary id, a negative id is padding, equal ids see each other where they are not contiguous."""
    ids = np.array([0, 0, 1, -1, 0, 1, -1, -2, 1])
    got = seen(kernels, 9, 9, q_segment_ids=jnp.asarray(ids)[None]) > 0
    np.testing.assert_array_equal(got, (ids[:, None] == ids[None]) & (ids >= 0)[:, None])


PATTERNS = [tuple(bool(i >> axis & 1) for axis in range(4)) for i in range(16)]
FEW = [PATTERNS[i] for i in (0, 3, 6, 9)]


@pytest.mark.parametrize("pattern", small_and_real(FEW, [p for p in PATTERNS if p not in FEW]), ids=str)
def test_br_38_masks_and_biases_broadcast(pattern, kernels):
    """A mask that is full along some axes, and a bias that is full along the others."""
    sizes = (2, 6, 33, 57)
    mask_shape = tuple(n if full else 1 for n, full in zip(sizes, pattern))
    bias_shape = tuple(1 if full else n for n, full in zip(sizes, pattern))
    mask = jax.random.bernoulli(jax.random.key(3), 0.7, mask_shape)
    # Sums of a bias gradient cancel to almost nothing; TF32 would drown them.
    options = {"mask": mask, "bias": normal(4, *bias_shape), "precision": "highest"}
    compare(Case("38", 2, 33, 57, 6, 3, options=lambda: options), TIER, kernels)


@everywhere
@pytest.mark.parametrize("given", ["query_seq_lengths", "key_value_seq_lengths"])
def test_br_39_each_length_works_alone(given, kernels):
    lengths = jnp.array([24, 40, 0, 13])
    options = {given: lengths}
    got = compare(Case("39", 4, 40, 40, options=lambda: options), TIER, kernels)
    del got
    q, k, v, do, dlse = Case("39", 4, 40, 40).arrays()
    behind = (jnp.arange(40) >= lengths[:, None])[:, :, None, None]
    if given == "query_seq_lengths":
        poisoned = jnp.where(behind, jnp.nan, q), k, v, jnp.where(behind, jnp.nan, do), dlse
    else:
        poisoned = q, jnp.where(behind, jnp.nan, k), jnp.where(behind, jnp.nan, v), do, dlse
    with kernels():
        results = [run(x, options, TIER, ()) for x in ((q, k, v, do, dlse), poisoned)]
    for name in ("out", "lse", "dq", "dk", "dv"):
        np.testing.assert_array_equal(*(np.asarray(r[name]) for r in results), err_msg=name)


@everywhere
def test_br_40_no_mask_overwrites_another(kernels):
    """Each of five sources forbids a pair that no other does."""
    size = 12
    mask = np.ones((size, size), bool)
    mask[11, 9] = False
    ids = np.zeros(size, int)
    ids[7] = 1
    options = {"is_causal": True, "local_window_size": (6, None), "key_value_seq_lengths": jnp.array([11])}
    got = seen(kernels, size, size, mask=jnp.asarray(mask), q_segment_ids=jnp.asarray(ids)[None], **options) > 0
    i, j = np.arange(size)[:, None], np.arange(size)[None]
    sources = [j <= i, j >= i - 6, (j < 11) & (i >= 0), mask, ids[:, None] == ids[None]]
    for n, source in enumerate(sources):
        others = np.logical_and.reduce([s for m, s in enumerate(sources) if m != n])
        assert (others & ~source).any(), f"source {n} is not needed: the test proves nothing"
    np.testing.assert_array_equal(got, np.logical_and.reduce(sources))


@everywhere
def test_br_42_soft_cap_lets_no_forbidden_key_in(kernels):
    q, k, v, do, dlse = Case("42", q_len=64, kv_len=64).arrays()
    static = (("is_causal", True), ("logits_soft_cap", 1.0))
    k2, v2 = (x.at[:, 40:].set(-7 * x[:, 40:]) for x in (k, v))
    do = do.at[:, 40:].set(0)
    with kernels():
        one, two = (run((q, k, v, do, dlse), {}, TIER, static) for k, v in ((k, v), (k2, v2)))
    np.testing.assert_array_equal(one["out"][:, :40], two["out"][:, :40])
    np.testing.assert_array_equal(one["dq"][:, :40], two["dq"][:, :40])
    assert (np.asarray(one["out"])[:, 40:] != np.asarray(two["out"])[:, 40:]).any()


@pytest.mark.parametrize(
    "size", small_and_real([(129, 65)], [(192, 192), (4092, 1000), (1000, 129), (127, 4092)]), ids=str
)
def test_br_43_lengths_that_tiles_do_not_divide(size, kernels):
    case = Case("43", 1, *size, heads=4, kv_heads=4, dim=16, dtype="bfloat16")
    compare(case, TIER, kernels)
    with kernels():
        first, *others = (run(case.arrays(), {}, TIER, ()) for _ in range(10 if max(size) > 150 else 2))
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), first, other)


@pytest.mark.parametrize("dim", small_and_real([128], [256]))
def test_br_45_channels_behind_the_first_64(dim, kernels):
    arrays = Case("45", q_len=33, kv_len=33, dim=dim).arrays()
    quiet = jnp.arange(dim) < 64
    arrays = (*(jnp.where(quiet, 0, x) for x in arrays[:4]), arrays[4])
    got = compare_arrays(arrays, {}, TIER, kernels)
    for name in ("out", "dq", "dk", "dv"):
        assert np.abs(np.asarray(got[name])[..., 64:]).max() > 0.01, name


def test_br_46_every_head_dim_is_in_the_table():
    dims = {c.dim for c in (*CASES, *BIG_CASES)}
    assert dims >= {16, 32, 40, 48, 56, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256, 320, 512}


@gpu
def test_br_48_float32_with_bias_and_segments_fits(kernels):
    ids = jnp.asarray((np.arange(300) >= 130).astype(np.int32))[None].repeat(2, 0)
    options = {"bias": normal(4, 1, 2, 300, 300), "q_segment_ids": ids}
    compare(Case("48", q_len=300, kv_len=300, dim=128, options=lambda: options), TIER, kernels)


GROUPS = [((9, 3), 5), ((10, 2), 1), ((28, 4), 17)]


@pytest.mark.parametrize(
    "size",
    small_and_real(GROUPS, [((h, kv), t) for h, kv in ((9, 3), (28, 4), (12, 1), (5, 5), (40, 8)) for t in (1, 130)]),
    ids=str,
)
def test_br_54_groups_that_are_no_power_of_two(size, kernels):
    (heads, kv_heads), q_len = size
    compare(Case("54", 1, q_len, 40, heads, kv_heads, options=lambda: {"is_causal": True}), TIER, kernels)


@everywhere
def test_br_55_which_key_head_serves_a_query_head(kernels):
    v = jnp.broadcast_to(jnp.array([1.0, 2.0])[:, None], (1, 20, 2, 16))
    q, k = normal(0, 1, 20, 6, 16), normal(1, 1, 20, 2, 16)
    with kernels():
        out = pf.flash_attention(q, k, v, implementation=TIER, precision="highest")
    np.testing.assert_allclose(np.asarray(out)[0, :, :, 0], np.broadcast_to([1, 1, 1, 2, 2, 2], (20, 6)), rtol=1e-5)


@pytest.mark.parametrize("size", small_and_real([(4, 24)], [(8, 64)]), ids=str)
def test_br_81_bias_gradient_for_every_batch_row(size, kernels):
    heads, length = size
    options = {"bias": normal(7, 2, heads, length, length)}
    got = compare(Case("81", 2, length, length, heads, heads, options=lambda: options), TIER, kernels)
    del got


@everywhere
@pytest.mark.parametrize("only_lse", [False, True])
def test_br_84_the_lse_has_a_gradient(only_lse, kernels):
    q, k, v, do, dlse = Case("84", q_len=40, kv_len=40, heads=4).arrays()
    got = compare_arrays((q, k, v, do * (not only_lse), dlse), {"is_causal": True}, TIER, kernels)
    assert got["lse"].shape == (2, 4, 40) and got["lse"].dtype == jnp.float32
    assert np.abs(got["dq"]).max() > 0.01 and (np.abs(got["dv"]).max() == 0) == only_lse


@pytest.mark.parametrize("cap", small_and_real([15.0], [1.0, 30.0, 50.0]))
def test_br_86_soft_cap_with_large_logits(cap, kernels):
    length = 217 if cap != 15.0 else 40
    ids = jnp.asarray((np.arange(length) >= 23).astype(np.int32))[None].repeat(2, 0)
    q, k, v, do, dlse = Case("86", q_len=length, kv_len=length, heads=4).arrays()
    scale = 170 / float(jnp.abs(jnp.einsum("btnd,bsnd->bnts", q, jnp.repeat(k, 2, 2))).max())
    options = {"logits_soft_cap": cap, "is_causal": True, "q_segment_ids": ids, "bias": normal(5, 1, 4, length, length)}
    compare_arrays((q, k, v, do, dlse), {**options, "scale": scale}, TIER, kernels)


@everywhere
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_br_129_dtypes_of_results(dtype, kernels):
    x = normal(0, 1, 8, 2, 16, dtype=dtype)

    def both(q, k, v):
        out, vjp = jax.vjp(lambda *a: pf.flash_attention(*a, implementation=TIER), q, k, v)
        return out, *vjp(jnp.ones_like(out))

    with kernels():
        assert [r.dtype for r in jax.eval_shape(both, x, x, x)] == [jnp.dtype(dtype)] * 4
        assert [r.dtype for r in jax.jit(both)(x, x, x)] == [jnp.dtype(dtype)] * 4


def test_br_131_the_layout_is_stated_and_checked():
    documented = pf.flash_attention.__doc__ or ""
    assert documented.index("query: [B, T, N, D]") < documented.index("bias: float")
    with pytest.raises(
        ValueError, match=r"layout is \[batch, length, heads, head_dim\].*\(1, 4, 32, 64\).*\(1, 3, 5, 64\)"
    ):
        pf.flash_attention(jnp.ones((1, 4, 32, 64)), jnp.ones((1, 3, 5, 64)), jnp.ones((1, 3, 5, 64)))


CONCERN_US = """01 05 06 07 09 10 14 15 16 17 21 23 25 26 27 28 31 32 33 35 38 39 40 42 43 45 46 48 51 54 55 56 58 60 61
62 63 65 67 68 70 77 79 81 84 86 89 110 124 127 128 129 131 11 12 19 24 71 72 78 90 92 94 95 98 99 106 113 114 118
122 123 125 132 133 134 135"""


def test_every_recipe_has_a_test():
    text = "".join(p.read_text() for p in pathlib.Path(__file__).parent.glob("test_*.py"))
    text = text.replace(CONCERN_US, "")
    found = set(re.findall(r"BR-(\d+)", text)) | set(re.findall(r"br_(\d+)", text))
    assert set(CONCERN_US.split()) - found == set()


def test_split_leaves_nothing_out():
    """The helper of these tests: were an option dropped here, they would pass for the wrong reason."""
    traced, static = split({"is_causal": True, "q_segment_ids": jnp.zeros((1, 2), int), "mask": pf.Causal()})
    assert set(traced) == {"q_segment_ids", "mask"} and static == (("is_causal", True),)
