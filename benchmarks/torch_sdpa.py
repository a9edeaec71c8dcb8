"""FlashAttention-2's CUDA kernels, as PyTorch ships them, on the same numbers as everybody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .peers import Refusal
from .workloads import Workload


def calls(w: Workload, q: Any, k: Any, v: Any, do: Any) -> tuple[dict[str, Callable[[], Any]], Callable[[Any], Any]]:
    """Forward and backward as calls without arguments, and the function that waits for what they queued."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Refusal("torch is not installed") from error
    if not torch.cuda.is_available():
        raise Refusal("torch sees no CUDA device")
    if w.documents or w.window is not None or w.bias or w.only_ours:
        raise Refusal("no packed documents, no window, no bias, and no option that jax.nn lacks on this path")

    def to_torch(x: jax.Array) -> Any:
        x32 = torch.from_numpy(np.asarray(x.astype(jnp.float32)).copy())
        return x32.to("cuda", getattr(torch, w.dtype)).transpose(1, 2).contiguous()

    q, k, v = (to_torch(x).requires_grad_() for x in (q, k, v))
    do = to_torch(do)
    grouped = q.shape[1] != k.shape[1]

    def attention() -> Any:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=w.causal, enable_gqa=grouped)

    out = attention()

    def forward() -> Any:
        with torch.no_grad():
            return (attention(),)

    def backward() -> Any:
        return torch.autograd.grad(out, (q, k, v), do, retain_graph=True)

    return {"forward": forward, "backward": backward}, lambda _: torch.cuda.synchronize()


def to_numpy(result: Any) -> np.ndarray:
    return result.detach().transpose(1, 2).float().cpu().numpy()
