#!/usr/bin/env python3
"""Compares imported models with transformers: five tiny random models that transformers makes and saves.

  test_huggingface_import.py TRIAD     TRIAD: the program

For each: the logits of `triad grads` after `triad import`, in fp32 on the CPU, against transformers' (relative L2 <= 1e-5); the
same for an import as NSA whose window covers the row and whose gate is forced to it (<= 2e-5); 64 greedy tokens of
`triad generate --prompt-ids`, equal to transformers'. Skipped where torch or transformers is missing."""
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

try:
    import torch
    import transformers
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
except ImportError as missing:
    print(f"SKIPPED: {missing}")
    sys.exit(4)  # kSkippedCode of tests/support/skip.h

TOKENS = 96
MOST = {"dense": 1e-5, "nsa": 2e-5}
SHAPE = dict(vocab_size=320, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, bos_token_id=None,
             eos_token_id=None, pad_token_id=None)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# The name of each model, its config, and the size of its files: None for one file.
MODELS = {
    "llama": (LlamaConfig(**SHAPE), None),
    "llama with llama3 rope and tied head": (LlamaConfig(**SHAPE, rope_parameters=LLAMA3, tie_word_embeddings=True), None),
    "mistral": (MistralConfig(**SHAPE, head_dim=32, sliding_window=None, rms_norm_eps=1e-5), None),
    "qwen2": (Qwen2Config(**SHAPE, rope_parameters=YARN), None),
    "qwen3 in several files": (Qwen3Config(**SHAPE, head_dim=32), "200KB"),
}
if hasattr(transformers, "SmolLM3Config"):  # older ones lack it
    MODELS["smollm3"] = (transformers.SmolLM3Config(**SHAPE, no_rope_layer_interval=2), None)


def run(triad, *args, **environment):
    done = subprocess.run([triad, *map(str, args)], capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, f"triad {' '.join(map(str, args))}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def make(config, folder, shard_size):
    """A random model, saved. Norms and biases begin at 1 and 0, which would hide that they are mixed up."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight += 0.3 * torch.randn(weight.shape)
    model.save_pretrained(folder, **({"max_shard_size": shard_size} if shard_size else {}))
    files = len(list(folder.glob("*.safetensors")))
    assert (files > 1) == (shard_size is not None), f"{folder}: {files} files"
    return model


def logits_of(triad, checkpoint, tokens, folder, **environment):
    shard = folder / "tokens.bin"
    words = [20240520, 1, len(tokens)]
    shard.write_bytes(struct.pack("<256i", *words, *[0] * (256 - len(words))) + struct.pack(f"<{len(tokens)}H", *tokens))
    out = folder / "grads.safetensors"
    run(triad, "grads", "--device", "cpu", "--checkpoint", checkpoint, "--tokens", shard, "--batch", 1, "--seq",
        len(tokens) - 1, "--out", out, **environment)
    from safetensors.torch import load_file
    return load_file(out)["logits"][0].double()


def check(triad, name, config, shard_size, folder):
    model = make(config, folder / "hf", shard_size)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, config.vocab_size, (TOKENS + 1,), generator=generator).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens[:-1]])).logits[0].double()
    run(triad, "import", folder / "hf", "--out", folder / "dense")
    run(triad, "import", folder / "hf", "--out", folder / "nsa", "--attention", "nsa", "--set", f"nsa.w={2 * TOKENS}")
    wrong = []
    for kind, environment in (("dense", {}), ("nsa", {"NSA_FORCE_BRANCH": "win"})):
        logits = logits_of(triad, folder / kind, tokens, folder, **environment)
        error = float((logits - expected).norm() / expected.norm())
        print(f"{name}, {kind}: logits differ by {error:.2e} (at most {MOST[kind]:.0e})")
        if not error <= MOST[kind]:
            wrong.append(kind)
    prompt = tokens[:5]
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False, use_cache=True)[0].tolist()
    printed = run(triad, "generate", "--device", "cpu", "--checkpoint", folder / "dense", "--temperature", 0, "--tokens", 64,
                  "--prompt-ids", ",".join(map(str, prompt)))
    greedy = list(map(int, printed.strip().split(",")))
    assert len(set(ids[5:])) > 3, f"{name}: transformers repeats {set(ids[5:])}, so this compares little"
    print(f"{name}: greedy ids {'equal' if greedy == ids else f'differ: {greedy} instead of {ids}'}")
    if greedy != ids or len(ids) != 5 + 64:
        wrong.append("greedy ids")
    origin = json.loads((folder / "dense" / "state.json").read_text())["origin"]
    if origin["architecture"] != type(model).__name__:
        wrong.append(f"origin {origin['architecture']}")
    return [f"{name}: {what}" for what in wrong]


def main():
    triad = sys.argv[1]
    wrong = []
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    torch.set_num_threads(2)
    for name, (config, shard_size) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            wrong += check(triad, name, config, shard_size, pathlib.Path(folder))
    sys.exit("\n".join(wrong) or 0)


main()
