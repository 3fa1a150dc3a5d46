"""NSA by dense masks, for tests: every branch is a softmax over all T x T scores, in the dtype of the inputs, and PyTorch
differentiates it. It shares no code with the package or with the engine. kernels/nsa/README.md has the equations.

Shapes: q [B, T, Hq, dk], k [B, T, Hkv, dk], v [B, T, Hkv, dv]; or packed [N, H, D] with cu_seqlens, a list of bounds."""
import math

import torch


def softmax_attention(q, k, v, visible, scale):
    """q [B, Hkv, G, T, dk]; k, v [B, Hkv, S, d]; visible [.., T, S] bool. Returns o, p, and lse (-inf for an empty row)."""
    scores = torch.einsum("bhgtd,bhsd->bhgts", q, k) * scale
    visible = visible.expand_as(scores)
    some = visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, -math.inf)
    p = torch.softmax(scores.masked_fill(~some, 0), -1) * some
    lse = torch.logsumexp(scores.masked_fill(~some, 0), -1).masked_fill(~some[..., 0], -math.inf)
    return torch.einsum("bhgts,bhsd->bhgtd", p, v), p, lse


def mean_of_blocks(x, l, d):
    """[B, T, H, D] -> [B, Tc, H, D]"""
    if x.size(1) < l:
        return x[:, :0]
    return x.unfold(1, l, d).mean(-1)


