"""Causal attention with one softmax over listed blocks of tokens, and the index that can be taught to list them.

Lists are int32 [B, T, Hkv, n], one for each token and group of heads: numbers of blocks, ascending, -1 after the last one.
Block j is the tokens [j * block, (j + 1) * block); packed documents [N, Hkv, n] count from the document's first token.
"""
import torch

from . import block_sparse_ops as ops
from .arguments import expect
from .attention import attention, autocast, check_bounds, in_document, in_row, positions_of


def check_lists(lists, block, cu_seqlens=None):
    """Raises a ValueError that names the first entry that no list may have: one that is no block, that is after the token's
    own block, or that does not ascend. It reads the lists, which waits for the GPU."""
    expect(not torch.compiler.is_compiling() and not (lists.is_cuda and torch.cuda.is_current_stream_capturing()), lambda:
           "lists are checked by reading them, which neither a compiled function nor a CUDA graph can: check them outside")
    tokens = lists.size(-3)
    position = torch.arange(tokens, device=lists.device) if cu_seqlens is None else positions_of(cu_seqlens, tokens)
    own = position.div(block, rounding_mode="floor")[:, None, None]
    before = torch.nn.functional.pad(lists, (1, 0), value=-1)[..., :-1]
    first = torch.arange(lists.size(-1), device=lists.device) == 0
    reasons = {"is no block": lists < -1, "is after the token's own block": lists > own,
               "follows a -1": (lists >= 0) & (before == -1) & ~first, "stands twice": (lists >= 0) & (lists == before),
               "is less than the entry before it": (lists >= 0) & (lists < before)}
    wrong = torch.stack(list(reasons.values())).any(0)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        reason = next(reason for reason, entries in reasons.items() if entries[at])
        raise ValueError(f"triad_nsa: lists{list(at)} is {lists[at].item()}, which {reason}; the token's own block is "
                         f"{own[at[-3], 0, 0].item()}")


def _prepared(tensors, cu_seqlens):
    """The tensors in autocast's type. Bounds are checked."""
    q = tensors[0]
    device_type = "cuda" if q.is_cuda else "cpu" if q.is_cpu else q.device.type
    if device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type):
        tensors = autocast(tensors, device_type)
    if cu_seqlens is not None and q.dim() == 3:
        check_bounds(cu_seqlens, q.shape[0], None, None)
    return tensors


def _blocks_expected(block):
    expect(block >= 1, lambda: f"block is {block}: at least 1 token is needed")


def block_sparse_attention(q, k, v, lists, *, block=64, cu_seqlens=None, scale=None, check=False, return_lse=False):
    """Softmax attention of each token to the tokens up to itself in the blocks that its group's list names.

    q [B, T, Hq, dk], k [B, T, Hkv, dk], v [B, T, Hkv, dv], q and k already rotated; or packed documents: [N, H, D] with
    cu_seqlens, int32 [documents + 1]. lists: from anywhere, int32 [B, T, Hkv, n], or [N, Hkv, n]: ascending, -1 after the last
    block; an empty one gives 0. Wrong entries give undefined results; check=True reads the lists and names the first one.
    block: tokens of a block; 64 and 128 are fastest. scale: of the scores; None: 1 / sqrt(dk).

    Returns o [B, T, Hq, dv], with return_lse (o, lse): the log-sum-exp of the scaled scores, f32 (f64 for f64) [B, T, Hq], -inf
    for an empty list. q, k and v get gradients, also through lse. Equal inputs give equal bits.
    """
    _blocks_expected(block)
    q, k, v = _prepared([q, k, v], cu_seqlens)
    if check:
        check_lists(lists, block, cu_seqlens)
    lists = in_row(lists, cu_seqlens, block)
    o, lse = ops.block_sparse(q, k, v, lists, cu_seqlens, block, 0.0 if scale is None else scale)
    return (o, lse) if return_lse else o


def _select(iq, ik, cu_seqlens, block, selected, init_blocks, local_blocks):
    """The lists, with the library's numbers."""
    _blocks_expected(block)
    expect(init_blocks >= 0 and local_blocks >= 1 and selected >= init_blocks + local_blocks, lambda:
           f"selected is {selected}, init_blocks {init_blocks} and local_blocks {local_blocks}: at least 0 and 1 of the latter are "
           "needed, which selected counts")
    return ops.select_by_index(iq, ik, cu_seqlens, [block, selected, init_blocks, local_blocks])


