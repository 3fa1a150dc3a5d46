"""triad_nsa.attention: Native Sparse Attention (arXiv 2502.11089) as a function of PyTorch tensors."""
import math
from typing import NamedTuple

import torch

from . import library, ops
from .arguments import accumulator, needed_tensors
from .plans import begins


class Parts(NamedTuple):
    """What attention(return_parts=True) returns besides the output. Constants: no gradient flows through them."""

    o: tuple  # of the branches cmp, sel, win: their outputs before the gates, in the shape of the output
    lse: tuple  # log-sum-exp of their scaled scores [B, T, Hq], f32 (f64 for f64); -inf for a row without keys
    block_index: torch.Tensor  # [B, T, Hkv, selected] i32: selected blocks, ascending, -1 after the last one. Blocks of
    # packed documents are counted from the document's first token


_settings = {"check_bounds": True, "signed_gates": 0}


def set_signed_gates(enabled):
    """Whether gates can be negative. On Hopper a negative gate per group gives gradients that are NaN, unless this is set;
    backward then takes longer. Gates per head can always be negative."""
    _settings["signed_gates"] = int(bool(enabled))


def set_bounds_check(enabled):
    """Whether attention reads cu_seqlens on the GPU to check it, once for each new tensor, which waits for the GPU. On the
    CPU bounds are always checked, inside torch.compile and CUDA graphs never. Wrong bounds give undefined results."""
    _settings["check_bounds"] = bool(enabled)


def supports(q):
    """Whether there are kernels for the dtype of q on its device."""
    if q.device.type == "cpu":
        return q.dtype in (torch.bfloat16, torch.float32, torch.float64)
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float32):
        return False
    try:
        library.context(q.device.index)
    except (RuntimeError, ValueError):  # a library without CUDA, or an architecture without kernels
        return False
    return True


