"""Which tile runs: tables, what a user tuned, and that every tile gives the same attention."""

import dataclasses
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash as pf
from pallas_flash.devices import Device
from pallas_flash.kernels.triton import tiles
from pallas_flash.problem import Problem
from pallas_flash.tile_table import Entry, Situation, TileTable

GPUS = [Device("cuda", "a GPU", capability) for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))]
H200 = GPUS[3]
PROBLEM = Problem(
    1, 4096, 4096, 4, 4, 128, 128, "bfloat16", 0.1, 0, "", (), False, 0.0, "Causal", "default", "auto"
)  # fmt: skip


def kernels_of(dim):
    """Wide heads have dk and dv apart."""
    return ("forward", "dq", *(("dk", "dv") if 128 < dim <= 256 else ("dkv",)), "dscore")


def problem(**changes):
    return dataclasses.replace(PROBLEM, **changes)


@pytest.mark.parametrize("device", GPUS, ids=lambda d: f"sm_{d.capability[0]}{d.capability[1]}")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [16, 72, 96, 128, 192, 256])
def test_every_gpu_has_a_tile_that_fits(device, dtype, dim):
    """BR-48."""
    for mask in ("no mask", "Causal", "Segments", "Causal & Window"):
        for kernel in kernels_of(dim):
            p = problem(head_dim=dim, v_head_dim=dim, dtype=dtype, mask=mask)
            tile, origin = tiles.choose_with_origin(p, kernel, device)
            assert tiles.fits(p, kernel, tile, device)
            assert ("measured on an NVIDIA H200" in origin) == (device is H200), origin


def test_short_rows_get_short_tiles():
    tile = tiles.choose(problem(q_len=5, kv_len=40), "forward", H200)
    assert (tile.block_q, tile.block_kv) == (16, 64)


def test_tiles_follow_length_and_mask():
    """What docs/performance.md measured: large tiles for long rows, 64 x 64 under windows and for documents."""
    long = problem(q_len=16384, kv_len=16384)
    assert tiles.choose(long, "forward", H200).block_q == 128
    assert tiles.choose(dataclasses.replace(long, mask="no mask"), "forward", H200).block_q == 256
    for mask in ("Causal & Window", "Causal & Segments"):
        assert tiles.choose(dataclasses.replace(long, mask=mask), "forward", H200).block_q == 64
    grouped = problem(num_kv_heads=2)
    assert tiles.choose(grouped, "dkv", H200) != tiles.choose(PROBLEM, "dkv", H200)


@pytest.mark.parametrize(
    "dim, kernel", [(dim, kernel) for dim in (64, 80, 128, 192, 256) for kernel in kernels_of(dim)]
)
def test_candidates_fit_and_hold_the_present_choice(kernel, dim):
    p = problem(head_dim=dim, v_head_dim=dim)
    found = tiles.candidates(p, kernel, H200)
    assert tiles.choose(p, kernel, H200) in found and len(found) == len(set(found))
    assert all(tiles.fits(p, kernel, tile, H200) for tile in found)


def entry(length=4096, mask="masked", kernel="forward", dim=128, block_q=32):
    tile = tiles.Tile(block_q, 32, 4, 2)
    return Entry(Situation("triton", kernel, 16, dim, mask, False, length), tile.fields())


def test_a_table_serves_calls_like_those_it_saw():
    own = tiles.Tile(32, 32, 4, 2)
    with TileTable([entry()]):
        assert tiles.choose_with_origin(PROBLEM, "forward", H200) == (own, "tuned here")
        assert tiles.choose(problem(q_len=8192, kv_len=8192), "forward", H200) == own  # twice as long
        for other in (
            problem(q_len=9000, kv_len=9000),
            problem(mask="no mask"),
            problem(head_dim=64, v_head_dim=64),
            problem(dtype="float32"),
        ):
            assert tiles.choose_with_origin(other, "forward", H200)[1] != "tuned here"
        assert tiles.choose_with_origin(PROBLEM, "dq", H200)[1] != "tuned here"
        with TileTable([entry(block_q=16)], "inner"):
            assert tiles.choose_with_origin(PROBLEM, "forward", H200)[1] == "inner"
            assert tiles.choose_with_origin(problem(mask="no mask"), "forward", H200)[1] != "inner"
        assert tiles.choose(PROBLEM, "forward", H200) == own
    assert tiles.choose(PROBLEM, "forward", H200) != own


