"""One process setup for all tests: the CPU unless GPU tests are asked for, eight virtual devices, strict ranks."""

import os
import sys

_wants_gpu = any(word in " ".join(sys.argv) for word in ("-m gpu", "-m=gpu", "gpu_record"))
if not _wants_gpu:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import contextlib

import jax
import pytest

import pallas_flash

jax.config.update("jax_numpy_rank_promotion", "allow")


@pytest.fixture
def kernels():
    """A context in which implementation="triton" runs here: compiled on a GPU, interpreted elsewhere."""
    return contextlib.nullcontext if jax.default_backend() == "gpu" else pallas_flash.interpret


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
