"""triad_nsa.for_transformers on tiny models of transformers: against their own attention, and against `triad`, whose import makes
the same model. Skipped where Python lacks transformers."""
import importlib.util
import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
HAS = importlib.util.find_spec("transformers") is not None
if HAS:
    import safetensors.torch
    import transformers

    from triad_nsa import for_transformers
    from triad_nsa.module import read_tensors

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

SMALL = dict(block=16, selected=3, init_blocks=0, local_blocks=1)
CLASSES = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")


def tokens(count=200, rows=1):
    return torch.tensor([[(7 * i * i + (3 + b) * i) % 251 for i in range(count)] for b in range(rows)])


@unittest.skipUnless(HAS, "Python has no transformers")
class Transformers(unittest.TestCase):
    def model(self, name="Llama", **more):
        torch.manual_seed(2)
        config = getattr(transformers, f"{name}Config")(**{**dict(
            vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, max_position_embeddings=512, initializer_range=0.15, sliding_window=None, eos_token_id=None, bos_token_id=None,
            pad_token_id=None), **(dict(no_rope_layers=[1, 0]) if name == "SmolLM3" else {}), **more})
        return transformers.AutoModelForCausalLM.from_config(config)

    def converted(self, name="Llama", **options):
        return for_transformers.convert(self.model(name), **{**SMALL, **options})

    def test_all_blocks_are_the_models_own_attention(self):
        x = tokens(rows=2)
        for name in CLASSES:
            with self.subTest(name):
                plain, model = self.model(name), self.converted(name, selected=13)
                for each in (plain, model):
                    each(x, labels=x).loss.backward()
                expected, out = plain(x).logits, model(x).logits
                self.assertLessEqual(((out - expected).norm() / expected.norm()).item(), 1e-5)
                mine = dict(model.named_parameters())
                for parameter, theirs in plain.named_parameters():
                    self.assertLessEqual((mine[parameter].grad - theirs.grad).norm().item(), 1e-4 * (1e-3 + theirs.grad.norm().item()))
                for_transformers.warm_up(model)
                out = self.converted(name).eval()(x).logits
                self.assertGreater(((out - expected).norm() / expected.norm()).item(), 1e-3)  # three blocks are not all
                self.assertLessEqual(((model(x).logits - expected).norm() / expected.norm()).item(), 1e-5)

    def test_the_index_alone_learns_from_its_loss(self):
        model, x = self.converted(), tokens(100)
        optimizer = torch.optim.Adam((p for index in for_transformers.indices(model) for p in index.parameters()), lr=1e-2)
        for dense in (True, False):
            for_transformers.warm_up(model, dense)
            losses = []
            for _ in range(20):
                model(x)
                loss = for_transformers.index_loss(model)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            self.assertLess(losses[-1], 0.8 * losses[0])
        self.assertTrue(all(p.grad is None for name, p in model.named_parameters() if ".index." not in name))

    def test_checkpointing(self):
        x, gradients = tokens(100), []
        for checkpointing in (False, True):
            model = self.converted().train()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            loss = model(x, labels=x, use_cache=False).loss
            (loss + for_transformers.index_loss(model)).backward()
            gradients.append([p.grad for p in model.parameters()])
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(*gradients)))

    def test_generate(self):
        x = tokens(60, rows=2)
        for name in CLASSES:
            model = self.converted(name).eval()
            for options in (dict(), dict(num_beams=3)):
                with self.subTest(f"{name}, {options}"):
                    cached, plain = (model.generate(x, max_new_tokens=40, do_sample=False, use_cache=cache, **options)
                                     for cache in (True, False))
                    self.assertEqual(cached.shape, (2, 100))
                    self.assertTrue(torch.equal(cached, plain))
        # A prompt in two parts.
        first = model(x[:, :33], use_cache=True)
        cache = first.cache if "cache" in first else first.past_key_values
        rest = model(x[:, 33:], **{"cache" if "cache" in first else "past_key_values": cache}).logits
        expected = model(x).logits[:, 33:]
        self.assertLessEqual(((rest - expected).norm() / expected.norm()).item(), 1e-5)

    def test_padding_at_the_end_and_packed_documents(self):
        model, x = self.converted(), tokens(100, rows=2)
        mask = torch.ones_like(x)
        mask[1, 70:] = 0
        out, loss = model(x, attention_mask=mask).logits, for_transformers.index_loss(model)
        alone = [(model(x[b:b + 1, :n]).logits, for_transformers.index_loss(model), n) for b, n in ((0, 100), (1, 70))]
        for b, (logits, _, n) in enumerate(alone):
            self.assertLessEqual(((out[b, :n] - logits[0]).norm() / logits.norm()).item(), 1e-5)
        expected = sum(each * n for _, each, n in alone) / 170
        self.assertLessEqual(abs(loss.item() - expected.item()), 1e-5)
        packed, positions = torch.cat((x[0], x[1, :70]))[None], torch.cat((torch.arange(100), torch.arange(70)))[None]
        bounds = torch.tensor([0, 100, 170], dtype=torch.int32)
        more = dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=100, max_length_k=100)
        out = model(packed, position_ids=positions, use_cache=False, **more).logits
        for logits, a, b in ((alone[0][0], 0, 100), (alone[1][0], 100, 170)):
            self.assertLessEqual(((out[:, a:b] - logits).norm() / logits.norm()).item(), 1e-5)
        self.assertLessEqual(abs(for_transformers.index_loss(model).item() - expected.item()), 1e-5)

    def test_saved_and_loaded(self):
        with tempfile.TemporaryDirectory() as folder:
            model = self.converted("Qwen3", d_index=4).eval()
            model.save_pretrained(folder, max_shard_size="20KB")
            again = for_transformers.load(folder).eval()
            self.assertEqual(again.config.triad_msa, dict(d_index=4, **SMALL))
            self.assertTrue(torch.equal(model(tokens()).logits, again(tokens()).logits))

    def test_refused(self):
        model, x = self.converted(), tokens(40, rows=2)
        left = torch.ones_like(x)
        left[0, :5] = 0
        plain = self.model()
        plain.set_attn_implementation(for_transformers.NAME)
        packed = torch.cat((torch.arange(20), torch.arange(20)))[None]
        for pattern, call in (
                ("padding before tokens", lambda: model(x, attention_mask=left)),
                ("padding before tokens", lambda: model.generate(x, attention_mask=left.flip(1), max_new_tokens=3)),
                ("LlamaAttention has no index", lambda: plain(x)),
                ("packed documents need cu_seq_lens_q", lambda: model(x[:1], position_ids=packed, use_cache=False)),
                ("the cache has a Static", lambda: model.generate(x, max_new_tokens=2, cache_implementation="static")),
                ("d_index is 3: an even divisor of head_dim 8", lambda: self.converted(d_index=3)),
                ("no index loss", lambda: for_transformers.index_loss(self.converted().eval())),
                ("sliding_window is 16", lambda: for_transformers.convert(self.model("Mistral", sliding_window=16), **SMALL)(x, use_cache=False)),
                ("attention_dropout is 0.1", lambda: for_transformers.convert(self.model(attention_dropout=0.1), **SMALL).train()(x))):
            with self.subTest(pattern), self.assertRaisesRegex(ValueError, pattern):
                call()

    def test_the_model_of_triad_import(self):
        program = os.environ.get("TRIAD_PROGRAM")
        if not program:
            self.skipTest("no program `triad` was given")

        def triad(*arguments):
            done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, f"{arguments}\n{done.stdout}{done.stderr}")

        x = tokens()[0].tolist()
        sets = ["nsa.selector=index", "nsa.branches=sel", "nsa.d_index=4", "nsa.l_sel=16", "nsa.n_sel=3", "nsa.init_blocks=0",
                "nsa.local_blocks=1", "model.init_std=0.15"]
        scaled = dict(rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                           original_max_position_embeddings=64))
        for name, more in (*((each, dict()) for each in CLASSES), ("Llama", scaled)):
            with self.subTest(f"{name} {more}"), tempfile.TemporaryDirectory() as path:
                path = pathlib.Path(path)
                model = self.model(name, **more)
                model.save_pretrained(path / "hf")
                triad("import", path / "hf", "--out", path / "triad", "--attention", "nsa", *(word for each in sets for word in ("--set", each)))
                shard = struct.pack("<3i", 20240520, 1, len(x) + 1).ljust(1024, b"\0")
                (path / "tokens.bin").write_bytes(shard + struct.pack(f"<{len(x) + 1}H", *x, 1))
                triad("grads", "--checkpoint", path / "triad", "--tokens", path / "tokens.bin", "--batch", 1, "--seq", len(x), "--out",
                      path / "grads")
                theirs = safetensors.torch.load_file(path / "grads")
                for_transformers.convert(model, **SMALL, d_index=4)
                with torch.no_grad():
                    for i, index in enumerate(for_transformers.indices(model)):
                        found = read_tensors(path / "triad/model.safetensors", f"blocks.{i}.attn.index_")
                        for key, parameter in index.named_parameters():
                            parameter.copy_(found.pop(key))
                        self.assertFalse(found)
                logits = model.train()(torch.tensor([x])).logits[0]
                expected = theirs["logits"].view(len(x), -1)
                self.assertLessEqual(((logits - expected[:, :256]).norm() / expected.norm()).item(), 1e-5)
                for index, loss in zip(for_transformers.indices(model), theirs["index_loss"].tolist(), strict=True):
                    self.assertLessEqual(abs(index.loss.item() - loss), 1e-5)
                    self.assertGreater(loss, 1e-2)
