#!/usr/bin/env python3
"""Compares exported models with the engine: transformers loads what `triad export` has written, and offline.

  test_huggingface_export.py TRIAD     TRIAD: the program

NSA models (every phi and gate, mixed layers, nsa.layers, scaled rotations): logits and gradients against `triad grads` in fp32 on the CPU, over
a length where blocks are chosen; generate with the cache, without it, with padding, and `triad generate`: the same greedy tokens. Dense
models load as Llama, Qwen2, Qwen3 and SmolLM3. A model of transformers that is imported and exported has the same bits. The byte tokenizer
gives bytes. Skipped where torch or transformers is missing."""
import functools
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
CACHE = tempfile.TemporaryDirectory()  # where transformers copies the models' code
os.environ["HF_HOME"] = CACHE.name
try:
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as missing:
    print(f"SKIPPED: {missing}")
    sys.exit(4)  # kSkippedCode of tests/support/skip.h

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENS, MOST_LOGITS, MOST_GRADIENT = 200, 1e-5, 1e-4
# Larger weights than usual, so that blocks differ clearly; the list of n_sel = 4 of the tiny config is full from 32 tokens on.
SHAPE = ["model.init_std=0.12", "model.d_v=12", "nsa.w=12", "nsa.l_sel=16"]
NSA = {
    "avg": [],
    "conv, sigmoid gate": ["nsa.phi=conv", "nsa.gate=sigmoid", "nsa.gate_temperature=0.7"],
    "mlp, tied head, swiglu": ["nsa.phi=mlp", "model.mlp=swiglu", "model.tie_embeddings=true"],
    "l = d, more forced blocks": ["nsa.l=4", "nsa.d=4", "nsa.n_sel=6", "nsa.init_blocks=2", "nsa.local_blocks=3", "nsa.w=1"],
    "forced branch": ["nsa.force_branch=sel"],
    "uniform gate, shared keys": ["nsa.uniform_gate=true", "nsa.shared_kv=true"],
    "mixed layers, gate_init, llama3 rope": ["model.n_layers=3", 'model.dense_layers="1:2"', 'model.nope_layers="1:3"',
                                             "nsa.gate_init=[0.2,0.3,0.5]", "model.rope_scaling=llama3", "model.rope_factor=4", "model.rope_original_len=64"],
    "biases and norms, yarn": ["model.qkv_bias=true", "model.qk_norm=true", "model.rope_scaling=yarn", "model.rope_factor=4",
                               "model.rope_original_len=64"],
    "layers with other strides, a window alone, one softmax, norms": [
        "model.n_layers=4", 'model.nope_layers="0:1,3:4"', "model.qk_norm=true", "nsa.phi=conv", "nsa.index_loss=0",
        'nsa.layers=[{"layers":"1:2","l":4,"d":2,"l_sel":8,"n_sel":6,"w":20,"init_blocks":0},'
        '{"layers":"2:3","branches":"win","w":30},{"layers":"3:4","branches":"sel","selector":"index","d_index":6,"n_sel":5}]'],
    "one list for 8 tokens": ["nsa.select_every=8"],
    "one list for 4 tokens, by layer, index": [
        "model.n_layers=3", "nsa.selector=index", "nsa.d_index=6", "nsa.select_every=4", "nsa.index_loss=0",
        'nsa.layers=[{"layers":"1:2","branches":"sel","n_sel":5},{"layers":"2:3","selector":"compressed","select_every":2}]'],
    "dense with mlp silu": ["model.attention=dense", "model.rope_scale=2"],
}
DENSE = {
    "Llama": ["model.rope_theta=5000"],
    "Llama, linear rope, tied head": ["model.rope_scale=4", "model.tie_embeddings=true"],
    "Llama, llama3 rope": ["model.rope_scaling=llama3", "model.rope_factor=4", "model.rope_original_len=64"],
    "Qwen2, yarn": ["model.qkv_bias=true", "model.rope_scaling=yarn", "model.rope_factor=4", "model.rope_original_len=64"],
    "Qwen3": ["model.qk_norm=true", "model.d_k=16", "model.d_v=16"],
    "SmolLM3": ["model.n_layers=3", 'model.nope_layers="1:2"'],
}
PROMPT = b"In 1789 a shepherd counted 42 sheep, and 17 goats"