def select(iq, ik, *, block=64, selected=16, init_blocks=1, local_blocks=2, cu_seqlens=None):
    """The lists of an index: of each token and group the first init_blocks and the last local_blocks blocks up to its own, then
    those complete blocks whose best token has the highest score iq . ik / sqrt(di), the lower block first if equal.

    iq [B, T, Hkv, di], ik [B, T, 1, di], rotated as the index is to see them; or packed [N, Hkv, di], [N, 1, di] with
    cu_seqlens. Returns int32 [B, T, Hkv, selected], or [N, Hkv, selected], for block_sparse_attention. No gradient.
    """
    iq, ik = _prepared([iq, ik], cu_seqlens)
    return in_document(_select(iq, ik, cu_seqlens, block, selected, init_blocks, local_blocks), cu_seqlens, block)


def _loss(q, k, lse, lists, iq, ik, padding_begin, cu_seqlens, block, scale):
    """The loss of the index over the tokens of these lists, which have the library's numbers."""
    keep = torch.is_grad_enabled() and (iq.requires_grad or ik.requires_grad)
    loss, _, _ = ops.index_loss(q.detach(), k.detach(), lse.detach(), lists, iq, ik, padding_begin, cu_seqlens, block, scale,
                                keep)
    return loss


def _taught(q, k, v, lists, iq, ik, padding_begin, cu_seqlens, block, scale):
    """Attention, and the loss of the index over the same tokens."""
    scale = 0.0 if scale is None else scale
    o, lse = ops.block_sparse(q, k, v, lists, cu_seqlens, block, scale)
    return o, _loss(q, k, lse, lists, iq, ik, padding_begin, cu_seqlens, block, scale), lse


def indexed_attention(q, k, v, iq, ik, *, block=64, selected=16, init_blocks=1, local_blocks=2, cu_seqlens=None, scale=None,
                      padding_begin=None, return_lse=False):
    """block_sparse_attention(q, k, v, select(iq, ik)), and the loss that teaches the index where the attention looks.

    The loss is the mean over tokens and groups of KL(P || Q): P the mean over the group's heads of the attention's probabilities, Q
    the softmax of the index's scores iq . ik / sqrt(di), both over the tokens that the list shows. It gives gradients to
    iq and ik alone, and nothing else does. Add it to the objective, times a weight if need be. padding_begin, int32 [B] ([1] for
    packed documents): the tokens of a row from this one on are padding, which the loss leaves out.

    Arguments as of both functions. Returns (o, index_loss), with return_lse (o, index_loss, lse). The loss is computed
    whether it is used or not: for inference call the two functions.
    """
    q, k, v, iq, ik = _prepared([q, k, v, iq, ik], cu_seqlens)
    if iq.shape[:-1] != k.shape[:-1] or iq.dtype != q.dtype:
        ops.check_taught(q, k, iq, ik, cu_seqlens)
    lists = _select(iq, ik, cu_seqlens, block, selected, init_blocks, local_blocks)
    o, loss, lse = _taught(q, k, v, lists, iq, ik, padding_begin, cu_seqlens, block, scale)
    return (o, loss, lse) if return_lse else (o, loss)


def attention_with_index(q, k, v, gate, iq, ik, *, block=64, selected=16, init_blocks=1, local_blocks=2, cu_seqlens=None,
                         scale=None, padding_begin=None, **more):
    """attention(q, k, v, gate) with the blocks of select(iq, ik) in its selected branch, and the loss that teaches the index where
    that branch looks. more: compress, window, k_cmp and v_cmp. Returns (out, index_loss)."""
    three = [_prepared(x if isinstance(x, (list, tuple)) else [x], None) for x in (k, v)]
    k, v = (x[0] if len(x) == 1 else x for x in three)
    q, iq, ik = _prepared([q, iq, ik], cu_seqlens)
    k_sel = k if isinstance(k, torch.Tensor) else k[1]
    ops.check_taught(q, k_sel, iq, ik, cu_seqlens)
    lists = _select(iq, ik, cu_seqlens, block, selected, init_blocks, local_blocks)
    out, parts = attention(q, k, v, gate, block=block, lists=in_document(lists, cu_seqlens, block), cu_seqlens=cu_seqlens, scale=scale,
                           return_parts=True, **more)
    return out, _loss(q, k_sel, parts.lse[1], lists, iq, ik, padding_begin, cu_seqlens, block, 0.0 if scale is None else scale)


def dense_attention_with_index(q, k, v, iq, ik, *, cu_seqlens=None, scale=None, padding_begin=None, return_lse=False):
    """As indexed_attention, but each token attends to all tokens up to itself, and so does its index: for warm-up, before
    the index knows which blocks to list."""
    q, k, v, iq, ik = _prepared([q, k, v, iq, ik], cu_seqlens)
    o, loss, lse = _taught(q, k, v, None, iq, ik, padding_begin, cu_seqlens, 64, scale)
    return (o, loss, lse) if return_lse else (o, loss)
