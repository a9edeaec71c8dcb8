"""``python -m docs.make``: writes docs/options.md and the pictures of masks, from what the library itself answers."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import pallas_flash as pf

HERE = pathlib.Path(__file__).parent
B, S, N, K, D = 2, 256, 4, 2, 64


def arrays(dtype: str = "bfloat16", dim: int = D, batch: Any = B) -> dict[str, Any]:
    q, k = (jax.ShapeDtypeStruct((batch, S, heads, dim), dtype) for heads in (N, K))
    return {"query": q, "key": k, "value": k}


ids = jnp.zeros((B, S), jnp.int32)
lengths = jnp.array([S, S // 2])
pairs = jnp.ones((1, N, S, S), bool)
# Each argument of flash_attention at least once: a name for the table, and the arguments.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain, grouped heads": {},
    "`bias` [1, N, T, S]": {"bias": jnp.zeros(pairs.shape)},
    "`mask` bool [1, N, T, S]": {"mask": pairs},
    "`mask` object": {"mask": pf.Causal() | pf.Prefix(jnp.array([5]))},
    "`mask` of blocks": {"mask": pf.Blocks(jnp.ones((1, N, 4, 4), bool), 64, 64)},
    "`mask`, mapped": {"mask": pf.BlockMap.of(pf.Causal() & pf.Dilated(3), S, S)},
    "`scale`, traced": {"scale": jnp.float32(0.1)},
    "`is_causal`": {"is_causal": True},
    "`query_seq_lengths`": {"query_seq_lengths": lengths},
    "`key_value_seq_lengths`": {"key_value_seq_lengths": lengths},
    "`local_window_size`": {"local_window_size": (16, 3)},
    "`return_residual`": {"return_residual": True},
    "`causal_alignment`": {"is_causal": True, "causal_alignment": "bottom_right"},
    "`q_offset`, per row": {"is_causal": True, "q_offset": lengths},
    "`q_segment_ids`, `kv_segment_ids`": {"q_segment_ids": ids, "kv_segment_ids": ids},
    "`logits_soft_cap`": {"logits_soft_cap": 30.0},
    "`sinks`": {"sinks": jnp.zeros((N, 2))},
    "`alibi_slopes`": {"alibi_slopes": jnp.ones(N)},
    "`score`": {"score": pf.RelativeBias(jnp.zeros((N, 32)))},
    "`dropout_rate`, `dropout_rng`": {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)},
    "`broadcast_dropout`": {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0), "broadcast_dropout": True},
    "`precision` highest, float32": {**arrays("float32"), "precision": "highest"},
    '`backward` "deterministic"': {"backward": "deterministic"},
    '`backward` "fast"': {"backward": "fast"},
    "`return_lse`": {"return_lse": True},
    "float16": arrays("float16"),
    "float64": arrays("float64"),
    "head dim 320": arrays(dim=320),
    "head dim 640": arrays(dim=640),
    "symbolic batch size": arrays(batch=jax.export.symbolic_shape("b")[0]),
}
OPTIONS["all together"] = {
    "bias": OPTIONS["`bias` [1, N, T, S]"]["bias"],
    "mask": pf.Causal() | pf.Prefix(jnp.array([5])),
    **OPTIONS["`scale`, traced"],
    **OPTIONS["`query_seq_lengths`"],
    **OPTIONS["`key_value_seq_lengths`"],
    **OPTIONS["`local_window_size`"],
    **OPTIONS["`q_offset`, per row"],
    **OPTIONS["`q_segment_ids`, `kv_segment_ids`"],
    **OPTIONS["`logits_soft_cap`"],
    **OPTIONS["`sinks`"],
    **OPTIONS["`alibi_slopes`"],
    **OPTIONS["`score`"],
    **OPTIONS["`broadcast_dropout`"],
    **OPTIONS["`return_lse`"],
}
TIERS = ("triton", "xla", "xla_chunked")

HEADER = """# Options, tier by tier