def check_bounds(cu_seqlens, tokens, blocks, compress):
    """Raises a ValueError unless bounds ascend from 0 to `tokens`. blocks: rows of k_cmp, or None."""
    if torch.compiler.is_compiling() or type(cu_seqlens) is not torch.Tensor or cu_seqlens.dtype != torch.int32:
        return
    if cu_seqlens.is_cuda and (not _settings["check_bounds"] or torch.cuda.is_current_stream_capturing()):
        return
    version = None if cu_seqlens.is_inference() else cu_seqlens._version
    state = (version, tokens, blocks, compress)
    if version is not None and getattr(cu_seqlens, "_triad_nsa_checked", None) == state:
        return
    bounds = cu_seqlens.tolist()
    if len(bounds) < 2 or bounds[0] != 0:
        raise ValueError(f"triad_nsa: cu_seqlens is {bounds[:8]}: bounds have to begin with 0, and one more is needed")
    for i, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        if end < begin or (end == begin and end != tokens):
            raise ValueError(f"triad_nsa: cu_seqlens[{i}] is {begin} and cu_seqlens[{i + 1}] is {end}: bounds have to ascend")
    if bounds[-1] != tokens:
        raise ValueError(f"triad_nsa: cu_seqlens ends with {bounds[-1]}: there are {tokens} tokens")
    if blocks is not None:
        l, d = compress
        needed = sum(max(0, (end - begin - l) // d + 1) for begin, end in zip(bounds, bounds[1:]))
        if blocks < needed:
            raise ValueError(f"triad_nsa: k_cmp has {blocks} rows: the documents have {needed} compressed blocks")
    cu_seqlens._triad_nsa_checked = state


def positions_of(cu_seqlens, tokens):
    """The position of each token in its document, i64 [tokens], without synchronization."""
    at = torch.arange(tokens, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, at.to(cu_seqlens.dtype), right=True) - 1
    return at - cu_seqlens[document]


def first_blocks(cu_seqlens, tokens, block):
    """The library's number of the first block in each token's document, i32 [tokens, 1, 1]: it counts blocks in the row."""
    token = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, token, right=True, out_int32=True) - 1
    return (cu_seqlens[document].div(block, rounding_mode="floor") + document)[:, None, None]


def in_row(lists, cu_seqlens, block):
    """A caller's lists, whose blocks count in the document, with the library's numbers."""
    if cu_seqlens is None or lists.dim() != 3:
        return lists
    return torch.where(lists < 0, lists, lists + first_blocks(cu_seqlens, lists.size(0), block))


def in_document(lists, cu_seqlens, block):
    """The library's lists, as a caller counts."""
    if cu_seqlens is None:
        return lists
    return torch.where(lists < 0, -1, lists - first_blocks(cu_seqlens, lists.size(0), block))


def autocast(tensors, device_type):
    """Under autocast q, k and v get its dtype; f64 tensors and gates stay as they are."""
    dtype = torch.get_autocast_dtype(device_type)
    if dtype == torch.float16:
        raise ValueError("triad_nsa: autocast to float16 is not supported, bfloat16 is")
    return [x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def attention(q, k, v, gate=None, *, cu_seqlens=None, compress=(32, 16), block=64, selected=16, window=512, init_blocks=1,
              local_blocks=2, k_cmp=None, v_cmp=None, scale=None, lists=None, return_parts=False):
    """Causal Native Sparse Attention: the gated sum of attention to compressed blocks, to selected blocks and to a window.

    q [B, T, Hq, dk], k [B, T, Hkv, dk], v [B, T, Hkv, dv], q and k already rotated; or packed documents: [N, H, D] with
    cu_seqlens, int32 [documents + 1] on q's device. Returns [B, T, Hq, dv], or [N, Hq, dv].

    k, v: one tensor for all branches, or three in the order cmp, sel, win. gate: factors (not logits) in that order,
    [.., Hkv, 3] or [.., Hq, 3]; None: 1/3 each. compress: length l and stride d of the compressed blocks, whose keys and
    values are the means of k's and v's, unless k_cmp and v_cmp [B, Tc, Hkv, D] give them: Tc = (T - l) // d + 1, or 0 if
    T < l; packed, the documents' blocks one after another (more rows are not read). Then k[0] and v[0] may be None in a list
    of three. block, selected: tokens of a selection block and blocks that a token selects, the first init_blocks and the
    last local_blocks of them always. window: tokens. scale: of the scores; None: 1 / sqrt(dk). lists: blocks that the selected
    branch attends to, as of block_sparse_attention; then selected, init_blocks and local_blocks have no meaning.

    bfloat16 and float32 on GPUs; also float64 on the CPU. All inputs get gradients. Equal inputs give equal bits.
    return_parts: returns (output, Parts).
    """
    k0, k1, k2 = needed_tensors("k", k, k_cmp)
    v0, v1, v2 = needed_tensors("v", v, v_cmp)
    tensors = [q, k0, k1, k2, v0, v1, v2, gate, k_cmp, v_cmp]
    device_type = "cuda" if q.is_cuda else "cpu" if q.is_cpu else q.device.type
    if device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type):
        tensors = autocast(tensors[:7], device_type) + [gate] + autocast(tensors[8:], device_type)
        q = tensors[0]
    if gate is not None and gate.dtype not in (q.dtype, accumulator(q.dtype)):
        tensors[7] = gate.to(accumulator(q.dtype))
    if cu_seqlens is not None and q.dim() == 3:
        check_bounds(cu_seqlens, q.shape[0], None if k_cmp is None else k_cmp.shape[0], tuple(compress))
    if lists is not None:
        selected, init_blocks, local_blocks = lists.size(-1), 0, 1
        lists = in_row(lists, cu_seqlens, block).contiguous()
    options = (*compress, block, selected, window, init_blocks, local_blocks, _settings["signed_gates"])
    result = ops.forward(tensors, lists, cu_seqlens, options, 0.0 if scale is None else scale, return_parts)
    return (result[0], _parts(*result, cu_seqlens, block)) if return_parts else result


def _parts(out, values, lse, lists, cu_seqlens, block):
    def of_branches(buffer, shape):
        count = math.prod(shape)
        found, _ = begins([count] * 3, buffer.dtype)
        return tuple(buffer[at:at + count].view(shape) for at in found)

    return Parts(of_branches(values, out.shape), of_branches(lse, out.shape[:-1]), in_document(lists, cu_seqlens, block))
