"""modeling_triad.py (tools/huggingface): logits, gradients and generated tokens with the kernels of triad_nsa and without them;
with a taught index, those of `triad`."""
import os
import pathlib
import shutil
import struct
import subprocess
import tempfile
import unittest

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
CACHE = tempfile.TemporaryDirectory()  # where transformers copies the models' code
os.environ["HF_HOME"] = CACHE.name
ROOT = pathlib.Path(__file__).resolve().parents[2]
SHAPE = ["model.init_std=0.12", "model.d_v=12", "nsa.w=12", "nsa.l_sel=16"]
MODELS = {
    "avg": [],
    "mlp, sigmoid gate": ["nsa.phi=mlp", "nsa.gate=sigmoid"],
    "shared, mixed layers": ["nsa.shared_kv=true", "model.n_layers=3", 'model.dense_layers="1:2"', 'model.nope_layers="1:3"'],
    "forced branch": ["nsa.force_branch=sel"],
}
INDEX = ["nsa.selector=index", "nsa.d_index=6"]
ONE_SOFTMAX = INDEX + ["nsa.branches=sel", "nsa.init_blocks=0", "nsa.local_blocks=1"]
TAUGHT = {
    "index": INDEX,
    "index, norms, shared": INDEX + ["model.qk_norm=true", "nsa.shared_kv=true"],
    "one softmax, norms": ONE_SOFTMAX + ["model.qk_norm=true"],
    "one softmax, biases, mixed layers": ONE_SOFTMAX + ["model.qkv_bias=true", "model.n_layers=3", 'model.dense_layers="1:2"'],
    "by layer": ["model.n_layers=3", 'model.nope_layers="2:3"', 'nsa.layers=[{"layers":"1:2","branches":"win","w":20},'
                 '{"layers":"2:3","branches":"sel","selector":"index","d_index":6,"n_sel":3,"local_blocks":1}]'],
}


class HuggingFace(unittest.TestCase):
    def setUp(self):
        self.program = os.environ.get("TRIAD_PROGRAM")
        if not self.program:
            self.skipTest("no program `triad` was given")
        try:
            import safetensors
            import transformers
        except ImportError as missing:
            self.skipTest(str(missing))
        self.transformers, self.safetensors = transformers, safetensors

    def triad(self, *arguments):
        done = subprocess.run([self.program, *map(str, arguments)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, f"{arguments}\n{done.stdout}{done.stderr}")
        return done.stdout

    def load(self, folder, sets):
        options = [word for each in SHAPE + sets for word in ("--set", each)]
        self.triad("init", ROOT / "configs/tiny.json", *options, "--out", folder / "checkpoint")
        self.triad("export", folder / "checkpoint", "--out", folder / "out", "--dtype", "f32")
        shutil.copy(ROOT / "tools/huggingface/modeling_triad.py", folder / "out/modeling_triad.py")
        # A class of its own for each model: transformers keeps the code of a folder by the folder's name.
        os.rename(folder / "out", folder / f"out{folder.name.replace('-', '_')}")
        return self.transformers.AutoModelForCausalLM.from_pretrained(next(folder.glob("out*")), trust_remote_code=True)

    def test_with_and_without_kernels(self):
        self.transformers.logging.set_verbosity_error()
        self.transformers.logging.disable_progress_bar()
        for name, sets in {**MODELS, **TAUGHT}.items():
            with self.subTest(name), tempfile.TemporaryDirectory() as path:
                model = self.load(pathlib.Path(path), sets)
                attention = type(model.model.blocks[0].attn)
                self.assertTrue(attention.use_kernels)
                calls, kernels = [], attention.kernels_fit
                for block in model.model.blocks:
                    if hasattr(block.attn, "nsa"):
                        type(block.attn).kernels_fit = lambda *given: kernels(*given) and not calls.append(1)
                x = torch.tensor([[(7 * i * i + 3 * i) % 251 for i in range(200)]])
                results = []
                for used in (True, False):
                    for block in model.model.blocks:
                        type(block.attn).use_kernels = used
                    model.zero_grad()
                    out = model.train()(x, labels=x)
                    out.loss.backward()
                    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
                    tokens = model.eval().generate(x[:, :50], max_new_tokens=20, do_sample=False)
                    results.append((out.logits.detach(), gradients, tokens))
                self.assertEqual(len(calls), 2 * (len(model.model.blocks) - ("mixed" in name or name == "by layer")))
                (a, b, tokens), (c, d, expected) = results
                self.assertLessEqual(((a - c).norm() / c.norm()).item(), 1e-5)
                self.assertLessEqual(((b - d).norm() / d.norm()).item(), 1e-4)
                self.assertTrue(torch.equal(tokens, expected))

    def test_taught_index(self):
        """Over texts with many more blocks than the lists hold, and prompts too: by triad_nsa's kernels and without them."""
        self.transformers.logging.set_verbosity_error()
        self.transformers.logging.disable_progress_bar()
        x = [(7 * i * i + 3 * i) % 251 for i in range(200)]
        prompt = x[:120]
        for name, sets in TAUGHT.items():
            with self.subTest(name), tempfile.TemporaryDirectory() as path:
                path = pathlib.Path(path)
                model = self.load(path, [*sets, "data.tokenizer=none"]).eval()  # no token ends a text
                shard = struct.pack("<3i", 20240520, 1, len(x) + 1).ljust(1024, b"\0")
                (path / "tokens.bin").write_bytes(shard + struct.pack(f"<{len(x) + 1}H", *x, 1))
                self.triad("grads", "--checkpoint", path / "checkpoint", "--tokens", path / "tokens.bin", "--batch", 1,
                           "--seq", len(x), "--out", path / "grads.safetensors")
                with self.safetensors.safe_open(path / "grads.safetensors", "pt") as file:
                    expected = file.get_tensor("logits").flatten()
                ids = self.triad("generate", "--checkpoint", path / "checkpoint", "--context", 200, "--temperature", 0,
                                 "--tokens", 64, "--prompt-ids", ",".join(map(str, prompt)))
                ids = [int(i) for i in ids.strip().split(",")]
                self.assertEqual(len(ids), len(prompt) + 64)
                for used in (True, False):
                    for block in model.model.blocks:
                        type(block.attn).use_kernels = used
                    logits = model(torch.tensor([x])).logits.detach().flatten()
                    self.assertLessEqual(((logits - expected).norm() / expected.norm()).item(), 1e-5)
                    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0].tolist()
                    self.assertEqual(ids, tokens)
