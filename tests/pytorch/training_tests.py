"""A model of 4 layers trained for 200 steps by PyTorch with NSAAttention and by `triad train`, from the same weights and on
the same tokens in f32 on the CPU: the losses of every step are compared. And checkpoints of `triad init` load by name.

The losses agree to about 1e-6, unless two blocks have scores so nearly equal that rounding decides which one a token
selects. Then a step differs by up to 1e-3. Rows of 48 tokens have few such choices, and large weights few ties."""
import json
import math
import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

import torch
import torch.nn as nn
import torch.nn.functional as F
import triad_nsa

STEPS, T, B, VOCABULARY, SEED, MOST = 200, 48, 2, 64, 1337, 1e-4
DTYPES = {"F32": torch.float32, "F64": torch.float64}


def read_safetensors(path):
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    tensors = {name: entry for name, entry in json.loads(data[8:end]).items() if name != "__metadata__"}
    return {name: torch.frombuffer(bytearray(data[end + e["data_offsets"][0]:end + e["data_offsets"][1]]),
                                   dtype=DTYPES[e["dtype"]]).view(e["shape"]) for name, e in tensors.items()}


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        m = c["model"]
        self.norm1, self.norm2 = (nn.RMSNorm(m["dim"], eps=m["norm_eps"]) for _ in range(2))
        self.attn = triad_nsa.NSAAttention.from_config(c, layer)
        self.mlp = nn.Module()
        self.mlp.fc1 = nn.Linear(m["dim"], m["mlp_hidden"], bias=False)
        self.mlp.fc2 = nn.Linear(m["mlp_hidden"], m["dim"], bias=False)

    def forward(self, x):
        """Returns the block's output, and the loss of its index, or 0."""
        y, index_loss = self.attn(self.norm1(x)) if self.attn.indexed else (self.attn(self.norm1(x)), 0)
        x = x + y
        return x + self.mlp.fc2(F.silu(self.mlp.fc1(self.norm2(x)))), index_loss


class Model(nn.Module):
    """The decoder of model/README.md, with its names."""

    def __init__(self, config):
        super().__init__()
        m = config["model"]
        self.embed = nn.Embedding(m["vocab_size"], m["dim"])
        self.blocks = nn.ModuleList(Block(config, i) for i in range(m["n_layers"]))
        self.norm_f = nn.RMSNorm(m["dim"], eps=m["norm_eps"])
        self.lm_head = nn.Linear(m["dim"], m["vocab_size"], bias=False)

    def forward(self, tokens):
        x, index_loss = self.embed(tokens), 0
        for block in self.blocks:
            x, loss = block(x)
            index_loss = index_loss + loss
        return self.lm_head(self.norm_f(x)), index_loss


def philox(seed, stream, counter):
    """engine/rng.h: the first 32 bits of a counter's block."""
    low = 0xFFFFFFFF
    x, k0, k1 = [counter & low, counter >> 32, stream & low, stream >> 32], seed & low, seed >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [b >> 32 ^ x[1] ^ k0, b & low, a >> 32 ^ x[3] ^ k1, a & low]
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return x[0]


def sequence_of(k, n):
    """io/data/rows.cpp: the number of sequence k of a run, of n sequences."""
    stream = 0x6F72646572000000 + k // n
    half = ((n - 1).bit_length() + 1) // 2
    x, mask = k % n, (1 << half) - 1
    while True:
        left, right = x >> half, x & mask
        for turn in range(6):
            left, right = right, left ^ philox(SEED, stream, turn << 32 | right) & mask
        x = left << half | right
        if x < n:
            return x


def write_shard(path, tokens):
    path.write_bytes(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens))


def make_tokens(count):
    """A walk that repeats itself, so that there is something to learn."""
    random = torch.Generator().manual_seed(5)
    steps = torch.randint(1, 7, (count,), generator=random)
    repeat = torch.rand(count, generator=random) < 0.5
    tokens = [0] * count
    for i in range(1, count):
        tokens[i] = tokens[i - 24] if repeat[i] and i >= 24 else (tokens[i - 1] + int(steps[i])) % VOCABULARY
    return tokens