def run(triad, *args):
    done = subprocess.run([triad, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, f"triad {' '.join(map(str, args))}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def make(triad, folder, sets):
    """A checkpoint, with random values where fresh ones are constant, and its export; returns both folders."""
    checkpoint, out = folder / "checkpoint", folder / "out"
    options = [word for each in sets for word in ("--set", each)]
    run(triad, "init", ROOT / "configs/tiny.json", *options, "--out", checkpoint)
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    torch.manual_seed(3)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 or "gate" in name or "phi" in name:
            tensor += 0.2 * torch.randn(tensor.shape)
    from safetensors.torch import save_file

    save_file(tensors, path, {"format": "pt"})
    run(triad, "export", checkpoint, "--out", out, "--dtype", "f32")
    return checkpoint, out


def grads_of(triad, checkpoint, tokens, folder):
    shard, out = folder / "tokens.bin", folder / "grads.safetensors"
    shard.write_bytes(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens))
    run(triad, "grads", "--device", "cpu", "--checkpoint", checkpoint, "--tokens", shard, "--batch", 1, "--seq",
        len(tokens) - 1, "--out", out)
    return load_file(out)


def difference(a, b):
    return ((a - b).norm() / b.norm()).item()


def text_of(ids):
    """The tokens of a generated text up to its end-of-text token."""
    return ids[: ids.index(0)] if 0 in ids else ids


def check_generate(triad, checkpoint, model, name):
    prompt = torch.tensor([[0, *PROMPT]])
    cached = model.generate(prompt, max_new_tokens=60, do_sample=False)[0, prompt.size(1):].tolist()
    plain = model.generate(prompt, max_new_tokens=60, do_sample=False, use_cache=False)[0, prompt.size(1):].tolist()
    assert cached == plain, f"{name}: with the cache {cached}, without {plain}"
    ours = json.loads(run(triad, "generate", "--device", "cpu", "--checkpoint", checkpoint, "--prompt", PROMPT.decode(), "--tokens", 60,
                          "--temperature", 0, "--context", 400, "--json"))["tokens"]
    assert text_of(cached) == ours, f"{name}: transformers {text_of(cached)}, triad {ours}"
    # A shorter text with padding before it, next to the whole one.
    short = torch.tensor([[0] * 11 + prompt[0, :-11].tolist(), prompt[0].tolist()])
    mask = torch.ones_like(short)
    mask[0, :11] = 0
    both = model.generate(short, attention_mask=mask, max_new_tokens=20, do_sample=False)
    alone = model.generate(prompt[:, :-11], max_new_tokens=20, do_sample=False)
    texts = [text_of(row.tolist()) for row in (both[0, short.size(1):], alone[0, prompt.size(1) - 11:])]
    assert texts[0] == texts[1], f"{name}: padded {texts[0]}, alone {texts[1]}"
    return len(ours)


def check_nsa(triad, name, sets):
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path)
        checkpoint, out = make(triad, folder, SHAPE + sets)
        model = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
        assert type(model).__name__ == "TriadForCausalLM", type(model).__name__
        tokens = [(7 * i * i + 3 * i) % 251 for i in range(TOKENS + 1)]
        engine = grads_of(triad, checkpoint, tokens, folder)
        x = torch.tensor([tokens])
        result = model(x, labels=x)
        error = difference(result.logits[:, :-1], engine["logits"])
        result.loss.backward()
        for items in ({}, {"num_items_in_batch": 0}):
            silent = model(x, labels=torch.full_like(x, -100), **items).loss
            assert silent.item() == 0, f"{name}: labels that are all -100 have the loss {silent.item()}"
        largest = max(engine[f"grad/{n}"].norm() for n in (k[5:] for k in engine if k.startswith("grad/")))
        worst = max((((parameter.grad if parameter.grad is not None else 0) - engine["grad/" + n.removeprefix("model.")]).norm()
                     / engine["grad/" + n.removeprefix("model.")].norm().clamp(min=1e-3 * largest)).item()
                    for n, parameter in model.named_parameters())
        generated = check_generate(triad, checkpoint, model.eval(), name)
        print(f"{name}: logits {error:.1e}, gradients {worst:.1e}, {generated} tokens generated", flush=True)
        assert error <= MOST_LOGITS, f"{name}: logits differ by {error}"
        assert worst <= MOST_GRADIENT, f"{name}: gradients differ by {worst}"