Written by `python -m docs.make` from the answers of `pallas_flash.explain` for an NVIDIA H200; a test compares. Every
option combines with every other, the last row with all of them at once. "-" is a refusal: named, the implementation
raises `NotImplementedError` with the reason below the table; not named, the next one runs.
"""


def options_table() -> str:
    """The text of options.md."""
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
    columns = [f"{tier} {direction}" for tier in TIERS for direction in ("forward", "backward")]
    lines = [HEADER, "| option | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    reasons: list[str] = []
    for name, options in OPTIONS.items():
        cells = []
        for tier in TIERS:
            try:
                with use_abstract_mesh(mesh), jax.enable_x64("float64" in name):
                    plan = pf.explain(**{**arrays(), **options}, implementation=tier)
                cells += [plan.forward, plan.backward]
            except NotImplementedError as error:
                cells += ["-", "-"]
                reasons.append(f"- {tier}, {name}: {str(error).splitlines()[1].split(':', 1)[1].strip()}.")
        lines.append(f"| {name} | " + " | ".join("yes" if cell in TIERS else cell for cell in cells) + " |")
    return "\n".join([*lines, "", *reasons, ""])


_documents = pf.Segments(*(jnp.repeat(jnp.arange(3), jnp.array([20, 34, 10]))[None],) * 2)
_turns = (jnp.arange(64) // 12 % 3)[None]
# A file name, what is drawn as one would write it, a word on it, and the mask.
MASKS: dict[str, tuple[str, str, pf.Mask]] = {
    "causal": ("Causal()", "", pf.Causal()),
    "window": ("Causal() & Window(left=24)", "", pf.Causal() & pf.Window(left=24)),
    "prefix-lm": ("Causal() | Prefix(20)", ": a prefix language model", pf.Causal() | pf.Prefix(jnp.array([20]))),
    "chunked": ("Causal() & Chunked(24)", ": the local layers of Llama 4", pf.Causal() & pf.Chunked(24)),
    "dilated": ("Causal() & Dilated(4)", ": strided", pf.Causal() & pf.Dilated(4)),
    "documents": ("Causal() & Segments(ids, ids)", ": packed documents", pf.Causal() & _documents),
    "documents-window": (
        "Causal() & Window(left=12) & Segments(ids, ids)",
        ": packed documents with a window",
        pf.Causal() & pf.Window(left=12) & _documents,
    ),
    "blocks": (
        "Causal() & Blocks(array, 16, 16)",
        ": block sparsity, here with a column that all see",
        pf.Causal() & pf.Blocks(jnp.eye(4, dtype=bool).at[:, 0].set(True), 16, 16),
    ),
    "interleaved": (
        "BlockMap.of(Segments(ids, ids), 64, 64, block_q=8, block_kv=8)",
        ": documents that take turns; a map knows the holes between their tiles",
        pf.BlockMap.of(pf.Segments(_turns, _turns), 64, 64, block_q=8, block_kv=8),
    ),
}


def masks_page() -> str:
    """The text of masks.md."""
    lines = ["# Masks, drawn", ""]
    lines += ["Written by `python -m docs.make` with `mask.draw()`; 64 queries and keys in tiles of 8 x 8.", ""]
    for name, (expression, note, _) in MASKS.items():
        lines += [f"## `{expression}`{note}", ""]
        lines += [f"![{name}](masks/{name}.png)", ""]
    return "\n".join(lines)


def draw_masks(folder: pathlib.Path) -> None:
    """A PNG for each of ``MASKS``."""
    folder.mkdir(exist_ok=True)
    for name, (_, _, mask) in MASKS.items():
        figure = mask.draw(64, 64, block_q=8, block_kv=8)
        figure.axes[0].set_title(name)
        figure.savefig(folder / f"{name}.png", dpi=80)


if __name__ == "__main__":
    (HERE / "options.md").write_text(options_table())
    (HERE / "masks.md").write_text(masks_page())
    draw_masks(HERE / "masks")
