"""NSAAttention: projections, rotation, compression and gates around triad_nsa.attention, with Triad's parameter names."""
import json
import math
import pathlib
import struct

import torch
import torch.nn as nn
import torch.nn.functional as F

from .attention import attention, positions_of
from .block_sparse import attention_with_index, block_sparse_attention, dense_attention_with_index, indexed_attention, select

BRANCHES = ("cmp", "sel", "win")
THREE, TAUGHT, ONE = ("compressed", "cmp,sel,win"), ("index", "cmp,sel,win"), ("index", "sel")  # selector and branches


def read_tensors(path, prefix="", holding=""):
    """The tensors of a safetensors file whose names begin with `prefix`, without it, and hold `holding`."""
    dtypes = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}
    with open(path, "rb") as file:
        end = 8 + struct.unpack("<Q", file.read(8))[0]
        entries, found = json.loads(file.read(end - 8)), {}
        for name, entry in entries.items():
            if not name.startswith(prefix) or holding not in name or name == "__metadata__":
                continue
            begin, stop = entry["data_offsets"]
            file.seek(end + begin)
            found[name.removeprefix(prefix)] = torch.frombuffer(
                bytearray(file.read(stop - begin)), dtype=dtypes[entry["dtype"]]).view(entry["shape"])
    return found


