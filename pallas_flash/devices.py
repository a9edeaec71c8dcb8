"""What the call would run on: platform, compute capability, shared memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

# JAX keeps such a context beside the shapes: what was compiled outside it is not taken for what is called inside.
_interpreting = jax.make_user_context(False)

# Bytes of shared memory that one block may ask for (CUDA C++ Programming Guide, table of technical specifications).
_SHARED_MEMORY = {(8, 0): 166_912, (8, 6): 101_376, (8, 7): 166_912, (8, 9): 101_376, (9, 0): 232_448}
_SHARED_MEMORY |= {(10, 0): 232_448, (10, 3): 232_448, (12, 0): 101_376, (12, 1): 101_376}

# For lowering on a machine without the GPU, where only its name is known.
_CAPABILITIES = {
    "B200": (10, 0), "B300": (10, 3), "GB200": (10, 0), "GB300": (10, 3), "RTX 5090": (12, 0),
    "H100": (9, 0), "H200": (9, 0), "GH200": (9, 0), "H20": (9, 0), "L40": (8, 9), "L4": (8, 9), "RTX 4090": (8, 9),
    "A100": (8, 0), "A30": (8, 0), "A10": (8, 6), "RTX 3090": (8, 6), "T4": (7, 5), "V100": (7, 0),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Device:
    """The target of a call; hashable.

    ``interpret`` is True inside :func:`interpret`: kernels are then run by Pallas' interpreter, on any platform.
    """

    platform: str
    kind: str
    capability: tuple[int, int]
    interpret: bool = False

    @property
    def shared_memory(self) -> int:
        """Bytes that one block may use; interpreted kernels pretend to have an H200's."""
        return _SHARED_MEMORY.get(self.capability, 232_448 if self.interpret else 101_376)

    def __str__(self) -> str:
        mode = ", interpreted" if self.interpret else ""
        return f"{self.kind} ({self.platform}{mode})"


def current() -> Device:
    """The device that a call traced now would run on.

    An abstract mesh with an abstract device (for lowering without a GPU) wins over ``jax.default_device``, which wins
    over the default backend.
    """
    interpreting = _interpreting.value
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        kind = abstract.device_kind
        return Device(_platform(getattr(abstract, "platform", None) or "cuda"), kind, _capability(kind), interpreting)
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if default is None:
        default = jax.devices()[0]
    elif isinstance(default, str):
        default = jax.devices(default)[0]
    capability = getattr(default, "compute_capability", None)
    known = tuple(int(part) for part in str(capability).split(".")) if capability else _capability(default.device_kind)
    if len(known) != 2:
        known = (0, 0)
    return Device(_platform(default.platform, default), default.device_kind, known, interpreting)


def _platform(name: str, device: object = None) -> str:
    if name != "gpu":
        return name
    version = getattr(getattr(device, "client", None), "platform_version", "")
    return "rocm" if "rocm" in version.lower() else "cuda"


def _capability(kind: str) -> tuple[int, int]:
    for name, capability in _CAPABILITIES.items():
        if name in kind.split() or kind.endswith(name) or name in kind.replace("-", " ").split():
            return capability
    return (0, 0)


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Runs kernels in Pallas' interpreter while tracing inside it: for tests on a machine without a GPU.

    >>> import jax.numpy as jnp, pallas_flash
    >>> q = jnp.ones((1, 4, 1, 16))
    >>> with pallas_flash.interpret():
    ...     pallas_flash.flash_attention(q, q, q, implementation="triton").shape
    (1, 4, 1, 16)
    """
    with _interpreting(True):
        yield
