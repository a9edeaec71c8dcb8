"""One process setup for all tests: the CPU unless GPU tests are asked for, eight virtual devices, strict ranks."""

import os
import pathlib
import sys

# tests/gpu_record.py sets the variable; the words are for whoever types `pytest -m gpu`.
_wants_gpu = "PALLAS_FLASH_GPU_TESTS" in os.environ or "-m gpu" in " ".join(sys.argv)
if not _wants_gpu:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Interpreted kernels run for milliseconds and compile for seconds: the compiler is told not to try hard.
    _flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    _flags += " --xla_llvm_disable_expensive_passes=true"
else:
    _flags = "--xla_gpu_autotune_level=0"  # of plain products, which are only compared with
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " " + _flags
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import functools

import jax
import pytest

import pallas_flash

# Most of the time goes into compiling interpreted kernels; what took long once is read from disk the next time.
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


ON_GPU = jax.default_backend() == "gpu"
if ON_GPU:
    # Arrays, oracles and references, all that stands outside `with kernels():`, would be compiled for minutes there.
    jax.config.update("jax_default_device", jax.local_devices(backend="cpu")[0])


@pytest.fixture
def kernels():
    """A context in which implementation="triton" runs here: compiled on a GPU, interpreted elsewhere."""
    return functools.partial(jax.default_device, jax.devices()[0]) if ON_GPU else pallas_flash.interpret


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    for item in items:
        if ON_GPU and item.get_closest_marker("everywhere"):
            item.add_marker(pytest.mark.gpu)
        if not ON_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
