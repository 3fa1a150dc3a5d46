#!/usr/bin/env python3
"""Compares runs with train.lora with Hugging Face's PEFT, in f32 on the CPU and offline.

  test_lora_peft.py TRIAD     TRIAD: the program

A tiny Llama and a tiny Qwen3 are imported. From the same adapters and on the same tokens, 50 steps of PEFT with torch's AdamW and of `triad
train` have the same losses and end in the same adapters. `triad export --adapter` loads in PEFT, and gives the logits of the merged export
and of the engine. What PEFT has saved begins a run; an adapter of a wider base is refused. Skipped where peft, torch or transformers is missing."""
import csv
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import peft
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as missing:
    print(f"SKIPPED: {missing}")
    sys.exit(4)  # kSkippedCode of tests/support/skip.h

STEPS, T, B, LR, MOST = 50, 40, 3, 2e-3, 1e-5
SHAPE = dict(vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256, head_dim=8)
CASES = {  # name -> class of the base, train.lora
    "Llama, all projections": (transformers.LlamaConfig, dict(rank=8, alpha=16)),
    "Qwen3, some, rslora": (transformers.Qwen3Config, dict(rank=4, alpha=6, rslora="true", targets='["q_proj","v_proj","o_proj","up_proj"]')),
}


def run(triad, *args, code=0):
    done = subprocess.run([triad, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == code, f"triad {' '.join(map(str, args))}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def write_shard(path, tokens):
    path.write_bytes(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens))


def make_base(triad, folder, config_class, **changes):
    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_config(config_class(**(SHAPE | changes)))
    with torch.no_grad():
        for parameter in base.parameters():
            parameter += 0.08 * torch.randn(parameter.shape)
    base.save_pretrained(folder / "hf")
    run(triad, "import", folder / "hf", "--out", folder / "base")
    return folder / "base"


def load_base(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "hf").eval()


def train_arguments(folder, base, out, lora, steps=STEPS, lr=LR):
    sets = ["runtime.device=cpu", f"log.out_dir={out}", "data.kind=shards", f"data.paths={folder / 'train.bin'}",
            f"data.val_paths={folder / 'val.bin'}", "data.documents=attend_across", f"train.steps={steps}", f"train.seq_len={T}",
            f"train.micro_batch_size={B}", f"train.lr={lr}", "train.warmup_steps=0", "train.min_lr_fraction=1", "train.eval_every=0",
            "train.weight_decay=0.1", "train.grad_clip=1", f"train.save_every={max(steps, 1)}", "train.final_dtype=fp32", "log.every=1",
            "runtime.precision=fp32", *(f"train.lora.{key}={value}" for key, value in lora.items())]
    return ["train", base / "config.json", *(word for each in sets for word in ("--set", each))]


def batch(tokens):
    rows = torch.tensor([tokens[i * T:i * T + T + 1] for i in range(B)])
    return rows[:, :-1], rows[:, 1:]


def logits_of(triad, checkpoint, tokens, folder):
    out = folder / "grads.safetensors"
    run(triad, "grads", "--device", "cpu", "--checkpoint", checkpoint, "--tokens", folder / "train.bin", "--batch", 1, "--seq", B * T,
        "--out", out)
    return load_file(out)["logits"]


def difference(a, b):
    return ((a - b).norm() / b.norm()).item()


def train_peft(model, tokens):
    x, y = batch(tokens)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, betas=(0.9, 0.95), eps=1e-8,
                                  weight_decay=0.1)
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def check(triad, name, config_class, lora):
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path)
        tokens = [(7 * i * i + 3 * i) % 251 for i in range(B * T + 1)]
        write_shard(folder / "train.bin", tokens)
        write_shard(folder / "val.bin", tokens[:-1])
        base, out = make_base(triad, folder, config_class), folder / "run"
        run(triad, *train_arguments(folder, base, out, lora))
        ours = [float(row["loss"]) for row in csv.DictReader((out / "training.csv").open())]
        run(triad, "export", out / "checkpoints/step_0", "--adapter", "--out", folder / "first")
        run(triad, "export", out, "--adapter", "--out", folder / "last")
        run(triad, "export", out, "--dtype", "f32", "--out", folder / "merged")

        model = peft.PeftModel.from_pretrained(load_base(folder), folder / "first", is_trainable=True)
        theirs = train_peft(model, tokens)
        worst = max(abs(a - b) for a, b in zip(ours, theirs))
        assert len(ours) == STEPS and worst <= MOST, f"{name}: losses differ by {worst}: {ours} and {theirs}"
        assert ours[-1] < ours[0] - 0.5, f"{name}: nothing was learned: {ours}"
        model.save_pretrained(folder / "peft")
        a, b = load_file(folder / "last/adapter_model.safetensors"), load_file(folder / "peft/adapter_model.safetensors")
        assert a.keys() == b.keys(), a.keys() ^ b.keys()
        weights = max(difference(a[key], b[key]) for key in a)
        assert weights <= 1e-3, f"{name}: adapters differ by {weights}"

        x = torch.tensor([tokens[:-1]])
        with torch.no_grad():
            adapted = peft.PeftModel.from_pretrained(load_base(folder), folder / "last")(x).logits[0]
            merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged").eval()(x).logits[0]
            untrained = load_base(folder)(x).logits[0]
        errors = difference(merged, adapted), difference(logits_of(triad, out, tokens, folder).squeeze(), adapted)
        assert max(errors) <= MOST, f"{name}: logits differ by {errors}"
        assert difference(untrained, adapted) > 0.1, name

        # A run that begins with PEFT's adapters and learns nothing gives them back.
        begun = folder / "begun"
        run(triad, *train_arguments(folder, base, begun, lora | {"init_from": folder / "peft"}, steps=1, lr=0))
        run(triad, "export", begun, "--adapter", "--out", folder / "back")
        back = load_file(folder / "back/adapter_model.safetensors")
        assert all(torch.equal(back[key], b[key]) for key in b), f"{name}: adapters of PEFT change by a run without steps"
        for key, value, words in (("rank", lora["rank"] // 2, "r is"), ("alpha", 99, "multiplies by"),
                                  ("targets", '["q_proj"]', "is no adapter of train.lora.targets")):
            text = run(triad, *train_arguments(folder, base, folder / "no", lora | {"init_from": folder / "peft", key: value}), code=1)
            assert words in text, text
        wide = folder / "wide"
        wide.mkdir()
        other = make_base(triad, wide, config_class, hidden_size=64)
        text = run(triad, *train_arguments(folder, other, folder / "no", lora | {"init_from": folder / "peft"}), code=1)
        assert "lora_A.weight" in text and "the model's" in text, text
        print(f"{name}: losses {worst:.1e}, adapters {weights:.1e}, logits {max(errors):.1e}", flush=True)


def main():
    torch.set_num_threads(1)
    for name, (config_class, lora) in CASES.items():
        check(sys.argv[1], name, config_class, lora)


if __name__ == "__main__":
    main()