def check_dense(triad, name, sets):
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path)
        checkpoint, out = make(triad, folder, ["model.init_std=0.12", "model.attention=dense", "model.mlp=swiglu", *sets])
        model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert type(model).__name__ == name.split(",")[0] + "ForCausalLM", type(model).__name__
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        ours, theirs = load_file(checkpoint / "model.safetensors"), dict(model.named_parameters())
        assert len(ours) == len(theirs), (len(ours), len(theirs))
        pairs = {"blocks.1.attn.k_win_proj.weight": "model.layers.1.self_attn.k_proj.weight",
                 "blocks.0.mlp.down_proj.weight": "model.layers.0.mlp.down_proj.weight", "norm_f.weight": "model.norm.weight"}
        for a, b in pairs.items():
            assert torch.equal(ours[a], theirs[b]), (a, b)
        tokens = [(7 * i * i + 3 * i) % 251 for i in range(TOKENS + 1)]
        error = difference(model(torch.tensor([tokens[:-1]])).logits, grads_of(triad, checkpoint, tokens, folder)["logits"])
        print(f"{name}: {type(model).__name__}, logits {error:.1e}", flush=True)
        assert error <= MOST_LOGITS, f"{name}: logits differ by {error}"


def check_round_trip(triad):
    """A model of transformers, imported and exported: the same class, configuration and bits."""
    shape = dict(vocab_size=300, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=256)
    classes = [transformers.LlamaConfig, transformers.MistralConfig, transformers.Qwen2Config, transformers.Qwen3Config]
    if hasattr(transformers, "SmolLM3Config"):  # older ones lack it
        classes += [functools.partial(transformers.SmolLM3Config, no_rope_layers=rotating, bos_token_id=None,
                                      eos_token_id=None, pad_token_id=None) for rotating in ([0, 1], [1, 1])]
    for config in (each(**shape) for each in classes):
        if hasattr(config, "sliding_window"):
            config.sliding_window = None
        with tempfile.TemporaryDirectory() as path:
            folder = pathlib.Path(path)
            torch.manual_seed(1)
            before = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter in before.parameters():
                    parameter += 0.05 * torch.randn(parameter.shape)
            before.save_pretrained(folder / "hf")
            run(triad, "import", folder / "hf", "--out", folder / "checkpoint")
            run(triad, "export", folder / "checkpoint", "--out", folder / "out", "--dtype", "f32")
            after = transformers.AutoModelForCausalLM.from_pretrained(folder / "out")
            assert type(before) is type(after), (type(before), type(after))
            a, b = before.state_dict(), after.state_dict()
            assert a.keys() == b.keys()
            for key in a:
                assert torch.equal(a[key], b[key]), key
            x = torch.arange(50)[None] % 300
            assert torch.equal(before.eval()(x).logits, after.eval()(x).logits)
            print(f"{type(after).__name__}: imported and exported, {len(a)} tensors equal", flush=True)


def check_tokenizer(triad):
    with tempfile.TemporaryDirectory() as path:
        _, out = make(triad, pathlib.Path(path), [])
        tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
        assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0 and len(tokenizer) == 256
        for text in ["a b\n\tc", "\u0100 na\u00efve \u20ac \u6f22 \U0001f389 \x00 a\x00b", *map(chr, range(0x800)), *map(chr, range(0x800, 0xd800, 37))]:
            assert tokenizer(text).input_ids == list(text.encode()), repr(text)
            assert tokenizer.decode(list(text.encode())) == text, repr(text)
        print("byte tokenizer: tokens are bytes")


def main():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    triad = sys.argv[1]
    check_tokenizer(triad)
    for name, sets in NSA.items():
        check_nsa(triad, name, sets)
    for name, sets in DENSE.items():
        check_dense(triad, name, sets)
    check_round_trip(triad)


if __name__ == "__main__":
    main()
