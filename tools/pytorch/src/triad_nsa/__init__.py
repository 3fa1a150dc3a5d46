"""Native Sparse Attention for PyTorch, and block-sparse attention with lists of any origin. README.md has examples."""
from .attention import Parts, attention, set_bounds_check, set_signed_gates, supports
from .block_sparse import (attention_with_index, block_sparse_attention, check_lists, dense_attention_with_index, indexed_attention,
                           select)
from .decode import decode, decode_block_sparse, decode_select
from .library import build_info
from .module import NSAAttention

__version__ = build_info().split(",")[0]
__all__ = ["NSAAttention", "Parts", "attention", "attention_with_index", "block_sparse_attention", "build_info", "check_lists",
           "decode", "decode_block_sparse", "decode_select", "dense_attention_with_index", "indexed_attention", "select",
           "set_bounds_check", "set_signed_gates", "supports"]
