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


def _select(p, t, blocks, l, d, block, selected, init_blocks, local_blocks):
    """p [B, Hkv, Tc], t [B]. Returns block numbers [B, Hkv, n]; `blocks` where a list has no more of them."""
    before, inside = l // d - 1, block // d
    begin = torch.arange(-before, inside, device=p.device) * d
    share = ((begin + l).clamp(max=block) - begin.clamp(min=0)).to(p.dtype) / l
    p = F.pad(p, (before, blocks * inside - p.size(-1)))  # negative: cuts compressed blocks that nobody sees
    score = (p.unfold(-1, before + inside, inside) * share).sum(-1)
    j, t = torch.arange(blocks, device=p.device), t[:, None, None]
    current = t // block
    forced = (j <= current) & ((j < init_blocks) | (j > current - local_blocks))
    score = score.masked_fill((j + 1) * block > t + 1, -math.inf).masked_fill(forced, math.inf)
    best = score.sort(dim=-1, descending=True, stable=True)  # stable: of equal scores the smaller number is first
    return best.indices[..., :selected].masked_fill(best.values[..., :selected] == -math.inf, blocks)


@torch.no_grad()
def decode(q, k, v, gate=None, *, lengths, block_table=None, compress=(32, 16), block=64, selected=16, window=512,
           init_blocks=1, local_blocks=2, k_cmp=None, v_cmp=None, cmp_block_table=None, scale=None):
    """Native Sparse Attention of the newest token of each sequence.

    q [B, Hq, dk] or [B, 1, Hq, dk], rotated; k, v: caches that hold the new token, each one tensor or three (cmp, sel, win):
    [B, S, Hkv, D], or pages [pages, page_size, Hkv, D] with block_table [B, pages per sequence]; lengths [B]: tokens of
    each sequence, the new one included; gate [B, Hkv or Hq, 3], or with an axis of 1 token as q.
    k_cmp, v_cmp [B, Tc, Hkv, D]: the compressed blocks that are complete, or pages of them with cmp_block_table. Without
    them the means of the blocks are computed from k[0] and v[0] at every call, which reads the whole cache.
    Returns the output in the shape of q. The result has no gradient.
    """
    k, v = three_tensors("k", k), three_tensors("v", v)
    l, d = compress
    if l % d or block % d:
        raise ValueError(f"compress is ({l}, {d}) and block is {block}: the stride {d} has to divide both others")
    token_axis = q.dim() == 4
    if q.dim() not in (3, 4) or (token_axis and q.size(1) != 1):
        raise ValueError(f"q is {list(q.shape)}: [B, Hq, dk] or [B, 1, Hq, dk] is needed, one new token per sequence")
    if gate is not None and gate.dim() == 4:
        gate = gate[:, 0]
    q = q[:, 0] if token_axis else q
    B, Hq, dk = q.shape
    Hkv = k[1].size(2)
    if lengths.shape != (B,):
        raise ValueError(f"lengths is {list(lengths.shape)}: [{B}] is needed, as q is {list(q.shape)}")
    if Hq % Hkv:
        raise ValueError(f"q has {Hq} heads and k has {Hkv}: the number of k's heads has to divide that of q")
    if gate is not None and gate.shape not in ((B, Hkv, 3), (B, Hq, 3)):
        raise ValueError(f"gate is {list(gate.shape)}: [{B}, {Hkv}, 3] or [{B}, {Hq}, 3] is needed")
    for name, x in (("k", k[0]), ("v", v[0]), ("lengths", lengths)):
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, and q on {q.device}: both have to be on one device")
    scale = dk**-0.5 if scale is None else scale
    lengths = lengths.long()
    t, newest = lengths - 1, (lengths - 1)[:, None]
    grouped = q.view(B, Hkv, Hq // Hkv, dk)
    head = torch.arange(Hkv, device=q.device)[:, None]
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
    blocks = -(-k_sel.capacity // block)
    chosen = _select(p.sum(2), t, blocks, l, d, block, selected, init_blocks, local_blocks)
    token = (chosen[..., None] * block + torch.arange(block, device=q.device)).flatten(2)
    near = token.minimum(newest[:, None])
    o_sel, _ = _attend(grouped, k_sel.at(near, head), v_sel.at(near, head), token < lengths[:, None, None], scale)

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
