"""Models of transformers (Llama, Qwen, Mistral, SmolLM3) with one softmax over the blocks that an index of their own lists, as in MSA:
attention implementation "triad_msa".

    convert(model)                                         # adds an index to each layer
    warm_up(model)                                         # dense attention, from which the index learns; warm_up(model, False)
    loss = model(ids, labels=ids).loss + index_loss(model)

The index of a layer sees the layer's input, without a gradient for it, and is rotated as q and k are; model/TAUGHT.md of Triad has
the equations. `triad import --attention nsa --set nsa.selector=index --set nsa.branches=sel` makes the same model of the same folder.
"""
import pathlib

import torch
import torch.nn as nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from .block_sparse import block_sparse_attention, dense_attention_with_index, indexed_attention, select
from .decode import decode_block_sparse, decode_select
from .module import RMSNorm, read_tensors, rotate

NAME = "triad_msa"


class Index(nn.Module):
    """The index of a layer. Called before the layer's forward, it leaves its queries and keys for attend()."""

    def __init__(self, attention, config, d_index, options):
        super().__init__()
        like = attention.q_proj.weight
        where = {"device": like.device, "dtype": like.dtype}
        self.groups = config.num_key_value_heads
        self.share, left = divmod(attention.head_dim, d_index)  # the rotation's pairs from one of the index's to the next
        if left or d_index % 2:
            raise ValueError(f"d_index is {d_index}: an even divisor of head_dim {attention.head_dim} is needed")
        self.q_proj, self.k_proj = (nn.Linear(like.size(1), heads * d_index, bias=False, **where) for heads in (self.groups, 1))
        for projection in (self.q_proj, self.k_proj):
            nn.init.normal_(projection.weight, std=config.initializer_range)
        norms = hasattr(attention, "q_norm")
        self.q_norm, self.k_norm = (RMSNorm(d_index, config.rms_norm_eps, **where) if norms else nn.Identity() for _ in range(2))
        self.options, self.dense, self.loss, self.found = options, False, None, None
        self.cache_layer = config.num_hidden_layers + attention.layer_idx  # after the model's own ones

    def forward(self, attention, arguments, named):
        x = (named["hidden_states"] if "hidden_states" in named else arguments[0]).detach()
        q, k = (norm(projection(x).unflatten(-1, (heads, -1))) for norm, projection, heads in (
            (self.q_norm, self.q_proj, self.groups), (self.k_norm, self.k_proj, 1)))
        if getattr(attention, "use_rope", True):  # in SmolLM3 some layers do not rotate
            tables = [table[..., :table.size(-1) // 2:self.share] for table in named["position_embeddings"]]
            q, k = (rotate(each, *tables) for each in (q, k))
        cache = named.get("cache", named.get("past_key_values"))
        self.found = q, k if cache is None else self.extended(cache, k, attention.layer_idx)

    def extended(self, cache, k, layer):
        """The index's keys so far, which the cache keeps, reorders and crops as those of one more layer."""
        if any(type(each) is not DynamicLayer for each in cache.layers[layer:layer + 1]):
            raise ValueError(f"{NAME}: the cache has a {type(cache.layers[layer]).__name__}: a DynamicCache is needed")
        while len(cache.layers) <= self.cache_layer:
            cache.layers.append(DynamicLayer())
        heads_first = k.transpose(1, 2)
        return cache.layers[self.cache_layer].update(heads_first, heads_first[..., :0])[0].transpose(1, 2)


def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, **named):
    """transformers' attention function: heads come first in its arguments, tokens in its result."""
    index = getattr(module, "index", None)
    if not isinstance(index, Index) or index.found is None:
        raise ValueError(f"{NAME}: this {type(module).__name__} has no index: call triad_nsa.for_transformers.convert(model)")
    for name, given in (("attention_dropout", dropout), ("sliding_window", sliding_window)):
        if given:
            raise ValueError(f"{NAME}: {name} is {given}: there is none with lists of blocks")
    (iq, ik), index.found = index.found, None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    T, S, block, bounds = q.size(1), k.size(1), index.options["block"], named.get("cu_seq_lens_q")
    if attention_mask is not None and attention_mask.numel() == 0:
        if bounds is None:
            raise ValueError(f"{NAME}: the mask is not a causal one; packed documents need cu_seq_lens_q")
        attention_mask = None
    options = dict(scale=scaling)
    if bounds is not None:
        if q.size(0) != 1 or T != S:
            raise ValueError(f"{NAME}: cu_seq_lens_q with {q.size(0)} rows and {S - T} tokens in a cache: one row without a cache is needed")
        q, k, v, iq, ik = (x[0] for x in (q, k, v, iq, ik))
        options["cu_seqlens"] = bounds
    if T < S:
        if T == 1:
            lengths = torch.full((q.size(0),), S, device=q.device)
            lists = decode_select(iq, ik, lengths=lengths, **index.options)
            return decode_block_sparse(q, k, v, lists, lengths=lengths, block=block, scale=scaling), None
        # Zeros stand for the tokens whose output nobody asks for.
        q, iq = (torch.cat((x.new_zeros(x.size(0), S - T, *x.shape[2:]), x), 1) for x in (q, iq))
    if index.dense:
        o, index.loss = dense_attention_with_index(q, k, v, iq, ik, padding_begin=attention_mask, **options)
    elif module.training:
        o, index.loss = indexed_attention(q, k, v, iq, ik, padding_begin=attention_mask, **options, **index.options)
    else:
        lists = select(iq, ik, **index.options, **({"cu_seqlens": bounds} if bounds is not None else {}))
        o = block_sparse_attention(q, k, v, lists, block=block, **options)
    return (o[None] if bounds is not None else o[:, S - T:]), None


def mask(*_, mask_function=causal_mask_function, attention_mask=None, **__):
    """transformers' mask function: None, int32 [B], where the padding at the rows' ends begins, or an empty tensor for a mask
    that is not a causal one."""
    if mask_function is not causal_mask_function:
        return torch.empty(0, dtype=torch.int32)
    if attention_mask is None or attention_mask.all():
        return None
    counted = attention_mask.bool()
    if (counted[:, 1:] & ~counted[:, :-1]).any():
        raise ValueError(f"{NAME}: attention_mask has padding before tokens: pad texts at their ends, and generate "
                         "together only what is equally long")
    return counted.sum(1, dtype=torch.int32)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)


