"""Pictures of masks: which pairs are allowed, and which tiles a kernel skips, tests or takes whole."""

from __future__ import annotations

from typing import Any

import numpy as np

from .masks import Mask, by_itself
from .spans import Tiles
from .visits import kv_visits

_KINDS = {
    "skipped": "#ffffff",
    "tested, forbidden": "#f4d9b0",
    "tested, allowed": "#d98c2b",
    "taken whole": "#3b6ea5",
}


def kinds(mask: Mask, q_len: int, kv_len: int, block_q: int, block_kv: int, q_offset: Any, **least: int) -> np.ndarray:
    """For each pair an index into the four kinds of the picture: int [B or 1, N or 1, q_len, kv_len]."""
    allowed = np.asarray(mask.dense(q_len, kv_len, q_offset, **least))
    m, _ = by_itself(mask, q_len, kv_len, q_offset, **least)
    visits = kv_visits(m, q_len, kv_len, block_q, block_kv, q_offset)
    states = Tiles(kv_len, block_kv).states(visits.bounds) if visits.states is None else visits.states
    states = np.asarray(states)
    states = states.repeat(block_q, axis=2)[:, :, :q_len].repeat(block_kv, axis=3)[..., :kv_len]
    return np.select([states == 2, states == 1], [3, 1 + allowed], 0)


def draw(mask: Mask, sizes: tuple[int, int], blocks: tuple[int, int], q_offset: Any, batch: int, head: int) -> Any:
    """See :meth:`Mask.draw`; pairs are (queries, keys)."""
    (q_len, kv_len), (block_q, block_kv) = sizes, blocks
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ImportError("pictures of masks need matplotlib: pip install matplotlib") from None
    all_kinds = kinds(mask, q_len, kv_len, block_q, block_kv, q_offset, batch=batch + 1, heads=head + 1)
    shown = all_kinds[min(batch, all_kinds.shape[0] - 1), min(head, all_kinds.shape[1] - 1)]
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shown, cmap=ListedColormap(list(_KINDS.values())), vmin=0, vmax=3, aspect="equal")
    axes.set_xticks(np.arange(0, kv_len, block_kv) - 0.5, minor=True)
    axes.set_yticks(np.arange(0, q_len, block_q) - 0.5, minor=True)
    axes.grid(which="minor", color="#b0b0b0", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    axes.set(xlabel="key", ylabel="query", title=f"{type(mask).__name__}, tiles {block_q} x {block_kv}")
    patches = [Patch(facecolor=color, edgecolor="#808080", label=name) for name, color in _KINDS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, fontsize="small")
    return figure
