"""A decoder in PyTorch with the sizes of one of Triad's configs: RMSNorm, rotary embedding, grouped causal attention,
and the same MLP. Import it once torch is known to exist."""
import dataclasses

import torch
from torch import nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Sizes:
    dim: int
    layers: int
    heads: int
    groups: int
    width: int
    vocab: int
    hidden: int
    swiglu: bool
    theta: float
    tied: bool

    @classmethod
    def of_config(cls, model, **changes):
        """Reads a config's group "model"; `changes` replace what it says."""
        assert model["d_v"] == model["d_k"], "d_k and d_v must be equal"
        swiglu = model.get("mlp", "silu") == "swiglu"
        rounded = -(-8 * model["dim"] // 3 // 64) * 64 if swiglu else 4 * model["dim"]
        sizes = cls(dim=model["dim"], layers=model["n_layers"], heads=model["n_heads"], groups=model["n_kv_groups"],
                    width=model["d_k"], vocab=model["vocab_size"], hidden=model.get("mlp_hidden") or rounded,
                    swiglu=swiglu, theta=model.get("rope_theta", 10000.0), tied=model.get("tie_embeddings", False))
        return dataclasses.replace(sizes, **changes)


class Dense(nn.Module):
    """Causal attention by scaled_dot_product_attention. An attention gets the layer's normed input h too."""

    def __init__(self, sizes):
        super().__init__()

    def forward(self, h, q, k, v):  # q [B,T,Hq,d], k and v [B,T,Hkv,d]
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                                              enable_gqa=True).transpose(1, 2)


class DenseOnCpu(Dense):
    """With repeated keys and values: on a CPU at least as fast as enable_gqa=True."""

    def forward(self, h, q, k, v):
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                              is_causal=True).transpose(1, 2)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Layer(nn.Module):
    def __init__(self, sizes, attention):
        super().__init__()
        self.sizes, self.attention = sizes, attention(sizes)
        self.norm1, self.norm2 = nn.RMSNorm(sizes.dim, eps=1e-6), nn.RMSNorm(sizes.dim, eps=1e-6)
        self.qkv = nn.Linear(sizes.dim, (sizes.heads + 2 * sizes.groups) * sizes.width, bias=False)
        self.out = nn.Linear(sizes.heads * sizes.width, sizes.dim, bias=False)
        self.fc1 = nn.Linear(sizes.dim, sizes.hidden * (2 if sizes.swiglu else 1), bias=False)
        self.fc2 = nn.Linear(sizes.hidden, sizes.dim, bias=False)

    def forward(self, x, cos, sin):
        s, h = self.sizes, self.norm1(x)
        heads = self.qkv(h).unflatten(-1, (-1, s.width))
        q, k, v = heads.split([s.heads, s.groups, s.groups], dim=-2)
        o = self.attention(h, rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.out(o.flatten(-2))
        h = self.fc1(self.norm2(x))
        if s.swiglu:
            gate, up = h.chunk(2, dim=-1)
            return x + self.fc2(F.silu(gate) * up)
        return x + self.fc2(F.silu(h))


class Decoder(nn.Module):
    """attention: a module class such as Dense. Sequences have `length` tokens."""

    def __init__(self, sizes, length, attention):
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.dim)
        self.layers = nn.ModuleList(Layer(sizes, attention) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.dim, eps=1e-6)
        self.head = nn.Linear(sizes.dim, sizes.vocab, bias=False)
        if sizes.tied:
            self.head.weight = self.embed.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        frequencies = sizes.theta ** (-torch.arange(0, sizes.width, 2).float() / sizes.width)
        angles = torch.outer(torch.arange(length).float(), frequencies)[:, None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def training_step(model, optimizer, tokens, targets):
    """Forward, backward, clipping and update. Returns the loss."""
    loss = model(tokens, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss
