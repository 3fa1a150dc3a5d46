"""The code of tools/pytorch/megatron.md on a stand-in of the parts of Megatron-Core that it imports: tensors [s, b, ..], packed ones
[t, ..], and the calls that Megatron's attention makes."""
import pathlib
import re
import sys
import types
import unittest

import torch
import torch.nn as nn

import triad_nsa
from problem import error

PAGE = pathlib.Path(__file__).resolve().parents[2] / "tools/pytorch/megatron.md"
DIM, HEADS, GROUPS, WIDTH = 24, 4, 2, 8


class MegatronModule(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config


def apply_rotary_pos_emb(t, freqs, config, cu_seqlens=None):
    """freqs [s, 1, 1, width]: the angles twice."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        freqs = torch.cat([freqs[:b - a] for a, b in zip(bounds, bounds[1:])])[:, 0]
    u, w = t.chunk(2, -1)
    return t * freqs.cos() + torch.cat((-w, u), -1) * freqs.sin()


class SelfAttention(MegatronModule):
    def __init__(self, config, submodules, layer_number, attn_mask_type=None, cp_comm_type=None):
        super().__init__(config)
        self.core_attention = submodules.core_attention(
            config=config, layer_number=layer_number, attn_mask_type=attn_mask_type, attention_type="self", cp_comm_type=cp_comm_type,
            softmax_scale=None)
        self.checkpoint_core_attention = config.recompute_granularity == "selective"
        self.linear_qkv = nn.Linear(DIM, GROUPS * (HEADS // GROUPS + 2) * WIDTH, bias=False, dtype=config.params_dtype)
        self.linear_proj = nn.Linear(HEADS * WIDTH, DIM, bias=False, dtype=config.params_dtype)

    def forward(self, hidden_states, attention_mask, key_value_states=None, inference_context=None, rotary_pos_emb=None,
                attention_bias=None, packed_seq_params=None):
        mixed = self.linear_qkv(hidden_states).unflatten(-1, (GROUPS, -1)).split((HEADS // GROUPS * WIDTH, WIDTH, WIDTH), -1)
        q, k, v = mixed[0].unflatten(-1, (-1, WIDTH)).flatten(2, 3), *mixed[1:]
        bounds = None
        if packed_seq_params is not None:
            q, k, v, bounds = q.squeeze(1), k.squeeze(1), v.squeeze(1), packed_seq_params.cu_seqlens_q
        q, k = (apply_rotary_pos_emb(x, rotary_pos_emb, self.config, bounds) for x in (q, k))
        o = self.core_attention(q, k, v, attention_mask, attn_mask_type=None, attention_bias=attention_bias,
                                packed_seq_params=packed_seq_params)
        return self.linear_proj(o.reshape(o.size(0), 1, -1) if bounds is not None else o), None


def page():
    """The page's module, with the stand-in in place of megatron.core; small lists."""
    names = {"models.common.embeddings.rope_utils": apply_rotary_pos_emb, "transformer.attention": SelfAttention,
             "transformer.module": MegatronModule}
    made = {}
    for name, thing in names.items():
        made[f"megatron.core.{name}"] = types.ModuleType(name)
        setattr(made[f"megatron.core.{name}"], thing.__name__, thing)
        parts = name.split(".")[:-1]
        for i in range(len(parts) + 1):
            made.setdefault(".".join(["megatron.core", *parts[:i]]), types.ModuleType("package"))
    made["megatron"] = types.ModuleType("megatron")
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0]
    code, found = re.subn(r"D_INDEX, LISTS = .*", "D_INDEX, LISTS = 4, dict(block=8, selected=3, init_blocks=0, local_blocks=1)", code)
    assert found == 1
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        scope = {"__name__": "page"}
        exec(compile(code, str(PAGE), "exec"), scope)
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
    return types.SimpleNamespace(**scope)


