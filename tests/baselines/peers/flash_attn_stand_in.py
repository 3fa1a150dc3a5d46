"""Stands in for flash_attn, which NSA libraries import for their window branch, where it is not installed: the one
function that they train with, by the FlashAttention-2 kernels that PyTorch itself contains."""
import importlib.machinery
import importlib.util
import sys
import types


class Module(types.ModuleType):
    """A module that has any name: a function that was not implemented here fails when it is called."""

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__ = []
        self.__version__ = "2.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_, **__):
            raise NotImplementedError(f"{self.__name__}.{name} has no stand-in: pip install flash-attn")
        return absent


def varlen_function(torch):
    """flash_attn_varlen_func for causal attention, without dropout, with or without a window."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, options):
            lengths = (options["cu_q"], options["cu_k"], options["max_q"], options["max_k"])
            out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
                q, k, v, *lengths, 0.0, True, False, **options["scores"])
            ctx.save_for_backward(q, k, v, out, lse, seed, offset)
            ctx.lengths, ctx.scores = lengths, options["scores"]
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, lse, seed, offset = ctx.saved_tensors
            grads = torch.ops.aten._flash_attention_backward(
                dout.contiguous(), q, k, v, out, lse, *ctx.lengths, 0.0, True, seed, offset, **ctx.scores)
            return (*grads, None)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                               softmax_scale=None, causal=False, window_size=(-1, -1), **others):
        if dropout_p or not causal or any(value for value in others.values()):
            raise NotImplementedError(f"dropout_p={dropout_p}, causal={causal}, {others}: install flash-attn")
        left, right = window_size
        scores = {"scale": softmax_scale or q.shape[-1] ** -0.5, "window_size_left": left,
                  "window_size_right": max(right, 0)}
        return Attention.apply(q, k, v, {"cu_q": cu_seqlens_q, "cu_k": cu_seqlens_k, "max_q": max_seqlen_q,
                                         "max_k": max_seqlen_k, "scores": scores})

    return flash_attn_varlen_func


def install(torch):
    """Makes `import flash_attn` work. Does nothing where the package is installed."""
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        return
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_2_cuda"):
        sys.modules[name] = Module(name)
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        sys.modules[name].flash_attn_varlen_func = varlen_function(torch)
    sys.modules["flash_attn"].flash_attn_interface = sys.modules["flash_attn.flash_attn_interface"]
