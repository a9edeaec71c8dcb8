"""Exact flash attention for JAX: Pallas GPU kernels behind one function.

``flash_attention`` takes the arguments of ``jax.nn.dot_product_attention`` and more; ``explain`` tells what would run.
"""

from .attention import dense_mask, explain, flash_attention
from .devices import interpret
from .dispatch import Plan, use_implementation
from .masks import And, Full, Mask, Or, mask, static
from .pair_masks import BlockMap, Blocks, Dense
from .position_masks import Causal, Chunked, Dilated, Lengths, Prefix, Window
from .scores import Alibi, Bias, Chain, RelativeBias, Score, SoftCap, score
from .softmax import merge
from .spans import Range, Span, Tiles
from .tile_table import TileTable
from .token_masks import KeyRanges, Segments
from .tuning import autotune
from .varlen import pack, unpack, varlen_attention

__version__ = "0.1.0"

__all__ = [
    "Alibi",
    "And",
    "Bias",
    "BlockMap",
    "Blocks",
    "Causal",
    "Chain",
    "Chunked",
    "Dense",
    "Dilated",
    "Full",
    "KeyRanges",
    "Lengths",
    "Mask",
    "Or",
    "Plan",
    "Prefix",
    "Range",
    "RelativeBias",
    "Score",
    "Segments",
    "SoftCap",
    "Span",
    "TileTable",
    "Tiles",
    "Window",
    "autotune",
    "dense_mask",
    "explain",
    "flash_attention",
    "interpret",
    "mask",
    "merge",
    "pack",
    "score",
    "static",
    "unpack",
    "use_implementation",
    "varlen_attention",
]