def select(p, T, l, d, block, selected, init_blocks, local_blocks):
    """p [B, Hkv, T, Tc], summed over the heads of a group -> lists [B, T, Hkv, selected], ascending, padded with -1."""
    c, j = torch.arange(p.size(-1))[:, None] * d, torch.arange(-(-T // block))[None, :] * block
    share = (torch.minimum(c + l, j + block) - torch.maximum(c, j)).clamp(min=0).to(p.dtype) / l
    score = p.detach().cpu() @ share
    return best_blocks(score, T, block, selected, init_blocks, local_blocks)


def best_blocks(score, T, block, selected, init_blocks, local_blocks):
    """score [B, Hkv, T, blocks] -> lists [B, T, Hkv, selected], ascending, padded with -1."""
    score = score.cpu()
    j, t = torch.arange(score.size(-1)), torch.arange(T)[:, None]
    current = t // block
    forced = (j <= current) & ((j < init_blocks) | (j > current - local_blocks))
    score = score.masked_fill((j + 1) * block > t + 1, -math.inf).masked_fill(forced, math.inf)
    order = score.sort(dim=-1, descending=True, stable=True)
    best = order.indices[..., :selected].masked_fill(order.values[..., :selected] == -math.inf, score.size(-1))
    best = best.sort(-1).values
    best = best.masked_fill(best == score.size(-1), -1)
    best = torch.nn.functional.pad(best, (0, selected - best.size(-1)), value=-1)
    return best.transpose(1, 2)


def in_listed_blocks(lists, block):
    """[B, T, Hkv, n] -> bool [B, Hkv, 1, T, T]: whether the list of token t holds the block of token s."""
    B, T, Hkv, _ = lists.shape
    listed = torch.zeros(B, T, Hkv, -(-T // block) + 1, dtype=torch.bool, device=lists.device)
    listed.scatter_(3, lists.long().masked_fill(lists < 0, listed.size(3) - 1), True)
    return listed[..., torch.arange(T, device=lists.device) // block].permute(0, 2, 1, 3)[:, :, None]


def one_document(q, k, v, gate, kc, vc, lists, compress, block, selected, window, init_blocks, local_blocks, scale):
    """k, v: three tensors each; gate [B, T, Hkv or Hq, 3]; kc, vc: compressed keys and values; lists: None, or given."""
    (l, d), (B, T, Hq, dk), Hkv = compress, q.shape, kc.size(2)
    grouped = q.reshape(B, T, Hkv, Hq // Hkv, dk).permute(0, 2, 3, 1, 4)
    by_head = lambda x: x.transpose(1, 2)  # noqa: E731
    t, s = torch.arange(T, device=q.device)[:, None], torch.arange(T, device=q.device)[None, :]
    blocks_end = torch.arange(kc.size(1), device=q.device)[None, :] * d + l
    o_cmp, p, lse_cmp = softmax_attention(grouped, by_head(kc), by_head(vc), blocks_end <= t + 1, scale)
    if lists is None:
        lists = select(p.sum(2), T, l, d, block, selected, init_blocks, local_blocks).to(q.device)
    o_sel, _, lse_sel = softmax_attention(grouped, by_head(k[1]), by_head(v[1]), in_listed_blocks(lists, block) & (s <= t), scale)
    o_win, _, lse_win = softmax_attention(grouped, by_head(k[2]), by_head(v[2]), (s <= t) & (s > t - window), scale)
    flat = [o.permute(0, 3, 1, 2, 4).reshape(B, T, Hq, vc.size(3)) for o in (o_cmp, o_sel, o_win)]
    lse = [x.permute(0, 3, 1, 2).reshape(B, T, Hq) for x in (lse_cmp, lse_sel, lse_win)]
    if gate.size(2) == Hkv:
        gate = gate.repeat_interleave(Hq // Hkv, 2)
    return sum(gate[..., b, None] * flat[b] for b in range(3)), flat, lse, lists


def attention(q, k, v, gate=None, *, cu_seqlens=None, compress=(32, 16), block=64, selected=16, window=512, init_blocks=1,
              local_blocks=2, k_cmp=None, v_cmp=None, scale=None, lists=None):
    """The arguments of triad_nsa.attention. lists: given selection lists, [B, T, Hkv, selected], blocks counted in each
    document. Returns out, the branches' o, their lse, and the lists; all of the shape [B, T, ..] or [N, ..]."""
    k = list(k) if isinstance(k, (list, tuple)) else [k] * 3
    v = list(v) if isinstance(v, (list, tuple)) else [v] * 3
    scale = q.size(-1) ** -0.5 if scale is None else scale
    if gate is None:
        gate = torch.full((*q.shape[:-2], k[1].size(-2), 3), 1 / 3, dtype=q.dtype, device=q.device)
    options = dict(compress=compress, block=block, selected=selected, window=window, init_blocks=init_blocks,
                   local_blocks=local_blocks, scale=scale)
    if cu_seqlens is None:
        kc = mean_of_blocks(k[0], *compress) if k_cmp is None else k_cmp
        vc = mean_of_blocks(v[0], *compress) if v_cmp is None else v_cmp
        return one_document(q, k, v, gate, kc, vc, lists, **options)
    results, at = [], 0
    for begin, end in zip(cu_seqlens[:-1], cu_seqlens[1:]):
        cut = lambda x: x[None, begin:end]  # noqa: E731
        k_own, v_own = [cut(x) for x in k], [cut(x) for x in v]
        blocks = max(0, (end - begin - compress[0]) // compress[1] + 1)
        kc = mean_of_blocks(k_own[0], *compress) if k_cmp is None else k_cmp[None, at:at + blocks]
        vc = mean_of_blocks(v_own[0], *compress) if v_cmp is None else v_cmp[None, at:at + blocks]
        at += blocks
        own = None if lists is None else cut(lists)
        results.append(one_document(cut(q), k_own, v_own, cut(gate), kc, vc, own, **options))
    joined = lambda parts: torch.cat([x[0] for x in parts])  # noqa: E731
    return (joined([r[0] for r in results]), [joined([r[1][b] for r in results]) for b in range(3)],
            [joined([r[2][b] for r in results]) for b in range(3)], joined([r[3] for r in results]))


def select_by_index(iq, ik, block, selected, init_blocks, local_blocks):
    """iq [B, T, Hkv, di], ik [B, T, 1, di] -> lists [B, T, Hkv, selected]."""
    T = iq.size(1)
    scores = torch.einsum("bthd,bsd->bhts", iq, ik[:, :, 0]).detach()
    scores = torch.nn.functional.pad(scores, (0, -T % block), value=-math.inf).unflatten(-1, (-1, block)).amax(-1)
    return best_blocks(scores, T, block, selected, init_blocks, local_blocks)


def one_softmax(q, k, v, lists, block, scale=None, iq=None, ik=None, cu_seqlens=None):
    """Attention with one softmax over listed blocks, or (lists None) all tokens. Returns o, lse and the index's mean loss."""
    if cu_seqlens is not None:
        cut = lambda x, a, b: None if x is None else x[None, a:b]  # noqa: E731
        parts = [one_softmax(*(cut(x, a, b) for x in (q, k, v, lists)), block, scale, cut(iq, a, b), cut(ik, a, b))
                 for a, b in zip(cu_seqlens, cu_seqlens[1:])]
        losses = [loss * (b - a) / cu_seqlens[-1] for (_, _, loss), a, b in zip(parts, cu_seqlens, cu_seqlens[1:])]
        return torch.cat([o[0] for o, _, _ in parts]), torch.cat([lse[0] for _, lse, _ in parts]), sum(losses)
    (B, T, Hq, dk), Hkv = q.shape, k.size(2)
    grouped = q.reshape(B, T, Hkv, Hq // Hkv, dk).permute(0, 2, 3, 1, 4)
    visible = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()[None, None, None]
    if lists is not None:
        visible = visible & in_listed_blocks(lists, block)
    o, p, lse = softmax_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), visible, dk ** -0.5 if scale is None else scale)
    loss = torch.zeros((), dtype=q.dtype, device=q.device)
    if iq is not None:
        teacher, seen = p.mean(2).detach(), visible.expand(B, Hkv, 1, T, T)[:, :, 0]
        scores = torch.einsum("bthd,bsd->bhts", iq, ik[:, :, 0]) * iq.size(-1) ** -0.5
        some = seen.any(-1, keepdim=True)
        log_student = torch.log_softmax(scores.masked_fill(~seen, -math.inf).masked_fill(~some, 0), -1)
        kl = teacher * (teacher.clamp(min=1e-300).log() - log_student.masked_fill(~seen, 0))
        loss = kl.masked_fill(teacher == 0, 0).sum() / max(1, B * T * Hkv)
    return o.permute(0, 3, 1, 2, 4).reshape(B, T, Hq, -1), lse.permute(0, 3, 1, 2).reshape(B, T, Hq), loss
