"""NSAAttention: projections, rotation, compression and gates around triad_nsa.attention, with Triad's parameter names."""
import json
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from .attention import attention

BRANCHES = ("cmp", "sel", "win")


def positions_of(cu_seqlens, tokens):
    """The position of each token in its document, i64 [tokens], without synchronization."""
    at = torch.arange(tokens, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, at.to(cu_seqlens.dtype), right=True) - 1
    return at - cu_seqlens[document]


def rotate(x, cos, sin):
    """x [.., tokens, heads, D]: rotates the pairs (j, j + D/2). cos and sin [tokens, D/2], f32 or wider."""
    u, w = x.to(cos.dtype).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((u * cos - w * sin, w * cos + u * sin), -1).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width, eps, device=None, dtype=None):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width, device=device, dtype=dtype)), eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.to(wide.dtype)).to(x.dtype)


class Compression(nn.Module):
    """A learned map from each block of l tokens, one every d tokens, to one key or value. kind: "conv" or "mlp"."""

    def __init__(self, kind, l, d, width, device=None, dtype=None):
        super().__init__()
        self.kind, self.l, self.d = kind, l, d
        where = {"device": device, "dtype": dtype}
        if kind == "conv":
            self.weight = nn.Parameter(torch.full((l, width), 1 / l, **where))
        else:
            self.pos = nn.Parameter(torch.zeros(l, width, **where))
            self.fc1 = nn.Linear(l * width, 2 * width, bias=False, **where)
            self.fc2 = nn.Linear(2 * width, width, bias=False, **where)

    def blocks(self, x, cu_seqlens):
        """The tokens of all blocks, [.., blocks, H, l, D]."""
        if cu_seqlens is None:
            return x.unfold(1, self.l, self.d).transpose(-1, -2) if x.size(1) >= self.l else \
                x.new_zeros(x.size(0), 0, x.size(2), self.l, x.size(3))
        # As many rows as documents can have in all: their number is known to the device only. Rows after the last block
        # repeat it, and attention does not read them.
        count = max(0, (x.size(0) - self.l) // self.d + 1)
        lengths = cu_seqlens.diff()
        ends = torch.where(lengths < self.l, 0, (lengths - self.l).div(self.d, rounding_mode="floor") + 1).cumsum(0)
        row = torch.arange(count, device=x.device)
        document = torch.searchsorted(ends, row.to(ends.dtype), right=True).clamp(max=lengths.numel() - 1)
        first = ends[document] - torch.where(lengths[document] < self.l, 0,
                                             (lengths[document] - self.l).div(self.d, rounding_mode="floor") + 1)
        token = (cu_seqlens[document] + (row - first) * self.d).clamp(max=max(0, x.size(0) - self.l))
        return x[token[:, None] + torch.arange(self.l, device=x.device)].transpose(1, 2)

    def forward(self, x, cu_seqlens=None):
        """x [B, T, H, D], or packed [N, H, D]: returns [B, Tc, H, D], or the documents' blocks one after another."""
        blocks = self.blocks(x, cu_seqlens)
        if self.kind == "conv":
            return (blocks * self.weight).sum(-2)
        return self.fc2(F.silu(self.fc1((blocks + self.pos).flatten(-2))))


class NSAAttention(nn.Module):
    """Causal self-attention layer with Native Sparse Attention: [B, T, dim] -> [B, T, dim], or packed [N, dim].

    Its parameters have the names that Triad's checkpoints give them after `blocks.I.attn.`, so a layer of a checkpoint
    loads by load_state_dict. The state_dict of a layer also holds what else its function depends on (`_extra_state`), and
    a layer with other values refuses it; a checkpoint's has none, and loads into any.

    phi: how blocks of keys and values are compressed, "avg", "conv" or "mlp". gate: "softmax", "sigmoid", or None, which
    gives every branch 1/3. shared_kv: one pair k, v for all branches. rope_theta: None leaves q and k unrotated.
    """

    def __init__(self, dim, n_heads, n_kv_groups, d_k, d_v=None, *, compress=(32, 16), block=64, selected=16, window=512,
                 init_blocks=1, local_blocks=2, phi="avg", gate="softmax", gate_temperature=1.0, shared_kv=False,
                 rope_theta=10000.0, rope_scale=1.0, qkv_bias=False, qk_norm=False, norm_eps=1e-6, init_std=0.02,
                 device=None, dtype=None):
        super().__init__()
        if n_heads % n_kv_groups:
            raise ValueError(f"n_heads is {n_heads}: it has to be a multiple of n_kv_groups, which is {n_kv_groups}")
        if phi not in ("avg", "conv", "mlp"):
            raise ValueError(f'phi is {phi!r}: "avg", "conv" or "mlp" is needed')
        if gate not in ("softmax", "sigmoid", None):
            raise ValueError(f'gate is {gate!r}: "softmax", "sigmoid" or None is needed')
        d_v = d_k if d_v is None else d_v
        self.n_heads, self.n_kv_groups, self.d_k, self.d_v = n_heads, n_kv_groups, d_k, d_v
        self.nsa = dict(compress=tuple(compress), block=block, selected=selected, window=window, init_blocks=init_blocks,
                        local_blocks=local_blocks)
        self.gate_kind, self.gate_temperature, self.shared_kv = gate, gate_temperature, shared_kv
        self.rope_theta, self.rope_scale, self.qk_norm, self.init_std = rope_theta, rope_scale, qk_norm, init_std
        self.branches = ("win",) if shared_kv else BRANCHES
        where = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(dim, n_heads * d_k, bias=qkv_bias, **where)
        for branch in self.branches:
            setattr(self, f"k_{branch}_proj", nn.Linear(dim, n_kv_groups * d_k, bias=qkv_bias, **where))
            setattr(self, f"v_{branch}_proj", nn.Linear(dim, n_kv_groups * d_v, bias=qkv_bias, **where))
        if qk_norm:
            for name in ("q", *(f"k_{branch}" for branch in self.branches)):
                setattr(self, f"{name}_norm", RMSNorm(d_k, norm_eps, **where))
        self.phi_k, self.phi_v = (None if phi == "avg" else Compression(phi, *compress, width, **where)
                                  for width in (d_k, d_v))
        if gate is not None:
            self.gate = nn.Module()
            self.gate.fc1 = nn.Linear(d_k, d_k // 2, **where)
            self.gate.fc2 = nn.Linear(d_k // 2, 3, **where)
        self.out_proj = nn.Linear(n_heads * d_v, dim, bias=False, **where)
        self.reset_parameters()

    def settings(self):
        """What the layer's function depends on and no shape of a parameter shows."""
        return {**self.nsa, "n_heads": self.n_heads, "n_kv_groups": self.n_kv_groups, "gate": self.gate_kind,
                "gate_temperature": self.gate_temperature, "rope_theta": self.rope_theta, "rope_scale": self.rope_scale,
                "norm_eps": self.q_norm.eps if self.qk_norm else None}

    def get_extra_state(self):
        # A tensor, so that safetensors and torch.load(weights_only=True) take it.
        return torch.tensor(list(json.dumps(self.settings(), sort_keys=True).encode()), dtype=torch.uint8)

    def set_extra_state(self, state, name="this layer"):
        theirs, ours = json.loads(bytes(state.tolist())), json.loads(json.dumps(self.settings()))
        differences = [f"its {key} is {theirs.get(key)}, that of {name} {ours.get(key)}"
                       for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
        if differences:
            raise RuntimeError("the state_dict is another NSAAttention's: " + "; ".join(differences))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors):
        key = prefix + "_extra_state"
        if key in state_dict:  # before any weight of this layer is overwritten
            self.set_extra_state(state_dict[key], prefix.rstrip(".") or "this layer")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors)
        if key in missing_keys:  # in a checkpoint of Triad, and in what older versions saved
            missing_keys.remove(key)

    @torch.no_grad()
    def reset_parameters(self):
        """As `triad init`, but out_proj is not scaled by 1/sqrt(2 layers), which this layer does not know."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or name == "gate.fc2.weight":
                parameter.zero_()
            elif name.endswith("_norm.weight"):
                parameter.fill_(1)
            elif name in ("phi_k.weight", "phi_v.weight"):
                parameter.fill_(1 / self.nsa["compress"][0])
            else:
                parameter.normal_(std=self.init_std)

    def rotation(self, tokens, cu_seqlens=None, *, device=None, dtype=torch.float32):
        """cos and sin [tokens, d_k / 2], computed in f64. Layers with equal rotations can share them."""
        if cu_seqlens is None:
            position = torch.arange(tokens, device=device)
        else:
            position = positions_of(cu_seqlens, tokens)
        exponent = torch.arange(self.d_k // 2, dtype=torch.float64, device=position.device) * (-2 / self.d_k)
        angle = position.double()[:, None] / self.rope_scale * torch.exp(exponent * math.log(self.rope_theta))
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def gates(self, q):
        """Rotated q [.., Hq, dk] -> factors [.., Hkv, 3], f32 or wider."""
        mean = q.unflatten(-2, (self.n_kv_groups, -1)).mean(-2)
        z = self.gate.fc2(F.silu(self.gate.fc1(mean)))
        z = z.to(torch.promote_types(z.dtype, torch.float32)) / self.gate_temperature
        return torch.sigmoid(z) if self.gate_kind == "sigmoid" else torch.softmax(z, -1)

    def forward(self, x, cu_seqlens=None, cos_sin=None):
        """x [B, T, dim], or packed [N, dim] with cu_seqlens, i32 [documents + 1]. cos_sin: from rotation()."""
        if cos_sin is None and self.rope_theta is not None:
            dtype = torch.promote_types(x.dtype, torch.float32)
            cos_sin = self.rotation(x.size(-2), cu_seqlens, device=x.device, dtype=dtype)

        def rotated(name):
            y = getattr(self, f"{name}_proj")(x).unflatten(-1, (-1, self.d_k))
            y = getattr(self, f"{name}_norm")(y) if self.qk_norm else y
            return y if self.rope_theta is None else rotate(y, *cos_sin)

        q = rotated("q")
        k = [rotated(f"k_{branch}") for branch in self.branches]
        v = [getattr(self, f"v_{branch}_proj")(x).unflatten(-1, (-1, self.d_v)) for branch in self.branches]
        k_cmp, v_cmp = (None, None) if self.phi_k is None else (self.phi_k(k[0], cu_seqlens), self.phi_v(v[0], cu_seqlens))
        o = attention(q, k[0] if self.shared_kv else k, v[0] if self.shared_kv else v,
                      None if self.gate_kind is None else self.gates(q), cu_seqlens=cu_seqlens, k_cmp=k_cmp, v_cmp=v_cmp,
                      **self.nsa)
        return self.out_proj(o.flatten(-2).to(x.dtype))

    def extra_repr(self):
        return f"heads={self.n_heads}/{self.n_kv_groups}, d_k={self.d_k}, d_v={self.d_v}, " + \
            ", ".join(f"{name}={value}" for name, value in self.nsa.items())
