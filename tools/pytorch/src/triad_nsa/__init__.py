"""Native Sparse Attention for PyTorch: attention(), NSAAttention and decode(). README.md has an example of each."""
from .attention import Parts, attention, set_bounds_check, set_signed_gates, supports
from .decode import decode
from .library import build_info
from .module import NSAAttention

__all__ = ["NSAAttention", "Parts", "attention", "build_info", "decode", "set_bounds_check", "set_signed_gates", "supports"]