def test_nearest_prefers_dim_then_mask_then_length():
    table = TileTable(
        [entry(dim=64), entry(dim=256), entry(length=1024), entry(length=16384), entry(mask="window", length=8192)]
    )
    wanted = Situation("triton", "forward", 16, 128, "masked", False, 8192)
    assert table.nearest(wanted).situation == wanted._replace(length=16384)
    # a larger dim's tile fits, a smaller's does not
    assert table.nearest(wanted._replace(dim=130)).situation.dim == 256
    assert table.nearest(wanted._replace(dim=300)) is None
    assert table.nearest(wanted._replace(mask="window")).situation.mask == "window"
    assert table.nearest(wanted._replace(length=4096)).situation.length == 1024  # of two as far, the shorter


def test_save_load_and_union(tmp_path):
    a, b = TileTable([entry(), entry(1024)], "a"), TileTable([entry(block_q=64), entry(kernel="dq")], "b")
    a.save(tmp_path / "table.json")
    assert TileTable.load(tmp_path / "table.json") == TileTable(sorted(a.entries), "a")
    both = a | b
    assert both.origin == "a" and set(both.entries) == {*a.entries, entry(kernel="dq")}
    for text in ("[]", "{}", "not JSON", '{"origin": "x", "entries": [{"kernel": "dq"}]}'):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(ValueError, match=r"broken.json is not a table of tiles"):
            TileTable.load(tmp_path / "broken.json")


@pytest.mark.parametrize(
    "field, value",
    [
        ("dim", "128"),
        ("dim", 0),
        ("mask", "causal"),
        ("mask", []),
        ("bits", 8),
        ("kernel", "dqkv"),
        ("grouped", 1),
        ("length", 4.5),
        ("tier", None),
        ("tile", {"block_q": "32"}),
        ("tile", []),
        ("us", "fast"),
    ],
)
def test_a_file_with_an_impossible_entry_is_refused(tmp_path, field, value):
    path = tmp_path / "table.json"
    TileTable([entry()]).save(path)
    read = json.loads(path.read_text())
    read["entries"][0][field] = value
    path.write_text(json.dumps(read))
    with pytest.raises(ValueError, match=r"table.json is not a table of tiles") as refused:
        TileTable.load(path)
    assert field in str(refused.value) or field == "tile"


def test_a_table_of_something_else_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"entries must be .*Entry, got 1"):
        TileTable([1])
    (tmp_path / "t.json").write_text('{"origin": 5, "entries": []}')
    with pytest.raises(ValueError, match=r"t.json is not a table.*origin must be a text"):
        TileTable.load(tmp_path / "t.json")


def test_a_table_with_an_impossible_tile_is_refused_in_words():
    for tile, words in (
        ((("block_q", 32),), r"a tile in a table has block_kv, block_q.*got block_q"),
        (tuple({**dict(entry().tile), "block_q": 48}.items()), r"powers of two from 16.*'block_q': 48"),
    ):
        with TileTable([entry()._replace(tile=tile)]), pytest.raises(ValueError, match=words):
            tiles.choose(PROBLEM, "forward", H200)


def test_a_table_in_two_threads():
    table, seen, inside, leave = TileTable([entry()]), [], threading.Event(), threading.Event()

    def other():
        with table:
            inside.set()
            leave.wait(10)
            seen.append(tiles.choose_with_origin(PROBLEM, "forward", H200)[1])
        seen.append(tiles.choose_with_origin(PROBLEM, "forward", H200)[1])

    thread = threading.Thread(target=other)
    with table:
        thread.start()
        inside.wait(10)
    assert tiles.choose_with_origin(PROBLEM, "forward", H200)[1] != "tuned here"
    leave.set()
    thread.join()
    assert seen[0] == "tuned here" and seen[1] != "tuned here"


def test_shipped_tables_are_as_save_writes_them(tmp_path):
    for path in sorted(tiles.table_path(H200).parent.glob("*.json")):
        table = TileTable.load(path)
        table.save(tmp_path / path.name)
        assert json.loads((tmp_path / path.name).read_text()) == json.loads(path.read_text()), path
        for each in table.entries:
            assert tiles.Tile.of(each.tile).fields() == each.tile


def attend(q):
    return pf.flash_attention(q, q, q, is_causal=True, implementation="triton").sum()


