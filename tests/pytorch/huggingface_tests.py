"""modeling_triad.py (tools/huggingface) with the kernels of triad_nsa and without them: logits, gradients, generated tokens."""
import os
import pathlib
import shutil
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
    "shared, mixed layers": ["nsa.shared_kv=true", "model.n_layers=3", 'model.dense_layers="1:2"'],
    "forced branch": ["nsa.force_branch=sel"],
}


class HuggingFace(unittest.TestCase):
    def setUp(self):
        self.program = os.environ.get("TRIAD_PROGRAM")
        if not self.program:
            self.skipTest("no program `triad` was given")
        try:
            import transformers
        except ImportError as missing:
            self.skipTest(str(missing))
        self.transformers = transformers

    def triad(self, *arguments):
        done = subprocess.run([self.program, *map(str, arguments)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, f"{arguments}\n{done.stdout}{done.stderr}")

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
        for name, sets in MODELS.items():
            with self.subTest(name), tempfile.TemporaryDirectory() as path:
                model = self.load(pathlib.Path(path), sets)
                attention = type(model.model.blocks[0].attn)
                self.assertTrue(attention.use_kernels)
                calls = []
                by_kernels = attention.attend_by_kernels
                attention.attend_by_kernels = lambda *given: calls.append(1) or by_kernels(*given)
                x = torch.tensor([[(7 * i * i + 3 * i) % 251 for i in range(200)]])
                results = []
                for attention.use_kernels in (True, False):
                    model.zero_grad()
                    out = model.train()(x, labels=x)
                    out.loss.backward()
                    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
                    tokens = model.eval().generate(x[:, :50], max_new_tokens=20, do_sample=False)
                    results.append((out.logits.detach(), gradients, tokens))
                self.assertEqual(len(calls), 2 * (len(model.model.blocks) - ("mixed" in name)))
                (a, b, tokens), (c, d, expected) = results
                self.assertLessEqual(((a - c).norm() / c.norm()).item(), 1e-5)
                self.assertLessEqual(((b - d).norm() / d.norm()).item(), 1e-4)
                self.assertTrue(torch.equal(tokens, expected))