def rotate(x, cos, sin):
    """x [.., tokens, heads, D]: rotates the pairs (j, j + D/2). cos and sin [.., tokens, D/2]: computed in their type."""
    u, w = x.to(cos.dtype).chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
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

    selector "index": an index of width d_index lists the blocks. The layer returns (y, index_loss), which belongs in the
    objective; index_loss is None in eval mode. With branches "sel" one softmax over these blocks is all there is; compress,
    window, phi, gate and shared_kv then have no meaning.
    """

    def __init__(self, dim, n_heads, n_kv_groups, d_k, d_v=None, *, compress=(32, 16), block=64, selected=16, window=512,
                 init_blocks=1, local_blocks=2, phi="avg", gate="softmax", gate_temperature=1.0, shared_kv=False,
                 rope_theta=10000.0, rope_scale=1.0, qkv_bias=False, qk_norm=False, norm_eps=1e-6, init_std=0.02,
                 selector="compressed", branches="cmp,sel,win", d_index=64, device=None, dtype=None):
        super().__init__()
        if n_heads % n_kv_groups:
            raise ValueError(f"n_heads is {n_heads}: it has to be a multiple of n_kv_groups, which is {n_kv_groups}")
        if phi not in ("avg", "conv", "mlp"):
            raise ValueError(f'phi is {phi!r}: "avg", "conv" or "mlp" is needed')
        if gate not in ("softmax", "sigmoid", None):
            raise ValueError(f'gate is {gate!r}: "softmax", "sigmoid" or None is needed')
        if (selector, branches) not in (THREE, TAUGHT, ONE):
            raise ValueError(f"selector is {selector!r} and branches {branches!r}: {' with '.join(map(repr, THREE))} is needed, "
                             f"{' with '.join(map(repr, TAUGHT))}, or {' with '.join(map(repr, ONE))}")
        self.indexed, self.one_softmax, self.d_index = selector == "index", (selector, branches) == ONE, d_index
        if self.indexed and (d_index % 2 or not 2 <= d_index <= 256):
            raise ValueError(f"d_index is {d_index}: an even number from 2 to 256 is needed")
        if self.one_softmax:
            shared_kv, phi, gate = True, "avg", None
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
        if self.indexed:  # without biases, whatever qkv_bias is
            self.index_q_proj = nn.Linear(dim, n_kv_groups * d_index, bias=False, **where)
            self.index_k_proj = nn.Linear(dim, d_index, bias=False, **where)
            if qk_norm:
                self.index_q_norm, self.index_k_norm = (RMSNorm(d_index, norm_eps, **where) for _ in range(2))
        self.out_proj = nn.Linear(n_heads * d_v, dim, bias=False, **where)
        self.reset_parameters()

    @classmethod
    def from_config(cls, config, layer=0, *, device=None, dtype=None):
        """A fresh layer, as the one of this number in a model of Triad. config: `config` of a checkpoint's state.json."""
        m, n = config["model"], dict(config["nsa"])
        for entry in n.get("layers") or ():
            if any(layer in range(*map(int, part.split(":"))) for part in entry["layers"].split(",")):
                n.update({key: value for key, value in entry.items() if key != "layers"})
        dense, nope = ([range(*map(int, part.split(":"))) for part in m.get(key, "").split(",") if part]
                       for key in ("dense_layers", "nope_layers"))
        for key, value, wrong in (
                ("model.n_layers", m["n_layers"], not 0 <= layer < m["n_layers"]),
                ("model.attention", m["attention"], m["attention"] != "nsa"),
                ("model.dense_layers", m["dense_layers"], any(layer in part for part in dense)),
                ("model.rope_scaling", m["rope_scaling"], m["rope_scaling"] != "none"),
                ("nsa.branches", n["branches"], n["branches"] == "win"),
                ("nsa.select_every", n.get("select_every", 1), n.get("select_every", 1) != 1),
                ("nsa.force_branch", n["force_branch"], n["force_branch"] != "none"),
                ("nsa.uniform_gate", n["uniform_gate"], n["uniform_gate"]),
                ("nsa.stopgrad_gates", n["stopgrad_gates"], n["stopgrad_gates"])):
            if wrong:
                raise ValueError(f"layer {layer} of this config is no NSAAttention: {key} is {value!r}")
        three = {} if n["branches"] == "sel" else dict(
            compress=(n["l"], n["d"]), window=n["w"], phi=n["phi"], gate=n["gate"], gate_temperature=n["gate_temperature"],
            shared_kv=n["shared_kv"])
        return cls(m["dim"], m["n_heads"], m["n_kv_groups"], m["d_k"], m["d_v"], block=n["l_sel"], selected=n["n_sel"],
                   init_blocks=n["init_blocks"], local_blocks=n["local_blocks"],
                   rope_theta=None if any(layer in part for part in nope) else m["rope_theta"],
                   rope_scale=m["rope_scale"], qkv_bias=m["qkv_bias"], qk_norm=m["qk_norm"], norm_eps=m["norm_eps"],
                   init_std=m["init_std"], selector=n["selector"], branches=n["branches"], d_index=n["d_index"], device=device,
                   dtype=dtype, **three)

    @classmethod
    def from_checkpoint(cls, folder, layer=0, *, device=None, dtype=None):
        """The layer of this number in a checkpoint of Triad, with its weights: the folder of state.json and model.safetensors."""
        folder, prefix = pathlib.Path(folder), f"blocks.{layer}.attn."
        config = json.loads((folder / "state.json").read_text())["config"]
        made = cls.from_config(config, layer, device=device, dtype=dtype)
        made.load_state_dict(read_tensors(folder / "model.safetensors", prefix))
        return made

    def settings(self):
        """What the layer's function depends on and no shape of a parameter shows."""
        always = {"n_heads": self.n_heads, "n_kv_groups": self.n_kv_groups, "rope_theta": self.rope_theta,
                  "rope_scale": self.rope_scale, "norm_eps": self.q_norm.eps if self.qk_norm else None}
        index = {"selector": "index", "branches": "sel" if self.one_softmax else "cmp,sel,win", "d_index": self.d_index}
        if self.one_softmax:
            return {**self.chosen(), **index, **always}
        gates = {"gate": self.gate_kind, "gate_temperature": self.gate_temperature}
        return {**self.nsa, **gates, **(index if self.indexed else {}), **always}

    def chosen(self):
        """The options of the selection."""
        return {name: self.nsa[name] for name in ("block", "selected", "init_blocks", "local_blocks")}

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

    def rotation(self, tokens, cu_seqlens=None, *, device=None, dtype=torch.float32, width=None):
        """cos and sin [tokens, width / 2], computed in f64, of width d_k if none is given. Layers with equal rotations can
        share them."""
        width = self.d_k if width is None else width
        if cu_seqlens is None:
            position = torch.arange(tokens, device=device)
        else:
            position = positions_of(cu_seqlens, tokens)
        exponent = torch.arange(width // 2, dtype=torch.float64, device=position.device) * (-2 / width)
        angle = position.double()[:, None] / self.rope_scale * torch.exp(exponent * math.log(self.rope_theta))
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def gates(self, q):
        """Rotated q [.., Hq, dk] -> factors [.., Hkv, 3], f32 or wider."""
        mean = q.unflatten(-2, (self.n_kv_groups, -1)).mean(-2)
        z = self.gate.fc2(F.silu(self.gate.fc1(mean)))
        z = z.to(torch.promote_types(z.dtype, torch.float32)) / self.gate_temperature
        return torch.sigmoid(z) if self.gate_kind == "sigmoid" else torch.softmax(z, -1)

    def rotated(self, x, name, width, cos_sin):
        """The projection `name` of x, with its norm and rotated: [.., heads, width]."""
        y = getattr(self, f"{name}_proj")(x).unflatten(-1, (-1, width))
        y = getattr(self, f"{name}_norm")(y) if self.qk_norm else y
        return y if self.rope_theta is None else rotate(y, *cos_sin)

    def forward(self, x, cu_seqlens=None, cos_sin=None, *, dense=False, padding_begin=None):
        """x [B, T, dim], or packed [N, dim] with cu_seqlens, i32 [documents + 1]. cos_sin: from rotation(); with an index the
        pair of those of widths d_k and d_index. dense: attention to all tokens, which teaches the index too: its warm-up.
        padding_begin, as of indexed_attention: tokens that teach the index nothing."""
        if (dense or padding_begin is not None) and not self.indexed:
            raise ValueError(f"{'dense=True' if dense else 'padding_begin'} is for layers with selector 'index'")
        if cos_sin is None and self.rope_theta is not None:
            dtype = torch.promote_types(x.dtype, torch.float32)
            cos_sin, *of_index = (self.rotation(x.size(-2), cu_seqlens, device=x.device, dtype=dtype, width=width)
                                  for width in (self.d_k, *([self.d_index] if self.indexed else [])))
            cos_sin = (cos_sin, *of_index) if self.indexed else cos_sin
        cos_sin, cos_sin_index = (cos_sin or (None, None)) if self.indexed else (cos_sin, None)
        index = [self.rotated(x.detach(), name, self.d_index, cos_sin_index) for name in ("index_q", "index_k")] if self.indexed else []
        q = self.rotated(x, "q", self.d_k, cos_sin)
        # A dense pass reads the window's keys and values alone, as dense attention in Triad does.
        branches = ("win",) if dense else self.branches
        k = [self.rotated(x, f"k_{branch}", self.d_k, cos_sin) for branch in branches]
        v = [getattr(self, f"v_{branch}_proj")(x).unflatten(-1, (-1, self.d_v)) for branch in branches]
        if dense:
            o, loss = dense_attention_with_index(q, k[0], v[0], *index, cu_seqlens=cu_seqlens, padding_begin=padding_begin)
        elif self.one_softmax:
            o, loss = self.attend_selected(q, k[0], v[0], index, cu_seqlens, padding_begin)
        else:
            o, loss = self.attend_in_branches(q, k, v, index, cu_seqlens, padding_begin)
        y = self.out_proj(o.flatten(-2).to(x.dtype))
        return (y, loss) if self.indexed else y

    def attend_selected(self, q, k, v, index, cu_seqlens, padding_begin):
        if self.training:
            return indexed_attention(q, k, v, *index, cu_seqlens=cu_seqlens, padding_begin=padding_begin, **self.chosen())
        lists = select(*index, cu_seqlens=cu_seqlens, **self.chosen())
        return block_sparse_attention(q, k, v, lists, block=self.nsa["block"], cu_seqlens=cu_seqlens), None

    def attend_in_branches(self, q, k, v, index, cu_seqlens, padding_begin):
        k_cmp, v_cmp = (None, None) if self.phi_k is None else (self.phi_k(k[0], cu_seqlens), self.phi_v(v[0], cu_seqlens))
        k, v = (k[0], v[0]) if self.shared_kv else (k, v)
        gate = None if self.gate_kind is None else self.gates(q)
        options = dict(cu_seqlens=cu_seqlens, k_cmp=k_cmp, v_cmp=v_cmp, **self.nsa)
        if self.indexed and self.training:
            return attention_with_index(q, k, v, gate, *index, padding_begin=padding_begin, **options)
        lists = select(*index, cu_seqlens=cu_seqlens, **self.chosen()) if self.indexed else None
        return attention(q, k, v, gate, lists=lists, **options), None

    def extra_repr(self):
        return f"heads={self.n_heads}/{self.n_kv_groups}, d_k={self.d_k}, d_v={self.d_v}, " + \
            ", ".join(f"{name}={value}" for name, value in self.nsa.items())
