"""Block-sparse attention: layouts, one function with two executors, and its use in existing models.

`layouts.py` builds what `config.py` describes; `attention.py` is the function; `replace.py` puts it into models;
`picture.py` draws a layout and computes how far a token sees. See docs/sparse-attention.md.
"""

from .attention import SparseSelfAttention, sparse_attention
from .config import SparsityConfig, read_sparsity
from .layouts import Layout, build_layout
from .picture import Reach, draw, reach, save_picture
from .replace import extend_positions, place_heads, replace_attention

__all__ = [
    "Layout",
    "Reach",
    "SparseSelfAttention",
    "SparsityConfig",
    "build_layout",
    "draw",
    "extend_positions",
    "place_heads",
    "reach",
    "read_sparsity",
    "replace_attention",
    "save_picture",
    "sparse_attention",
]