def indices(model):
    return [module for module in model.modules() if isinstance(module, Index)]


def convert(model, *, d_index=None, block=128, selected=16, init_blocks=0, local_blocks=1):
    """Adds an index to each layer of the model, and makes "triad_msa" its attention. d_index: its width, an even divisor of
    head_dim, which is the default; the other options are those of triad_nsa.select. Returns the model."""
    options = dict(block=block, selected=selected, init_blocks=init_blocks, local_blocks=local_blocks)
    for layer in model.base_model.layers:
        attention = layer.self_attn
        if any(not hasattr(attention, name) for name in ("q_proj", "head_dim", "layer_idx")):
            raise ValueError(f"{NAME}: {type(attention).__name__} is none of Llama's, Qwen's, Mistral's or SmolLM3's attention")
        width = attention.head_dim if d_index is None else d_index
        attention.index = Index(attention, model.config, width, options)
        attention.register_forward_pre_hook(lambda module, arguments, named: module.index(module, arguments, named), with_kwargs=True)
    model.config.triad_msa = dict(d_index=width, **options)
    model.set_attn_implementation(NAME)
    return model


def load(folder, **more):
    """A model that was converted and saved by save_pretrained. more: arguments of from_pretrained."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", **more)
    convert(model, **model.config.triad_msa)
    saved = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        saved.update(read_tensors(path, holding=".self_attn.index."))
    missing = [name for name in model.state_dict() if ".self_attn.index." in name and name not in saved]
    if missing:
        raise ValueError(f"{folder} has no tensor {missing[0]}")
    model.load_state_dict(saved, strict=False)
    return model


def warm_up(model, dense=True):
    """Whether layers attend to all tokens, from which their indices learn."""
    for index in indices(model):
        index.dense = dense


def index_loss(model):
    """The sum of the layers' losses in the last forward pass, which belongs into the objective."""
    losses = [index.loss for index in indices(model)]
    if not losses or any(loss is None for loss in losses):
        raise ValueError(f"{NAME}: there is no index loss: no layer was converted, or the model is in eval mode")
    if model.training and torch.is_grad_enabled() and not all(loss.requires_grad for loss in losses):
        raise ValueError(f"{NAME}: the index loss has no gradient: checkpointing needs use_reentrant=False")
    for index in indices(model):
        index.loss = None
    return sum(loss.to(losses[0].device) for loss in losses)
