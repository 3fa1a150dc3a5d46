"""Attention of one new token per sequence over a cache, in plain PyTorch operations: equal to the last row of
triad_nsa.attention. It neither synchronizes nor depends on lengths in its shapes, so a CUDA graph can record it."""
import math

import torch
import torch.nn.functional as F

from .arguments import three_tensors


class _Cache:
    """Keys or values by (sequence, position), contiguous [B, S, Hkv, D], or paged [pages, page_size, Hkv, D]."""

    def __init__(self, rows, table):
        self.rows, self.table = rows, table
        self.capacity = rows.size(1) if table is None else rows.size(1) * table.size(1)

    def at(self, position, head=None):
        """position [B, n], or [B, Hkv, n] with head [Hkv, 1]: returns [B, n, Hkv, D] or [B, Hkv, n, D]."""
        sequence = torch.arange(position.size(0), device=position.device).view(-1, *[1] * (position.dim() - 1))
        if self.table is not None:
            size = self.rows.size(1)
            sequence, position = self.table[sequence, position // size].clamp(min=0).long(), position % size
        return self.rows[sequence, position] if head is None else self.rows[sequence, position, head]


def _attend(q, k, v, visible, scale):
    """q [B, Hkv, G, dk], k and v [B, Hkv, n, d], visible [B, Hkv or 1, n]. Returns o and the probabilities."""
    wide = torch.promote_types(q.dtype, torch.float32)
    seen = visible[..., None]
    k, v = (torch.where(seen, x, torch.zeros((), dtype=x.dtype, device=x.device)).to(wide) for x in (k, v))
    scores = (q.to(wide) @ k.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~visible[:, :, None], torch.finfo(wide).min)
    p = torch.softmax(scores, -1).masked_fill(~visible[:, :, None], 0)
    return p @ v, p


def _best(score, t, block, selected, init_blocks, local_blocks):
    """score [B, Hkv, blocks], t [B]. Returns block numbers [B, Hkv, at most `selected`]; `blocks` where a list has no more."""
    j, t = torch.arange(score.size(-1), device=score.device), t[:, None, None]
    current = t // block
    forced = (j <= current) & ((j < init_blocks) | (j > current - local_blocks))
    score = score.masked_fill((j + 1) * block > t + 1, -math.inf).masked_fill(forced, math.inf)
    best = score.sort(dim=-1, descending=True, stable=True)  # stable: of equal scores the smaller number is first
    return best.indices[..., :selected].masked_fill(best.values[..., :selected] == -math.inf, j.numel())


def _importance(p, blocks, l, d, block):
    """p [B, Hkv, Tc] -> [B, Hkv, blocks]"""
    before, inside = l // d - 1, block // d
    begin = torch.arange(-before, inside, device=p.device) * d
    share = ((begin + l).clamp(max=block) - begin.clamp(min=0)).to(p.dtype) / l
    p = F.pad(p, (before, blocks * inside - p.size(-1)))  # negative: cuts compressed blocks that nobody sees
    return (p.unfold(-1, before + inside, inside) * share).sum(-1)


def _attend_listed(q, k, v, lists, lengths, block, scale):
    """Attention to the tokens of listed blocks [B, Hkv, n]; entries that are no blocks of the sequence add none."""
    lists = torch.where(lists < 0, k.capacity // block + 1, lists)
    token = (lists[..., None] * block + torch.arange(block, device=q.device)).flatten(2)
    near = token.minimum((lengths - 1)[:, None, None])
    head = torch.arange(q.size(1), device=q.device)[:, None]
    return _attend(q, k.at(near, head), v.at(near, head), token < lengths[:, None, None], scale)[0]


def _one_token(name, q, lengths):
    """q without its axis of one token, and whether it has one; lengths i64."""
    if q.dim() not in (3, 4) or (q.dim() == 4 and q.size(1) != 1):
        raise ValueError(f"{name} is {list(q.shape)}: [B, heads, width] or [B, 1, heads, width] is needed, one new token per "
                         "sequence")
    if lengths.shape != q.shape[:1]:
        raise ValueError(f"lengths is {list(lengths.shape)}: [{q.size(0)}] is needed, as {name} is {list(q.shape)}")
    return q[:, 0] if q.dim() == 4 else q, q.dim() == 4, lengths.long()


def _one_device(q, **others):
    for name, x in others.items():
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, and the queries are on {q.device}: all have to be on one device")


@torch.no_grad()
def decode_select(iq, ik, *, lengths, block_table=None, block=64, selected=16, init_blocks=1, local_blocks=2):
    """The newest token's lists by an index: the last row of triad_nsa.select.

    iq [B, Hkv, di] or [B, 1, Hkv, di]; ik: the index's keys of all tokens, [B, S, 1, di], or pages [pages, page_size, 1, di] with
    block_table. Returns int32 [B, Hkv, selected], or [B, 1, Hkv, selected], ascending, -1 after the last block.
    """
    iq, token_axis, lengths = _one_token("iq", iq, lengths)
    _one_device(iq, ik=ik, lengths=lengths)
    if ik.dim() != 4 or ik.size(2) != 1 or ik.size(3) != iq.size(2):
        raise ValueError(f"ik is {list(ik.shape)}: [.., .., 1, {iq.size(2)}] is needed, as iq is {list(iq.shape)}")
    if selected < init_blocks + local_blocks or init_blocks < 0 or local_blocks < 1:
        raise ValueError(f"selected is {selected}, init_blocks {init_blocks} and local_blocks {local_blocks}: at least 0 and 1 of the "
                         "latter are needed, which selected counts")
    keys = _Cache(ik, block_table)
    wide = torch.promote_types(iq.dtype, torch.float32)
    at = torch.arange(keys.capacity, device=iq.device).expand(iq.size(0), -1)
    rows = keys.at(at.minimum((lengths - 1)[:, None]))[:, :, 0].to(wide)  # what no token has written may hold anything
    score = (iq.to(wide) @ rows.transpose(1, 2)) / math.sqrt(iq.size(2))
    # Only complete blocks are chosen by their scores, so that of tokens after the newest one none counts.
    blocks = -(-keys.capacity // block)
    score = F.pad(score, (0, blocks * block - keys.capacity), value=-math.inf).unflatten(-1, (blocks, block)).amax(-1)
    lists = _best(score, lengths - 1, block, selected, init_blocks, local_blocks).sort(-1).values
    lists = F.pad(lists.masked_fill(lists == blocks, -1), (0, selected - lists.size(-1)), value=-1).to(torch.int32)
    return lists[:, None] if token_axis else lists


@torch.no_grad()
def decode_block_sparse(q, k, v, lists, *, lengths, block_table=None, block=64, scale=None):
    """The newest token's attention to listed blocks: the last row of triad_nsa.block_sparse_attention.

    q, k, v, lengths and block_table as of decode; lists int32 [B, Hkv, n] or [B, 1, Hkv, n], from decode_select or anywhere, in
    any order; blocks after the newest token add nothing, an empty list gives 0. Returns the output in the shape of q.
    """
    q, token_axis, lengths = _one_token("q", q, lengths)
    _one_device(q, k=k, v=v, lists=lists, lengths=lengths)
    B, Hq, dk = q.shape
    Hkv = k.size(2)
    if Hq % Hkv:
        raise ValueError(f"q has {Hq} heads and k has {Hkv}: the number of k's heads has to divide that of q")
    lists = lists[:, 0] if lists.dim() == 4 and lists.size(1) == 1 else lists
    if lists.dim() != 3 or lists.shape[:2] != (B, Hkv):
        raise ValueError(f"lists is {list(lists.shape)}: [{B}, {Hkv}, n] is needed, or [{B}, 1, {Hkv}, n]")
    o = _attend_listed(q.view(B, Hkv, Hq // Hkv, dk), _Cache(k, block_table), _Cache(v, block_table), lists, lengths, block,
                       dk**-0.5 if scale is None else scale)
    o = o.to(q.dtype).reshape(B, Hq, -1)
    return o[:, None] if token_axis else o


@torch.no_grad()
def decode(q, k, v, gate=None, *, lengths, block_table=None, compress=(32, 16), block=64, selected=16, window=512,
           init_blocks=1, local_blocks=2, k_cmp=None, v_cmp=None, cmp_block_table=None, scale=None, lists=None):
    """Native Sparse Attention of the newest token of each sequence.

    q [B, Hq, dk] or [B, 1, Hq, dk], rotated; k, v: caches that hold the new token, each one tensor or three (cmp, sel, win):
    [B, S, Hkv, D], or pages [pages, page_size, Hkv, D] with block_table [B, pages per sequence]; lengths [B]: tokens of
    each sequence, the new one included; gate [B, Hkv or Hq, 3], or with an axis of 1 token as q.
    k_cmp, v_cmp [B, Tc, Hkv, D]: the compressed blocks that are complete, or pages of them with cmp_block_table. Without
    them the means of the blocks are computed from k[0] and v[0] at every call, which reads the whole cache.
    lists: the blocks of the selected branch, as of decode_block_sparse; None: the compressed branch selects.
    Returns the output in the shape of q. The result has no gradient.
    """
    k, v = three_tensors("k", k), three_tensors("v", v)
    l, d = compress
    if l % d or block % d:
        raise ValueError(f"compress is ({l}, {d}) and block is {block}: the stride {d} has to divide both others")
    if gate is not None and gate.dim() == 4:
        gate = gate[:, 0]
    q, token_axis, lengths = _one_token("q", q, lengths)
    B, Hq, dk = q.shape
    Hkv = k[1].size(2)
    if Hq % Hkv:
        raise ValueError(f"q has {Hq} heads and k has {Hkv}: the number of k's heads has to divide that of q")
    if gate is not None and gate.shape not in ((B, Hkv, 3), (B, Hq, 3)):
        raise ValueError(f"gate is {list(gate.shape)}: [{B}, {Hkv}, 3] or [{B}, {Hq}, 3] is needed")
    _one_device(q, k=k[0], v=v[0], lengths=lengths)
    scale = dk**-0.5 if scale is None else scale
    t, newest = lengths - 1, (lengths - 1)[:, None]
    grouped = q.view(B, Hkv, Hq // Hkv, dk)
    (_, k_sel, k_win), (_, v_sel, v_win) = ([_Cache(x, block_table) for x in each] for each in (k, v))

    # The compressed branch, over all blocks that the cache has room for.
    if k_cmp is None:
        raw = [_Cache(x, block_table) for x in (k[0], v[0])]
        every = torch.arange(raw[0].capacity, device=q.device).expand(B, -1)
        if every.size(1) < l:
            kc, vc = (x.rows.new_zeros(B, Hkv, 0, x.rows.size(-1)) for x in raw)
        else:  # in the wider type, as rows that no token has written yet may hold anything
            wide = torch.promote_types(q.dtype, torch.float32)
            kc, vc = (x.at(every.minimum(newest)).to(wide).unfold(1, l, d).mean(-1).to(q.dtype).transpose(1, 2)
                      for x in raw)
    else:
        caches = [_Cache(x, cmp_block_table) for x in (k_cmp, v_cmp)]
        every = torch.arange(caches[0].capacity, device=q.device).expand(B, -1)
        every = every.minimum(((lengths - l) // d).clamp(min=0)[:, None])
        kc, vc = (x.at(every).transpose(1, 2) for x in caches)
    ends = torch.arange(kc.size(2), device=q.device) * d + l
    o_cmp, p = _attend(grouped, kc, vc, (ends <= lengths[:, None])[:, None], scale)

    # The selected branch.
    if lists is None:
        score = _importance(p.sum(2), -(-k_sel.capacity // block), l, d, block)
        lists = _best(score, t, block, selected, init_blocks, local_blocks)
    o_sel = _attend_listed(grouped, k_sel, v_sel, lists[:, 0] if lists.dim() == 4 else lists, lengths, block, scale)

    # The window branch.
    recent = newest - torch.arange(min(window, k_win.capacity) - 1, -1, -1, device=q.device)
    inside = recent.clamp(min=0)
    rows = (x.at(inside).transpose(1, 2) for x in (k_win, v_win))
    o_win, _ = _attend(grouped, *rows, (recent >= 0)[:, None], scale)

    if gate is None:
        out = (o_cmp + o_sel + o_win) / 3
    else:
        gate = gate.to(o_cmp.dtype).repeat_interleave(Hq // Hkv if gate.size(1) == Hkv else 1, 1)
        gate = gate.view(B, Hkv, Hq // Hkv, 3, 1)
        out = gate[..., 0, :] * o_cmp + gate[..., 1, :] * o_sel + gate[..., 2, :] * o_win
    out = out.to(q.dtype).reshape(B, Hq, -1)
    return out[:, None] if token_axis else out
