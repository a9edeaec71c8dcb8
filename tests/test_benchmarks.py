"""The benchmark command, at sizes that a CPU runs in seconds."""

import json
import subprocess
import sys

import pytest

from benchmarks import report, workloads


def test_flops_are_counted_as_the_papers_do():
    full, causal = workloads.cell(128, 16384, False), workloads.cell(128, 16384, True)
    assert full.flops == 4 * 1 * 16 * 16384**2 * 128 and causal.flops == full.flops / 2
    documents = workloads.find("documents")[0]
    assert sum(documents.documents) == documents.length
    assert 0 < documents.flops < workloads.cell(128, 16384, True).flops


def test_smoke_run_writes_json_and_table(tmp_path):
    out = tmp_path / "smoke.json"
    command = [sys.executable, "-m", "benchmarks", "run", "--workloads", "smoke", "--peers", "xla,jax.nn xla,tokamax"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert {"command", "date", "commit", "device", "versions"} <= results.keys()
    timed = [r for r in results["rows"] if "us" in r]
    assert len(timed) >= 8
    for r in timed:
        assert r["us"] > 0 and r["error"] < 1e-5
    table = report.table(results)
    assert "| smoke-causal | forward |" in table and table in done.stdout


def test_tables_are_inserted(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    row = {"workload": "w", "peer": "p", "direction": "forward", "us": 10.0, "tflops": 3.0, "spread": 0, "error": 0.5}
    results = {"rows": [row], "device": "H", "versions": {"jax": "1"}, "commit": "c" * 40, "date": "2026-01-01T00",
               "command": "x"}  # fmt: skip
    (tmp_path / "mine.json").write_text(json.dumps(results))
    document = tmp_path / "README.md"
    document.write_text("before\n<!-- table:mine -->old<!-- /table -->\nafter")
    report.insert(document)
    text = document.read_text()
    assert "old" not in text and "| w | forward | 3 (10) **error 5e-01** |" in text and text.endswith("after")


def test_unknown_names_are_refused():
    with pytest.raises(SystemExit, match="unknown workload 'nope'"):
        workloads.find("nope")