def test_autotune_measures_what_the_function_runs(monkeypatch):
    """Of jitted code too, which JAX would answer from what it has compiled before."""
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 40, 2, 16)), jnp.float32)
    compiled = jax.jit(attend)
    few = [tiles.Tile(16, 16, 4, 2), tiles.Tile(32, 16, 4, 2)]
    built, lines = [], []
    choose = tiles.choose

    def recorded(p, kernel, device):
        built.append(choose(p, kernel, device))
        return built[-1]

    monkeypatch.setattr(tiles, "choose", recorded)
    monkeypatch.setattr(tiles, "candidates", lambda p, kernel, device: few)
    monkeypatch.setattr("pallas_flash.tuning.SAMPLES", 1)
    monkeypatch.setattr("pallas_flash.tuning.MOST_CALLS", 1)
    with pf.interpret():
        compiled(q)
        table = pf.autotune(compiled, q, kernels=("forward", "dq"), progress=lines.append)
    assert set(few) < set(built) and len(lines) == 3  # each compiled anew
    assert {e.situation.kernel for e in table.entries} <= {"forward"}


def test_gradients_under_a_table():
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 40, 2, 16)), jnp.float32)
    gradient = jax.jit(jax.grad(attend))
    tile = {"forward": tiles.Tile(16, 16, 4, 2), "dq": tiles.Tile(32, 16, 4, 2), "dkv": tiles.Tile(16, 32, 4, 2)}
    table = TileTable(
        Entry(Situation("triton", kernel, 32, 16, "masked", False, 40), t.fields()) for kernel, t in tile.items()
    )
    with pf.interpret():
        wanted = gradient(q)
        with table:
            np.testing.assert_allclose(gradient(q), wanted, atol=1e-5)
            plan = pf.explain(q, q, q, is_causal=True, implementation="triton")
    assert "16x32, 4 warps, 2 stages (tuned here)" in str(plan)


def test_autotune_of_a_tile_that_the_compiler_refuses(monkeypatch):
    q = jnp.ones((1, 16, 1, 16))
    impossible = tiles.Tile(16, 512, 4, 2)
    monkeypatch.setattr(tiles, "candidates", lambda p, kernel, device: [impossible])

    def compiler(problem, tile):
        if tile == impossible:
            raise ValueError("too much shared memory")
        return tile

    monkeypatch.setattr(tiles, "_clipped", compiler)
    lines = []
    with pf.interpret():
        assert pf.autotune(attend, q, kernels=("forward",), progress=lines.append).entries == ()
    assert len(lines) == 2 and "refused with block_kv 512" in lines[1]


def test_autotune_when_no_tile_works(monkeypatch):
    """A tile in force that fails is no reason to stop; that every tile fails is, with the function's own error."""
    q = jnp.ones((1, 16, 1, 16))
    good, lines = tiles.Tile(16, 16, 4, 2), []

    def only_good(fn, args, table):
        if table.entries and table.entries[0].tile == good.fields():
            return 1.0
        raise RuntimeError

    monkeypatch.setattr("pallas_flash.tuning._seconds", only_good)
    for candidates in ([tiles.Tile(32, 16, 4, 2), good], [tiles.Tile(32, 16, 4, 2)]):
        monkeypatch.setattr(tiles, "candidates", lambda p, kernel, device, found=candidates: found)
        with pf.interpret():
            if good in candidates:
                table = pf.autotune(attend, q, kernels=["forward"], progress=lines.append)
                assert [e.tile for e in table.entries] == [good.fields()]
            else:
                with pytest.raises(RuntimeError):
                    pf.autotune(attend, q, kernels=["forward"])
    assert "refused with the tile that it has: RuntimeError" in lines[0]


def test_autotune_takes_numpy_arrays_and_numbers(monkeypatch):
    monkeypatch.setattr("pallas_flash.tuning._seconds", lambda fn, args, table: 1.0)
    with pf.interpret():
        table = pf.autotune(lambda scale, q: attend(q) * scale, 2.0, np.ones((1, 16, 1, 16), np.float32))
    assert table.origin.startswith("tuned on cpu")


@pytest.mark.parametrize("kernels", ["dq", ("dkdv",)])
def test_autotune_of_kernels_that_do_not_exist(kernels):
    with pytest.raises(ValueError, match=r"kernels must be some of .*'dkv'"):
        pf.autotune(attend, jnp.ones((1, 16, 1, 16)), kernels=kernels)


def test_autotune_where_no_kernel_runs():
    q = jnp.ones((1, 16, 1, 16))
    with pytest.raises(ValueError, match=r"fn runs no kernel that has tiles .*explain"):
        pf.autotune(lambda q: pf.flash_attention(q, q, q, implementation="xla"), q)