class Megatron(unittest.TestCase):
    def setUp(self):
        self.page = page()

    def config(self, **more):
        return types.SimpleNamespace(**{**dict(
            hidden_size=DIM, num_query_groups=GROUPS, params_dtype=torch.float64, layernorm_epsilon=1e-6, attention_dropout=0.0,
            context_parallel_size=1, tensor_model_parallel_size=1, recompute_granularity=None,
            init_method=lambda weight: nn.init.normal_(weight, std=0.3)), **more})

    def layer(self, **more):
        torch.manual_seed(3)
        submodules = types.SimpleNamespace(core_attention=self.page.BlockSparseCoreAttention)
        return self.page.IndexedSelfAttention(self.config(**more), submodules, 1).cpu()  # on a GPU machine it is made there

    @staticmethod
    def angles(tokens, width=WIDTH):
        freqs = torch.arange(tokens, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) * 2 / width)
        return torch.cat((freqs, freqs), -1)[:, None, None]

    def test_against_the_package_layer(self):
        """NSAAttention with the same weights, whose index has no norm of the input: here it sees a normed one."""
        layer, x = self.layer(), torch.randn(70, 2, DIM, dtype=torch.float64)
        x = x / x.square().mean(-1, keepdim=True).sqrt()  # what the index's norm, whose weights are ones, leaves as it is
        other = triad_nsa.NSAAttention(DIM, HEADS, GROUPS, WIDTH, selector="index", branches="sel", block=8, selected=3, init_blocks=0,
                                       local_blocks=1, d_index=4, dtype=torch.float64)
        qkv = layer.linear_qkv.weight.unflatten(0, (GROUPS, -1)).split((HEADS // GROUPS * WIDTH, WIDTH, WIDTH), 1)
        with torch.no_grad():
            for name, weight in zip(("q", "k_win", "v_win"), qkv):
                getattr(other, f"{name}_proj").weight.copy_(weight.flatten(0, 1))
            for name in ("index_q_proj", "index_k_proj"):
                getattr(other, name).weight.copy_(getattr(layer, name).weight)
            other.out_proj.weight.copy_(layer.linear_proj.weight)
        core = layer.core_attention
        for dense in (False, True):
            core.dense = dense
            (y, _), (expected, loss) = layer(x, None, rotary_pos_emb=self.angles(70)), other(x.transpose(0, 1), dense=dense)
            self.assertLessEqual(error(y.transpose(0, 1), expected), 1e-5)  # rms + eps
            self.assertLessEqual(abs(core.index_loss.item() - loss.item()), 1e-5)
        core.dense = False
        layer.eval()
        y, expected = layer(x, None, rotary_pos_emb=self.angles(70))[0], other.eval()(x.transpose(0, 1))[0]
        self.assertLessEqual(error(y.transpose(0, 1), expected), 1e-5)
        self.assertIsNone(core.index_loss)

    def test_packed(self):
        layer, x, bounds = self.layer(), torch.randn(70, 1, DIM, dtype=torch.float64), [0, 3, 33, 70]
        packed = types.SimpleNamespace(cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32), qkv_format="thd")
        y, _ = layer(x, None, rotary_pos_emb=self.angles(70), packed_seq_params=packed)
        alone = torch.cat([layer(x[a:b], None, rotary_pos_emb=self.angles(b - a))[0] for a, b in zip(bounds, bounds[1:])])
        self.assertLessEqual(error(y, alone), 1e-12)

    def test_the_loss_has_its_weight(self):
        x, gradients = torch.randn(70, 2, DIM, dtype=torch.float64), []
        for weight in (1.0, 0.25, 0.0):
            layer = self.layer()
            layer.core_attention.weight = weight
            leaf = x.clone().requires_grad_()
            layer(leaf, None, rotary_pos_emb=self.angles(70))[0].sum().backward()
            gradients.append({"the input": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}})
        for name, whole in gradients[0].items():
            of_index = name.startswith("index_")
            self.assertTrue(whole.norm() > 0)
            for other, share in zip(gradients[1:], (0.25, 0.0)):
                self.assertLessEqual((other[name] - (share if of_index else 1) * whole).abs().max().item(), 1e-15)

    def test_refused(self):
        x = torch.randn(9, 1, DIM, dtype=torch.float64)
        for pattern, call in (("attention_dropout is 0.1", lambda: self.layer(attention_dropout=0.1)),
                              ("context_parallel_size - 1 is 1", lambda: self.layer(context_parallel_size=2)),
                              ("tensor parallelism", lambda: self.layer(tensor_model_parallel_size=2)),
                              ("selective recomputation", lambda: self.layer(recompute_granularity="selective")),
                              ("attention_bias", lambda: self.layer()(x, None, rotary_pos_emb=self.angles(9), attention_bias=x)),
                              ("no index", lambda: self.layer().core_attention(x, x, x, None))):
            with self.subTest(pattern), self.assertRaisesRegex(ValueError, pattern):
                call()