class Training(unittest.TestCase):
    def setUp(self):
        self.program = os.environ.get("TRIAD_PROGRAM")
        if not self.program:
            self.skipTest("no program `triad` was given")

    def triad(self, *arguments):
        done = subprocess.run([self.program, *map(str, arguments)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, f"{arguments}\n{done.stdout}{done.stderr}")

    def start(self, folder, sets):
        """Fresh weights; returns their config and tensors."""
        tiny = pathlib.Path(__file__).resolve().parents[2] / "configs/tiny.json"
        options = [word for each in sets for word in ("--set", each)]
        self.triad("init", tiny, *options, "--out", folder / "init")
        config = json.loads((folder / "init/state.json").read_text())["config"]
        return tiny, options, config, read_safetensors(folder / "init/model.safetensors")

    def test_same_losses(self):
        for name, sets in {"apart": [], "shared, conv, norms, sigmoid": [
                "nsa.shared_kv=true", "nsa.phi=conv", "model.qk_norm=true", "nsa.gate=sigmoid", "model.qkv_bias=true"],
                           "taught index, one softmax": ["nsa.selector=index", "nsa.branches=sel", "nsa.d_index=6", "model.qk_norm=true",
                                            "nsa.init_blocks=0", "nsa.local_blocks=1", "nsa.n_sel=2", "nsa.index_loss=0.5"],
                           "taught index, three branches, no rotation": ["nsa.selector=index", "nsa.d_index=6", "nsa.phi=conv",
                                                                         "model.qkv_bias=true", "model.nope_layers=1:3"]}.items():
            with self.subTest(name), tempfile.TemporaryDirectory() as path:
                self.check(name, pathlib.Path(path), sets)

    def check(self, name, folder, sets):
        tokens = make_tokens(61 * T + 1)
        write_shard(folder / "train.bin", tokens)
        write_shard(folder / "val.bin", tokens[:2 * T])
        tiny, options, config, weights = self.start(folder, [
            *sets, "model.n_layers=4", f"model.vocab_size={VOCABULARY}", "model.d_v=12", "nsa.w=12", f"train.steps={STEPS}",
            f"train.seq_len={T}", f"train.micro_batch_size={B}", "train.lr=0.002", "model.init_std=0.1", "train.warmup_steps=10", f"train.seed={SEED}",
            "data.kind=shards", f'data.paths=["{folder}/train.bin"]', f'data.val_paths=["{folder}/val.bin"]',
            f"log.out_dir={folder}/run", "runtime.device=cpu"])
        self.triad("train", tiny, *options, "--set", f"train.init_from={folder}/init")
        steps = [json.loads(line) for line in (folder / "run/heartbeat_rank0.jsonl").read_text().splitlines()]
        theirs = [step["loss"] for step in steps if step["msg"] == "step_end"]
        ours = self.train(config, Model(config), weights, tokens)
        worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        print(f"{name}: {STEPS} steps, loss {ours[0]:.4f} to {ours[-1]:.4f}, largest difference {worst:.1e}", flush=True)
        self.assertLess(ours[-1], ours[0] - 0.3)
        self.assertLessEqual(worst, MOST)

    @staticmethod
    def train(config, model, weights, tokens):
        c = config["train"]
        model.load_state_dict(weights)
        index = [p for name, p in model.named_parameters() if ".index_" in name]  # clipped by a norm of its own
        rest = [p for name, p in model.named_parameters() if ".index_" not in name]
        tokens, n = torch.tensor(tokens), (len(tokens) - 1) // T
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=c["lr"],
                                      betas=(c["beta1"], c["beta2"]), eps=c["eps"], weight_decay=c["weight_decay"])
        losses = []
        for step in range(STEPS):
            begins = [sequence_of(step * B + b, n) * T for b in range(B)]
            batch = torch.stack([tokens[begin:begin + T + 1] for begin in begins])
            logits, index_loss = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            (loss + config["nsa"]["index_loss"] * index_loss).backward()
            nn.utils.clip_grad_norm_(rest, c["grad_clip"])
            nn.utils.clip_grad_norm_(index, c["grad_clip"])
            lowest, warm = c["lr"] * c["min_lr_fraction"], c["warmup_steps"]
            cosine = lowest + 0.5 * (c["lr"] - lowest) * (1 + math.cos(math.pi * (step - warm) / (STEPS - warm)))
            for group in optimizer.param_groups:
                group["lr"] = c["lr"] * (step + 1) / warm if step < warm else cosine
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def test_names_of_checkpoints(self):
        for sets in ([], ["nsa.phi=mlp"], ["nsa.phi=conv", "nsa.shared_kv=true", "model.qk_norm=true", "model.qkv_bias=true"],
                     ["nsa.selector=index", "nsa.branches=sel", "nsa.d_index=6", "model.qk_norm=true", "model.qkv_bias=true"],
                     ["nsa.selector=index", "nsa.phi=conv", "nsa.d_index=6", "model.qk_norm=true"],
                     ['nsa.layers=[{"layers":"1:2","l":4,"d":2,"l_sel":12,"w":9,"branches":"cmp,sel,win"}]', "nsa.phi=conv"],
                     ['nsa.layers=[{"layers":"1:2","branches":"sel","selector":"index","d_index":4,"local_blocks":1}]', "nsa.index_loss=0"]):
            with self.subTest(str(sets)), tempfile.TemporaryDirectory() as path:
                _, _, config, weights = self.start(pathlib.Path(path), sets)
                model = Model(config)
                model.load_state_dict(weights)
                layer = triad_nsa.NSAAttention.from_checkpoint(f"{path}/init", layer=1)
                self.assertEqual(layer.settings(), model.blocks[1].attn.settings())
                for (name, mine), (other, theirs) in zip(layer.named_parameters(), model.blocks[1].attn.named_parameters(), strict=True):
                    self.assertTrue(name == other and torch.equal(mine, theirs), name)

    def test_layers_of_other_kinds_are_refused(self):
        for key, value, pattern in (("model.attention", "dense", "model.attention is 'dense'"),
                                    ("model.dense_layers", "1:2", "model.dense_layers is '1:2'"),
                                    ("nsa.uniform_gate", "true", "nsa.uniform_gate is True"),
                                    ("nsa.layers", '[{"layers":"1:2","branches":"win"}]', "nsa.branches is 'win'"),
                                    ("nsa.select_every", "4", "nsa.select_every is 4"), ("nsa.w", "9", "model.n_layers is 2")):
            with self.subTest(key), tempfile.TemporaryDirectory() as path:
                self.start(pathlib.Path(path), [f"{key}={value}"])
                with self.assertRaisesRegex(ValueError, pattern):
                    triad_nsa.NSAAttention.from_checkpoint(f"{path}/init", layer=2 if key == "nsa.w" else 1)
