"""``python3 -m tests.gpu_record``: runs the GPU tests and writes their record, benchmarks/results/gpu_tests.json."""

from __future__ import annotations

import collections
import importlib.util
import os
import sys
import time

import jax
import pytest

from benchmarks import report


class Recorder:
    """Counts outcomes as pytest reports them, and seconds: pytest's own list is lost when it is interrupted."""

    def __init__(self):
        self.passed, self.failed, self.skipped = 0, [], {}
        self.seconds = collections.Counter()
        self.random: dict[int, int] = {}  # examples of each seed

    def pytest_collectreport(self, report):
        if report.failed:  # a file that could not be read holds no failed test, and is no success
            self.failed.append(report.nodeid)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)
            # At once: of a run that is cut short this is all that is left.
            print(f"\nFAILED {report.nodeid}: {str(report.longrepr).splitlines()[-1]}", flush=True)
        elif report.skipped:
            self.skipped[report.nodeid] = str(report.longrepr[2] if report.longrepr else "")
        elif report.when == "call":
            self.passed += 1
            properties = dict(report.user_properties)
            if "seed" in properties:
                self.random[properties["seed"]] = properties["random_examples"]


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
        "tests",
        *sys.argv[1:],
    ]
    if importlib.util.find_spec("xdist"):  # most of the time is compilation on the host
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # the oracle's, in each of the workers
        arguments += ["-n", str(min(16, os.cpu_count() or 1)), "--dist", "worksteal"]
    code = pytest.main(arguments, plugins=[recorder])
    record = {
        **report.provenance(),
        "command": "python3 -m tests.gpu_record " + " ".join(sys.argv[1:]),
        # or interrupted before the end, or never begun
        "complete": recorder.passed > 0 and code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
        "passed": recorder.passed,
        "failed": recorder.failed,
        "skipped": recorder.skipped,
        "random_examples": sum(recorder.random.values()),
        "random_seeds": sorted(recorder.random),
        "seconds": round(time.perf_counter() - started, 1),
    }
    report.write(report.RESULTS / "gpu_tests.json", record)
    for test, seconds in recorder.seconds.most_common(25):
        print(f"{seconds:7.1f} s {test}")
    print(f"{recorder.passed} passed, {len(recorder.failed)} failed, {len(recorder.skipped)} skipped")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
