"""``python3 -m tests.gpu_record``: runs the GPU tests and writes their record, benchmarks/results/gpu_tests.json."""

from __future__ import annotations

import importlib.util
import os
import sys
import time

import jax
import pytest

from benchmarks import report


class Recorder:
    """Counts outcomes as pytest reports them."""

    def __init__(self):
        self.passed, self.failed, self.skipped = 0, [], {}

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.skipped:
            self.skipped[report.nodeid] = str(report.longrepr[2] if report.longrepr else "")
        elif report.when == "call":
            self.passed += 1


def main() -> int:
    if jax.default_backend() != "gpu":
        raise SystemExit("the GPU tests need an NVIDIA GPU, and JAX sees none on this machine")
    recorder = Recorder()
    started = time.perf_counter()
    os.environ["PALLAS_FLASH_GPU_TESTS"] = "1"
    arguments = [
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "--durations=25",
        "tests",
        *sys.argv[1:],
    ]
    if importlib.util.find_spec("xdist"):  # most of the time is compilation on the host
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        arguments += ["-n", str(min(14, os.cpu_count() or 1))]
    code = pytest.main(arguments, plugins=[recorder])
    record = {
        **report.provenance(),
        "command": "python3 -m tests.gpu_record " + " ".join(sys.argv[1:]),
        "complete": code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),  # or interrupted before the end
        "passed": recorder.passed,
        "failed": recorder.failed,
        "skipped": recorder.skipped,
        "seconds": round(time.perf_counter() - started, 1),
    }
    report.write(report.RESULTS / "gpu_tests.json", record)
    print(f"{recorder.passed} passed, {len(recorder.failed)} failed, {len(recorder.skipped)} skipped")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
