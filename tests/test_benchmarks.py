"""The benchmark command, at sizes that a CPU runs in seconds."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import pallas_flash as pf
from benchmarks import __main__ as command
from benchmarks import peers, reference, report, sass, timing, workloads
from benchmarks.workloads import Workload
from pallas_flash.kernels.triton import tiles
from pallas_flash.tile_table import Entry, asking

# The options that the smoke workloads lack, small.
SMALL = [
    Workload("documents", 1, 96, 2, 16, dtype="float32", causal=True, documents=(30, 50, 16)),
    Workload("window", 2, 80, 2, 16, dtype="float32", causal=True, window=7),
    Workload("bias", 2, 32, 4, 16, kv_heads=2, dtype="float32", bias=True),
    Workload("everything", 2, 32, 4, 16, dtype="float32", soft_cap=3.0, alibi=True, sinks=True, dropout=0.2),
    Workload("varlen", 1, 32, 2, 16, dtype="float32", causal=True, documents=(20, 12), varlen=True),
    Workload("blocks", 1, 512, 2, 16, dtype="float32", blocks=0.4),
    Workload("causal-array", 1, 64, 2, 16, dtype="float32", causal=True, causal_array=True),
    Workload("values-of-8", 1, 32, 2, 16, dtype="float32", causal=True, v_dim=8),
    Workload("highest", 1, 32, 2, 16, dtype="float32", precision="highest"),
    Workload("rising", 1, 32, 2, 16, dtype="float32", rising=True),
    Workload("repeated", 1, 32, 2, 16, dtype="float32", q_length=5, repeats=3),
]


def invoke(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
    command.main()


def test_flops_are_counted_as_the_papers_do():
    full, causal = workloads.cell(128, 16384, False), workloads.cell(128, 16384, True)
    assert full.flops == 4 * 1 * 16 * 16384**2 * 128 and causal.flops == full.flops / 2
    assert workloads.cell(64, 4096, True).flops == 4 * 4 * 32 * 4096**2 * 64 / 2
    documents = workloads.find("documents")[0]
    assert sum(documents.documents) == documents.length
    assert documents.flops == 4 * 16 * sum(d * d for d in documents.documents) * 128 / 2
    assert workloads.find("window-1024")[0].flops == 4 * 16 * 16384 * 1024 * 128


def test_the_cells_are_those_of_the_table_of_peers():
    assert len(workloads.CELLS) == 12 and len(workloads.GRID) == 36
    for w in workloads.CELLS + workloads.GRID:
        assert w.batch * w.length == 16384 and w.heads * w.dim == 2048


@pytest.mark.parametrize("w", SMALL, ids=lambda w: w.name)
def test_adapters_agree_with_the_reference(w):
    case = timing.Case.of(w)
    q, k, v, do = case.arrays
    for peer in ("xla",) if w.only_ours else ("xla", "jax.nn xla"):
        computed = jax.jit(functools.partial(_results, peers.PEERS[peer](w)))(*case.arrays, case.extras)
        assert computed["out"].shape == do.shape
        assert reference.error(w, computed, case.wanted) < 1e-5


def _results(attention, q, k, v, do, extras):
    out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, extras), q, k, v)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *pullback(do))))


def test_the_kernel_written_by_hand_is_causal_attention():
    w = workloads.Workload("hand", 2, 256, 2, 16, dtype="bfloat16", causal=True)
    case = timing.Case.of(w)
    with pf.interpret():
        computed = jax.jit(functools.partial(_results, peers.PEERS["plain causal kernel"](w)))(
            *case.arrays, case.extras
        )
    assert reference.error(w, computed, case.wanted) < 1e-2
    with pytest.raises(peers.Refusal, match="plain causal"):
        peers.PEERS["plain causal kernel"](workloads.SMOKE[1])


def test_wrong_numbers_are_seen():
    w = workloads.SMOKE[0]
    case = timing.Case.of(w)
    out = jax.jit(peers.PEERS["xla"](w))(*case.arrays[:3], case.extras)
    assert abs(reference.error(w, {"out": 1.5 * out}, case.wanted) - 0.5) < 1e-5
    nan = reference.error(w, {"out": out.at[-1, 3, -1, 0].set(jnp.nan)}, case.wanted)
    assert nan != nan
    row = {"us": 1.0, "tflops": 1.0, "error": nan}
    assert "error nan" in report._cell(row) and "error" not in report._cell({**row, "error": 0.01})


def test_smoke_run_writes_json_and_table(tmp_path, monkeypatch, capsys):
    out = tmp_path / "smoke.json"
    invoke(monkeypatch, "run", "--workloads", "smoke", "--peers", "xla,jax.nn xla,tokamax triton", "--out", out)
    results = json.loads(out.read_text())
    assert {"command", "date", "commit", "device", "versions", "error_is"} <= results.keys()
    timed = [r for r in results["rows"] if "us" in r]
    assert len(timed) >= 8
    flops = {w.name: w.flops for w in workloads.SMOKE}
    for r in timed:
        assert r["us"] > 0 and r["error"] < 1e-5 and r["temp_bytes"] >= 0
        counted = flops[r["workload"]] * (1 if r["direction"] == "forward" else 2.5)
        assert r["tflops"] * r["us"] * 1e6 == pytest.approx(counted)
    table = report.table(results)
    assert "| smoke-causal | forward |" in table and table in capsys.readouterr().out


def test_a_spent_budget_starts_nothing_and_says_so(tmp_path, monkeypatch):
    out = tmp_path / "none.json"
    with pytest.raises(SystemExit, match="nothing was run"):
        invoke(monkeypatch, "run", "--workloads", "smoke", "--peers", "xla", "--budget", "-1", "--out", out)
    results = json.loads(out.read_text())
    assert results["rows"] == [] and len(results["not_run"]) == 2


def test_memory_is_planned_not_run(tmp_path, monkeypatch):
    out, picture = tmp_path / "memory.json", tmp_path / "memory.png"
    monkeypatch.setenv("PALLAS_FLASH_COMMIT", "abc")
    invoke(monkeypatch, "memory", "--peers", "xla,triton", "--lengths", "1024,2048", "--out", out, "--plot", picture)
    results = json.loads(out.read_text())
    short, long = (r["temp_bytes"] for r in results["rows"] if r["peer"] == "xla")
    assert long > 3 * short > 0  # quadratic
    assert all("refused" in r for r in results["rows"] if r["peer"] == "triton")
    assert f"| 2048 | {long / 2**20:.1f} | - |" in report.table(results)
    assert results["commit"] == "abc" and picture.stat().st_size > 1000


def test_tables_are_inserted_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    row = {"workload": "d64-full-1k", "peer": "p", "direction": "forward", "us": 10.0, "tflops": 3.0, "error": 0.5}
    results = {"rows": [row], "device": "H", "versions": {"jax": "1"}, "commit": "c" * 40, "date": "2026-01-01T00",
               "command": "x"}  # fmt: skip
    (tmp_path / "mine.json").write_text(json.dumps(results))
    document, picture = tmp_path / "README.md", tmp_path / "mine.png"
    document.write_text("before\n<!-- table:mine -->old<!-- /table -->\nafter")
    invoke(monkeypatch, "report", tmp_path / "mine.json", "--write", document, "--plot", picture)
    text = document.read_text()
    assert "old" not in text and "| d64-full-1k | forward | 3 (10) **error 5e-01** |" in text and text.endswith("after")
    assert picture.stat().st_size > 1000
    document.write_text("no place")
    with pytest.raises(SystemExit, match="no <!-- table:NAME -->"):
        report.insert(document)


def test_unknown_names_are_refused():
    with pytest.raises(SystemExit, match="unknown workload 'nope'"):
        workloads.find("nope")
    with pytest.raises(SystemExit, match="unknown peer 'nope'"):
        peers.find("nope")
    assert peers.find("triton,cudnn,torch") == ["triton", "jax.nn cudnn", "torch flash"]


def test_machine_code_without_a_gpu(monkeypatch, capfd):
    """Compiles where the CUDA plugin of JAX is installed, and says what to install where it is not."""
    with pytest.raises(SystemExit) as ended:
        invoke(monkeypatch, "sass", "--workloads", "smoke-causal")
    printed = capfd.readouterr()
    assert ended.value.code == 0 or "no ptxas among the installed packages: pip install" in printed.err
    assert "flash_forward" in printed.out or ended.value.code == 1


def test_tune_times_both_directions(monkeypatch, tmp_path, capsys):
    asked = []

    def fake(fn, *args, kernels, seconds, progress):
        asked.append((kernels, seconds))
        with asking() as listener:
            jax.eval_shape(fn, *args)
        found = {s.kernel: s for s in listener.candidates}
        assert set(kernels) <= set(found)  # the timed function runs what is tuned
        return pf.TileTable([Entry(found[kernels[0]], (("block_q", 32),), 1.0)])

    monkeypatch.setattr(pf, "autotune", fake)
    with pf.interpret():
        invoke(monkeypatch, "tune", "--workloads", "smoke-causal", "--seconds", "3", "--into", tmp_path / "t.json")
    assert asked == [(("forward",), 3.0), (("dq", "dkv"), 6.0)]
    saved = pf.TileTable.load(tmp_path / "t.json")
    assert {e.situation.kernel for e in saved.entries} == {
        "forward",
        "dq",
    } and "smoke-causal" in capsys.readouterr().out


def test_sass_compares_with_its_record():
    row = {"gpu": "sm_90", "workload": "w", "kernel": "flash_dq", "spill_stores": 100, "warnings": []}
    assert sass.worse([row], [row]) == []
    assert sass.worse([row | {"spill_stores": 64}], []) == []
    (text,) = sass.worse([row | {"spill_stores": 300}], [row])
    assert text == "sm_90 w flash_dq spills 300 bytes, 100 in the record"
    (text,) = sass.worse([row | {"warnings": ["C7510"]}], [row])
    assert "serialised: C7510" in text
    (text,) = sass.worse([row | {"refused": "too much"}], [row])
    assert "does not compile: too much" in text


def _sum_of(attention):
    return lambda *arguments: attention(*arguments).astype(jnp.float32).sum()


@pytest.mark.parametrize("gpu", sass.GPUS)
def test_sass_compiles_every_tile_of_the_tables(gpu):
    """Each entry is what some workload's kernel takes."""
    device = sass.GPUS[gpu].device
    taken = set()
    for w in sass.of_tables(sass.GPUS[gpu]):
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(device.kind, 132, "cuda"))):
            attention = peers.PEERS["triton"](w)
            (q, k, v, _), extras = jax.eval_shape(lambda w=w: (timing.inputs(w), peers.extras(w)))
            with asking() as listener:
                jax.eval_shape(jax.grad(_sum_of(attention)), q, k, v, extras)
        for situation in listener.candidates:
            taken.add(tiles.shipped(device).nearest(situation))
    assert {e for e in tiles.shipped(device).entries if e.situation.kernel != "dscore"} <= taken


def test_train_gives_tokens_per_second(monkeypatch, tmp_path, capsys):
    invoke(monkeypatch, "train", "--sizes", "smoke", "--lengths", "32", "--tokens", "64", "--peers",
           "xla,jax.nn xla,triton", "--out", tmp_path / "train.json")  # fmt: skip
    ours, theirs, refused = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.05) and ours["tokens_per_second"] > 0
    assert "'triton' cannot run" in refused["refused"]
    assert "| smoke-32 | training step |" in capsys.readouterr().out
